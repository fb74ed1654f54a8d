// exchange_states(): what a call must keep, then the backend's kernel; what the fault word says.
#include "api/backends.hpp"
#include "api/exchange_checks.hpp"
#include "base/alignment.hpp"
#include "base/message.hpp"
#include "fixup/exchanged_rows.hpp"
#include "lean/dtypes.hpp"
#include "lean/exchange.hpp"
#include "lean/lean.hpp"

namespace lean {
namespace {

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr std::int64_t kMostLengths = (std::int64_t{1} << 31) - 1;

/// What is written must not be what others still read; merged_o may be o, each of whose rows is read first.
Status check_overlaps(const ExchangedStates& states) noexcept {
  const std::int64_t lse_bytes = states.rows * bytes_of(DType::kFloat32);
  const std::int64_t o_bytes = states.rows * states.value_dim * bytes_of(states.dtype);
  const auto apart = [](const void* a, std::int64_t a_bytes, const void* b, std::int64_t b_bytes) {
    return !overlap(a, a_bytes, b, b_bytes);
  };
  if (!apart(states.merged_lse, lse_bytes, states.lse, lse_bytes) || !apart(states.merged_lse, lse_bytes, states.o, o_bytes))
    return refuse(kInvalid, "merged_lse", reinterpret_cast<std::intptr_t>(states.merged_lse), "must not overlap lse or o");
  const bool in_place = states.merged_o == states.o;
  if ((!in_place && !apart(states.merged_o, o_bytes, states.o, o_bytes)) ||
      !apart(states.merged_o, o_bytes, states.lse, lse_bytes) || !apart(states.merged_o, o_bytes, states.merged_lse, lse_bytes)) {
    return refuse(kInvalid, "merged_o", reinterpret_cast<std::intptr_t>(states.merged_o),
                  "must be o, or overlap none of o, lse and merged_lse");
  }
  return {};
}

Status check_states(const ExchangedStates& states) noexcept {
  if (states.rows < 0 || states.rows > fixup::kMaxExchangedRows)
    return refuse(kInvalid, "rows", states.rows, "allowed 0 to 2^31 - 1");
  if (states.value_dim < 1 || states.value_dim > kMaxHeadDim)
    return refuse(kInvalid, "value_dim", states.value_dim, "allowed 1 to 576");
  if (!traits_of(states.dtype).of_queries())
    return refuse(kInvalid, "dtype", static_cast<std::int64_t>(states.dtype), "allowed float32, float16, bfloat16");
  const struct {
    const char* name;
    const void* pointer;
    std::int64_t alignment;
  } pointers[] = {{"o", states.o, bytes_of(states.dtype)},
                  {"lse", states.lse, 4},
                  {"merged_o", states.merged_o, bytes_of(states.dtype)},
                  {"merged_lse", states.merged_lse, 4}};
  for (const auto& [name, pointer, alignment] : pointers) {
    if (states.rows > 0 && pointer == nullptr) return refuse(kInvalid, name, 0, "must not be null");
    if (!aligned_to(pointer, alignment)) return refuse(kInvalid, name, alignment, "must be a multiple of this many bytes");
  }
  return {};
}

}  // namespace

Status check_ranks(const Exchange& exchange) noexcept {
  if (exchange.ranks < 1 || exchange.ranks > Exchange::kMaxRanks)
    return refuse(kInvalid, "exchange.ranks", exchange.ranks, "allowed 1 to 16");
  if (exchange.rank < 0 || exchange.rank >= exchange.ranks)
    return refuse(kInvalid, "exchange.rank", exchange.rank, "allowed 0 to ranks - 1");
  return {};
}

Status check_exchange(const Exchange& exchange, std::int64_t rows, std::int32_t value_dim, DType dtype) noexcept {
  if (const Status status = check_ranks(exchange); !status.ok()) return status;
  if (rows > fixup::kMaxExchangedRows) return refuse(kInvalid, "rows", rows, "allowed 0 to 2^31 - 1");
  if (exchange.limit_ns < 0) return refuse(kInvalid, "exchange.limit_ns", exchange.limit_ns, "allowed 0 or more");
  if (exchange.fault == nullptr) return refuse(kInvalid, "exchange.fault", 0, "must not be null");
  const auto need = static_cast<std::int64_t>(exchange_bytes(exchange.ranks, rows, value_dim, dtype));
  for (std::int32_t rank = 0; rank < exchange.ranks; ++rank) {
    if (need > 0 && exchange.memory[rank] == nullptr)
      return refuse_element(StatusCode::kWorkspaceTooSmall, "exchange.memory", rank, 0, "must not be null");
    if (!aligned_to(exchange.memory[rank], 256))
      return refuse_element(StatusCode::kWorkspaceMisaligned, "exchange.memory", rank, 256,
                            "must be a multiple of this many bytes");
  }
  if (static_cast<std::uint64_t>(need) > exchange.memory_bytes)
    return refuse(StatusCode::kWorkspaceTooSmall, "exchange.memory_bytes", static_cast<std::int64_t>(exchange.memory_bytes),
                  "exchange_bytes() of these rows is more");
  return {};
}

std::size_t exchange_bytes(std::int32_t ranks, std::int64_t rows, std::int32_t value_dim, DType dtype) noexcept {
  if (ranks < 1 || ranks > Exchange::kMaxRanks || rows < 0 || rows > fixup::kMaxExchangedRows) return 0;
  if (value_dim < 1 || value_dim > kMaxHeadDim || !traits_of(dtype).of_queries()) return 0;
  return static_cast<std::size_t>(fixup::ExchangeLayout{ranks}.bytes(fixup::ExchangedRows::of(rows, value_dim, dtype).blocks()));
}

Status exchange_states(const Exchange& exchange, const ExchangedStates& states, const Options& options) noexcept {
  if (const Status status = check_states(states); !status.ok()) return status;
  if (const Status status = check_exchange(exchange, states.rows, states.value_dim, states.dtype); !status.ok()) return status;
  if (const Status status = check_overlaps(states); !status.ok()) return status;
  const BackendEntry* backend = nullptr;
  if (const Status status = find_backend(options, backend); !status.ok()) return status;
  if (backend->exchange == nullptr)
    return refuse(StatusCode::kUnsupported, "options.backend", static_cast<std::int64_t>(options.backend),
                  "peer memory is of GPUs: results in host memory are merged by merge_states()");
  return states.rows == 0 ? Status{} : backend->exchange(exchange, states, options);
}

Status shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count, const TokenShard& shard,
                     const Options& options) noexcept {
  if (count < 0 || count > kMostLengths) return refuse(kInvalid, "count", count, "allowed 0 to 2^31 - 1");
  if (count > 0 && tokens == nullptr) return refuse(kInvalid, "tokens", 0, "must not be null");
  if (count > 0 && held == nullptr) return refuse(kInvalid, "held", 0, "must not be null");
  if (shard.block_tokens < 1) return refuse(kInvalid, "shard.block_tokens", shard.block_tokens, "allowed 1 or more");
  if (shard.ranks < 1) return refuse(kInvalid, "shard.ranks", shard.ranks, "allowed 1 or more");
  if (shard.rank < 0 || shard.rank >= shard.ranks) return refuse(kInvalid, "shard.rank", shard.rank, "allowed 0 to ranks - 1");
  const BackendEntry* backend = nullptr;
  if (const Status status = find_backend(options, backend); !status.ok()) return status;
  return count == 0 ? Status{} : backend->shard_lengths(tokens, held, count, shard, options);
}

Status exchange_status(const Exchange& exchange) noexcept {
  if (exchange.fault == nullptr) return refuse(kInvalid, "exchange.fault", 0, "must not be null");
  const auto word = *static_cast<const volatile std::uint32_t*>(exchange.fault);  // a device may be writing it
  const fixup::Collected found = fixup::fault_of(word);
  switch (found.fault) {
    case fixup::ExchangeFault::kNone: return {};
    case fixup::ExchangeFault::kPeerLate:
      return refuse(StatusCode::kBackendError, "exchange.rank", found.rank,
                    "did not come within the limit; rows that need it are NaN");
    case fixup::ExchangeFault::kPeerAhead:
      return refuse(StatusCode::kBackendError, "exchange.rank", found.rank,
                    "is in a later call: it had given this rank up, or made other calls; rows that need it are NaN");
  }
  return refuse(StatusCode::kBackendError, "exchange.fault", static_cast<std::int64_t>(word), "no fault that a call leaves");
}

}  // namespace lean

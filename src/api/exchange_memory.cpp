// The memory of an exchange, taken and given back: what the caller may ask, then the backend.
#include "api/backends.hpp"
#include "api/exchange_checks.hpp"
#include "base/message.hpp"
#include "lean/exchange.hpp"

namespace lean {
namespace {

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr std::size_t kMostBytes = std::size_t{1} << 48;  // more than a process can address: a size that went wrong

/// The backend whose devices share memory.
Status find_memory(const ExchangeMemory*& memory) noexcept {
  const BackendEntry* backend = nullptr;
  if (const Status status = find_backend({.backend = Backend::kCuda}, backend); !status.ok()) return status;
  memory = backend->exchange_memory;
  return {};
}

/// A side that create_exchange() made, and that nobody has written into since.
Status check_own(const Exchange& exchange) noexcept {
  if (exchange.device < 0) return refuse(kInvalid, "exchange.device", exchange.device, "make it by create_exchange()");
  if (const Status status = check_ranks(exchange); !status.ok()) return status;
  if (exchange.memory[exchange.rank] == nullptr)
    return refuse_element(kInvalid, "exchange.memory", exchange.rank, 0, "must not be null");
  if (exchange.fault == nullptr) return refuse(kInvalid, "exchange.fault", 0, "must not be null");
  return {};
}

/// Another rank, whose memory is not there yet, of an exchange that create_exchange() made.
Status check_other(const Exchange& exchange, std::int32_t rank) noexcept {
  if (const Status status = check_own(exchange); !status.ok()) return status;
  if (rank < 0 || rank >= exchange.ranks) return refuse(kInvalid, "rank", rank, "allowed 0 to ranks - 1");
  if (rank == exchange.rank) return refuse(kInvalid, "rank", rank, "is this side's own");
  if (exchange.memory[rank] != nullptr) return refuse(kInvalid, "rank", rank, "its memory is there already");
  return {};
}

}  // namespace

Status create_exchange(std::int32_t rank, std::int32_t ranks, std::size_t memory_bytes, Exchange& exchange,
                       ExchangeHandle* handle) noexcept {
  if (ranks < 1 || ranks > Exchange::kMaxRanks) return refuse(kInvalid, "ranks", ranks, "allowed 1 to 16");
  if (rank < 0 || rank >= ranks) return refuse(kInvalid, "rank", rank, "allowed 0 to ranks - 1");
  if (memory_bytes == 0 || memory_bytes > kMostBytes)
    return refuse(kInvalid, "memory_bytes", static_cast<std::int64_t>(memory_bytes), "needs exchange_bytes() of the largest call");
  if (exchange.device >= 0)
    return refuse(kInvalid, "exchange.device", exchange.device, "holds memory already: close_exchange() gives it back");
  const ExchangeMemory* memory = nullptr;
  if (const Status status = find_memory(memory); !status.ok()) return status;
  Exchange made{.rank = rank, .ranks = ranks, .memory_bytes = memory_bytes};
  ExchangeHandle told;
  const Status status = memory->create(made, told);
  if (!status.ok()) return status;
  exchange = made;
  if (handle != nullptr) *handle = told;
  return {};
}

Status open_exchange(Exchange& exchange, std::int32_t rank, const ExchangeHandle& handle) noexcept {
  if (const Status status = check_other(exchange, rank); !status.ok()) return status;
  const ExchangeMemory* memory = nullptr;
  if (const Status status = find_memory(memory); !status.ok()) return status;
  return memory->open(exchange, rank, handle);
}

Status join_exchange(Exchange& exchange, const Exchange& other) noexcept {
  if (const Status status = check_other(exchange, other.rank); !status.ok()) return status;
  if (other.ranks != exchange.ranks) return refuse(kInvalid, "other.ranks", other.ranks, "must be exchange.ranks");
  if (other.device < 0) return refuse(kInvalid, "other.device", other.device, "make it by create_exchange()");
  if (other.memory[other.rank] == nullptr) return refuse_element(kInvalid, "other.memory", other.rank, 0, "must not be null");
  const ExchangeMemory* memory = nullptr;
  if (const Status status = find_memory(memory); !status.ok()) return status;
  return memory->join(exchange, other);
}

Status clear_exchange(Exchange& exchange) noexcept {
  if (const Status status = check_own(exchange); !status.ok()) return status;
  const ExchangeMemory* memory = nullptr;
  if (const Status status = find_memory(memory); !status.ok()) return status;
  return memory->clear(exchange);
}

Status close_exchange(Exchange& exchange) noexcept {
  if (exchange.device < 0) return {};
  if (const Status status = check_ranks(exchange); !status.ok()) return status;
  const ExchangeMemory* memory = nullptr;
  if (const Status status = find_memory(memory); !status.ok()) return status;
  return memory->close(exchange);
}

}  // namespace lean

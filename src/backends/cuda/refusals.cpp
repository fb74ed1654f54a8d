// What the CUDA backend refuses: a row for each demand on a problem, and what a plan shows that this build or device lacks.
#include "backends/cuda/refusals.hpp"

#include <array>
#include <cstdint>

#include "base/alignment.hpp"
#include "base/kv_type.hpp"
#include "base/message.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {
namespace {

using P = const Problem&;

constexpr auto kUnsupported = StatusCode::kUnsupported;

/// More would make groups of partials longer than the kernel stages at once.
constexpr std::int32_t kMaxWorkers = fixup::kMaxOneLevel * fixup::kMaxOneLevel;

std::int64_t as_int(const void* pointer) noexcept { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }

/// Single bytes are copied one by one, if need be.
bool kv_aligned(const TensorView& t) noexcept { return kv_type_of(t.dtype).bytes == 1 || rows_aligned(t, kPieceBytes); }

// clang-format off: one row, one refusal
constexpr std::array kRefused = {
    Precondition<Problem>{kUnsupported, "q.dtype", "the CUDA backend computes float16 and bfloat16",
                 [](P p) noexcept -> std::int64_t { return static_cast<std::int64_t>(p.q.dtype); },
                 [](P p) noexcept { return p.q.dtype == DType::kFloat16 || p.q.dtype == DType::kBFloat16; }},
    Precondition<Problem>{kUnsupported, "head_dim", "the CUDA backend needs a multiple of 8",
                 [](P p) noexcept -> std::int64_t { return p.head_dim; },
                 [](P p) noexcept { return p.head_dim % 8 == 0; }},
    Precondition<Problem>{kUnsupported, "value_dim", "the CUDA backend needs value_dim equal to head_dim",
                 [](P p) noexcept -> std::int64_t { return p.value_dim; },
                 [](P p) noexcept { return value_dim_of(p) == p.head_dim; }},
    Precondition<Problem>{kUnsupported, "q.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.q.strides.dim; },
                 [](P p) noexcept { return p.q.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "k.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.k.strides.dim; },
                 [](P p) noexcept { return p.k.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "v.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.v.strides.dim; },
                 [](P p) noexcept { return p.v.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "o.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.o.strides.dim; },
                 [](P p) noexcept { return p.o.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "q.data", "the CUDA backend needs rows of q that begin at multiples of 4 bytes",
                 [](P p) noexcept { return as_int(p.q.data); },
                 [](P p) noexcept { return rows_aligned(p.q, 4); }},
    Precondition<Problem>{kUnsupported, "k.data", "the CUDA backend needs rows of 16-bit k that begin at multiples of 16 bytes",
                 [](P p) noexcept { return as_int(p.k.data); },
                 [](P p) noexcept { return kv_aligned(p.k); }},
    Precondition<Problem>{kUnsupported, "v.data", "the CUDA backend needs rows of 16-bit v that begin at multiples of 16 bytes",
                 [](P p) noexcept { return as_int(p.v.data); },
                 [](P p) noexcept { return kv_aligned(p.v); }},
    Precondition<Problem>{kUnsupported, "o.data", "the CUDA backend needs rows of o that begin at multiples of 4 bytes with rotary",
                 [](P p) noexcept { return as_int(p.o.data); },
                 [](P p) noexcept { return p.append.rotary_dim == 0 || rows_aligned(p.o, 4); }},
};
// clang-format on

}  // namespace

Status refuse_problem(const Problem& problem) noexcept {
  return PreconditionTable<Problem>{kRefused.data(), kRefused.size()}.check(problem);
}

Status refuse_plan(const Problem& problem, const CallPlan& plan) noexcept {
  const Options& options = plan.options;
  const KernelEntry* const any_call = plan.launches[0].any_call;
  if (any_call == nullptr) {
    return refuse(kUnsupported, "head_dim", problem.head_dim,
                  "this build has no kernels for it and the type of k (LEAN_CUDA_FAMILIES)");
  }
  if (const Status status = fixup::check_pairing(problem, options, any_call->config.tile(), options.workers); !status.ok()) {
    return status;
  }
  if (options.workers > kMaxWorkers) {
    return refuse(kUnsupported, "options.workers", options.workers, "the CUDA backend takes 1024 at most");
  }
  if (plan.launches[0].kernel == nullptr) {
    return refuse(kUnsupported, "head_dim", problem.head_dim, "this device has too little shared memory for it");
  }
  if (options.dependent_launch && !plan.device.launches_dependents()) {
    return refuse(kUnsupported, "options.dependent_launch", 1, "needs a device of compute capability 9.0 or newer");
  }
  if (options.fixup != Fixup::kHostBlock) return {};
  if (options.dependent_launch) {
    return refuse(kUnsupported, "options.dependent_launch", 1, "host_block needs a cooperative launch, which has no dependents");
  }
  if (!plan.device.cooperative || options.workers > plan.device.multiprocessors) {
    return refuse(kUnsupported, "options.workers", options.workers,
                  "host_block needs all workers resident: one a multiprocessor at most");
  }
  return {};
}

}  // namespace lean::cuda

// Which backends this build has: a line each, its plan's type and the two functions that make and carry out a plan.
#include "api/backends.hpp"

#include "api/planned_call.hpp"
#include "backends/cpu/cpu_backend.hpp"
#include "base/message.hpp"

namespace lean {

const BackendEntry* backend_of(Backend backend) noexcept {
  using Call = PlannedCall<cpu::CallPlan, cpu::decide, cpu::run_call>;
  static constexpr BackendEntry kCpu{.supports = Call::supports,
                                     .workspace_size = Call::workspace_size,
                                     .decode = Call::decode,
                                     .clear_state = cpu::clear_state,
                                     .read_header = cpu::read_header,
                                     .tiling_of = cpu::tiling_of,
                                     .merge_states = cpu::merge_states,
                                     .shard_lengths = cpu::shard_lengths,
                                     .exchange = nullptr,
                                     .exchange_memory = nullptr};
  switch (backend) {
    case Backend::kCpu: return &kCpu;
    case Backend::kCuda: return cuda_backend();
  }
  return nullptr;
}

Status find_backend(const Options& options, const BackendEntry*& backend) noexcept {
  backend = backend_of(options.backend);
  if (backend != nullptr) return {};
  return refuse(StatusCode::kUnsupported, "options.backend", static_cast<std::int64_t>(options.backend), "not in this build");
}

}  // namespace lean

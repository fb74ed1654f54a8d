#include "api/backends.hpp"

#include "backends/cpu/cpu_backend.hpp"

namespace lean {

const BackendEntry* backend_of(Backend backend) noexcept {
  static constexpr BackendEntry kCpu{
      .supports = cpu::supports,
      .workspace_size = cpu::workspace_size,
      .decode = cpu::decode,
      .clear_state = cpu::clear_state,
      .read_sticky = cpu::read_sticky,
      .select_tile = [](const Problem& problem, const Options&) noexcept { return cpu::select_tile(problem); },
      .cost_model = cpu::cost_model,
      .worker_count = cpu::worker_count};
  switch (backend) {
    case Backend::kCpu: return &kCpu;
    case Backend::kCuda: return cuda_backend();
  }
  return nullptr;
}

}  // namespace lean

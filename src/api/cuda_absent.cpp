// The build without the CUDA backend.
#include "api/backends.hpp"

namespace lean {

const BackendEntry* cuda_backend() noexcept { return nullptr; }

}  // namespace lean

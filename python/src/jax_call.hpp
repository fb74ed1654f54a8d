// decode() inside a program that XLA compiled. While jax.jit traces there are shapes and no memory: the call is read from
// stand-ins as any other, and kept as an image without pointers, an attribute of the compiled operation. The handler takes the
// image, points it at the buffers of the run, and calls the library. It never touches Python: XLA's threads hold no GIL.
#pragma once

#include "arguments.hpp"

namespace lean::python {

/// The bytes of `call` without its pointers.
[[nodiscard]] Reference image_of(const Call& call);

/// A dict from XLA's platform name to a capsule with the handler, for jax.ffi.register_ffi_target().
[[nodiscard]] Reference jax_handlers();

}  // namespace lean::python

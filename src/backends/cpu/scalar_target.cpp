// lean_tile-inl.hpp for Highway's scalar target: one lane, what any machine runs, and an oracle for the others.
#define HWY_COMPILE_ONLY_SCALAR 1

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/highway_targets.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "lean/float_types.hpp"
#include "softmax/state.hpp"
//
#include "backends/cpu/lean_tile-inl.hpp"

namespace lean::cpu {

const TileKernels* scalar_kernels() noexcept {
  static const TileKernels kernels = HWY_NAMESPACE::tile_kernels();
  return &kernels;
}

}  // namespace lean::cpu

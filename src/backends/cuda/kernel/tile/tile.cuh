// TileOf: the LeanTile() of a variant. What the consumer's loop over tiles asks of it is begin(), scores(), update_softmax(),
// accumulate(), finish(), stage() and idle().
#pragma once

#include <type_traits>

#include "backends/cuda/kernel/tile/lean_tile.cuh"
#include "backends/cuda/kernel/tile/narrow_tile.cuh"

namespace lean::cuda {

template <KernelConfig kConfig, bool kWhole>
using TileOf = std::conditional_t<kConfig.narrow(), NarrowTile<kConfig, true>, WarpTile<kConfig, kWhole>>;

}  // namespace lean::cuda

// Tiles of many rows on AMX, for the table in amx_bf16.cpp.
#pragma once

#include "backends/cpu/tile_kernels.hpp"

namespace lean::cpu {

/// Only where amx_bf16_kernels() is not null.
[[nodiscard]] const TurnedTile& amx_turned_tile() noexcept;

}  // namespace lean::cpu

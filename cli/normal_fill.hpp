// normal_fill(): N(0, 1) numbers of any float type, fast and in parallel. An element depends on the seed and its index
// alone, not on the number of threads.
#pragma once

#include <cstdint>

#include "lean/problem.hpp"

namespace lean::cli {

/// data[i], i in [0, elements).
void normal_fill(void* data, DType dtype, std::int64_t elements, std::uint64_t seed);

}  // namespace lean::cli

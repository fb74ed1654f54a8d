// NormalNumbers: N(0, 1) numbers of any float type, fast and in parallel, on the host or the GPU. An element depends on the
// seed and its index alone: not on the number of threads, nor on where it lies.
#pragma once

#include <cstdint>

#include "cli/memory.hpp"
#include "lean/problem.hpp"

namespace lean::cli {

class NormalNumbers {
 public:
  NormalNumbers(DType dtype, Place place);

  /// data[i], i in [0, elements), lies where this was made for.
  void fill(void* data, std::int64_t elements, std::uint64_t seed) const;

 private:
  DType dtype_;
  Buffer table_;  // every quantile in the type asked for
};

}  // namespace lean::cli

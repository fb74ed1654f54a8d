// Ceilings: what no attention kernel can beat on this machine. ReadCeiling reads the very bytes of K and V that a call
// reads, on as many threads; ComputePeak makes multiply-adds in registers. Both are measured in the run they are used in.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "cli/decode_problem.hpp"
#include "cli/machine_kernels.hpp"
#include "lean/options.hpp"

namespace lean::cli {

class ReadCeiling {
 public:
  /// Tries every read kernel a few times and keeps the fastest.
  ReadCeiling(const DecodeProblem& problem, std::int32_t threads);

  /// One pass over K and V.
  void run() const;

  [[nodiscard]] const char* kernel_name() const { return kernel_->name; }

 private:
  void read(const ReadKernel& kernel) const;

  const std::byte* k_;
  const std::byte* v_;
  std::int64_t bytes_;  // of K, and as many of V
  std::int32_t threads_;
  const ReadKernel* kernel_;
};

/// How the products of a call are made: in fp32, or by the bf16 dot-product instruction of vectors or of tiles.
enum class Arithmetic : std::int32_t { kFloat32, kBFloat16Dot, kBFloat16Tile };

[[nodiscard]] Arithmetic arithmetic_of(const Options& options, const Problem& problem);

class ComputePeak {
 public:
  /// Multiply-adds per microsecond of `threads` threads together; measured once, then remembered.
  [[nodiscard]] double products_per_us(Arithmetic arithmetic, std::int32_t threads);

 private:
  std::map<std::pair<Arithmetic, std::int32_t>, double> known_;
};

}  // namespace lean::cli

// The options that say what to compute, the same for every command that takes a problem: --lens, --trace, --preset,
// heads, head dimension, dtype, query tokens, layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/problem_spec.hpp"
#include "cli/trace.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lean::cli {

class ProblemOptions {
 public:
  void add_to(CLI::App& app);

  /// Throws BadArgument.
  [[nodiscard]] ProblemSpec spec() const;

 private:
  [[nodiscard]] std::vector<std::int32_t> lengths() const;

  std::string lens_;
  std::string preset_;
  std::string trace_;
  std::int64_t batch_ = 0;
  Pick pick_ = Pick::kSpread;
  CLI::Option* pick_option_ = nullptr;  // says whether it was given
  std::int32_t q_heads_ = 32;
  std::int32_t kv_heads_ = 8;
  std::int32_t head_dim_ = 128;
  std::int32_t value_dim_ = 0;
  bool latent_ = false;
  DType dtype_ = DType::kBFloat16;
  std::int32_t q_tokens_ = 1;
  std::string causal_ = "auto";
  std::string layout_ = "auto";
  std::string kv_dtype_ = "auto";
  std::int32_t page_tokens_ = 0;
  std::int32_t window_left_ = -1;
  std::int32_t window_right_ = -1;
  float softcap_ = 0.0F;
  bool alibi_ = false;
  bool sinks_ = false;
};

/// "1000,37,5001", "8x4096" (eight of them), "4k" (1024 each). Throws BadArgument.
[[nodiscard]] std::vector<std::int32_t> parse_lengths(const std::string& option, const std::string& text);

}  // namespace lean::cli

#include "cli/problem_options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string_view>

#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"
#include "cli/choice.hpp"
#include "cli/validators.hpp"
#include "lean/dtypes.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kMaxTokens = INT32_MAX;
constexpr const char* kLengthsAllowed =
    "token counts from 0 to 2147483647 with commas between them, as in 1000,37,4k or 8x4096, which is 8 requests";
constexpr std::int32_t kLatentValueDim = 512;  // DeepSeek-V2's, of keys of 576 (arXiv 2405.04434, sec. 2.1)
constexpr std::int64_t kMaxBatch = 1 << 20;    // of the command, not of the library: lengths are listed in its output

/// Each is listed in a schedule, and so kept.
constexpr std::int64_t kMaxOutputs = 1 << 24;
constexpr std::int64_t kMaxElements = std::int64_t{1} << 58;  // of K, and of q: bytes of all tensors together fit 63 bits

/// 0, or what the library takes: below, a score's quotient by it leaves fp32.
CLI::Validator softcap_in_range() {
  constexpr float kLeast = 1e-30F, kMost = 1e30F;
  const std::string allowed = "0 or a number from " + number_text(kLeast) + " to " + number_text(kMost);
  const auto check = [=](std::string& text) {
    const float value = number_in("--softcap", text, 0.0F, kMost);
    if (value != 0.0F && value < kLeast) throw BadArgument("--softcap", text, allowed);
    text = number_text(value);
    return std::string();
  };
  return {check, allowed, "--softcap"};
}

void require_countable(const ProblemSpec& spec) {
  constexpr std::int64_t kBlockRows = 128;  // the longest row block of any backend has as many at least
  const std::int64_t blocks = ceil_div(std::int64_t{spec.group()} * spec.q_tokens, kBlockRows);
  const std::int64_t outputs = checked_product(checked_product(spec.batch(), spec.kv_heads), blocks);
  if (outputs < 0 || outputs > kMaxOutputs) {
    throw BadArgument("--q-heads", std::to_string(spec.q_heads),
                      "up to 16777216 outputs, which are requests x key/value heads x blocks of 128 rows");
  }
  if (spec.page_tokens > 0 && spec.pages() > INT32_MAX)
    throw BadArgument("--page-tokens", std::to_string(spec.page_tokens), "up to 2147483647 pages in all");
  const std::int64_t tokens = round_up(spec.longest_kv_tokens(), std::max(spec.page_tokens, 1));
  const auto elements = [&](std::int64_t of_a_request, std::int32_t heads) {
    return checked_product(checked_product(spec.batch(), of_a_request),
                           checked_product(heads, std::max(spec.head_dim, spec.dims_of_value())));
  };
  for (const std::int64_t count : {elements(tokens, spec.kv_heads), elements(spec.q_tokens, spec.q_heads)}) {
    if (count < 0 || count > kMaxElements) throw BadArgument("the requests have more than 2^58 elements of K, or of q");
  }
}

/// Element types of a list by the command's names.
template <std::size_t kCount>
Choices<DType> choices_of(const std::array<DType, kCount>& types) {
  Choices<DType> choices;
  for (const DType dtype : types) choices.emplace_back(name_of(dtype), dtype);
  return choices;
}
const Choices<DType> kDTypeChoices = choices_of(kQueryDTypes);

/// Element types of K and V: the queries', or one of those that are of K and V alone.
std::vector<std::string> kv_dtype_words() {
  std::vector<std::string> words{"auto"};
  for (const DType dtype : kScaledDTypes) words.emplace_back(name_of(dtype));
  return words;
}

const Choices<Pick> kPicks{{"spread", Pick::kSpread}, {"first", Pick::kFirst}};

/// A whole number with an optional k (x 1024) behind it; -1 when it is none or too large.
std::int64_t parse_count(std::string_view text) {
  const bool kilo = !text.empty() && text.back() == 'k';
  if (kilo) text.remove_suffix(1);
  std::int64_t value = -1;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || value < 0 || value > kMaxTokens) return -1;
  value *= kilo ? 1024 : 1;
  return value > kMaxTokens ? -1 : value;
}

Layout layout_of(const std::string& name, const std::vector<std::int32_t>& kv_lens) {
  for (const Layout layout : {Layout::kBhsd, Layout::kBshd, Layout::kHsd, Layout::kShd}) {
    if (name == name_of(layout)) return layout;
  }
  return natural_layout(kv_lens);
}

}  // namespace

std::vector<std::int32_t> parse_lengths(const std::string& option, const std::string& text) {
  std::vector<std::int32_t> lengths;
  for (const std::string& item : items_of(text)) {
    const std::size_t times = item.find('x');
    const std::int64_t count = times == std::string::npos ? 1 : parse_count(item.substr(0, times));
    const std::int64_t tokens = parse_count(times == std::string::npos ? item : item.substr(times + 1));
    if (count < 1 || tokens < 0) throw BadArgument(option, item, kLengthsAllowed);
    if (count + static_cast<std::int64_t>(lengths.size()) > kMaxBatch) throw BadArgument(option, item, "up to 1048576 requests");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), static_cast<std::int32_t>(tokens));
  }
  return lengths;
}

void ProblemOptions::add_to(CLI::App& app) {
  const std::string group = "Problem";
  app.add_option("--lens", lens_, "Key/value tokens of each request: 1000,37,4k or 8x4096")
      ->check(not_empty("--lens", kLengthsAllowed))
      ->group(group);
  app.add_option("--preset", preset_, "Ready-made lengths; conv32: 32 requests of the Azure conversation trace")
      ->check(one_of("--preset", {"conv32"}))
      ->group(group);
  app.add_option("--trace", trace_, "CSV with a column ContextTokens, a line a request")
      ->check(not_empty("--trace", "a file that can be read"))
      ->group(group);
  app.add_option("--batch", batch_, "Requests to take from the trace; 0: all")
      ->transform(in_range("--batch", std::int64_t{0}, kMaxBatch))
      ->group(group);
  pick_option_ =
      add_choice(app, "--pick", pick_, kPicks, "Which requests of the trace: spread (every k-th, default) or the first ones")
          ->group(group);
  app.add_option("--q-heads", q_heads_, "Query heads")
      ->transform(in_range("--q-heads", 1, INT32_MAX))
      ->capture_default_str()
      ->group(group);
  app.add_option("--kv-heads", kv_heads_, "Key/value heads")
      ->transform(in_range("--kv-heads", 1, INT32_MAX))
      ->capture_default_str()
      ->group(group);
  app.add_option("--head-dim", head_dim_, "Head dimension")
      ->transform(in_range("--head-dim", 1, kMaxHeadDim))
      ->capture_default_str()
      ->group(group);
  app.add_option("--value-dim", value_dim_, "Dims of a value; 0: as --head-dim, and 512 of 576 with --latent")
      ->transform(in_range("--value-dim", 0, kMaxHeadDim))
      ->group(group);
  app.add_flag("--latent", latent_, "Values are the first dims of keys, in the same memory: multi-head latent attention")
      ->group(group);
  add_choice(app, "--dtype", dtype_, kDTypeChoices, "Element type; bf16 by default")->group(group);
  app.add_option("--n-q", q_tokens_, "Query tokens of each request")
      ->transform(in_range("--n-q", 1, 1 << 20))
      ->capture_default_str()
      ->group(group);
  app.add_option("--causal", causal_, "Bottom-right causal mask; auto: with more than one query token")
      ->check(one_of("--causal", {"auto", "on", "off"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--layout", layout_, "Axes of K and V, slowest first; auto: bhsd for a uniform batch, packed hsd for a ragged one")
      ->check(one_of("--layout", {"auto", "bhsd", "bshd", "hsd", "shd"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--kv-dtype", kv_dtype_, "Element type of K and V; auto: as --dtype")
      ->check(one_of("--kv-dtype", kv_dtype_words()))
      ->capture_default_str()
      ->group(group);
  app.add_option("--page-tokens", page_tokens_, "Tokens of a page, by block table; 0: not paged. b of --layout is then the page")
      ->transform(in_range("--page-tokens", 0, 1 << 20))
      ->group(group);
  app.add_option("--window-left", window_left_, "Keys seen to the left of a query's own position; -1: all")
      ->transform(in_range("--window-left", -1, INT32_MAX))
      ->group(group);
  app.add_option("--window-right", window_right_, "Keys seen to the right; -1: all")
      ->transform(in_range("--window-right", -1, INT32_MAX))
      ->group(group);
  app.add_option("--softcap", softcap_, "Scores become softcap tanh(s / softcap); 0: as they are")
      ->transform(softcap_in_range())
      ->group(group);
  app.add_flag("--alibi", alibi_, "ALiBi with slopes 2^(-8 (h + 1) / heads)")->group(group);
  app.add_flag("--sinks", sinks_, "An attention sink of logit 0 for each query head")->group(group);
}

std::vector<std::int32_t> ProblemOptions::lengths() const {
  const int sources = static_cast<int>(!lens_.empty()) + static_cast<int>(!preset_.empty()) + static_cast<int>(!trace_.empty());
  if (sources > 1) throw BadArgument("only one of --lens, --preset and --trace may be given");
  if (trace_.empty() && batch_ != 0) throw BadArgument("--batch", std::to_string(batch_), "goes with --trace");
  if (trace_.empty() && pick_option_ != nullptr && pick_option_->count() > 0) throw BadArgument("--pick goes with --trace");
  if (!lens_.empty()) return parse_lengths("--lens", lens_);
  return trace_.empty() ? conv32_lengths() : trace_lengths(trace_, batch_, pick_);
}

ProblemSpec ProblemOptions::spec() const {
  if (q_heads_ % kv_heads_ != 0) {
    throw BadArgument("--q-heads", std::to_string(q_heads_), "a multiple of --kv-heads, which is " + std::to_string(kv_heads_));
  }
  ProblemSpec spec{.kv_lens = lengths(),
                   .q_heads = q_heads_,
                   .kv_heads = kv_heads_,
                   .head_dim = head_dim_,
                   .value_dim = value_dim_,
                   .values_in_keys = latent_,
                   .dtype = dtype_,
                   .q_tokens = q_tokens_,
                   .causal = causal_ == "on" || (causal_ == "auto" && q_tokens_ > 1),
                   .page_tokens = page_tokens_,
                   .window_left = window_left_,
                   .window_right = window_right_,
                   .softcap = softcap_,
                   .alibi = alibi_,
                   .sinks = sinks_};
  if (latent_ && value_dim_ == 0 && head_dim_ == kMaxHeadDim) spec.value_dim = kLatentValueDim;
  if (latent_ && spec.dims_of_value() >= head_dim_) {
    throw BadArgument("--value-dim", std::to_string(spec.dims_of_value()),
                      "below --head-dim, which is " + std::to_string(head_dim_) + ", with --latent");
  }
  for (const DType dtype : kScaledDTypes) {
    if (kv_dtype_ == name_of(dtype)) spec.kv_dtype = dtype;
  }
  spec.layout = page_tokens_ > 0 && layout_ == "auto" ? Layout::kBhsd : layout_of(layout_, spec.kv_lens);
  if (page_tokens_ > 0 && spec.packed()) throw BadArgument("--layout", layout_, "bhsd or bshd with --page-tokens");
  if (spec.packed() && spec.kv_tokens() > kMaxTokens) {
    throw BadArgument("the requests", std::to_string(spec.kv_tokens()) + " tokens in all", "up to 2147483647 in a packed layout");
  }
  require_countable(spec);
  return spec;
}

}  // namespace lean::cli

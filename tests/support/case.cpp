#include "support/case.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <span>

#include "lean/dtypes.hpp"
#include "support/target.hpp"
#include "support/text.hpp"

namespace lean::support {
namespace {

// ---- values as text -------------------------------------------------------------------------------------------------

std::string print(std::int32_t value) { return std::to_string(value); }
std::string print(bool value) { return value ? "1" : "0"; }
std::string print(const std::string& value) { return value; }
std::string print(float value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.9g", static_cast<double>(value));
  return text.data();
}
std::string print(const std::vector<std::int32_t>& values) {
  std::string text;
  for (const std::int32_t value : values) text += (text.empty() ? "" : "+") + std::to_string(value);
  return text.empty() ? "-" : text;
}

template <typename T>
bool parse_integer(const std::string& text, T& value) {
  char* end = nullptr;
  value = static_cast<T>(std::strtoll(text.c_str(), &end, 10));
  return !text.empty() && *end == '\0';
}

bool parse(const std::string& text, std::int32_t& value) { return parse_integer(text, value); }
bool parse(const std::string& text, bool& value) {
  value = text == "1";
  return text == "0" || text == "1";
}
bool parse(const std::string& text, std::string& value) {
  value = text;
  return !text.empty();
}
bool parse(const std::string& text, float& value) {
  char* end = nullptr;
  value = std::strtof(text.c_str(), &end);
  return !text.empty() && *end == '\0';
}
bool parse(const std::string& text, std::vector<std::int32_t>& values) {
  values.clear();
  if (text == "-") return true;
  for (const std::string& part : split(text, '+')) {
    if (!parse_integer(part, values.emplace_back())) return false;
  }
  return true;
}

template <typename T>
struct Named {
  T value;
  const char* name;
};

constexpr Named<DType> kDTypes[] = {{DType::kFloat32, "f32"}, {DType::kFloat16, "f16"}, {DType::kBFloat16, "bf16"}};
constexpr Named<Input> kInputs[] = {
    {Input::kNormal, "normal"},         {Input::kPeaks, "peaks"},         {Input::kAscending, "ascending"},
    {Input::kDescending, "descending"}, {Input::kEqual, "equal"},         {Input::kUniform, "uniform"},
    {Input::kOneHot, "onehot"},         {Input::kSignature, "signature"}, {Input::kFlat, "flat"}};
constexpr Named<KvType> kKvTypes[] = {{KvType::kAsQueries, "q"}, {KvType::kE4M3, "e4m3"}, {KvType::kE5M2, "e5m2"}};
static_assert(std::size(kDTypes) == kQueryDTypes.size() && std::size(kKvTypes) == 1 + kScaledDTypes.size());
constexpr Named<KvScales> kKvScales[] = {{KvScales::kNone, "none"}, {KvScales::kTensor, "tensor"}, {KvScales::kHead, "head"}};
constexpr Named<Mask> kMasks[] = {
    {Mask::kNone, "none"}, {Mask::kBoolean, "bool"}, {Mask::kFloat32, "f32"}, {Mask::kFloat16, "f16"}, {Mask::kBFloat16, "bf16"}};
constexpr Named<Fill> kFills[] = {{Fill::kNan, "nan"}, {Fill::kZero, "zero"}, {Fill::kInfinity, "inf"}};
constexpr Named<Guard> kGuards[] = {{Guard::kCanary, "canary"}, {Guard::kPage, "page"}};
constexpr Named<Fixup> kFixups[] = {{Fixup::kLastArriver, "last"}, {Fixup::kTwoKernels, "two"}, {Fixup::kHostBlock, "host"}};
constexpr Named<Determinism> kDeterminisms[] = {
    {Determinism::kRunToRun, "run"}, {Determinism::kBatchInvariant, "batch"}, {Determinism::kNotGuaranteed, "none"}};
constexpr Named<CpuIsa> kIsas[] = {{CpuIsa::kBest, "best"},      {CpuIsa::kScalar, "scalar"}, {CpuIsa::kNative128, "native128"},
                                   {CpuIsa::kAvx2, "avx2"},      {CpuIsa::kAvx512, "avx512"}, {CpuIsa::kAvx512Bf16, "avx512bf16"},
                                   {CpuIsa::kAmxBf16, "amxbf16"}};
constexpr Named<ExecutorKind> kExecutors[] = {{ExecutorKind::kDefault, "default"},     {ExecutorKind::kPool, "pool"},
                                              {ExecutorKind::kPermuted, "permuted"},   {ExecutorKind::kDelayed, "delayed"},
                                              {ExecutorKind::kAscending, "ascending"}, {ExecutorKind::kDescending, "descending"}};
constexpr Named<Policy::Kind> kPolicies[] = {{Policy::Kind::kLean, "lean"},
                                             {Policy::Kind::kFixedSplit, "split"},
                                             {Policy::Kind::kDataParallel, "data"},
                                             {Policy::Kind::kFixedChunk, "chunk"}};

template <typename T>
std::string print_name(T value, std::span<const Named<T>> names) {
  for (const Named<T>& named : names) {
    if (named.value == value) return named.name;
  }
  return "?";
}

template <typename T>
bool parse_name(const std::string& text, T& value, std::span<const Named<T>> names) {
  for (const Named<T>& named : names) {
    if (text != named.name) continue;
    value = named.value;
    return true;
  }
  return false;
}

std::string print(DType value) { return print_name<DType>(value, kDTypes); }
std::string print(Input value) { return print_name<Input>(value, kInputs); }
std::string print(KvType value) { return print_name<KvType>(value, kKvTypes); }
std::string print(KvScales value) { return print_name<KvScales>(value, kKvScales); }
std::string print(Mask value) { return print_name<Mask>(value, kMasks); }
std::string print(Fill value) { return print_name<Fill>(value, kFills); }
std::string print(Guard value) { return print_name<Guard>(value, kGuards); }
std::string print(Fixup value) { return print_name<Fixup>(value, kFixups); }
std::string print(Determinism value) { return print_name<Determinism>(value, kDeterminisms); }
std::string print(CpuIsa value) { return print_name<CpuIsa>(value, kIsas); }
std::string print(ExecutorKind value) { return print_name<ExecutorKind>(value, kExecutors); }
std::string print(const Policy& value) {
  const std::int32_t number = value.kind == Policy::Kind::kFixedSplit ? value.splits : value.chunk_tokens;
  return print_name<Policy::Kind>(value.kind, kPolicies) + (number != 0 ? ":" + std::to_string(number) : "");
}

bool parse(const std::string& text, DType& value) { return parse_name<DType>(text, value, kDTypes); }
bool parse(const std::string& text, Input& value) { return parse_name<Input>(text, value, kInputs); }
bool parse(const std::string& text, KvType& value) { return parse_name<KvType>(text, value, kKvTypes); }
bool parse(const std::string& text, KvScales& value) { return parse_name<KvScales>(text, value, kKvScales); }
bool parse(const std::string& text, Mask& value) { return parse_name<Mask>(text, value, kMasks); }
bool parse(const std::string& text, Fill& value) { return parse_name<Fill>(text, value, kFills); }
bool parse(const std::string& text, Guard& value) { return parse_name<Guard>(text, value, kGuards); }
bool parse(const std::string& text, Fixup& value) { return parse_name<Fixup>(text, value, kFixups); }
bool parse(const std::string& text, Determinism& value) { return parse_name<Determinism>(text, value, kDeterminisms); }
bool parse(const std::string& text, CpuIsa& value) { return parse_name<CpuIsa>(text, value, kIsas); }
bool parse(const std::string& text, ExecutorKind& value) { return parse_name<ExecutorKind>(text, value, kExecutors); }
bool parse(const std::string& text, Policy& value) {
  const std::vector<std::string> parts = split(text, ':');
  value = {};
  if (!parse_name<Policy::Kind>(parts[0], value.kind, kPolicies)) return false;
  if (parts.size() == 1) return true;
  std::int32_t& number = value.kind == Policy::Kind::kFixedSplit ? value.splits : value.chunk_tokens;
  return parts.size() == 2 && parse_integer(parts[1], number);
}

// ---- the fields -----------------------------------------------------------------------------------------------------

/// Calls use(key, field) for every field of the case; one list for printing and parsing.
template <typename TCase, typename TUse>
void for_each_field(TCase& c, TUse use) {
  use("dtype", c.dtype);
  use("kv", c.kv_type);
  use("scales", c.kv_scales);
  use("hq", c.q_heads);
  use("hkv", c.kv_heads);
  use("d", c.head_dim);
  use("dv", c.value_dim);
  use("vink", c.values_in_keys);
  use("lens", c.lens);
  use("nq", c.n_q);
  use("pad", c.pad);
  use("page", c.page_tokens);
  use("csr", c.csr);
  use("cap", c.capacity);
  use("lengths", c.lengths);
  use("causal", c.causal);
  use("scale", c.scale);
  use("append", c.append);
  use("alayout", c.append_layout);
  use("rotary", c.rotary_dim);
  use("interleaved", c.rotary_interleaved);
  use("absolute", c.rotary_absolute);
  use("left", c.window_left);
  use("right", c.window_right);
  use("softcap", c.softcap);
  use("alibi", c.alibi);
  use("alibib", c.alibi_per_sequence);
  use("sinks", c.sinks);
  use("mask", c.mask);
  use("mlayout", c.mask_layout);
  use("tree", c.tree);
  use("lse", c.lse);
  use("q", c.q_layout);
  use("k", c.k_layout);
  use("v", c.v_layout);
  use("o", c.o_layout);
  use("l", c.lse_layout);
  use("in", c.input);
  use("qstd", c.q_std);
  use("ids", c.ids);
  use("fill", c.fill);
  use("guard", c.guard);
  use("policy", c.policy);
  use("fixup", c.fixup);
  use("det", c.determinism);
  use("workers", c.workers);
  use("isa", c.isa);
  use("exec", c.executor);
  use("scratch", c.scratch);
}

std::vector<std::string> field_texts(const Case& c) {
  std::vector<std::string> texts;
  for_each_field(c, [&](const char* key, const auto& field) { texts.push_back(std::string(key) + "=" + print(field)); });
  return texts;
}

}  // namespace

std::string to_text(const Case& c) {
  const std::vector<std::string> texts = field_texts(c);
  const std::vector<std::string> defaults = field_texts(Case{});
  std::string line;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i] != defaults[i]) line += (line.empty() ? "" : ",") + texts[i];
  }
  return line.empty() ? texts[0] : line;
}

std::string reproducer(const Case& c) {
  return std::string("conformance_tests") + (on_cuda() ? " --backend=cuda" : "") + " '--case=" + to_text(c) +
         "' --seed=" + std::to_string(c.seed);
}

std::optional<Case> parse_case(const std::string& text, std::string& error) {
  Case c;
  for (const std::string& part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : part.substr(equals + 1);
    bool known = false;
    bool valid = false;
    for_each_field(c, [&](const char* name, auto& field) {
      if (key != name) return;
      known = true;
      valid = parse(value, field);
    });
    if (known && valid) continue;
    error = known ? "'" + value + "' is no value for '" + key + "'" : "unknown field '" + key + "'";
    return std::nullopt;
  }
  return c;
}

}  // namespace lean::support

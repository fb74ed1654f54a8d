// Differential fuzzing: bytes -> a call, valid or not -> the library on guarded memory against the oracle. Any crash,
// sanitizer report, disagreement between supports() and decode(), byte written where none may be, or result outside the
// bound ends the process with the case's line. libFuzzer calls LLVMFuzzerTestOneInput; fuzz_main.cpp does elsewhere.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

/// Takes values off the front of the input; zeros when it is used up.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t count) : data_(data), count_(count) {}

  template <typename T>
  [[nodiscard]] T raw() {
    T value{};
    const std::size_t taken = sizeof(T) < count_ ? sizeof(T) : count_;
    std::memcpy(&value, data_, taken);
    data_ += taken;
    count_ -= taken;
    return value;
  }
  /// In [low, high].
  [[nodiscard]] std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(raw<std::uint16_t>() % static_cast<std::uint32_t>(high - low + 1));
  }
  [[nodiscard]] bool chance(int percent) { return between(0, 99) >= 100 - percent; }
  template <typename T>
  [[nodiscard]] T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<std::int32_t>(values.size()) - 1)];
  }
  [[nodiscard]] bool empty() const { return count_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t count_;
};

constexpr std::int64_t kMaxElements = 1 << 16;  // of K: keeps one run near a millisecond

std::string random_layout(Bytes& bytes, bool output) {
  std::string name = bytes.one_of({"bhsd", "bshd", "sbhd", "bhds", "shd", "hsd", "sdh"});
  if (bytes.chance(20)) name += "~gap" + std::to_string(bytes.between(1, 9));
  if (bytes.chance(15)) name += "~inner" + std::to_string(bytes.between(2, 3));
  if (bytes.chance(10)) name += bytes.one_of({"~negs", "~negd"});
  if (bytes.chance(10)) name += "~off" + std::to_string(bytes.between(1, 15));
  if (!output && bytes.chance(8)) name += bytes.one_of({"~bcasth", "~bcasts"});
  return name;
}

Case valid_case(Bytes& bytes) {
  Case c;
  c.seed = bytes.raw<std::uint16_t>();
  c.dtype = bytes.one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  c.kv_type = bytes.chance(25) ? bytes.one_of({KvType::kE4M3, KvType::kE5M2}) : KvType::kAsQueries;
  if (c.kv_type != KvType::kAsQueries) c.kv_scales = bytes.one_of({KvScales::kNone, KvScales::kTensor, KvScales::kHead});
  c.kv_heads = bytes.between(1, 3);
  c.q_heads = c.kv_heads * (bytes.chance(20) ? bytes.between(1, 17) : bytes.between(1, 4));
  c.head_dim = bytes.chance(50) ? bytes.between(1, bytes.chance(90) ? 256 : kMaxHeadDim) : 8 * bytes.between(1, 16);
  c.value_dim = bytes.chance(40) ? (bytes.chance(50) ? bytes.between(1, 256) : 8 * bytes.between(1, 32)) : 0;
  const std::int64_t row = std::int64_t{c.kv_heads} * (c.head_dim > c.value_dim ? c.head_dim : c.value_dim);
  const std::int32_t sequences = bytes.between(1, 5);
  const auto longest = static_cast<std::int32_t>(kMaxElements / row / sequences);
  c.lens.clear();
  for (std::int32_t b = 0; b < sequences; ++b) c.lens.push_back(bytes.chance(10) ? 0 : bytes.between(1, longest));
  c.q_layout = random_layout(bytes, false);
  c.n_q = {bytes.chance(60) ? 1 : bytes.between(1, bytes.chance(80) ? 9 : 90)};
  if (is_packed(c.q_layout) && bytes.chance(50)) c.n_q.push_back(bytes.between(0, 7));
  if (bytes.chance(40)) {
    for (const std::int32_t length : c.lens) c.pad.push_back(bytes.between(0, length));
  }
  c.capacity = bytes.chance(30) ? bytes.between(0, longest) : 0;
  c.lengths = !bytes.chance(10) || !c.pad.empty();
  c.causal = bytes.chance(50);
  c.scale = bytes.chance(20) ? bytes.one_of({0.01F, 1.0F, -0.5F}) : 0.0F;
  c.window_left = bytes.chance(20) ? bytes.between(0, longest) : -1;
  c.window_right = bytes.chance(10) ? bytes.between(0, 20) : -1;
  c.softcap = bytes.chance(20) ? bytes.one_of({0.1F, 5.0F, 50.0F}) : 0.0F;
  c.alibi = bytes.chance(15);
  c.alibi_per_sequence = bytes.chance(50);
  c.sinks = bytes.chance(15);
  c.mask = bytes.chance(20) ? bytes.one_of({Mask::kBoolean, Mask::kFloat32, Mask::kFloat16, Mask::kBFloat16}) : Mask::kNone;
  c.mask_layout = bytes.one_of({"bhsd", "bshd~gap3", "dshb", "bhsd~inner2"});
  c.tree = bytes.chance(15);
  c.lse = bytes.chance(80);
  c.k_layout = random_layout(bytes, false);
  c.v_layout = bytes.one_of({"bhsd", "bshd~gap3", "bhsd~inner2", "sbhd", "bshd~negs", "bhds"});
  if (bytes.chance(30)) {
    ask_for_pages(c, bytes.chance(50) ? bytes.one_of({1, 3, 16, 64}) : bytes.between(1, 100));
    c.csr = bytes.chance(40);
  }
  if (bytes.chance(20)) {
    ask_to_append(c, bytes.chance(50) ? 0 : bytes.between(0, c.head_dim / 2) * 2);
    c.rotary_interleaved = bytes.chance(50);
    c.rotary_absolute = bytes.chance(50);
    c.append_layout = bytes.one_of({"bshd", "bhsd~gap3", "sbhd~inner2", "bhds"});
  }
  c.o_layout = bytes.one_of({"bhsd", "bshd~gap2", "bhsd~inner2", "bhds", "sbhd~negd"});
  c.lse_layout = bytes.one_of({"bhsd", "bshd~gap1"});
  c.input = bytes.one_of({Input::kNormal, Input::kPeaks, Input::kAscending, Input::kDescending, Input::kSignature, Input::kFlat});
  c.q_std = bytes.one_of({1.0F, 0.1F, 10.0F});
  c.fill = bytes.one_of({Fill::kNan, Fill::kInfinity});
  c.guard = bytes.one_of({Guard::kPage, Guard::kCanary});
  const std::vector<Policy> policies = all_policies();
  c.policy = policies[static_cast<std::size_t>(bytes.between(0, static_cast<std::int32_t>(policies.size()) - 1))];
  c.fixup = bytes.one_of({Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock});
  c.determinism = bytes.one_of({Determinism::kRunToRun, Determinism::kBatchInvariant, Determinism::kNotGuaranteed});
  c.workers = bytes.chance(80) ? bytes.between(1, 12) : bytes.between(1, 200);
  const std::vector<CpuIsa> isas = available_isas();
  c.isa = isas[static_cast<std::size_t>(bytes.between(0, static_cast<std::int32_t>(isas.size()) - 1))];
  c.scratch = bytes.one_of({Fill::kNan, Fill::kZero, Fill::kInfinity});
  return c;
}

/// What a careless caller may get wrong without lying about memory: sizes only shrink, enumerators are anything.
void break_call(Bytes& bytes, Problem& problem, Options& options) {
  const auto anything = [&bytes] { return bytes.chance(50) ? bytes.between(-3, 9) : bytes.raw<std::int32_t>(); };
  switch (bytes.between(0, 17)) {
    case 0: problem.q.dtype = static_cast<DType>(anything()); break;
    case 1: problem.k.dtype = static_cast<DType>(anything()); break;
    case 2: problem.o.dtype = static_cast<DType>(anything()); break;
    case 3: options.policy.kind = static_cast<Policy::Kind>(anything()); break;
    case 4: options.policy.splits = anything(); break;
    case 5: options.policy.chunk_tokens = anything(); break;
    case 6: options.fixup = static_cast<Fixup>(anything()); break;
    case 7: options.determinism = static_cast<Determinism>(anything()); break;
    case 8: options.cpu_isa = static_cast<CpuIsa>(anything()); break;
    case 9: options.workers = -1 - bytes.between(0, 1000); break;
    case 10: problem.o.data = const_cast<void*>(problem.q.data); break;
    case 11: problem.k.strides.token = bytes.one_of({INT64_MIN, INT64_MAX, INT64_MAX / 3}); break;
    case 12: problem.scores.window_left = anything(); break;
    case 13: problem.scores.softcap = bytes.raw<float>(); break;
    case 14: problem.scores.scale = bytes.one_of({INFINITY, -INFINITY, NAN}); break;
    case 15: problem.kv_capacity = -1 - bytes.between(0, 100); break;
    case 16: problem.value_dim = kMaxHeadDim + 1 + bytes.between(0, 10000); break;
    default: problem.batch = bytes.one_of<std::int64_t>({-1, 0, INT64_MIN, INT64_MAX}); break;
  }
}

/// Device-side lengths and page ids that lie: clamped by the library, and by the oracle in the same way. With append only lengths
/// do: where sequences share tokens and one writes them, no result is defined.
void break_lengths(Bytes& bytes, TestProblem& built) {
  const Case& c = built.description();
  const std::int32_t sequence = bytes.between(0, static_cast<std::int32_t>(c.batch()) - 1);
  const std::int32_t tokens = c.lens[static_cast<std::size_t>(sequence)];
  std::int32_t* number = nullptr;
  if (!c.append && c.page_tokens > 0 && tokens > 0 && bytes.chance(50)) {
    number = built.page_ids(sequence) + bytes.between(0, (tokens - 1) / c.page_tokens);
  } else {
    number = c.append ? bytes.one_of({built.kv_lengths(), built.kv_left_pad()})
                      : bytes.one_of({built.kv_lengths(), built.kv_left_pad(), built.cu_kv_tokens(), built.page_indptr()});
    if (number != nullptr) number += sequence;
  }
  if (number == nullptr) return;
  *number = bytes.chance(50) ? bytes.raw<std::int32_t>() : bytes.between(-9, 99);
  built.remember();
}

[[noreturn]] void fail(const Case& c, const char* what) {
  std::fprintf(stderr, "%s\n%s\n", what, reproducer(c).c_str());
  std::abort();
}

void refuse_or_fail(TestProblem& built, const Options& options, const Status& said) {
  if (said.message[0] == '\0') fail(built.description(), "a refusal without a message");
  if (workspace_size(built.problem(), options).status.code != said.code)
    fail(built.description(), "workspace_size() disagrees with supports()");
  const GuardedBuffer state(1 << 16);
  const GuardedBuffer scratch(1 << 16);
  state.fill(std::byte{0});
  const Status status = decode(built.problem(), options, {state.data(), state.size_bytes(), scratch.data(), scratch.size_bytes()});
  if (status.code != said.code) fail(built.description(), "decode() disagrees with supports()");
  if (!built.outputs_untouched() || !state.intact() || !scratch.intact())
    fail(built.description(), "a refused call wrote something");
}

void check(Bytes bytes) {
  static const TestExecutor executor(ExecutorKind::kPool, 3);
  Case c = valid_case(bytes);
  const bool broken_lengths = bytes.chance(15);
  const bool broken_call = !broken_lengths && bytes.chance(15);
  // Either may show hidden tokens to some rows of a block: NaN or infinity in V there reaches all (docs/numerics.md).
  if (broken_lengths || broken_call) c.fill = Fill::kZero;
  TestProblem built(c);
  Options options = options_of(c, executor);
  if (broken_lengths) break_lengths(bytes, built);
  if (broken_call) break_call(bytes, built.problem(), options);
  const Status said = supports(built.problem(), options);
  if (!said.ok()) return refuse_or_fail(built, options, said);
  if (built.problem().batch == 0) {
    if (!decode(built.problem(), options, {}).ok() || !built.outputs_untouched()) fail(c, "an empty batch");
    return;
  }
  const auto result = run_and_check(built, reference::decode(built.problem()), options);
  if (!result) fail(c, result.message());
}

}  // namespace
}  // namespace lean::support

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  lean::support::check(lean::support::Bytes(data, size));
  return 0;
}

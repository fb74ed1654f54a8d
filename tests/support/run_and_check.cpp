#include "support/run_and_check.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "acceptance/rounding.hpp"
#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "backends/reference/load.hpp"
#include "base/kv_type.hpp"
#include "fixup/workspace.hpp"
#include "problem/address.hpp"
#include "problem/pages.hpp"
#include "problem/sequence.hpp"
#include "support/random.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

testing::AssertionResult failure(const TestProblem& built) {
  return testing::AssertionFailure() << "repeat: " << reproducer(built.description()) << "\n  ";
}

/// The state may differ from all zeros in the first fault only: counters are left as they were found.
bool is_as_found(const WorkspaceBuffer& state, bool may_have_fault) {
  auto bytes = state.contents();
  if (may_have_fault) std::fill(bytes.begin() + sizeof(fixup::Counter), bytes.begin() + sizeof(fixup::StateHeader), std::byte{0});
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}
static_assert(offsetof(fixup::StateHeader, sticky_code) == sizeof(fixup::Counter));

/// True when a page that holds a token which some query may see by position is not in the pool.
bool meets_bad_page(const Problem& problem, std::int64_t sequence) {
  const Sequence lengths = LengthSource(problem)(sequence);
  if (!is_paged(problem.pages) || lengths.q_tokens == 0) return false;
  const KeySpan seen = visible_span(lengths, 0, lengths.q_tokens - 1, reach_of(problem.scores));
  for (std::int32_t token = seen.begin; token < seen.end; ++token) {
    if (!in_pool(problem.pages, page_ids(problem.pages, lengths, sequence)[token / problem.pages.page_tokens])) return true;
  }
  return false;
}

StatusCode expected_sticky(const Problem& problem) {
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    if (LengthSource(problem)(b).clamped) return StatusCode::kBadLengths;
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    if (meets_bad_page(problem, b)) return StatusCode::kBadPageIndex;
  }
  return StatusCode::kOk;
}

std::atomic<std::int64_t> served_calls{0};
std::atomic<std::int64_t> refused_calls{0};

}  // namespace

Options options_of(const Case& c, const TestExecutor& executor) {
  return {.backend = target(),
          .policy = c.policy,
          .fixup = c.fixup,
          .determinism = c.determinism,
          .workers = c.workers,
          .cpu_isa = c.isa,
          .executor = executor.get()};
}

reference::Rounding rounding_of(const Problem& problem, const Options& options) {
  return acceptance::rounding_of(problem, options, backend_of(options.backend)->tiling_of(problem, resolve(options)));
}

bool served(const TestProblem& built, const Options& options) {
  const bool declined = on_cuda() && supports(built.problem(), options).code == StatusCode::kUnsupported;
  if (declined) ++refused_calls;
  return !declined;
}

bool target_serves(const Case& c) {
  const TestExecutor executor(c.executor, 1);
  return supports(TestProblem(c, Contents::kFill).problem(), options_of(c, executor)).code != StatusCode::kUnsupported;
}

Tally tally() { return {served_calls, refused_calls}; }

Status decode_and_wait(const Problem& problem, const Options& options, const Workspace& workspace) {
  if (const Status status = decode(problem, options, workspace); !status.ok()) return status;
  return wait_for_target();
}

testing::AssertionResult run(TestProblem& built, const Options& options, Fill scratch) {
  const Problem& problem = built.problem();
  if (const Status status = supports(problem, options); !status.ok()) return failure(built) << "supports(): " << status.message;
  const TestWorkspace workspace(problem, options, scratch);
  if (!workspace.status().ok()) return failure(built) << "workspace_size(): " << workspace.status().message;
  built.poison_outputs();
  if (const Status status = decode_and_wait(problem, options, workspace.get()); !status.ok()) {
    return failure(built) << "decode(): " << name_of(status.code) << ": " << status.message;
  }
  if (!workspace.intact()) return failure(built) << "memory beside the workspace was written";
  if (const std::string faults = built.memory_faults(); !faults.empty()) return failure(built) << faults;
  const StatusCode expected = expected_sticky(problem);
  const Status sticky = sticky_status(workspace.get(), options);
  if (sticky.code != expected)
    return failure(built) << "sticky_status(): " << name_of(sticky.code) << ", expected " << name_of(expected);
  if (expected != StatusCode::kOk && std::strstr(sticky.message, "] = ") == nullptr)
    return failure(built) << "sticky_status() names no entry: " << sticky.message;
  if (!is_as_found(workspace.state(), expected != StatusCode::kOk))
    return failure(built) << "the state was not left as it was found";
  ++served_calls;
  return testing::AssertionSuccess();
}

testing::AssertionResult run_and_check(TestProblem& built, const reference::Answer& answer, const Options& options) {
  if (auto result = run(built, options, built.description().scratch); !result) return result;
  const reference::ErrorReport report = reference::compare(built.problem(), answer, rounding_of(built.problem(), options));
  if (!report.passes()) return failure(built) << reference::describe(report);
  return testing::AssertionSuccess();
}

testing::AssertionResult run_and_check(const Case& c) {
  const TestExecutor executor(c.executor, 4, c.seed);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return testing::AssertionSuccess() << "declined";
  return run_and_check(built, reference::decode(built.problem()), options_of(c, executor));
}

namespace {

/// run_and_check() of what a case builds, changed by `change` where the case is served.
testing::AssertionResult run_changed(const Case& c, const auto& change) {
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  const Options options = options_of(c, executor);
  if (!served(built, options)) return testing::AssertionSuccess();
  change(built);
  built.remember();
  return run_and_check(built, reference::decode(built.problem()), options);
}

}  // namespace

testing::AssertionResult skips_page(const Case& c, std::int32_t page) {
  return run_changed(c, [&](TestProblem& built) { built.page_ids(static_cast<std::int64_t>(c.lens.size()) - 1)[page] = -1; });
}

testing::AssertionResult takes_key_scale(const Case& c, float scale) {
  return run_changed(c, [&](TestProblem& built) { *const_cast<float*>(built.problem().k_scales) = scale; });
}

// ---- the proof that the bound can fail ------------------------------------------------------------------------------

namespace {

/// A result that was never computed by the library: the oracle's answer rounded to the output type, in dense memory.
class FakeResult {
 public:
  FakeResult(const Problem& problem, const reference::Answer& answer)
      : problem_(problem), answer_(answer), o_(answer.o.size() * sizeof(float)), lse_(answer.lse.size()) {
    const std::int64_t dv = answer.value_dim;
    const std::int64_t row = answer.q_heads * dv;
    problem_.o.data = o_.data();
    problem_.o.strides = {.sequence = problem.q_tokens * row, .head = dv, .token = row, .dim = 1};
    problem_.lse = {lse_.data(), problem.q_tokens * std::int64_t{answer.q_heads}, 1, answer.q_heads};
    for (std::int64_t r = 0; r < answer.rows(); ++r) copy_row(answer, r);
  }

  void copy_row(const reference::Answer& from, std::int64_t row) {
    lse_[static_cast<std::size_t>(row)] = static_cast<float>(from.lse[static_cast<std::size_t>(row)]);
    for (std::int64_t e = row * answer_.value_dim; e < (row + 1) * answer_.value_dim; ++e) {
      reference::store_element(o_.data(), problem_.o.dtype, e, from.o[static_cast<std::size_t>(e)]);
    }
  }

  void clear_row(std::int64_t row) {
    for (std::int64_t e = row * answer_.value_dim; e < (row + 1) * answer_.value_dim; ++e) {
      reference::store_element(o_.data(), problem_.o.dtype, e, 0.0);
    }
  }

  [[nodiscard]] bool passes(const reference::Rounding& rounding, bool with_lse) const {
    Problem problem = problem_;
    if (!with_lse) problem.lse = {};
    return reference::compare(problem, answer_, rounding).passes();
  }

 private:
  Problem problem_;
  const reference::Answer& answer_;
  std::vector<std::byte> o_;
  std::vector<float> lse_;
};

/// One LeanTile of every sequence weighed differently: bias -inf drops it, ln 2 counts it twice.
struct TileBias {
  std::vector<float> bias;  // [B, Hq, kv capacity]
  Problem problem;

  TileBias(const TestProblem& built, std::int32_t tile_tokens, float value) : problem(built.problem()) {
    const std::int64_t capacity = problem.kv_capacity;
    bias.assign(static_cast<std::size_t>(problem.batch * problem.q_heads * capacity), 0.0F);
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const Sequence lengths = LengthSource(problem)(b);
      if (lengths.kv_tokens() == 0) continue;
      const std::uint64_t key = key_of({static_cast<std::int64_t>(built.description().seed), 9, b});
      const std::int64_t tile = pick(key, ceil_div(lengths.kv_tokens(), tile_tokens));
      const std::int64_t begin = lengths.kv_begin + tile * tile_tokens;
      for (std::int64_t head = 0; head < problem.q_heads; ++head) {
        for (std::int64_t t = begin; t < min_of(begin + tile_tokens, lengths.kv_end); ++t) {
          bias[static_cast<std::size_t>((b * problem.q_heads + head) * capacity + t)] = value;
        }
      }
    }
    problem.scores.mask = bias.data();
    problem.scores.mask_strides = {.sequence = problem.q_heads * capacity, .head = capacity, .token = 0, .dim = 1};
  }
};

}  // namespace

testing::AssertionResult bound_refuses_wrong_results(const TestProblem& built, const reference::Answer& answer,
                                                     const Options& options) {
  const Problem& problem = built.problem();
  if (problem.cu_q_tokens != nullptr) throw std::invalid_argument("needs a q layout with b");
  const reference::Rounding rounding = rounding_of(problem, options);
  if (!FakeResult(problem, answer).passes(rounding, true)) return failure(built) << "the bound refuses the rounded oracle itself";
  const TileBias drop(built, rounding.tile_tokens, -std::numeric_limits<float>::infinity());
  const TileBias repeat(built, rounding.tile_tokens, std::log(2.0F));
  const reference::Answer dropped = reference::decode(drop.problem);
  const reference::Answer repeated = reference::decode(repeat.problem);
  // A tile may hold one token: where weights are rounded before P V, its LSE tells what its output cannot.
  const bool coarse = rounding.p_roundoff > 0.0;
  int proofs = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t tiles = ceil_div(LengthSource(problem)(b).kv_tokens(), rounding.tile_tokens);
    if (tiles == 0) continue;
    const std::int64_t row = answer.first_row[static_cast<std::size_t>(b + 1)] - 1;  // of one output: the last query token's
    const auto refuses = [&](const char* what, bool with_lse, auto change) {
      FakeResult wrong(problem, answer);
      change(wrong);
      ++proofs;
      return wrong.passes(rounding, with_lse) ? std::string("sequence ") + std::to_string(b) + " passes with " + what
                                              : std::string();
    };
    const std::string gaps[] = {refuses("an output of zeros", false, [&](FakeResult& wrong) { wrong.clear_row(row); }),
                                refuses("a dropped tile", coarse, [&](FakeResult& wrong) { wrong.copy_row(dropped, row); }),
                                refuses("a doubled tile", coarse || tiles == 1,
                                        [&](FakeResult& wrong) { wrong.copy_row(repeated, row); })};  // one tile: l tells
    for (const std::string& gap : gaps) {
      if (!gap.empty()) return failure(built) << gap;
    }
  }
  if (proofs == 0) return failure(built) << "no sequence has a tile";
  return testing::AssertionSuccess();
}

}  // namespace lean::support

// lean schedule: who computes what, for any number of workers, without computing it.
#include <CLI/CLI.hpp>

#include "api/option_preconditions.hpp"
#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"
#include "cli/call_options.hpp"
#include "cli/command.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_options.hpp"
#include "cli/validators.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean::cli {
namespace {

/// Each is listed, and so kept.
constexpr std::int64_t kMaxOutputs = 1 << 24;

void check_outputs(const Problem& problem) {
  const std::int64_t blocks = ceil_div(schedule::row_capacity(problem), tile::kMaxRowBlock);
  const std::int64_t outputs = checked_product(checked_product(problem.batch, problem.kv_heads), blocks);
  if (outputs >= 0 && outputs <= kMaxOutputs) return;
  throw BadArgument("--q-heads", std::to_string(problem.q_heads),
                    "up to 16777216 outputs, which are requests x key/value heads x blocks of 128 rows");
}

class ScheduleCommand final : public Command {
 public:
  std::string name() const override { return "schedule"; }
  std::string description() const override { return "Draw or print the schedule of a batch for any number of workers"; }
  std::string example() const override { return "lean schedule --lens 1000,37,5001 --workers 132 --svg schedule.svg"; }

  void add_options(CLI::App& app) override {
    problem_.add_to(app);
    call_.add_schedule_to(app);
    app.add_option("--svg", svg_path_, "Write a drawing to this file; -: to stdout, in place of the text")
        ->check(not_empty("--svg", "the name of a file, or - for stdout"));
  }

  int run(bool json) override {
    const Options options = resolve(call_.options());
    const ProblemSpec spec = problem_.spec();
    const ProblemShape shape(spec);
    check_outputs(shape.problem());
    const explain::ScheduleMap map = map_of(shape.problem(), options);
    const bool drawing_on_stdout = svg_path_ == "-";
    if (drawing_on_stdout && json) throw BadArgument("--svg", svg_path_, "the name of a file with --json, which has stdout");
    if (!svg_path_.empty()) {
      const std::string drawing = explain::to_svg({map}, {});
      if (drawing_on_stdout) return print(drawing), kExitOk;
      OutputFile("--svg", svg_path_).begin(drawing);
    }
    print(json ? explain::to_json(map) : explain::to_text(map));
    if (!json && !svg_path_.empty()) print("\nwrote " + svg_path_ + "\n");
    return kExitOk;
  }

 private:
  ProblemOptions problem_;
  CallOptions call_;
  std::string svg_path_;
};

}  // namespace

std::unique_ptr<Command> make_schedule_command() { return std::make_unique<ScheduleCommand>(); }

}  // namespace lean::cli

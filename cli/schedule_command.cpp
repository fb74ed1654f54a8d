// lean schedule: who computes what, for any number of workers, without computing it.
#include <CLI/CLI.hpp>

#include "api/option_preconditions.hpp"
#include "cli/bad_argument.hpp"
#include "cli/call_options.hpp"
#include "cli/command.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_options.hpp"
#include "cli/schedule_page.hpp"
#include "cli/validators.hpp"

namespace lean::cli {
namespace {

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
    app.add_option("--html", html_path_,
                   "Write a page with sliders, four policies side by side, to this file; -: to stdout, in place of the text")
        ->check(not_empty("--html", "the name of a file, or - for stdout"));
  }

  int run(bool json) override {
    const Options options = resolve(call_.options());
    const ProblemSpec spec = problem_.spec();
    const ProblemShape shape(spec);
    const explain::ScheduleMap map = map_of(shape.problem(), options);
    require_one_on_stdout(json);
    if (!svg_path_.empty() && write("--svg", svg_path_, explain::to_svg({map}, {}))) return kExitOk;
    if (!html_path_.empty()) {
      if (map.policy.kind != Policy::Kind::kLean) {
        throw BadArgument("--schedule and --determinism: as they are by default with --html, whose page has four policies");
      }
      if (write("--html", html_path_, schedule_page(map, tiling_of(shape.problem(), options).cost_model))) return kExitOk;
    }
    print(json ? explain::to_json(map) : explain::to_text(map));
    for (const std::string& path : {svg_path_, html_path_}) {
      if (!json && !path.empty()) print("\nwrote " + path + "\n");
    }
    return kExitOk;
  }

 private:
  void require_one_on_stdout(bool json) const {
    if (svg_path_ == "-" && json) throw BadArgument("--svg", svg_path_, "the name of a file with --json, which has stdout");
    if (html_path_ != "-") return;
    if (json) throw BadArgument("--html", html_path_, "the name of a file with --json, which has stdout");
    if (!svg_path_.empty()) throw BadArgument("--html", html_path_, "the name of a file with --svg");
  }

  /// True when that was all there is to print.
  static bool write(const std::string& option, const std::string& path, const std::string& text) {
    if (path == "-") return print(text), true;
    OutputFile(option, path).begin(text);
    return false;
  }

  ProblemOptions problem_;
  CallOptions call_;
  std::string svg_path_;
  std::string html_path_;
};

}  // namespace

std::unique_ptr<Command> make_schedule_command() { return std::make_unique<ScheduleCommand>(); }

}  // namespace lean::cli

// Command: one sub-command of `lean`. main() adds its options to the command line, then runs the one that was named.
// Text goes to stdout for people; with --json stdout holds JSON and nothing else; progress and errors go to stderr.
#pragma once

#include <memory>
#include <string>

namespace CLI {
class App;
}

namespace lean::cli {

enum ExitCode : int { kExitOk = 0, kExitCheckFailed = 1, kExitBadArguments = 2 };

class Command {
 public:
  virtual ~Command() = default;
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual std::string description() const = 0;
  [[nodiscard]] virtual std::string example() const = 0;
  virtual void add_options(CLI::App& app) = 0;

  /// Returns an ExitCode; throws BadArgument for arguments that only the work itself can judge.
  virtual int run(bool json) = 0;

 protected:
  Command() = default;
};

[[nodiscard]] std::unique_ptr<Command> make_run_command();
[[nodiscard]] std::unique_ptr<Command> make_schedule_command();
[[nodiscard]] std::unique_ptr<Command> make_simulate_command();
[[nodiscard]] std::unique_ptr<Command> make_timeline_command();
[[nodiscard]] std::unique_ptr<Command> make_bench_command();
[[nodiscard]] std::unique_ptr<Command> make_doctor_command();
[[nodiscard]] std::unique_ptr<Command> make_demo_command();

}  // namespace lean::cli

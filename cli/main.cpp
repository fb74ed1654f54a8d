// lean: runs, draws, measures and checks decode attention. Exit codes: 0 ok, 1 a check failed, 2 bad arguments.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cli/bad_argument.hpp"
#include "cli/command.hpp"
#include "lean/version.hpp"

namespace lean::cli {
namespace {

struct Entry {
  std::unique_ptr<Command> command;
  CLI::App* app = nullptr;
  bool json = false;
};

std::vector<std::unique_ptr<Entry>> make_entries(CLI::App& app) {
  std::vector<std::unique_ptr<Entry>> entries;
  for (auto* make : {make_demo_command, make_run_command, make_schedule_command, make_simulate_command, make_timeline_command,
                     make_bench_command, make_doctor_command}) {
    auto& entry = *entries.emplace_back(std::make_unique<Entry>());
    entry.command = make();
    entry.app = app.add_subcommand(entry.command->name(), entry.command->description());
    entry.app->footer("Example:\n  " + entry.command->example());
    entry.app->add_flag("--json", entry.json, "Print JSON on stdout and nothing else");
    entry.command->add_options(*entry.app);
  }
  return entries;
}

/// Every error looks like this: "lean run: --head-dim = 600: a whole number from 1 to 576".
int complain(const std::string& who, const std::string& what, ExitCode code) {
  std::fprintf(stderr, "%s: %s\n", who.c_str(), what.c_str());
  return code;
}

int run(const Entry& entry) {
  const std::string who = "lean " + entry.command->name();
  try {
    return entry.command->run(entry.json);
  } catch (const BadArgument& error) {
    return complain(who, error.what(), kExitBadArguments);
  } catch (const std::bad_alloc&) {
    return complain(who, "out of memory", kExitCheckFailed);
  } catch (const std::exception& error) {
    return complain(who, error.what(), kExitCheckFailed);
  }
}

/// "lean", or "lean run" from when the command was named.
std::string words_of(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? "lean" : "lean " + parsed.front()->get_name();
}

int main_of(int argc, char** argv) {
  CLI::App app("Exact decode attention by LeanTiles and stream-K.", "lean");
  app.set_version_flag("--version", LEAN_VERSION_STRING);
  app.require_subcommand(1);
  app.footer("`lean COMMAND --help` has an example. Exit codes: 0 ok, 1 a check failed, 2 bad arguments.");
  const auto entries = make_entries(app);
  try {
    app.parse(argc, argv);
  } catch (const BadArgument& error) {
    return complain(words_of(app), error.what(), kExitBadArguments);
  } catch (const CLI::Success& asked) {  // --help and --version
    (void)app.exit(asked);
    return std::cout.flush() ? kExitOk : complain("lean", "stdout could not be written", kExitCheckFailed);
  } catch (const CLI::ParseError& error) {
    const std::string who = words_of(app);
    if (who == "lean" && argc > 1 && argv[1][0] != '-')
      return complain(who, std::string(argv[1]) + ": no such command; `lean --help` lists what there is", kExitBadArguments);
    return complain(who, std::string(error.what()) + "; `" + who + " --help` lists what there is", kExitBadArguments);
  }
  for (const auto& entry : entries) {
    if (entry->app->parsed()) return run(*entry);
  }
  return kExitBadArguments;
}

}  // namespace
}  // namespace lean::cli

int main(int argc, char** argv) { return lean::cli::main_of(argc, argv); }

// lean: runs, draws, measures and checks decode attention. Exit codes: 0 ok, 1 a check failed, 2 bad arguments.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
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
  for (auto* make : {make_demo_command, make_run_command, make_schedule_command, make_bench_command, make_doctor_command}) {
    auto& entry = *entries.emplace_back(std::make_unique<Entry>());
    entry.command = make();
    entry.app = app.add_subcommand(entry.command->name(), entry.command->description());
    entry.app->footer("Example:\n  " + entry.command->example());
    entry.app->add_flag("--json", entry.json, "Print JSON on stdout and nothing else");
    entry.command->add_options(*entry.app);
  }
  return entries;
}

int run(const Entry& entry) {
  try {
    return entry.command->run(entry.json);
  } catch (const BadArgument& error) {
    std::fprintf(stderr, "lean %s: %s\n", entry.command->name().c_str(), error.what());
    return kExitBadArguments;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "lean %s: out of memory\n", entry.command->name().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lean %s: %s\n", entry.command->name().c_str(), error.what());
  }
  return kExitCheckFailed;
}

int main_of(int argc, char** argv) {
  CLI::App app("Exact decode attention by LeanTiles and stream-K.", "lean");
  app.set_version_flag("--version", LEAN_VERSION_STRING);
  app.require_subcommand(1);
  app.footer("`lean COMMAND --help` has an example. Exit codes: 0 ok, 1 a check failed, 2 bad arguments.");
  const auto entries = make_entries(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitBadArguments;  // --help and --version come this way too
  }
  for (const auto& entry : entries) {
    if (entry->app->parsed()) return run(*entry);
  }
  return kExitBadArguments;
}

}  // namespace
}  // namespace lean::cli

int main(int argc, char** argv) { return lean::cli::main_of(argc, argv); }

// add_choice(): an option whose value is one of a few words.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/bad_argument.hpp"

namespace lean::cli {

template <typename T>
using Choices = std::vector<std::pair<std::string, T>>;

template <typename T>
std::string names_of(const Choices<T>& choices, const std::string& separator) {
  std::string names;
  for (const auto& [name, value] : choices) names += (names.empty() ? "" : separator) + name;
  return names;
}

/// `value` keeps what it holds unless the option is given. `choices` outlives the parse.
template <typename T>
CLI::Option* add_choice(CLI::App& app, const std::string& option, T& value, const Choices<T>& choices,
                        const std::string& description) {
  const auto set = [&value, &choices, option](const std::string& text) {
    for (const auto& [name, choice] : choices) {
      if (name != text) continue;
      value = choice;
      return;
    }
    throw BadArgument(option, text, "one of " + names_of(choices, ", "));
  };
  return app.add_option_function<std::string>(option, set, description)->type_name(names_of(choices, "|"));
}

}  // namespace lean::cli

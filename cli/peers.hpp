// Peers: other libraries' times, from a file of JSON lines. Rows are matched by their problem, not by their names.
#pragma once

#include <map>
#include <string>

#include "cli/problem_spec.hpp"

namespace lean::cli {

struct PeerTime {
  std::string impl;
  double us = 0.0;
  double ceiling_us = 0.0;  // of a pure read in the peer's run; 0: not known
};

class Peers {
 public:
  Peers() = default;
  explicit Peers(const std::string& path);  // throws BadArgument

  /// The fastest of a problem; null when there is none.
  [[nodiscard]] const PeerTime* best(const ProblemSpec& spec) const;

  [[nodiscard]] bool empty() const { return best_.empty(); }
  [[nodiscard]] const std::string& device() const { return device_; }

 private:
  std::map<std::string, PeerTime> best_;  // by the problem's key
  std::string device_;
};

}  // namespace lean::cli

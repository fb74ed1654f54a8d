// Every way of computing one problem, held against one answer of the oracle.
#pragma once

#include <cstdint>
#include <vector>

#include "support/case.hpp"

namespace lean::support {

/// Expects the case to be right on every instruction set; nothing where the target declines it.
void expect_right_on_every_isa(const Case& c);

/// Expects the case to be right under every policy, every fix-up that goes with it and each of these worker counts, as far as the
/// target serves them. Four threads of an ExecutorKind::kPool compute it.
void expect_right_however_shared_out(const Case& c, const std::vector<std::int32_t>& worker_counts);

}  // namespace lean::support

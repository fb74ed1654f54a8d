// A LengthFault in words. Apart from what finds it: device code includes that.
#pragma once

#include "lean/status.hpp"
#include "problem/length_faults.hpp"

namespace lean {

/// Whether what was found is a page's id, and no length.
[[nodiscard]] bool is_page_id(const LengthFault& fault) noexcept;

/// "name[index] = seen: allowed 0 to most (what that is)", and then `what_was_done` about it. Codes: ok (nothing found), bad_lengths,
/// bad_page_index.
[[nodiscard]] Status status_of(const LengthFault& fault, const char* what_was_done = "") noexcept;

}  // namespace lean

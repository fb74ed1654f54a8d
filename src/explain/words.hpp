// Wording shared by the text, JSON and SVG forms of a schedule. Numbers are printed in the classic locale, whatever
// the host program has set.
#pragma once

#include <cstdint>
#include <locale>
#include <sstream>
#include <string>

#include "explain/schedule_map.hpp"

namespace lean::explain::words {

/// A string stream that no global locale can bend.
[[nodiscard]] inline std::ostringstream stream() {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  return out;
}

/// `value` with `decimals` digits after the point.
[[nodiscard]] std::string fixed(double value, int decimals);

/// 1234567 -> "1,234,567".
[[nodiscard]] std::string grouped(std::int64_t value);

/// "1 output", "2 outputs".
[[nodiscard]] std::string counted(std::int64_t count, const std::string& noun);

/// "97.3 %"; never rounded up to 100.
[[nodiscard]] std::string percent(double ratio);

/// The policy's name in programs: "fixed_split".
[[nodiscard]] const char* policy_name(Policy::Kind kind) noexcept;

/// The policy in words, with its parameter and where it comes from: "fixed split x 5 (FlashDecoding)".
[[nodiscard]] std::string policy_words(const ScheduleMap& map);

/// "32 sequences of 91 to 7,432 tokens, 8 kv heads, LeanTile of 256 tokens".
[[nodiscard]] std::string batch_words(const ScheduleMap& map);

/// "128 of 132 workers busy".
[[nodiscard]] std::string workers_words(const ScheduleMap& map);

/// "3 outputs shared by up to 4", "no output shared".
[[nodiscard]] std::string sharing_words(const ScheduleMap& map);

}  // namespace lean::explain::words

// Numbers and names as people read them, the same in text and figures.
#include "explain/words.hpp"

#include <algorithm>
#include <cmath>
#include <iomanip>

namespace lean::explain::words {

std::string fixed(double value, int decimals) {
  std::ostringstream out = stream();
  out << std::fixed << std::setprecision(decimals) << value;
  return out.str();
}

std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t place = digits.size(); place > first + 3;) {
    place -= 3;
    digits.insert(place, 1, ',');
  }
  return digits;
}

std::string counted(std::int64_t count, const std::string& noun) { return grouped(count) + " " + noun + (count == 1 ? "" : "s"); }

std::string percent(double ratio) {
  const double shown = std::floor(ratio * 1000.0 + 1e-9) / 10.0;
  return fixed(shown, 1) + " %";
}

const char* policy_name(Policy::Kind kind) noexcept {
  switch (kind) {
    case Policy::Kind::kLean: return "lean";
    case Policy::Kind::kFixedSplit: return "fixed_split";
    case Policy::Kind::kDataParallel: return "data_parallel";
    case Policy::Kind::kFixedChunk: return "fixed_chunk";
  }
  return "unknown";
}

std::string policy_words(const ScheduleMap& map) {
  switch (map.policy.kind) {
    case Policy::Kind::kLean: return "lean (stream-K)";
    case Policy::Kind::kFixedSplit: return "fixed split x " + std::to_string(map.plan.splits) + " (FlashDecoding)";
    case Policy::Kind::kDataParallel: return "data parallel (FlashAttention-2)";
    case Policy::Kind::kFixedChunk:
      return "fixed chunk of " + grouped(std::int64_t{map.plan.granularity_tiles} * map.shape.tile_tokens) +
             " tokens (batch-invariant)";
  }
  return "unknown";
}

std::string batch_words(const ScheduleMap& map) {
  std::ostringstream out = stream();
  out << counted(map.shape.batch, "sequence");
  if (!map.sequences.empty()) {
    const auto by_length = [](const schedule::SequenceWork& a, const schedule::SequenceWork& b) {
      return a.kv_tokens < b.kv_tokens;
    };
    const auto [shortest, longest] = std::minmax_element(map.sequences.begin(), map.sequences.end(), by_length);
    out << " of " << grouped(shortest->kv_tokens);
    if (shortest->kv_tokens != longest->kv_tokens) out << " to " << grouped(longest->kv_tokens);
    out << " tokens";
  }
  out << ", " << counted(map.shape.kv_heads, "kv head") << ", LeanTile of " << counted(map.shape.tile_tokens, "token");
  return out.str();
}

std::string workers_words(const ScheduleMap& map) {
  return grouped(map.busy_workers) + " of " + counted(map.workers_asked, "worker") + " busy";
}

std::string sharing_words(const ScheduleMap& map) {
  if (map.shared_outputs == 0) return "no output shared";
  return counted(map.shared_outputs, "output") + " shared by up to " + grouped(map.max_contributors);
}

}  // namespace lean::explain::words

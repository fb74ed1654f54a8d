// A ScheduleMap as JSON, for programs: the call, the line, and every worker's segments. Keys are part of what users see
// (docs/cli.md).
#include <string>

#include "explain/schedule_map.hpp"
#include "explain/words.hpp"

namespace lean::explain {
namespace {

/// Writes JSON in document order and puts the commas. Keys and strings are the program's own words: nothing to escape.
class JsonWriter {
 public:
  JsonWriter() { out_.precision(17); }

  void begin(char bracket) {
    separate();
    out_ << bracket;
    first_ = true;
  }
  void end(char bracket) {
    out_ << bracket;
    first_ = false;
  }
  void begin(const char* key, char bracket) {
    write_key(key);
    begin(bracket);
  }

  template <typename T>
  void field(const char* key, T value) {
    write_key(key);
    write(value);
    first_ = false;
  }

  [[nodiscard]] std::string text() const { return out_.str() + "\n"; }

 private:
  void separate() {
    if (!first_) out_ << ',';
    first_ = true;
  }
  void write_key(const char* key) {
    separate();
    out_ << '"' << key << "\":";
  }
  void write(const char* value) { out_ << '"' << value << '"'; }
  void write(bool value) { out_ << (value ? "true" : "false"); }
  void write(std::int32_t value) { out_ << value; }
  void write(std::int64_t value) { out_ << value; }
  void write(double value) { out_ << value; }

  std::ostringstream out_ = words::stream();
  bool first_ = true;  // nothing written yet in the innermost bracket, or a key just written
};

void write_shape(JsonWriter& json, const schedule::LineShape& shape) {
  json.begin("shape", '{');
  json.field("batch", shape.batch);
  json.field("kv_heads", shape.kv_heads);
  json.field("group", shape.group);
  json.field("q_rows", shape.q_rows);
  json.field("tile_tokens", shape.tile_tokens);
  json.field("window_left", shape.reach.left);
  json.field("window_right", shape.reach.right);
  json.end('}');
}

void write_plan(JsonWriter& json, const ScheduleMap& map) {
  json.field("policy", words::policy_name(map.policy.kind));
  json.field("workers", map.workers_asked);
  json.begin("plan", '{');
  json.field("workers", map.plan.workers);
  json.field("splits", map.plan.splits);
  json.field("granularity_tiles", map.plan.granularity_tiles);
  json.field("snap_units", map.plan.snap_units);
  json.field("whole_outputs", map.plan.whole_outputs);
  json.end('}');
}

void write_balance(JsonWriter& json, const char* key, const Balance& balance) {
  json.begin(key, '{');
  json.field("mean", balance.mean);
  json.field("max", balance.max);
  json.field("balance", balance.ratio());
  json.end('}');
}

void write_summary(JsonWriter& json, const ScheduleMap& map) {
  json.begin("summary", '{');
  json.field("busy_workers", map.busy_workers);
  json.field("outputs", map.outputs);
  json.field("tiles", map.total_tiles);
  json.field("segments", map.segments);
  json.field("shared_outputs", map.shared_outputs);
  json.field("max_contributors", map.max_contributors);
  json.field("slots", map.slots);
  write_balance(json, "worker_tiles", map.tiles);
  write_balance(json, "worker_cost_units", map.cost_units);
  json.end('}');
}

void write_segment(JsonWriter& json, const schedule::Segment& segment) {
  json.begin('{');
  json.field("sequence", segment.output.sequence);
  json.field("kv_head", segment.output.kv_head);
  json.field("row_block", segment.output.row_block);
  json.field("tile_begin", segment.tile_begin);
  json.field("tile_end", segment.tile_end);
  json.field("output_tiles", segment.output.tiles);
  json.field("first_tile", segment.output.first_tile);
  json.field("contributor", segment.contributor);
  json.field("contributors", segment.contributors);
  if (!segment.sole()) json.field("slot", segment.slots.slot(segment.contributor));
  json.end('}');
}

void write_share(JsonWriter& json, const WorkerShare& share) {
  json.begin('{');
  json.field("tiles", share.tiles);
  json.field("cost_units", share.cost_units);
  json.begin("segments", '[');
  for (const schedule::Segment& segment : share.segments) write_segment(json, segment);
  json.end(']');
  json.end('}');
}

}  // namespace

std::string to_json(const ScheduleMap& map) {
  JsonWriter json;
  json.begin('{');
  write_plan(json, map);
  write_shape(json, map.shape);
  write_summary(json, map);
  json.begin("sequences", '[');
  for (const schedule::SequenceWork& sequence : map.sequences) {
    json.begin('{');
    json.field("q_tokens", sequence.q_tokens);
    json.field("kv_tokens", sequence.kv_tokens);
    json.end('}');
  }
  json.end(']');
  json.begin("shares", '[');
  for (const WorkerShare& share : map.workers) write_share(json, share);
  json.end(']');
  json.end('}');
  return json.text();
}

}  // namespace lean::explain

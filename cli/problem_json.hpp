// How problems and samples look in JSON, the same in every command and in result files.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "cli/measure.hpp"
#include "cli/problem_spec.hpp"
#include "cli/suites/matrix.hpp"

namespace lean::cli {

using Json = nlohmann::ordered_json;

/// A line of JSON. Bytes of a name that are no UTF-8 become U+FFFD: a result that was computed is not lost to them.
inline std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

/// lens, q_heads, kv_heads, head_dim, dtype, layout, n_q, causal, and what else was asked for.
inline void add_problem(Json& json, const ProblemSpec& spec) {
  json["lens"] = spec.kv_lens;
  json["q_heads"] = spec.q_heads;
  json["kv_heads"] = spec.kv_heads;
  json["head_dim"] = spec.head_dim;
  if (spec.value_dim != 0) json["value_dim"] = spec.value_dim;
  if (spec.values_in_keys) json["values_in_keys"] = true;
  json["dtype"] = name_of(spec.dtype);
  json["layout"] = name_of(spec.layout);
  json["n_q"] = spec.q_tokens;
  json["causal"] = spec.causal;
  if (spec.kv_dtype) json["kv_dtype"] = name_of(*spec.kv_dtype);
  if (spec.page_tokens > 0) json["page_tokens"] = spec.page_tokens;
  if (spec.window_left >= 0) json["window_left"] = spec.window_left;
  if (spec.window_right >= 0) json["window_right"] = spec.window_right;
  if (spec.softcap > 0.0F) json["softcap"] = spec.softcap;
  if (spec.alibi) json["alibi"] = true;
  if (spec.sinks) json["sinks"] = true;
}

/// Rows of no tier have no such field.
inline void add_tier(Json& json, Tier tier) {
  if (tier != Tier::kNone) json["tier"] = std::string(1, static_cast<char>(tier));
}

/// us, us_min, us_max: median, least and most.
inline void add_times(Json& json, const Samples& samples) {
  json["us"] = samples.median();
  json["us_min"] = samples.min();
  json["us_max"] = samples.max();
}

}  // namespace lean::cli

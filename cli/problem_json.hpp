// How problems and samples look in JSON, the same in every command and in result files.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/measure.hpp"
#include "cli/problem_spec.hpp"

namespace lean::cli {

using Json = nlohmann::ordered_json;

/// lens, q_heads, kv_heads, head_dim, dtype, layout, n_q, causal.
inline void add_problem(Json& json, const ProblemSpec& spec) {
  json["lens"] = spec.kv_lens;
  json["q_heads"] = spec.q_heads;
  json["kv_heads"] = spec.kv_heads;
  json["head_dim"] = spec.head_dim;
  json["dtype"] = name_of(spec.dtype);
  json["layout"] = name_of(spec.layout);
  json["n_q"] = spec.q_tokens;
  json["causal"] = spec.causal;
}

/// us, us_min, us_max: median, least and most.
inline void add_times(Json& json, const Samples& samples) {
  json["us"] = samples.median();
  json["us_min"] = samples.min();
  json["us_max"] = samples.max();
}

}  // namespace lean::cli

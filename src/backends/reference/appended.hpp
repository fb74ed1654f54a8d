// What a call with new tokens works on: queries rotated by the rotary embedding, and new keys and values as they will stand in the
// cache. Values pass through fp32 and the types' own rounding, exactly as problem/append.hpp says: they are inputs, not results.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/reference/load.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"

namespace lean::reference {

/// x in the type, in double.
[[nodiscard]] inline double rounded_to(DType dtype, double x) {
  float room = 0.0F;  // for an element of any type
  store_element(&room, dtype, 0, x);
  return load_element(&room, dtype, 0);
}

inline void rotate(const Append& append, const Sequence& lengths, std::int64_t token, std::vector<double>& row) {
  std::vector<float> narrow(row.begin(), row.end());
  rotate_row(append, rotary_position(append, lengths, token), narrow.data());
  row.assign(narrow.begin(), narrow.end());
}

/// A query row, which the caller has loaded.
inline void rotate_query(const Problem& problem, const Sequence& lengths, std::int32_t query_token, std::vector<double>& row) {
  if (!rotates_queries(problem.append, lengths)) return;
  rotate(problem.append, lengths, std::int64_t{lengths.kv_end} - lengths.q_tokens + query_token, row);
  for (double& x : row) x = rounded_to(problem.q.dtype, x);
}

enum class NewRow { kKey, kValue };

/// The elements that the cache will hold of a new token, before its scale.
[[nodiscard]] inline std::vector<double> appended_row(const Problem& problem, const Sequence& lengths, HeadPosition kv_head,
                                                      std::int64_t token, NewRow which) {
  const bool key = which == NewRow::kKey;
  const TensorView& from = key ? problem.append.k : problem.append.v;
  const TensorView& cache = key ? problem.k : problem.v;
  const float scale = key ? k_scale_of(problem, kv_head.head) : v_scale_of(problem, kv_head.head);
  std::vector<double> row(static_cast<std::size_t>(key || problem.value_dim == 0 ? problem.head_dim : problem.value_dim));
  load_run(from.data, from.dtype, append_offset(problem, from.strides, lengths, kv_head, token), from.strides.dim,
           static_cast<std::int64_t>(row.size()), row.data());
  if (key) rotate(problem.append, lengths, token, row);
  for (double& x : row) x = rounded_to(cache.dtype, static_cast<double>(static_cast<float>(x) / scale));
  return row;
}

}  // namespace lean::reference

// New tokens of a call that appends: rotated, rounded as the cache holds them, kept in private memory and written by one worker.
#include "backends/cpu/new_tokens.hpp"

#include <functional>

#include "backends/cpu/elements.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/page_set.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

/// A row on its way into the cache: `row` holds it in fp32, `copy` takes it as the cache's type.
void quantise(const TileKernels& kernels, const TensorView& cache, float scale, const float* row, std::byte* copy,
              std::int32_t dims) noexcept {
  if (!traits_of(cache.dtype).scaled && scale == 1.0F) return kernels.store_row[table_index(cache.dtype)](row, 1.0F, copy, dims);
  float stored[kMaxHeadDim];
  for (std::int32_t d = 0; d < dims; ++d) stored[d] = scale == 1.0F ? row[d] : row[d] / scale;
  store_elements(cache.dtype, stored, copy, dims);
}

/// `look(place)` of each of a sequence's pages [begin, end) whose id lies in the pool and in [first, first + PageSet::kPages),
/// until one is true: whether it was.
template <typename TLook>
bool any_page(const Problem& problem, std::int64_t first, const std::int32_t* ids, std::int32_t begin, std::int32_t end,
              TLook&& look) noexcept {
  for (std::int32_t page = begin; page < end; ++page) {
    const std::int32_t id = ids[page];
    const std::int64_t place = id - first;
    if (in_pool(problem.pages, id) && place >= 0 && place < PageSet::kPages && look(place)) return true;
  }
  return false;
}

/// reads_new_tokens_of_others() of page ids in [first, first + PageSet::kPages).
bool reads_new_tokens_of_others(const Problem& problem, const Lengths& lengths, std::int64_t first) noexcept {
  const std::int32_t page_tokens = problem.pages.page_tokens;
  PageSet written;
  bool writes = false;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence& of = lengths(b);
    const std::int32_t begin = first_new_token(problem, of);
    if (begin >= of.kv_end) continue;
    static_cast<void>(any_page(problem, first, page_ids(problem.pages, of, b), begin / page_tokens,
                               (of.kv_end - 1) / page_tokens + 1, [&](std::int64_t page) {
                                 static_cast<void>(written.add(page));
                                 writes = true;
                                 return false;
                               }));
  }
  for (std::int64_t b = 0; writes && b < problem.batch; ++b) {
    const Sequence& of = lengths(b);
    if (of.q_tokens == 0 || of.kv_tokens() == 0) continue;
    const std::int32_t own = first_new_token(problem, of);  // on a page that is its own from there on
    const std::int32_t end = own < of.kv_end ? own / page_tokens : (own - 1) / page_tokens + 1;
    if (any_page(problem, first, page_ids(problem.pages, of, b), of.kv_begin / page_tokens, end,
                 [&](std::int64_t page) { return written.has(page); }))
      return true;
  }
  return false;
}

}  // namespace

bool reads_new_tokens_of_others(const Problem& problem, const Lengths& lengths) noexcept {
  if (!appends(problem) || !is_paged(problem.pages) || problem.batch < 2) return false;
  for (std::int64_t first = 0; first < problem.pages.page_count; first += PageSet::kPages)
    if (reads_new_tokens_of_others(problem, lengths, first)) return true;
  return false;
}

void NewTokens::begin(const TileOutput& output) noexcept {
  output_ = output;
  first_ = first_new_token(problem_, output.lengths);
}

NewTokens::Rows NewTokens::make(std::int64_t token, std::int32_t set, Rows cache) const noexcept {
  const Append& append = problem_.append;
  const std::int32_t head = output_.kv_head.head;
  const std::int32_t value_dim = value_dim_of(problem_);
  const std::int64_t place = (token - first_) % memory_.layout.new_rows;  // of a tile's new tokens no two fall together
  std::byte* const k = memory_.new_kv[set] + place * memory_.layout.new_row_bytes();
  std::byte* const v = k + memory_.layout.new_k_bytes();
  float row[kMaxHeadDim];
  const auto load = [&](const TensorView& tensor, std::int32_t dims) {
    const std::int64_t offset = append_offset(problem_, tensor.strides, output_.lengths, output_.kv_head, token);
    load_row(kernels_, tensor, element(tensor, offset), row, dims);
  };
  load(append.k, problem_.head_dim);
  rotate_row(append, rotary_position(append, output_.lengths, token), row);
  quantise(kernels_, problem_.k, k_scale_of(problem_, head), row, k, problem_.head_dim);
  load(append.v, value_dim);
  quantise(kernels_, problem_.v, v_scale_of(problem_, head), row, v, value_dim);
  if (writes(token)) {
    copy_elements(problem_.k, k, const_cast<std::byte*>(cache.k), problem_.head_dim);
    copy_elements(problem_.v, v, const_cast<std::byte*>(cache.v), value_dim);
  }
  return {k, v};
}

bool NewTokens::made(const std::byte* row) const noexcept {
  const std::byte* const begin = memory_.new_kv[0];
  const std::byte* const end = begin + kTileSets * memory_.layout.new_kv_floats() * static_cast<std::int64_t>(sizeof(float));
  return begin != nullptr && !std::less<>()(row, begin) && std::less<>()(row, end);
}

bool NewTokens::writes(std::int64_t token) const noexcept {
  return writes_new_token(output_.lengths, output_.group, output_.first_row, output_.rows, token);
}

void rotate_query(const Problem& problem, const Sequence& lengths, std::int32_t query_token, float* row) noexcept {
  if (!rotates_queries(problem.append, lengths)) return;
  const std::int64_t token = query_position(lengths, query_token);
  rotate_row(problem.append, rotary_position(problem.append, lengths, token), row);
  round_row(problem.q.dtype, row, problem.append.rotary_dim);
}

}  // namespace lean::cpu

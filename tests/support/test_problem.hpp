// TestProblem: a Case made real. Owns every buffer of a lean::Problem, guarded; reachable elements hold the case's
// data, all others its fill; outputs are poisoned. Knows afterwards whether memory is as it must be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lean/problem.hpp"
#include "support/case.hpp"
#include "support/guarded_buffer.hpp"
#include "support/layout.hpp"

namespace lean::support {

/// Which element of q, k, v or o: token counts inside the sequence, also in packed tensors.
struct At {
  std::int64_t sequence = 0;
  std::int32_t head = 0;
  std::int64_t token = 0;
  std::int32_t dim = 0;
};

/// Whether q, k and v hold the case's data, or its fill alone: for questions that no element answers.
enum class Contents { kData, kFill };

class TestProblem {
 public:
  /// Throws std::invalid_argument when the case cannot be built (a layout that is none, ...).
  explicit TestProblem(const Case& description, Contents contents = Contents::kData);

  [[nodiscard]] const Case& description() const { return case_; }
  [[nodiscard]] const Problem& problem() const { return problem_; }
  /// For tests that break something; remember() takes changed inputs as the ones to be left alone.
  [[nodiscard]] Problem& problem() { return problem_; }

  [[nodiscard]] double q(At at) const;
  [[nodiscard]] double k(At at) const;
  [[nodiscard]] double v(At at) const;
  [[nodiscard]] double o(At at) const;
  [[nodiscard]] float lse(At at) const;
  void set_q(At at, double value);
  void set_k(At at, double value);
  void set_v(At at, double value);
  /// Puts K and V back to what they were before a call appended to them.
  void restore_cache() const;

  /// Length arrays, writable; null when the case has none.
  [[nodiscard]] std::int32_t* kv_lengths() const { return kv_lengths_.as<std::int32_t>(); }
  [[nodiscard]] std::int32_t* kv_left_pad() const { return kv_left_pad_.as<std::int32_t>(); }
  [[nodiscard]] std::int32_t* cu_q_tokens() const { return cu_q_tokens_.as<std::int32_t>(); }
  [[nodiscard]] std::int32_t* cu_kv_tokens() const { return cu_kv_tokens_.as<std::int32_t>(); }

  /// The block table, or the page indices; writable.
  [[nodiscard]] std::int32_t* page_table() const { return page_table_.as<std::int32_t>(); }
  [[nodiscard]] std::int32_t* page_indptr() const { return page_indptr_.as<std::int32_t>(); }
  /// The sequence's entries there.
  [[nodiscard]] std::int32_t* page_ids(std::int64_t sequence) const;

  /// The buffers that o and lse lie in.
  [[nodiscard]] const GuardedBuffer& o_buffer() const { return o_; }
  [[nodiscard]] const GuardedBuffer& lse_buffer() const { return lse_; }
  [[nodiscard]] const GuardedBuffer& k_buffer() const { return k_; }
  [[nodiscard]] const GuardedBuffer& v_buffer() const { return v_; }

  /// The problem with every pointer moved from its buffer to the copy of that buffer at place(buffer).
  template <typename TPlace>
  [[nodiscard]] Problem placed(TPlace place) const {
    Problem p = problem_;
    const auto move = [&place]<typename T>(T*& pointer, const GuardedBuffer& buffer) {
      if (pointer == nullptr) return;
      const auto offset = static_cast<const std::byte*>(static_cast<const void*>(pointer)) - buffer.data();
      pointer = static_cast<T*>(static_cast<void*>(place(buffer) + offset));
    };
    move(p.q.data, q_);
    move(p.k.data, k_);
    move(p.v.data, case_.values_in_keys ? k_ : v_);
    move(p.o.data, o_);
    move(p.lse.data, lse_);
    move(p.kv_lengths, kv_lengths_);
    move(p.kv_left_pad, kv_left_pad_);
    move(p.cu_q_tokens, cu_q_tokens_);
    move(p.cu_kv_tokens, cu_kv_tokens_);
    move(p.pages.block_table, page_table_);
    move(p.pages.page_indices, page_table_);
    move(p.pages.page_indptr, page_indptr_);
    move(p.append.k.data, append_k_);
    move(p.append.v.data, append_v_);
    move(p.append.rotary_cos, rotary_cos_);
    move(p.append.rotary_sin, rotary_sin_);
    move(p.k_scales, k_scales_);
    move(p.v_scales, v_scales_);
    move(p.scores.alibi_slopes, alibi_slopes_);
    move(p.scores.sinks, sinks_);
    move(p.scores.mask, mask_);
    move(p.scores.tree_mask, tree_mask_);
    return p;
  }

  void remember();
  void poison_outputs();
  [[nodiscard]] bool outputs_untouched() const;

  /// Empty if all is well; else what was touched that must not be, or left that must be written.
  [[nodiscard]] std::string memory_faults() const;

  /// The bytes of every row that exists, o then lse, row by row: equal exactly when results are bit-identical.
  [[nodiscard]] std::vector<std::uint8_t> output_bits() const;
  /// The output's bits of one sequence.
  [[nodiscard]] std::vector<std::uint8_t> output_bits(std::int64_t sequence) const;

 private:
  void lay_out();
  void make_length_arrays();
  void make_kv_scales();
  void make_append();
  void make_rotary();
  void expect_appended();
  [[nodiscard]] bool appended_as_expected() const;
  void make_pages();
  void make_score_arrays();
  void make_mask();
  void make_tree_mask();
  void fill_inputs();
  [[nodiscard]] std::vector<const GuardedBuffer*> input_buffers() const;
  [[nodiscard]] bool seen_by_some_row(std::int64_t sequence, std::int32_t kv_head, std::int64_t token) const;
  [[nodiscard]] Layout layout_of(const std::string& name, Extents extents) const;
  [[nodiscard]] std::int32_t n_q_of(std::int64_t sequence) const;
  [[nodiscard]] std::int64_t identity_of(std::int64_t sequence) const;
  [[nodiscard]] std::int64_t q_offset_of(const Strides& strides, At at) const;
  [[nodiscard]] std::int64_t kv_offset_of(const Strides& strides, At at) const;
  [[nodiscard]] std::string output_faults(bool of_lse) const;
  [[nodiscard]] std::vector<std::uint64_t> input_checksums() const;

  Case case_;
  Problem problem_;
  bool q_packed_ = false;
  bool kv_packed_ = false;
  GuardedBuffer q_, k_, v_, o_, lse_;
  GuardedBuffer kv_lengths_, kv_left_pad_, cu_q_tokens_, cu_kv_tokens_;
  GuardedBuffer append_k_, append_v_, rotary_cos_, rotary_sin_;
  GuardedBuffer k_scales_, v_scales_;
  GuardedBuffer page_table_, page_indptr_;
  GuardedBuffer alibi_slopes_, sinks_, mask_, tree_mask_;
  Layout o_layout_, lse_layout_;
  std::vector<std::uint64_t> checksums_;
  /// A cache before and after a call that appends.
  struct Cache {
    std::vector<std::byte> before, after;
  };
  Cache k_cache_, v_cache_;
};

}  // namespace lean::support

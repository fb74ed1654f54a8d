// The arguments of decode() in Python's order, and the lean::Problem and lean::Options they make. Shapes are checked here,
// against each other and against the layout; what a backend can do is checked by the library itself.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "array.hpp"
#include "lean/lean.hpp"

namespace lean::python {

/// Positions in the argument list; `kArgumentNames` has the names users see.
enum class Argument : int {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kSeqlens,
  kLeftpad,
  kCuSeqlensQ,
  kCuSeqlensK,
  kMaxSeqlenQ,
  kMaxSeqlenK,
  kBlockTable,
  kPageIndptr,
  kPageIndices,
  kScale,
  kCausal,
  kWindow,
  kSoftcap,
  kAlibiSlopes,
  kSinks,
  kMask,
  kTreeMask,
  kAppendK,
  kAppendV,
  kRotaryCos,
  kRotarySin,
  kRotaryInterleaved,
  kRotaryAbsolute,
  kKScale,
  kVScale,
  kLayout,
  kOptions,
  kStream,
};

inline constexpr std::array kArgumentNames = {"q",
                                              "k",
                                              "v",
                                              "out",
                                              "lse",
                                              "seqlens",
                                              "leftpad",
                                              "cu_seqlens_q",
                                              "cu_seqlens_k",
                                              "max_seqlen_q",
                                              "max_seqlen_k",
                                              "block_table",
                                              "page_indptr",
                                              "page_indices",
                                              "scale",
                                              "causal",
                                              "window",
                                              "softcap",
                                              "alibi_slopes",
                                              "sinks",
                                              "mask",
                                              "tree_mask",
                                              "append_k",
                                              "append_v",
                                              "rotary_cos",
                                              "rotary_sin",
                                              "rotary_interleaved",
                                              "rotary_absolute",
                                              "k_scale",
                                              "v_scale",
                                              "layout",
                                              "options",
                                              "stream"};

/// Options from the integers of lean_attention._options.Options.encoded(); the defaults from None.
[[nodiscard]] Options decoded_options(PyObject* tuple);

/// One call: arrays as they were read, and the problem whose pointers lead into them. Not movable: the problem may point
/// into the call itself.
class Call {
 public:
  /// `arguments` has kArgumentNames.size() entries.
  explicit Call(PyObject* const* arguments);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const dlpack::Device& device() const noexcept { return q_.device; }

 private:
  [[nodiscard]] PyObject* argument(Argument which) const noexcept { return arguments_[static_cast<int>(which)]; }
  [[nodiscard]] bool given(Argument which) const noexcept { return argument(which) != Py_None; }
  [[nodiscard]] Array array(Argument which);
  [[nodiscard]] std::int64_t integer(Argument which, std::int64_t otherwise) const;
  [[nodiscard]] float number(Argument which, float otherwise) const;
  [[nodiscard]] bool flag(Argument which) const;
  [[nodiscard]] const std::int32_t* int32_array(Argument which, std::int64_t count);
  [[nodiscard]] const float* float_array(Argument which, std::int64_t count);
  void read_alibi();

  void read_layout();
  void read_queries();
  void read_keys();
  void read_pages(const Array& k);
  void read_lengths();
  void read_outputs();
  void read_scores();
  void read_mask();
  void read_append();

  PyObject* const* arguments_;
  Array q_;
  void* stream_ = nullptr;
  bool heads_first_ = true;
  bool one_token_ = false;    // q is [B, Hq, d]
  bool kv_writable_ = false;  // neither k nor v is read-only
  std::vector<Reference> owners_;
  std::vector<std::vector<std::int32_t>> converted_;  // int64 or strided lengths, as the library wants them
  Problem problem_;
  Options options_;
};

}  // namespace lean::python

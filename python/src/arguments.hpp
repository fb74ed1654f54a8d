// The arguments of decode() by their names in Python, and the lean::Problem and lean::Options they make. Shapes are checked
// here, against each other and against the layout; what a backend can do is checked by the library itself.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "lean/lean.hpp"
#include "overlap.hpp"

namespace lean::python {

/// What decode() takes, the extension's one list of it; the order means nothing. return_lse is for the doors.
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
                                              "return_lse",
                                              "options",
                                              "stream"};

/// One of kArgumentNames, written as its name: what is not in the table does not compile.
class Argument {
 public:
  consteval Argument(const char* name) : index_(0) {  // NOLINT: implicit, so that a name may stand for it
    while (std::string_view(kArgumentNames[index_]) != name) ++index_;
  }
  constexpr explicit Argument(std::size_t index) noexcept : index_(index) {}

  [[nodiscard]] constexpr std::size_t index() const noexcept { return index_; }
  [[nodiscard]] constexpr const char* name() const noexcept { return kArgumentNames[index_]; }
  [[nodiscard]] constexpr bool operator==(const Argument&) const noexcept = default;

 private:
  std::size_t index_;
};

/// One call: arrays as they were read, and the problem whose pointers lead into them. Not movable: the problem may point
/// into the call itself.
class Call {
 public:
  /// `framework` is the lean_attention._frameworks.Framework of q, or None where all is on q's device already; `arguments` the dict
  /// of what was given beside q, k and v.
  Call(PyObject* framework, PyObject* q, PyObject* k, PyObject* v, PyObject* arguments);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const dlpack::Device& device() const noexcept { return q_.device; }
  /// Whether a list or a plain number was given for a device.
  [[nodiscard]] bool has_numbers_on_host() const noexcept { return !on_host_.empty(); }
  /// Entries of page_indices.
  [[nodiscard]] std::int64_t page_id_count() const noexcept { return page_id_count_; }
  /// Options(check_lengths=True).
  [[nodiscard]] bool wants_checked_lengths() const noexcept { return wants_checked_lengths_; }

  /// Throws, naming the entry, when a length or page id on the host lies outside what there is; with `device` those on a device
  /// are copied to the host first. Reads what decode() reads: never for supports(), nor where arrays are stand-ins.
  void check_lengths(bool device);

  /// Throws when what the call writes overlaps what it reads: out, lse, and with append_k the cache. Where arrays are stand-ins it
  /// means nothing.
  void check_outputs_apart() const;

  /// Throws when new tokens stand in each other's places in the cache: some would be read after they were written over. Each in its
  /// own, as in check_outputs_apart(), is no overlap. Looks at lengths and caches in rows that the host can read.
  void check_new_tokens_apart() const;

  /// A refusal of this call by the library in the words of decode()'s arguments.
  [[nodiscard]] std::string text_of(const Status& status) const;
  /// Throws it unless ok.
  void check(const Status& status) const;

 private:
  /// int32 numbers in host memory of this call: lists, int64 and strided arrays, one number for all sequences.
  struct OnHost {
    Argument which;
    std::vector<std::int32_t> values;
  };

  void take(PyObject* arguments);
  [[nodiscard]] bool is_elsewhere() const;
  [[nodiscard]] PyObject* argument(Argument which) const noexcept { return arguments_[which.index()]; }
  [[nodiscard]] bool given(Argument which) const noexcept { return argument(which) != nullptr; }
  [[nodiscard]] Array array(Argument which) { return array(which, argument(which)); }
  [[nodiscard]] Array array(Argument which, PyObject* object);
  [[nodiscard]] Reference from_framework(const char* method, PyObject* first, PyObject* second) const;
  [[nodiscard]] std::int64_t integer(Argument which, std::int64_t otherwise) const;
  [[nodiscard]] static float float_of(PyObject* number, Argument which);  // True is no number
  [[nodiscard]] float number(Argument which, float otherwise) const;
  [[nodiscard]] bool flag(Argument which) const;
  [[nodiscard]] bool truth(Argument which) const;  // of one that is given
  [[nodiscard]] std::int64_t length_of(Argument which);
  [[nodiscard]] const std::int32_t* int32_array(Argument which, std::int64_t count);
  [[nodiscard]] const std::int32_t* keep(Argument which, std::vector<std::int32_t> values);
  [[nodiscard]] const std::int32_t* int32_numbers(Argument which, std::int64_t count);
  [[nodiscard]] const float* float_array(Argument which, std::int64_t count);
  template <typename T>
  [[nodiscard]] const void* on_device(Argument which, const char* method, const T* values, std::int64_t count);
  void read_alibi();

  void read_layout();
  void read_queries();
  void check_keys_said_once() const;
  void read_keys();
  void read_scales();
  void read_pages(const Array& k);
  void read_lengths();
  void read_outputs();
  void read_scores();
  void read_mask();
  void read_append();

  [[nodiscard]] const std::int32_t* host_copy(Argument which, const std::int32_t* used, bool device);
  void check_ends(const Problem& host) const;

  PyObject* framework_;
  std::array<PyObject*, kArgumentNames.size()> arguments_{};  // null: not given, or None; the caller's dict holds them
  std::array<Span, kArgumentNames.size()> spans_{};           // of those that are arrays
  Array q_;
  Array k_;
  Array v_;
  std::int64_t page_id_count_ = 0;  // of page_indices
  void* stream_ = nullptr;
  bool heads_first_ = true;
  bool one_token_ = false;  // q is [B, Hq, d]
  bool wants_checked_lengths_ = false;
  std::vector<Reference> owners_;
  std::deque<OnHost> on_host_;              // addresses stay
  std::deque<std::vector<float>> numbers_;  // addresses stay here too
  Problem problem_;
  Options options_;
};

/// Where calls on q's device run.
struct CallDevice {
  std::int32_t index;  // of the GPU; -1: the CPU
  void* stream;
};
[[nodiscard]] CallDevice device_of(PyObject* framework, PyObject* q, PyObject* stream);

}  // namespace lean::python

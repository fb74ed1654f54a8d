// Array: a tensor of any framework as pointer, type, shape and strides, without a copy. Read by the fastest way its type
// offers: DLPack's C exchange API (PyTorch 2.10 and newer), NumPy's __array_struct__, then __dlpack__.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "dlpack.hpp"
#include "lean/dtypes.hpp"
#include "python.hpp"

namespace lean::python {

/// Of an array's elements: the library's types by their numbers, and behind them those of lengths, tables and masks.
enum class ElementType : std::int32_t {
  kFloat32 = static_cast<std::int32_t>(DType::kFloat32),
  kFloat16 = static_cast<std::int32_t>(DType::kFloat16),
  kInt32 = kDTypeCount,
  kInt64,
  kUInt32,
  kBool,
  kOther,
};

/// Whether it is a DType, by the same number.
[[nodiscard]] constexpr bool is_of_library(ElementType type) noexcept { return static_cast<std::int32_t>(type) < kDTypeCount; }

[[nodiscard]] const char* name_of(ElementType type) noexcept;

struct Array {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  ElementType type = ElementType::kOther;
  dlpack::DataType code{};  // as the producer says it, for messages about kOther
  dlpack::Device device{};
  bool writable = true;
  bool of_torch = false;
  bool was_negative = false;  // a lazy negative of torch: this is a copy with the values themselves
  int ndim = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};  // elements
  Reference owner;                               // an object to hold as long as the data is used; may be null

  [[nodiscard]] bool on_cuda() const noexcept { return device.type == dlpack::kCuda || device.type == dlpack::kCudaManaged; }
  [[nodiscard]] bool same_device(const Array& other) const noexcept {
    return on_cuda() == other.on_cuda() && (!on_cuda() || device.index == other.device.index);
  }
  [[nodiscard]] std::string shape_text() const;
  /// "float32"
  [[nodiscard]] std::string type_text() const;
  /// "cuda:1"
  [[nodiscard]] std::string device_text() const;
};

/// Reads `object`, which errors call `name`. `stream` is what a CUDA producer must have its data ready on: a
/// cudaStream_t, null for the legacy default one.
[[nodiscard]] Array read_array(PyObject* object, const char* name, void* stream);

/// Throws TypeError for what is no float of the library's.
[[nodiscard]] DType dtype_of(const Array& array, const char* name);

/// Whether current_stream() knows the stream of this array's framework.
[[nodiscard]] bool tells_stream(PyObject* object);

/// Throws RuntimeError when a tensor requires a gradient.
void refuse_gradient(PyObject* tensor, const char* name);

/// The stream a framework works on now for the device of one of its tensors, where it tells; else null.
[[nodiscard]] void* current_stream(PyObject* object, const dlpack::Device& device);

}  // namespace lean::python

// ONNX Runtime's C interface as the operators here see it: values as pointers with a type and a shape, refusals as exceptions that
// name the node and the input, and one place where the library is called on the runtime's threads.
//
// Nothing is linked against ONNX Runtime: its functions come by the table that RegisterCustomOps is given.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "lean/dtypes.hpp"
#include "lean/lean.hpp"
#include "stream.hpp"

namespace lean::ort {

/// The interface that is asked for, whatever the headers' own.
inline constexpr std::uint32_t kApiVersion = 21;
static_assert(ORT_API_VERSION >= kApiVersion, "headers of ONNX Runtime 1.21 or newer are needed");

/// The runtime's functions. Set once, before any operator exists.
[[nodiscard]] const OrtApi& api() noexcept;
void set_api(const OrtApi& given) noexcept;

using Shape = std::vector<std::int64_t>;

/// A refusal: what is thrown here becomes an OrtStatus at the interface.
class Error : public std::runtime_error {
 public:
  Error(OrtErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] OrtErrorCode code() const noexcept { return code_; }

 private:
  OrtErrorCode code_;
};

// What messages are made of. They are made when there is one: a run that goes well formats nothing.
std::ostream& operator<<(std::ostream& out, const Shape& shape);
std::ostream& operator<<(std::ostream& out, ONNXTensorElementDataType type);

template <class... T>
[[nodiscard]] std::string text(const T&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// What the caller gave cannot be right.
template <class... T>
void demand(bool right, const T&... message) {
  if (!right) throw Error(ORT_INVALID_ARGUMENT, text(message...));
}

/// It makes sense, and this operator does not do it.
template <class... T>
void do_not(bool asked, const T&... message) {
  if (asked) throw Error(ORT_NOT_IMPLEMENTED, text(message...));
}

/// Throws what the runtime refused with.
void check(OrtStatus* status);

/// Runs `body`; what it throws is returned as a status, with `where` before it.
template <class Body>
[[nodiscard]] OrtStatus* guarded(const std::string& where, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return api().CreateStatus(error.code(), (where + error.what()).c_str());
  } catch (const std::exception& error) {
    return api().CreateStatus(ORT_FAIL, (where + error.what()).c_str());
  }
}

/// What the runtime's own operators have and ours do not know, with blanks between: "Operator.attribute", and "Operator@opset" for a
/// later definition. The interface of a kernel lists no attributes, so each is asked for by its name. Added to those of earlier calls.
void add_unknown(const std::string& words);
/// The opset of a later definition of the operator; "" where there is none.
[[nodiscard]] std::string unknown_definition(const std::string& op);

/// The processor that a node runs on: its tensors are in that one's memory, but for inputs that their definition keeps on the host.
enum class Place { kCpu, kGpu };

/// An input or output.
struct Tensor {
  void* data = nullptr;  // null: not there
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Shape shape;

  explicit operator bool() const noexcept { return type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; }
  [[nodiscard]] std::int64_t elements() const noexcept;
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

/// The library's name for a type. Throws Error, naming `what`, where it has none.
[[nodiscard]] DType dtype_of(ONNXTensorElementDataType type, const char* what);

/// float32, float16 or bfloat16 in host memory as fp32. Throws Error, naming `what`, for others.
[[nodiscard]] std::vector<float> to_floats(const Tensor& tensor, const char* what);

/// An input or output of an operator's definition.
struct Port {
  const char* name;
  bool optional = false;
  bool on_host = false;  // in host memory although the operator runs on a GPU
};

/// A node while its kernel is made: what the model says before a run.
class Node {
 public:
  Node(const OrtKernelInfo& info, Place place, bool infers) : info_(info), place_(place), infers_(infers) {}

  [[nodiscard]] bool on_gpu() const noexcept { return place_ == Place::kGpu; }
  /// Whether the operator said the types of its outputs; else they are all that of the first input.
  [[nodiscard]] bool infers() const noexcept { return infers_; }
  [[nodiscard]] std::string name() const;
  [[nodiscard]] std::int64_t integer(const char* name, std::int64_t otherwise) const;
  /// An integer that must be 0 or 1: ONNX Runtime's operators take others for 0, some for 1.
  [[nodiscard]] bool flag(const char* name, bool otherwise) const;
  [[nodiscard]] float number(const char* name, float otherwise) const;
  [[nodiscard]] std::string string(const char* name, const std::string& otherwise) const;
  /// Throws Error, naming it, where the model sets an attribute of the operator that is not known here.
  void refuse_unknown(const std::string& op) const;
  [[nodiscard]] bool has_input(std::size_t index) const;
  [[nodiscard]] bool has_output(std::size_t index) const;
  [[nodiscard]] ONNXTensorElementDataType input_type(std::size_t index) const;
  /// The input's value where the model fixes it, else nothing.
  [[nodiscard]] Tensor constant(std::size_t index) const;
  /// The type of the queries, which the library computes in. Throws Error, naming the input, for one that it has not here.
  ONNXTensorElementDataType computed_type(std::size_t index, const char* name) const;

 private:
  const OrtKernelInfo& info_;
  Place place_;
  bool infers_;
};

/// A node while it runs. On a GPU all is enqueued on the runtime's stream, nothing waits for it, and a captured graph may
/// repeat it: what tensors hold is read by kernels alone.
class Run {
 public:
  Run(OrtKernelContext& context, Place place);

  [[nodiscard]] bool on_gpu() const noexcept { return place_ == Place::kGpu; }
  /// On a GPU.
  [[nodiscard]] const gpu::Stream& stream() const noexcept { return stream_; }

  [[nodiscard]] Tensor input(std::size_t index) const;
  /// data is null when nobody reads the output.
  [[nodiscard]] Tensor output(std::size_t index, const Shape& shape);
  /// Memory of the node's processor until the end of the run.
  [[nodiscard]] void* scratch(std::size_t bytes);
  template <class T>
  [[nodiscard]] T* scratch_of(std::int64_t count) {
    return static_cast<T*>(scratch(static_cast<std::size_t>(count) * sizeof(T)));
  }

  /// Between memory of the node's processor.
  void copy(const void* from, void* to, std::size_t bytes);

  /// CPU: body(i) for every i in [0, count), on the runtime's threads.
  template <class Body>
  void parallel(std::size_t count, const Body& body) {
    check(api().KernelContext_ParallelFor(
        &context_, [](void* data, std::size_t i) { (*static_cast<const Body*>(data))(i); }, count, 0,
        const_cast<void*>(static_cast<const void*>(&body))));
  }

  /// lean::decode() on the runtime's threads or stream, with a workspace that is kept. Throws Error when it refuses.
  void decode(const Problem& problem);

 private:
  OrtKernelContext& context_;
  Place place_;
  gpu::Stream stream_{};
  std::int32_t device_ = -1;
  std::size_t device_scratch_bytes_ = 0;  // given out in this run
  std::vector<std::unique_ptr<std::byte[]>> scratch_;
};

/// An extent before a run: a number, a name that the model gives it, or neither.
struct Dim {
  std::int64_t value = -1;
  std::string name{};

  [[nodiscard]] bool known() const noexcept { return value >= 0; }
};

/// Number times or divided by a number; neither number nor name where one is not known.
[[nodiscard]] Dim operator*(const Dim& dim, std::int64_t factor);
[[nodiscard]] Dim operator/(const Dim& dim, std::int64_t divisor);

/// Types and shapes before a run.
class Inference {
 public:
  explicit Inference(const OrtShapeInferContext& context) : context_(context) {}

  struct Form {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    std::vector<Dim> dims{};

    explicit operator bool() const noexcept { return type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; }
    /// Extents that are not known where the model gives no shape, or one that a run will refuse.
    [[nodiscard]] Form of_rank(std::size_t rank) const { return dims.size() == rank ? *this : Form{type, std::vector<Dim>(rank)}; }
  };

  [[nodiscard]] Form input(std::size_t index) const;
  [[nodiscard]] std::int64_t integer(const char* name, std::int64_t otherwise) const;
  void set_output(std::size_t index, ONNXTensorElementDataType type, std::vector<Dim> dims) const;

 private:
  const OrtShapeInferContext& context_;
};

}  // namespace lean::ort

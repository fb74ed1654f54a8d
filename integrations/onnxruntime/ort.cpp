#include "ort.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gpu.hpp"
#include "integrations/runtime/call.hpp"
#include "integrations/runtime/device.hpp"
#include "number.hpp"

namespace lean::ort {
namespace {

const OrtApi* g_api = nullptr;

struct ReleaseShape {
  void operator()(OrtTensorTypeAndShapeInfo* info) const noexcept { api().ReleaseTensorTypeAndShapeInfo(info); }
};
using TypeAndShape = std::unique_ptr<OrtTensorTypeAndShapeInfo, ReleaseShape>;

/// Names and strings of the C interface: asked for their length first. `ask(buffer, size)`.
template <class Ask>
std::string string_by(const Ask& ask) {
  std::size_t bytes = 0;
  OrtStatus* const status = ask(nullptr, &bytes);
  if (bytes == 0) {
    check(status);
    return {};
  }
  api().ReleaseStatus(status);  // "the buffer is too small", in some versions
  std::string result(bytes, '\0');
  check(ask(result.data(), &bytes));
  result.resize(std::strlen(result.c_str()));
  return result;
}

/// False when the node has no such attribute. Throws what else was wrong, such as another type.
bool found(OrtStatus* status, const char* name) {
  if (status == nullptr) return true;
  const std::string message = api().GetErrorMessage(status);
  api().ReleaseStatus(status);
  if (message.find("No attribute") != std::string::npos) return false;
  throw Error(ORT_INVALID_ARGUMENT, text(name, ": ", message));
}

Tensor describe(const OrtTensorTypeAndShapeInfo& info) {
  Tensor tensor;
  check(api().GetTensorElementType(&info, &tensor.type));
  std::size_t rank = 0;
  check(api().GetDimensionsCount(&info, &rank));
  tensor.shape.resize(rank);
  check(api().GetDimensions(&info, tensor.shape.data(), rank));
  return tensor;
}

Tensor read(const OrtValue* value) {
  if (value == nullptr) return {};
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api().GetTensorTypeAndShape(value, &info));
  const TypeAndShape owned(info);
  Tensor tensor = describe(*info);
  check(api().GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

/// Threads that the process may use. The interface does not say how many the runtime's pool has; more workers than threads cost
/// little, since a thread that is done takes the next.
std::int32_t thread_count() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed));
}

OrtErrorCode code_of(StatusCode code) {
  if (code == StatusCode::kInvalidArgument) return ORT_INVALID_ARGUMENT;
  return code == StatusCode::kUnsupported ? ORT_NOT_IMPLEMENTED : ORT_FAIL;
}

void check(const Status& status) {
  if (!status.ok()) throw Error(code_of(status.code), text(name_of(status.code), ": ", status.message));
}

struct Body {
  void (*run)(void*, std::int32_t);
  void* argument;
};

/// Executor::run on ONNX Runtime's threads; it returns when all are done, and has no way to fail.
void run_in_pool(void* context, std::int32_t worker_count, void (*run)(void*, std::int32_t), void* argument) {
  Body body{run, argument};
  OrtStatus* const status = api().KernelContext_ParallelFor(
      static_cast<const OrtKernelContext*>(context),
      [](void* data, std::size_t worker) {
        const Body& given = *static_cast<const Body*>(data);
        given.run(given.argument, static_cast<std::int32_t>(worker));
      },
      static_cast<std::size_t>(worker_count), 0, &body);
  if (status == nullptr) return;
  api().ReleaseStatus(status);
  for (std::int32_t worker = 0; worker < worker_count; ++worker) run(argument, worker);
}

/// The library's types that tensors may be of, as ONNX numbers and names them.
struct OnnxFloat {
  DType dtype;
  ONNXTensorElementDataType type;
  const char* name;
};
constexpr OnnxFloat kOnnxFloats[] = {
    {DType::kFloat32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "float32"},
    {DType::kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "float16"},
    {DType::kBFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "bfloat16"},
    {DType::kFloat8E4M3, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, "float8e4m3fn"},
    {DType::kFloat8E5M2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2, "float8e5m2"},
};

}  // namespace

const OrtApi& api() noexcept { return *g_api; }
void set_api(const OrtApi& given) noexcept { g_api = &given; }

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (std::size_t axis = 0; axis < shape.size(); ++axis) out << (axis > 0 ? ", " : "") << shape[axis];
  return out << ']';
}

std::ostream& operator<<(std::ostream& out, ONNXTensorElementDataType type) {
  for (const OnnxFloat& known : kOnnxFloats) {
    if (known.type == type) return out << known.name;
  }
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return out << "float64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return out << "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return out << "int64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return out << "int8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: return out << "uint8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: return out << "bool";
    default: return out << "ONNX type " << static_cast<int>(type);
  }
}

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const Error error(api().GetErrorCode(status), api().GetErrorMessage(status));
  api().ReleaseStatus(status);
  throw error;
}

std::int64_t Tensor::elements() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

DType dtype_of(ONNXTensorElementDataType type, const char* what) {
  for (const OnnxFloat& known : kOnnxFloats) {
    if (known.type == type) return known.dtype;
  }
  throw Error(ORT_NOT_IMPLEMENTED, text(what, ": is ", type, ": allowed float32, float16, bfloat16"));
}

std::vector<float> to_floats(const Tensor& tensor, const char* what) {
  const DType dtype = dtype_of(tensor.type, what);
  std::vector<float> floats;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) floats.push_back(load_number(tensor.data, dtype, i));
  return floats;
}

std::string Node::name() const {
  return string_by([this](char* out, std::size_t* size) { return api().KernelInfo_GetNodeName(&info_, out, size); });
}

std::int64_t Node::integer(const char* name, std::int64_t otherwise) const {
  std::int64_t value = 0;
  return found(api().KernelInfoGetAttribute_int64(&info_, name, &value), name) ? value : otherwise;
}

bool Node::flag(const char* name, bool otherwise) const {
  const std::int64_t value = integer(name, otherwise ? 1 : 0);
  demand(value == 0 || value == 1, name, " = ", value, ": allowed 0, 1");
  return value == 1;
}

float Node::number(const char* name, float otherwise) const {
  float value = 0.0F;
  return found(api().KernelInfoGetAttribute_float(&info_, name, &value), name) ? value : otherwise;
}

std::string Node::string(const char* name, const std::string& otherwise) const {
  std::size_t bytes = 0;
  OrtStatus* const status = api().KernelInfoGetAttribute_string(&info_, name, nullptr, &bytes);
  if (bytes == 0) return found(status, name) ? "" : otherwise;
  api().ReleaseStatus(status);
  return string_by([&](char* out, std::size_t* size) { return api().KernelInfoGetAttribute_string(&info_, name, out, size); });
}

bool Node::has_input(std::size_t index) const {
  std::size_t count = 0;
  check(api().KernelInfo_GetInputCount(&info_, &count));
  if (index >= count) return false;
  return !string_by([&](char* out, std::size_t* size) { return api().KernelInfo_GetInputName(&info_, index, out, size); }).empty();
}

bool Node::has_output(std::size_t index) const {
  std::size_t count = 0;
  check(api().KernelInfo_GetOutputCount(&info_, &count));
  if (index >= count) return false;
  return !string_by([&](char* out, std::size_t* size) { return api().KernelInfo_GetOutputName(&info_, index, out, size); }).empty();
}

ONNXTensorElementDataType Node::input_type(std::size_t index) const {
  OrtTypeInfo* info = nullptr;
  check(api().KernelInfo_GetInputTypeInfo(&info_, index, &info));
  const std::unique_ptr<OrtTypeInfo, void (*)(OrtTypeInfo*)> owned(info, [](OrtTypeInfo* i) { api().ReleaseTypeInfo(i); });
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  check(api().CastTypeInfoToTensorInfo(info, &tensor));
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (tensor != nullptr) check(api().GetTensorElementType(tensor, &type));
  return type;
}

Tensor Node::constant(std::size_t index) const {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api().KernelInfoGetConstantInput_tensor(&info_, index, &is_constant, &value));
  return is_constant != 0 ? read(value) : Tensor{};
}

ONNXTensorElementDataType Node::computed_type(std::size_t index, const char* name) const {
  const auto type = input_type(index);
  const DType dtype = dtype_of(type, name);
  do_not(traits_of(dtype).scaled, name, ": is ", type, ": allowed float32, float16, bfloat16");
  do_not(on_gpu() && dtype == DType::kFloat32, name, ": is float32: allowed float16, bfloat16 on the CUDA provider");
  return type;
}

Run::Run(OrtKernelContext& context, Place place) : context_(context), place_(place) {
  if (!on_gpu()) return;
  check(api().KernelContext_GetGPUComputeStream(&context_, &stream_.handle));
  device_ = runtime::device::current();  // the provider's, which it makes current before a run
  stream_.dependents = runtime::device::launches_dependents(device_);
}

Tensor Run::input(std::size_t index) const {
  std::size_t count = 0;
  check(api().KernelContext_GetInputCount(&context_, &count));
  if (index >= count) return {};
  const OrtValue* value = nullptr;
  check(api().KernelContext_GetInput(&context_, index, &value));
  return read(value);
}

Tensor Run::output(std::size_t index, const Shape& shape) {
  std::size_t count = 0;
  check(api().KernelContext_GetOutputCount(&context_, &count));
  if (index >= count) return {};
  OrtValue* value = nullptr;
  check(api().KernelContext_GetOutput(&context_, index, shape.data(), shape.size(), &value));
  return read(value);
}

/// On a GPU runs of one stream follow each other, so each takes the same memory from its beginning.
void* Run::scratch(std::size_t bytes) {
  if (on_gpu()) {
    constexpr std::size_t kAlignment = kWorkspaceAlignment;
    const std::size_t begin = device_scratch_bytes_;
    device_scratch_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return static_cast<std::byte*>(runtime::device::scratch_for(device_, stream_.handle, device_scratch_bytes_)) + begin;
  }
  scratch_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
  return scratch_.back().get();
}

void Run::copy(const void* from, void* to, std::size_t bytes) {
  if (on_gpu()) return gpu::copy(stream_, from, to, bytes);
  std::memcpy(to, from, bytes);
}

void Run::decode(const Problem& problem) {
  static const std::int32_t threads = thread_count();
  const Executor executor{.context = &context_, .run = run_in_pool, .worker_count = threads};
  Options options{.executor = &executor};
  if (!on_gpu() && problem.pages.page_tokens > 0) check(check_lengths(problem));  // page ids; those a window hides may be any
  if (on_gpu()) options = {.backend = Backend::kCuda, .stream = stream_.handle};
  check(runtime::decode(problem, options, device_));
}

Dim operator*(const Dim& dim, std::int64_t factor) { return {dim.known() && factor > 0 ? dim.value * factor : -1}; }
Dim operator/(const Dim& dim, std::int64_t divisor) { return {dim.known() && divisor > 0 ? dim.value / divisor : -1}; }

Inference::Form Inference::input(std::size_t index) const {
  std::size_t count = 0;
  check(api().ShapeInferContext_GetInputCount(&context_, &count));
  if (index >= count) return {};
  OrtTensorTypeAndShapeInfo* info = nullptr;  // the context's own
  OrtStatus* const status = api().ShapeInferContext_GetInputTypeShape(&context_, index, &info);
  api().ReleaseStatus(status);
  if (status != nullptr || info == nullptr) return {};  // an optional input that is not there
  const Tensor tensor = describe(*info);
  std::vector<const char*> names(tensor.shape.size(), "");
  check(api().GetSymbolicDimensions(info, names.data(), names.size()));
  Form form{.type = tensor.type};
  for (std::size_t i = 0; i < names.size(); ++i) form.dims.push_back({tensor.shape[i], names[i] != nullptr ? names[i] : ""});
  return form;
}

std::int64_t Inference::integer(const char* name, std::int64_t otherwise) const {
  const OrtOpAttr* attribute = nullptr;
  OrtStatus* status = api().ShapeInferContext_GetAttribute(&context_, name, &attribute);
  std::int64_t value = 0;
  std::size_t bytes = 0;
  if (status == nullptr) status = api().ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof value, &bytes);
  if (status == nullptr) return value;
  api().ReleaseStatus(status);
  return otherwise;
}

/// An extent without number and name gets a name of its own: two of the same name would count as equal.
void Inference::set_output(std::size_t index, ONNXTensorElementDataType type, std::vector<Dim> dims) const {
  static std::atomic<std::uint64_t> unknown = 0;
  Shape values;
  std::vector<const char*> names;
  for (Dim& dim : dims) {
    if (!dim.known() && dim.name.empty()) dim.name = "lean_attention_" + std::to_string(unknown++);
    values.push_back(dim.known() ? dim.value : -1);
    names.push_back(dim.known() ? "" : dim.name.c_str());
  }
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api().CreateTensorTypeAndShapeInfo(&info));
  const TypeAndShape owned(info);
  check(api().SetTensorElementType(info, type));
  check(api().SetDimensions(info, values.data(), values.size()));
  check(api().SetSymbolicDimensions(info, names.data(), names.size()));
  check(api().ShapeInferContext_SetOutputTypeShape(&context_, index, info));
}

}  // namespace lean::ort

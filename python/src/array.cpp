#include "array.hpp"

#include <cstdarg>
#include <string_view>

namespace lean::python {
namespace {

/// PyArrayInterface of NumPy's array interface protocol, version 3 (numpy.org/doc/stable/reference/arrays.interface.html).
struct NumpyInterface {
  int two;
  int ndim;
  char kind;
  int item_bytes;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* description;
};
constexpr int kNumpyNativeOrder = 0x200;
constexpr int kNumpyWritable = 0x400;

/// An attribute, or null when the object has none.
Reference attribute(PyObject* object, const char* name) {
  Reference value(PyObject_GetAttrString(object, name));
  if (value == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw ErrorIsSet{};
    PyErr_Clear();
  }
  return value;
}

ElementType element_type(const dlpack::DataType& type) noexcept {
  if (type.lanes != 1) return ElementType::kOther;
  switch (type.code * 256 + type.bits) {
    case dlpack::kFloat * 256 + 32: return ElementType::kFloat32;
    case dlpack::kFloat * 256 + 16: return ElementType::kFloat16;
    case dlpack::kBFloat * 256 + 16: return ElementType::kBFloat16;
    case dlpack::kFloat8E4M3 * 256 + 8: return ElementType::kFloat8E4M3;
    case dlpack::kFloat8E5M2 * 256 + 8: return ElementType::kFloat8E5M2;
    case dlpack::kInt * 256 + 32: return ElementType::kInt32;
    case dlpack::kInt * 256 + 64: return ElementType::kInt64;
    case dlpack::kUInt * 256 + 32: return ElementType::kUInt32;
    case dlpack::kBool * 256 + 8: return ElementType::kBool;
    default: return ElementType::kOther;
  }
}

/// NumPy's own kinds. Those it does not know (bfloat16 and float8 of ml_dtypes) are told apart by the type's name.
ElementType element_type(const NumpyInterface& array, PyObject* object) {
  switch (array.kind * 256 + array.item_bytes) {
    case 'f' * 256 + 4: return ElementType::kFloat32;
    case 'f' * 256 + 2: return ElementType::kFloat16;
    case 'i' * 256 + 4: return ElementType::kInt32;
    case 'i' * 256 + 8: return ElementType::kInt64;
    case 'u' * 256 + 4: return ElementType::kUInt32;
    case 'b' * 256 + 1: return ElementType::kBool;
    default: break;
  }
  const Reference type = attribute(object, "dtype");
  const Reference text(checked(PyObject_Str(checked(type.get()))));
  const std::string_view name = checked(PyUnicode_AsUTF8AndSize(text.get(), nullptr));
  for (const ElementType known : {ElementType::kBFloat16, ElementType::kFloat8E4M3, ElementType::kFloat8E5M2}) {
    if (name == name_of(known)) return known;
  }
  return ElementType::kOther;
}

void check_dims(int ndim, const char* name) {
  if (ndim > Array::kMaxDims) raise(PyExc_ValueError, "%s: %d dimensions: allowed at most %d", name, ndim, Array::kMaxDims);
}

Array from_dlpack(const dlpack::Tensor& tensor, const char* name) {
  check_dims(tensor.ndim, name);
  Array array;
  array.data = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  array.type = element_type(tensor.dtype);
  array.device = tensor.device;
  array.ndim = tensor.ndim;
  std::int64_t dense = 1;
  for (std::size_t i = static_cast<std::size_t>(tensor.ndim); i-- > 0;) {
    array.shape[i] = tensor.shape[i];
    array.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
  }
  return array;
}

/// The exchange API of an object's type, or null. Types are few and live as long as the process, so answers are kept.
const dlpack::ExchangeApi* exchange_api(PyObject* object) {
  struct Known {
    PyTypeObject* type = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
  };
  static std::array<Known, 16> known;  // guarded by the GIL
  static std::size_t next = 0;
  PyTypeObject* const type = Py_TYPE(object);
  for (const Known& entry : known) {
    if (entry.type == type) return entry.api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  const Reference capsule = attribute(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr && PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(checked(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api")));
    while (api != nullptr && api->version.major != dlpack::kMajorVersion)
      api = static_cast<const dlpack::ExchangeApi*>(api->previous);
  }
  Known& entry = known[next++ % known.size()];
  Py_XDECREF(reinterpret_cast<PyObject*>(entry.type));
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  entry = {type, api};
  return api;
}

Array from_numpy(PyObject* object, Reference capsule, const char* name) {
  const auto& numpy = *static_cast<const NumpyInterface*>(checked(PyCapsule_GetPointer(capsule.get(), nullptr)));
  check_dims(numpy.ndim, name);
  if ((numpy.flags & kNumpyNativeOrder) == 0) raise(PyExc_TypeError, "%s: bytes are swapped: native order is needed", name);
  Array array;
  array.data = numpy.data;
  array.type = element_type(numpy, object);
  array.writable = (numpy.flags & kNumpyWritable) != 0;
  array.ndim = numpy.ndim;
  for (std::size_t i = 0; i < static_cast<std::size_t>(numpy.ndim); ++i) {
    array.shape[i] = numpy.shape[i];
    if (numpy.strides[i] % numpy.item_bytes != 0) {
      raise(PyExc_ValueError, "%s: stride of %zd bytes: must be a multiple of the element size %d", name, numpy.strides[i],
            numpy.item_bytes);
    }
    array.strides[i] = numpy.strides[i] / numpy.item_bytes;
  }
  return array;
}

/// __dlpack__'s number for a stream: 1 stands for the legacy default one, 0 is not allowed.
Reference stream_number(void* stream) {
  const auto handle = reinterpret_cast<std::uintptr_t>(stream);
  return Reference(checked(PyLong_FromSize_t(handle == 0 ? 1 : handle)));
}

Reference keywords_for(PyObject* object, void* stream, bool versioned) {
  Reference keywords(checked(PyDict_New()));
  if (versioned) {
    const Reference version(checked(Py_BuildValue("(ii)", 1, 1)));
    if (PyDict_SetItemString(keywords.get(), "max_version", version.get()) < 0) throw ErrorIsSet{};
  }
  const Reference device(checked(PyObject_CallMethod(object, "__dlpack_device__", nullptr)));
  const Reference device_type(checked(PySequence_GetItem(device.get(), 0)));
  const long type = PyLong_AsLong(device_type.get());
  if (type == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  if (type == dlpack::kCuda || type == dlpack::kCudaManaged) {
    if (PyDict_SetItemString(keywords.get(), "stream", stream_number(stream).get()) < 0) throw ErrorIsSet{};
  }
  return keywords;
}

/// A capsule of __dlpack__, versioned where the producer knows versions.
Reference capsule_of(PyObject* object, PyObject* method, void* stream) {
  const Reference nothing(checked(PyTuple_New(0)));
  Reference capsule(PyObject_Call(method, nothing.get(), keywords_for(object, stream, true).get()));
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {  // a producer older than DLPack 1.0
    PyErr_Clear();
    capsule.reset(PyObject_Call(method, nothing.get(), keywords_for(object, stream, false).get()));
  }
  checked(capsule.get());
  return capsule;
}

Array from_capsule(Reference capsule, const char* name) {
  Array array;
  if (PyCapsule_IsValid(capsule.get(), "dltensor_versioned")) {
    const auto* managed =
        static_cast<const dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.get(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajorVersion) {
      raise(PyExc_TypeError, "%s: DLPack version %d: 1 is known", name, static_cast<int>(managed->version.major));
    }
    array = from_dlpack(managed->tensor, name);
    array.writable = (managed->flags & dlpack::kReadOnlyFlag) == 0;
  } else {
    array = from_dlpack(static_cast<const dlpack::ManagedTensor*>(checked(PyCapsule_GetPointer(capsule.get(), "dltensor")))->tensor,
                        name);
  }
  array.owner = std::move(capsule);
  return array;
}

}  // namespace

void raise(PyObject* type, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(type, format, arguments);
  va_end(arguments);
  throw ErrorIsSet{};
}

const char* name_of(ElementType type) noexcept {
  switch (type) {
    case ElementType::kFloat32: return "float32";
    case ElementType::kFloat16: return "float16";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kFloat8E4M3: return "float8_e4m3fn";
    case ElementType::kFloat8E5M2: return "float8_e5m2";
    case ElementType::kInt32: return "int32";
    case ElementType::kInt64: return "int64";
    case ElementType::kUInt32: return "uint32";
    case ElementType::kBool: return "bool";
    case ElementType::kOther: break;
  }
  return "another type";
}

std::string Array::shape_text() const {
  std::string text = "(";
  for (std::size_t i = 0; i < static_cast<std::size_t>(ndim); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

Array read_array(PyObject* object, const char* name, void* stream) {
  if (const dlpack::ExchangeApi* api = exchange_api(object); api != nullptr && api->borrow != nullptr) {
    dlpack::Tensor tensor{};
    if (api->borrow(object, &tensor) != 0) throw ErrorIsSet{};
    return from_dlpack(tensor, name);
  }
  if (Reference capsule = attribute(object, "__array_struct__"); capsule != nullptr && PyCapsule_IsValid(capsule.get(), nullptr)) {
    return from_numpy(object, std::move(capsule), name);
  }
  const Reference method = attribute(object, "__dlpack__");
  if (method == nullptr) {
    const Reference type(checked(PyObject_Str(reinterpret_cast<PyObject*>(Py_TYPE(object)))));
    raise(PyExc_TypeError, "%s: %U is no array: a NumPy array, a torch tensor or another object with __dlpack__ is needed", name,
          type.get());
  }
  return from_capsule(capsule_of(object, method.get(), stream), name);
}

void* current_stream(PyObject* object, const dlpack::Device& device) {
  void* stream = nullptr;
  const dlpack::ExchangeApi* api = exchange_api(object);
  if (api != nullptr && api->current_stream != nullptr && api->current_stream(device.type, device.index, &stream) != 0)
    throw ErrorIsSet{};
  return stream;
}

}  // namespace lean::python

// Arrays of any framework as pointer, type, shape and strides, by the cheapest way that their type offers.
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
Reference attribute(PyObject* object, PyObject* name) {
  Reference value(lean_get_attribute(object, name));
  if (value == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw ErrorIsSet{};
    PyErr_Clear();
  }
  return value;
}

Reference attribute(PyObject* object, const char* name) {
  return attribute(object, Reference(checked(PyUnicode_FromString(name))).get());
}

constexpr ElementType element_type(DType dtype) noexcept { return static_cast<ElementType>(dtype); }

/// DLPack's code of each of the library's types.
constexpr dlpack::TypeCode code_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16: break;
    case DType::kBFloat16: return dlpack::kBFloat;
    case DType::kFloat8E4M3: return dlpack::kFloat8E4M3;
    case DType::kFloat8E5M2: return dlpack::kFloat8E5M2;
  }
  return dlpack::kFloat;
}

ElementType element_type(const dlpack::DataType& type) noexcept {
  if (type.lanes != 1) return ElementType::kOther;
  for (const DType dtype : kAllDTypes) {
    if (type.code == code_of(dtype) && type.bits == 8 * bytes_of(dtype)) return element_type(dtype);
  }
  switch (type.code * 256 + type.bits) {
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
  for (const DType known : kAllDTypes) {
    if (name == traits_of(known).name) return element_type(known);
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
  array.code = tensor.dtype;
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

/// How arrays of a type are read.
struct Kind {
  PyTypeObject* type = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
  bool of_torch = false;
  bool without_memory = false;  // a torch subclass that stands for other tensors
  bool masked = false;          // numpy.ma
  bool changes = true;          // false: of JAX, whose arrays never do, though their capsules do not say so
};

const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  const Reference capsule = attribute(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr || !PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(checked(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api")));
  while (api != nullptr && api->version.major != dlpack::kMajorVersion)
    api = static_cast<const dlpack::ExchangeApi*>(api->previous);
  return api != nullptr && api->borrow != nullptr ? api : nullptr;
}

/// Whether `type` is `name` of a module that is loaded, or derived from it.
bool derives_from(PyTypeObject* type, const char* module_name, const char* name) {
  PyObject* const modules = PyImport_GetModuleDict();  // borrowed
  PyObject* const module = PyDict_GetItemString(modules, module_name);
  if (module == nullptr) return false;
  const Reference base = attribute(module, name);
  if (base == nullptr || !PyType_Check(base.get())) return false;
  const int answer = PyObject_IsSubclass(reinterpret_cast<PyObject*>(type), base.get());  // jax.Array is an abstract class
  if (answer < 0) throw ErrorIsSet{};
  return answer == 1;
}

Kind kind_of_type(PyTypeObject* type) {
  Kind kind{.type = type, .api = exchange_api(type)};
  kind.masked = derives_from(type, "numpy.ma", "MaskedArray");
  kind.changes = !derives_from(type, "jax", "Array");
  kind.of_torch = derives_from(type, "torch", "Tensor");
  if (kind.of_torch) {
    const Reference own = attribute(reinterpret_cast<PyObject*>(type), "__torch_dispatch__");
    const Reference core(checked(PyImport_ImportModule("torch._C")));
    kind.without_memory = own != attribute(core.get(), "_disabled_torch_dispatch_impl");
  }
  return kind;
}

/// Types are few and live as long as the process, so answers are kept.
const Kind& kind_of(PyObject* object) {
  static std::array<Kind, 16> known;  // guarded by the GIL
  static std::size_t next = 0;
  PyTypeObject* const type = Py_TYPE(object);
  for (const Kind& kind : known) {
    if (kind.type == type) return kind;
  }
  const Kind found = kind_of_type(type);
  Kind& kept = known[next++ % known.size()];
  Py_XDECREF(reinterpret_cast<PyObject*>(kept.type));
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  return kept = found;
}

/// The first line of the exception that is set, which is cleared.
Reference first_line_of_error() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  const Reference held_type(type), held(value), held_traceback(traceback);
  const Reference text(checked(PyObject_Str(value != nullptr ? value : Py_None)));
  const Reference parts(checked(PyObject_CallMethod(text.get(), "partition", "s", "\n")));
  return Reference(checked(PySequence_GetItem(parts.get(), 0)));
}

Array borrowed(PyObject* object, const Kind& kind, const char* name) {
  dlpack::Tensor tensor{};
  if (kind.api->borrow(object, &tensor) == 0) return from_dlpack(tensor, name);
  const Reference why = first_line_of_error();
  const Reference device = attribute(object, "device");
  const Reference layout = attribute(object, "layout");
  PyObject* const unknown = Py_None;
  raise(PyExc_TypeError, "%s: a tensor on device %S, %S, whose memory cannot be read: %U", name, device ? device.get() : unknown,
        layout ? layout.get() : unknown, why.get());
}

/// Whether a tensor is a lazy negative of what its memory holds. Only imaginary parts of conjugated tensors and views of them are:
/// float32 or float16, and every second number of memory, so that most tensors need not be asked.
bool is_negative(PyObject* tensor, const Array& array) {
  if (array.type != ElementType::kFloat32 && array.type != ElementType::kFloat16) return false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(array.ndim); ++axis) {
    if (array.shape[axis] > 1 && array.strides[axis] % 2 != 0) return false;
  }
  static PyObject* const name = interned("is_neg");
  const Reference answer(checked(lean_call_method(tensor, name, nullptr)));
  return answer.get() == Py_True;
}

Array from_numpy(PyObject* object, Reference capsule, const char* name) {
  const auto& numpy = *static_cast<const NumpyInterface*>(checked(PyCapsule_GetPointer(capsule.get(), nullptr)));
  check_dims(numpy.ndim, name);
  if ((numpy.flags & kNumpyNativeOrder) == 0) raise(PyExc_TypeError, "%s: bytes are swapped: native order is needed", name);
  if (numpy.item_bytes == 0) raise(PyExc_TypeError, "%s: elements of no bytes: numbers are needed", name);
  Array array;
  array.data = numpy.data;
  array.type = element_type(numpy, object);
  array.code = {.code = static_cast<std::uint8_t>(numpy.kind), .bits = static_cast<std::uint8_t>(8 * numpy.item_bytes), .lanes = 0};
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
  static PyObject* const name = interned("__dlpack_device__");
  const Reference device(checked(lean_call_method(object, name, nullptr)));
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
  Reference capsule(lean_call(method, nothing.get(), keywords_for(object, stream, true).get()));
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {  // a producer older than DLPack 1.0
    PyErr_Clear();
    capsule.reset(lean_call(method, nothing.get(), keywords_for(object, stream, false).get()));
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
  } else if (PyCapsule_IsValid(capsule.get(), "dltensor")) {
    array = from_dlpack(static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.get(), "dltensor"))->tensor, name);
  } else {
    raise(PyExc_TypeError, "%s: its __dlpack__ returned %R: a capsule of DLPack that nobody has taken yet is needed", name,
          capsule.get());
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

PyObject* interned(const char* text) { return checked(PyUnicode_InternFromString(text)); }

Reference none() noexcept {
  Py_INCREF(Py_None);
  return Reference(Py_None);
}

void check_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) raise(PyExc_TypeError, "_core: %zd arguments, expected %zd", count, expected);
}

const char* name_of(ElementType type) noexcept {
  if (is_of_library(type)) return traits_of(static_cast<DType>(type)).name;
  switch (type) {
    case ElementType::kInt32: return "int32";
    case ElementType::kInt64: return "int64";
    case ElementType::kUInt32: return "uint32";
    case ElementType::kBool: return "bool";
    default: return "another type";
  }
}

std::string Array::shape_text() const {
  std::string text = "(";
  for (std::size_t i = 0; i < static_cast<std::size_t>(ndim); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (ndim == 1 ? ",)" : ")");
}

std::string Array::type_text() const {
  if (type != ElementType::kOther) return name_of(type);
  const char* kind = "another type of ";
  switch (code.code) {
    case dlpack::kFloat:
    case 'f': kind = "float"; break;
    case dlpack::kInt:
    case 'i': kind = "int"; break;
    case dlpack::kUInt:
    case 'u': kind = "uint"; break;
    case dlpack::kComplex:
    case 'c': kind = "complex"; break;
    case 'O': return "object";
    default: return kind + std::to_string(code.bits) + " bits";
  }
  return kind + std::to_string(code.bits);
}

std::string Array::device_text() const {
  if (on_cuda()) return "cuda:" + std::to_string(device.index);
  return device.type == dlpack::kCpu || device.type == dlpack::kCudaHost
             ? "the CPU"
             : "device type " + std::to_string(device.type) + " of DLPack";
}

namespace {

Array read_any(PyObject* object, const Kind& kind, const char* name, void* stream) {
  if (kind.api != nullptr) return borrowed(object, kind, name);
  static PyObject* const array_struct = interned("__array_struct__");
  if (Reference capsule = attribute(object, array_struct); capsule != nullptr && PyCapsule_IsValid(capsule.get(), nullptr))
    return from_numpy(object, std::move(capsule), name);
  const Reference method = attribute(object, "__dlpack__");
  if (method == nullptr) {
    const Reference type(checked(PyObject_Str(reinterpret_cast<PyObject*>(Py_TYPE(object)))));
    raise(PyExc_TypeError, "%s: %U is no array: a NumPy array, a torch tensor or another object with __dlpack__ is needed", name,
          type.get());
  }
  return from_capsule(capsule_of(object, method.get(), stream), name);
}

}  // namespace

Array read_array(PyObject* object, const char* name, void* stream) {
  const Kind kind = kind_of(object);
  if (kind.masked) raise(PyExc_TypeError, "%s: a masked array, whose mask would be lost: pass .filled(...) or .data", name);
  if (kind.without_memory) {
    raise(PyExc_TypeError, "%s: %R has no memory of its own that could be read: all tensors must be of one kind", name,
          reinterpret_cast<PyObject*>(kind.type));
  }
  Array array = read_any(object, kind, name, stream);
  array.of_torch = kind.of_torch;
  array.writable = array.writable && kind.changes;
  if (!kind.of_torch || !is_negative(object, array)) return array;
  if (array.on_cuda() && stream != nullptr)
    raise(PyExc_ValueError, "%s: is a lazy negative (is_neg()): pass its resolve_neg(), made on the stream that is given", name);
  static PyObject* const resolve = interned("resolve_neg");
  Reference resolved(checked(lean_call_method(object, resolve, nullptr)));
  array = read_any(resolved.get(), kind, name, stream);
  if (array.owner == nullptr) array.owner = std::move(resolved);  // else the capsule holds it
  array.of_torch = array.was_negative = true;
  return array;
}

DType dtype_of(const Array& array, const char* name) {
  if (is_of_library(array.type)) return static_cast<DType>(array.type);
  raise(PyExc_TypeError, "%s: %s: expected float32, float16, bfloat16 or float8", name, array.type_text().c_str());
}

bool tells_stream(PyObject* object) { return kind_of(object).api != nullptr; }

void refuse_gradient(PyObject* tensor, const char* name) {
  static PyObject* const requires_grad = interned("requires_grad");
  const Reference wanted(checked(lean_get_attribute(tensor, requires_grad)));
  if (wanted.get() == Py_True) {
    raise(PyExc_RuntimeError, "%s: requires a gradient, and there is no backward pass: pass its detach()", name);
  }
}

void* current_stream(PyObject* object, const dlpack::Device& device) {
  void* stream = nullptr;
  const dlpack::ExchangeApi* api = kind_of(object).api;
  if (api != nullptr && api->current_stream != nullptr && api->current_stream(device.type, device.index, &stream) != 0)
    throw ErrorIsSet{};
  return stream;
}

}  // namespace lean::python

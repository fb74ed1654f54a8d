// The part of the DLPack ABI that reading a tensor needs. Layouts of DLPack 1.3, include/dlpack/dlpack.h (Apache-2.0,
// github.com/dmlc/dlpack); fixed by its ABI rules within major version 1.
#pragma once

#include <cstdint>

namespace lean::python::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t type = kCpu;
  std::int32_t index = 0;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3 = 10,  // e4m3fn: finite values only, as lean::DType::kFloat8E4M3
  kFloat8E5M2 = 12,
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null: dense
  std::uint64_t byte_offset;
};

/// What a capsule "dltensor" holds begins with its tensor.
struct ManagedTensor {
  Tensor tensor;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t kReadOnlyFlag = 1;

/// What a capsule "dltensor_versioned" holds.
struct ManagedTensorVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

/// Functions of a framework that read its tensors without a Python call: `__dlpack_c_exchange_api__` of a tensor type.
struct ExchangeApi {
  Version version;
  const void* previous;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*borrow)(void* object, Tensor* out);  // may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out);
};

}  // namespace lean::python::dlpack

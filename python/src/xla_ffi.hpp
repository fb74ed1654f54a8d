// The part of XLA's FFI ABI that a handler without state needs: what jax.jit calls. Layouts of xla/ffi/api/c_api.h version 0.3
// (Apache-2.0, github.com/openxla/xla), which fields are only ever added to; every struct says its own size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lean::python::xla {

inline constexpr int kMajorVersion = 0;
inline constexpr int kMinorVersion = 3;

struct Error;
struct ExecutionContext;

enum class ErrorCode : int { kInvalidArgument = 3, kResourceExhausted = 8, kUnimplemented = 12, kInternal = 13 };
enum class Stage : int { kExecute = 3 };
enum class AttributeType : int { kArray = 1 };
enum class DataType : int { kInt32 = 4, kUInt8 = 6 };

/// Asks a handler something else than to run.
struct Extension {
  std::size_t struct_size;
  int type;
  Extension* next;
};

inline constexpr int kMetadataExtension = 1;

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  void* stream;  // out
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  void* error_get_message;
  void* error_destroy;
  void* handler_register;
  Error* (*stream_get)(StreamGetArgs*);
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

/// Arguments or results.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  int* types;
  Buffer** buffers;
};

struct Span {
  const char* data;
  std::size_t size;
};

struct ArrayAttribute {
  DataType dtype;
  std::size_t size;
  void* data;
};

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  AttributeType* types;
  Span** names;
  void** values;
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  ExecutionContext* context;
  Stage stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

using Handler = Error* (*)(CallFrame*);

}  // namespace lean::python::xla

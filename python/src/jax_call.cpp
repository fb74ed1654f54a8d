// The image of a traced call and the handler that XLA runs, on the CPU and on CUDA.
#include "jax_call.hpp"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "errors.hpp"
#include "integrations/runtime/call.hpp"
#include "integrations/runtime/device.hpp"
#include "integrations/runtime/executor.hpp"
#include "xla_ffi.hpp"

namespace lean::python {
namespace {

namespace device = runtime::device;

struct Image {
  std::size_t bytes = sizeof(Image);  // another build of the library may have another
  Problem problem;
  Options options;
  std::int64_t page_id_count = 0;  // of page_indices
};
static_assert(std::is_trivially_copyable_v<Image>);

/// Points an argument of the problem at `data`; false for those that are no arrays of a traced call: numbers and flags, and append,
/// which XLA's values that never change do not allow.
[[nodiscard]] bool set_pointer(Problem& problem, Argument which, void* data) {
  const auto point = [data]<typename T>(T*& pointer) {
    pointer = static_cast<T*>(data);
    return true;
  };
  switch (which.index()) {
    case Argument("q").index(): return point(problem.q.data);
    case Argument("k").index(): return point(problem.k.data);
    case Argument("v").index(): return point(problem.v.data);
    case Argument("out").index(): return point(problem.o.data);
    case Argument("lse").index(): return point(problem.lse.data);
    case Argument("seqlens").index(): return point(problem.kv_lengths);
    case Argument("leftpad").index(): return point(problem.kv_left_pad);
    case Argument("cu_seqlens_q").index(): return point(problem.cu_q_tokens);
    case Argument("cu_seqlens_k").index(): return point(problem.cu_kv_tokens);
    case Argument("block_table").index(): return point(problem.pages.block_table);
    case Argument("page_indptr").index(): return point(problem.pages.page_indptr);
    case Argument("page_indices").index(): return point(problem.pages.page_indices);
    case Argument("alibi_slopes").index(): return point(problem.scores.alibi_slopes);
    case Argument("sinks").index(): return point(problem.scores.sinks);
    case Argument("mask").index(): return point(problem.scores.mask);
    case Argument("tree_mask").index(): return point(problem.scores.tree_mask);
    case Argument("k_scale").index(): return point(problem.k_scales);
    case Argument("v_scale").index(): return point(problem.v_scales);
    default: return false;
  }
}

xla::Error* error(const xla::CallFrame& frame, xla::ErrorCode code, const std::string& message) {
  xla::ErrorCreateArgs arguments{sizeof(xla::ErrorCreateArgs), nullptr, message.c_str(), code};
  return frame.api->error_create(&arguments);
}

xla::Error* error(const xla::CallFrame& frame, const Status& status) {
  const bool invalid = status.code == StatusCode::kInvalidArgument || status.code == StatusCode::kTooLarge;
  const bool unsupported = status.code == StatusCode::kUnsupported;
  const xla::ErrorCode code = invalid       ? xla::ErrorCode::kInvalidArgument
                              : unsupported ? xla::ErrorCode::kUnimplemented
                                            : xla::ErrorCode::kInternal;
  return error(frame, code, "lean_attention: " + text_of(status));
}

const xla::ArrayAttribute* array_attribute(const xla::Attributes& attributes, std::string_view name) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    const xla::Span& given = *attributes.names[i];
    if (std::string_view(given.data, given.size) == name && attributes.types[i] == xla::AttributeType::kArray)
      return static_cast<const xla::ArrayAttribute*>(attributes.values[i]);
  }
  return nullptr;
}

/// The image with the pointers of this run; false when another build made it, or gave it an operand that no pointer is known
/// for: its array of this run would be left unread.
bool read_call(const xla::CallFrame& frame, Image& image) {
  const auto* const bytes = array_attribute(frame.attributes, "image");
  const auto* const operands = array_attribute(frame.attributes, "operands");
  if (bytes == nullptr || operands == nullptr || bytes->size != sizeof(Image)) return false;
  if (operands->size != static_cast<std::size_t>(frame.arguments.size)) return false;
  std::memcpy(&image, bytes->data, sizeof(Image));
  if (image.bytes != sizeof(Image)) return false;
  const auto* const which = static_cast<const std::int32_t*>(operands->data);
  for (std::size_t i = 0; i < operands->size; ++i) {
    if (!set_pointer(image.problem, Argument(static_cast<std::size_t>(which[i])), frame.arguments.buffers[i]->data)) return false;
  }
  if (image.problem.kv_capacity == 0) image.problem.k.data = image.problem.v.data = nullptr;
  if (frame.results.size > 1) image.problem.lse.data = static_cast<float*>(frame.results.buffers[1]->data);
  return set_pointer(image.problem, "out", frame.results.buffers[0]->data);
}

/// What the library cannot know, as Call::check_ends() looks at it. Of arrays in host memory.
Status check_ends(const Image& image) {
  const Problem& problem = image.problem;
  Status status;
  const auto refuse = [&](const char* name, std::int32_t seen, const char* allowed, std::int64_t number) {
    status.code = StatusCode::kInvalidArgument;
    std::snprintf(status.message, sizeof(status.message), "%s[%" PRId64 "] = %" PRId32 ": %s %" PRId64, name, problem.batch, seen,
                  allowed, number);
  };
  if (problem.cu_q_tokens != nullptr && problem.cu_q_tokens[problem.batch] != problem.total_q_tokens)
    refuse("cu_q_tokens", problem.cu_q_tokens[problem.batch], "must be the number of q's tokens,", problem.total_q_tokens);
  const std::int32_t* const indptr = problem.pages.page_indptr;
  if (indptr != nullptr && indptr[problem.batch] > image.page_id_count)
    refuse("pages.page_indptr", indptr[problem.batch], "page_indices has", image.page_id_count);
  return status;
}

Status run(Image& image, Backend backend, void* stream) {
  const bool cuda = backend == Backend::kCuda;
  Options& options = image.options;
  options.backend = backend;
  options.stream = stream;
  const std::int32_t index = cuda ? device::index_of(image.problem.q.data) : -1;
  const device::Guard guard(index);
  const Executor executor = runtime::executor_for(options.workers);
  options.executor = &executor;
  if (!cuda) {
    if (const Status status = check_ends(image); !status.ok()) return status;
    if (const Status status = check_lengths(image.problem); !status.ok()) return status;
  }
  return runtime::decode(image.problem, options, index);
}

/// Answers what XLA asks before it runs anything.
bool answered_metadata(xla::CallFrame* frame) {
  if (frame->extensions == nullptr || frame->extensions->type != xla::kMetadataExtension) return false;
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata;
  metadata.version.major = xla::kMajorVersion;
  metadata.version.minor = frame->api != nullptr ? frame->api->version.minor : xla::kMinorVersion;  // minor ones only add
  metadata.traits = 0;  // may not be captured: two calls of a graph could share a workspace
  return true;
}

template <Backend kBackend>
xla::Error* handle(xla::CallFrame* frame) {
  if (answered_metadata(frame)) return nullptr;
  try {
    Image image;
    if (!read_call(*frame, image)) {
      return error(*frame, xla::ErrorCode::kInvalidArgument,
                   "lean_attention: compiled with another version of the library, or with an operand that it cannot point at");
    }
    xla::StreamGetArgs stream{sizeof(xla::StreamGetArgs), nullptr, frame->context, nullptr};
    if constexpr (kBackend == Backend::kCuda) {
      if (xla::Error* const failed = frame->api->stream_get(&stream)) return failed;
    }
    const Status status = run(image, kBackend, stream.stream);
    return status.ok() ? nullptr : error(*frame, status);
  } catch (const std::bad_alloc&) {
    return error(*frame, xla::ErrorCode::kResourceExhausted, "lean_attention: no memory for the workspace");
  } catch (const device::Error& failed) {
    return error(*frame, xla::ErrorCode::kInternal, std::string("lean_attention: ") + failed.what());
  }
}

void add_handler(PyObject* handlers, const char* platform, xla::Handler handler) {
  const Reference capsule(checked(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr)));
  if (PyDict_SetItemString(handlers, platform, capsule.get()) < 0) throw ErrorIsSet{};
}

}  // namespace

Reference image_of(const Call& call) {
  Image image;
  image.problem = call.problem();
  image.options = call.options();
  image.page_id_count = call.page_id_count();
  for (std::size_t which = 0; which < kArgumentNames.size(); ++which)
    static_cast<void>(set_pointer(image.problem, Argument(which), nullptr));
  return Reference(checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&image), sizeof(image))));
}

Reference jax_handlers() {
  Reference handlers(checked(PyDict_New()));
  add_handler(handlers.get(), "cpu", handle<Backend::kCpu>);
  if (device::built()) add_handler(handlers.get(), "CUDA", handle<Backend::kCuda>);
  return handlers;
}

}  // namespace lean::python

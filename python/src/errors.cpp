#include "errors.hpp"

#include <string_view>

namespace lean::python {
namespace {

struct Renamed {
  std::string_view field;
  std::string_view argument;
};
/// Longer names before those they begin with.
constexpr Renamed kRenamed[] = {
    {"o.", "out."},
    {"q_heads", "q: heads"},
    {"kv_heads", "k: heads"},
    {"head_dim", "q: head dim"},
    {"value_dim", "v: head dim"},
    {"q_tokens", "max_seqlen_q"},
    {"kv_capacity", "max_seqlen_k"},
    {"scores.window_left", "window[0]"},
    {"scores.window_right", "window[1]"},
    {"scores.", ""},
    {"pages.page_tokens", "block_table (page size)"},
    {"pages.page_count", "k (pages)"},
    {"pages.", ""},
    {"append.k.data", "append_k"},
    {"append.v.data", "append_v"},
    {"append.", ""},
    {"cu_q_tokens", "cu_seqlens_q"},
    {"cu_kv_tokens", "cu_seqlens_k"},
    {"kv_lengths", "seqlens"},
    {"kv_left_pad", "leftpad"},
    {"k_scales", "k_scale"},
    {"v_scales", "v_scale"},
    {"options.policy.kind", "options.policy"},
    {"options.policy.", "options."},
};

PyObject* exception_for(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
    case StatusCode::kInvalidArgument:
    case StatusCode::kTooLarge:
    case StatusCode::kBadLengths:
    case StatusCode::kBadPageIndex: return PyExc_ValueError;
    case StatusCode::kUnsupported: return PyExc_NotImplementedError;
    case StatusCode::kWorkspaceTooSmall:
    case StatusCode::kWorkspaceMisaligned:
    case StatusCode::kWorkspaceDirty:
    case StatusCode::kWorkspaceInUse:
    case StatusCode::kBackendError: return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

}  // namespace

std::string text_of(const Status& status) {
  std::string text(status.message);
  for (const Renamed& name : kRenamed) {
    if (text.starts_with(name.field)) {
      text.replace(0, name.field.size(), name.argument);
      break;
    }
  }
  return text;
}

Reference message_of(const Status& status) {
  const std::string text = text_of(status);
  return Reference(checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()))));
}

void check(const Status& status) {
  if (!status.ok()) raise(exception_for(status.code), "%U", message_of(status).get());
}

}  // namespace lean::python

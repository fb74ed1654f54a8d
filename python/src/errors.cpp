// A Status as a Python exception: the library's names of fields become the names of decode()'s arguments.
#include "errors.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "arguments.hpp"

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
    {"append.k.", "append_k."},
    {"append.v.", "append_v."},
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

/// "q.data must not" -> "q must not".
void remove_all(std::string& text, std::string_view part) {
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) text.erase(at, part.size());
}

bool is_array(std::string_view name) noexcept {
  constexpr std::array kNumbers = {"max_seqlen_q", "max_seqlen_k", "scale", "causal", "softcap"};
  return std::find(kArgumentNames.begin(), kArgumentNames.end(), name) != kArgumentNames.end() &&
         std::find(kNumbers.begin(), kNumbers.end(), name) == kNumbers.end();
}

/// "k.dtype = 1: ..." -> "k.dtype = float16: ...", and of an array, whose value is an address, the name alone.
void say_value(std::string& text) {
  const std::size_t equals = text.find(" = ");
  const std::size_t colon = text.find(": ", equals == std::string::npos ? 0 : equals);
  if (equals == std::string::npos || colon == std::string::npos) return;
  const std::string name = text.substr(0, equals);
  if (is_array(name)) {
    text.erase(equals, colon - equals);
  } else if (name.ends_with(".dtype")) {
    const std::size_t begin = equals + 3;
    text.replace(begin, colon - begin, name_of(static_cast<ElementType>(text[begin] - '0')));
  }
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
  for (const auto& [field, argument] :
       {std::pair("q_tokens or", "max_seqlen_q or"), std::pair("or kv_capacity", "or max_seqlen_k")}) {
    if (const std::size_t at = text.find(field); at != std::string::npos) text.replace(at, std::strlen(field), argument);
  }
  remove_all(text, ".data");
  say_value(text);
  return text;
}

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

Reference text_object(const std::string& text) {
  return Reference(checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace")));
}

void check(const Status& status) {
  if (!status.ok()) raise(exception_for(status.code), "%s", text_of(status).c_str());
}

void refuse_unknown(PyObject* name) {
  const Reference module(checked(PyImport_ImportModule("lean_attention._arguments")));
  const Reference never(PyObject_CallMethod(module.get(), "refuse_unknown", "O", name));
  throw ErrorIsSet{};
}

}  // namespace lean::python

// Status: what every call of the library returns. A code for programs, a message for people.
//
// The library never throws, prints, exits or allocates in a call, so the message lives inside the value.
// A message names the argument, the value seen and the values allowed: "head_dim = 600: allowed 1 to 576".
#pragma once

#include <cstdint>

namespace lean {

/// Why a call was refused, or what it met. The message of a Status says it in words.
enum class StatusCode : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,      // a precondition of the call is broken; nothing was written
  kUnsupported = 2,          // the call makes sense, this backend does not do it; nothing was written
  kTooLarge = 3,             // a product of sizes leaves the range the library computes in
  kWorkspaceTooSmall = 4,    // a workspace pointer is null or its size is below workspace_size()
  kWorkspaceMisaligned = 5,  // a workspace pointer is not aligned to kWorkspaceAlignment
  kWorkspaceDirty = 6,       // counters were not zero at entry; call reset_workspace(). CUDA: see check_workspace
  kWorkspaceInUse = 7,       // a second call in flight uses the same workspace state. CUDA: see check_workspace
  kBadLengths = 8,           // sticky: a device-side length lay outside [0, capacity] and was clamped
  kBadPageIndex = 9,         // sticky: a reachable page index lay outside the pool and was skipped
  kBackendError = 10,        // the backend's runtime (CUDA, the executor) refused, or did not run every worker once
};

/// A code for programs and a message for people. Trivially copyable, owns no memory.
struct [[nodiscard]] Status {
  static constexpr int kMessageBytes = 240;

  StatusCode code = StatusCode::kOk;
  char message[kMessageBytes] = {};  // zero-terminated; empty when ok

  [[nodiscard]] constexpr bool ok() const noexcept { return code == StatusCode::kOk; }
};

/// The code's name as in the documentation, for example "invalid_argument".
[[nodiscard]] constexpr const char* name_of(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid_argument";
    case StatusCode::kUnsupported: return "unsupported";
    case StatusCode::kTooLarge: return "too_large";
    case StatusCode::kWorkspaceTooSmall: return "workspace_too_small";
    case StatusCode::kWorkspaceMisaligned: return "workspace_misaligned";
    case StatusCode::kWorkspaceDirty: return "workspace_dirty";
    case StatusCode::kWorkspaceInUse: return "workspace_in_use";
    case StatusCode::kBadLengths: return "bad_lengths";
    case StatusCode::kBadPageIndex: return "bad_page_index";
    case StatusCode::kBackendError: return "backend_error";
  }
  return "unknown";
}

}  // namespace lean

// lean-attention's C++ interface: exact attention for the decode phase by LeanTiles and stream-K.
//
//   lean::WorkspaceSize need = lean::workspace_size(problem, options);
//   ... allocate need.state_bytes (zeroed once) and need.scratch_bytes ...
//   lean::Status status = lean::decode(problem, options, workspace);
//
// No function here throws, prints, allocates or synchronises. Thread safety: calls may run concurrently when each
// has its own Workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lean/exchange.hpp"
#include "lean/export.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"
#include "lean/version.hpp"

namespace lean {

/// Both workspace pointers must be aligned to this many bytes.
inline constexpr std::size_t kWorkspaceAlignment = 256;

/// Memory a call needs. `state` holds counters and sticky codes: zero it once, then leave it to the library, one per
/// call in flight. `scratch` holds partial results: uninitialised, may be shared by calls that follow each other.
struct WorkspaceSize {
  Status status{};
  std::size_t state_bytes = 0;
  std::size_t scratch_bytes = 0;
};

/// The memory of one call, which stays the caller's: host memory for the CPU, device memory for a GPU. Sizes in bytes, at least those
/// of workspace_size(); pointers aligned to kWorkspaceAlignment.
struct Workspace {
  void* state = nullptr;
  std::size_t state_bytes = 0;
  void* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

/// Ok when decode() would accept this problem with these options; else the reason. Never looks at pointers' targets
/// or at the workspace. Codes: ok, invalid_argument, unsupported, too_large.
[[nodiscard]] LEAN_API Status supports(const Problem& problem, const Options& options) noexcept;

/// Bytes decode() needs. Depends on sizes, capacities, policy, fix-up mode and worker count, never on lengths, so
/// one allocation serves every step up to the capacity. Codes: as supports().
[[nodiscard]] LEAN_API WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept;

/// Computes o = softmax(scale q k^T + mask) v for every sequence, and lse if asked for.
/// Empty or fully masked rows give o = 0 and lse = -inf. Sums are fp32: scores beyond +-2.3e38, and values whose weighted sum is
/// beyond 3.4e38, give infinity or NaN, and the status is ok. On an error nothing is written, but with backend_error outputs mean
/// nothing.
/// CPU: returns when the result is there. CUDA: returns when the launch is enqueued on options.stream.
/// Codes: those of supports(), workspace_too_small, workspace_misaligned, workspace_dirty, workspace_in_use, backend_error.
[[nodiscard]] LEAN_API Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept;

/// Sets the state back to zero: before first use of memory that is not zeroed, and after an aborted call.
[[nodiscard]] LEAN_API Status reset_workspace(const Workspace& workspace, const Options& options) noexcept;

/// The first fault a call on this workspace saw in device-resident data (bad_lengths, bad_page_index) since the
/// last reset, or with options.check_workspace in the workspace (workspace_dirty, workspace_in_use); ok if none. The
/// message names the entry, but for CUDA's fast kernels: "kv_lengths[1] = 500: allowed 0 to 128 (the tokens there is room for); it was clamped".
/// CPU: at once. CUDA: synchronises options.stream.
[[nodiscard]] LEAN_API Status sticky_status(const Workspace& workspace, const Options& options) noexcept;

/// Checks host-readable arrays of the problem: cumulative lengths start at 0, never fall, end within the totals; lengths lie in
/// [0, capacity]; ids of pages that the call would read lie in the pool, and no page is appended to twice (tables that are null are
/// not looked at). decode() itself clamps and skips instead; of a page to which two sequences append the contents are undefined,
/// and so are the outputs of these sequences.
/// With append.cached_lengths kv_lengths is written, as by the call. Codes: ok, bad_lengths, bad_page_index.
[[nodiscard]] LEAN_API Status check_lengths(const Problem& problem) noexcept;

/// Merges two results over disjoint key sets: o_a, lse_a become those of the union. Dense: o [rows, value_dim] of type `dtype`
/// (float32, float16 or bfloat16), lse [rows] (-inf or +inf: no keys, and that row's o is not looked at); no two of them overlap. A
/// sink belongs to one of the calls only. Merging is as good as one call but for the rounding of o_a and o_b to their type.
/// Of options the backend counts: on the CPU all is in host memory, and done on return; with CUDA in the current device's, and
/// enqueued on options.stream. Codes: ok, invalid_argument, unsupported (the build has no such backend), backend_error.
/// Source of the formula: LeanAttention, "Softmax Re-scaling as Reduction".
[[nodiscard]] LEAN_API Status merge_states(void* o_a, float* lse_a, const void* o_b, const float* lse_b, std::int64_t rows,
                                           std::int32_t value_dim, DType dtype = DType::kFloat32,
                                           const Options& options = {}) noexcept;

/// What explain_schedule() writes: text for a terminal, JSON, or a drawing as SVG.
enum class ScheduleFormat : std::int32_t { kText = 0, kJson = 1, kSvg = 2 };

/// Writes an explanation of the schedule decode() would follow (zero-terminated) into `buffer` and returns the bytes
/// it needs including the zero; nothing is written past buffer_bytes. Length arrays must be readable by the host.
/// options.workers sets the worker count to explain, up to 4096, or 1024 with CUDA. Returns 0 when supports() would say no.
/// A CUDA call that two launches serve, of sequences of few query tokens and of many by cu_q_tokens, is shown as if the launch for many
/// served all. The one function of the library that allocates.
[[nodiscard]] LEAN_API std::size_t explain_schedule(const Problem& problem, const Options& options, ScheduleFormat format,
                                                    char* buffer, std::size_t buffer_bytes);

/// The library's own executor: OpenMP when built with it, else a pool of std::thread. In a child of fork() whose parent had
/// computed before there are no threads: calls run on the calling thread alone.
[[nodiscard]] LEAN_API const Executor& default_executor() noexcept;

/// The instruction set CpuIsa::kBest stands for on this machine (kAmxBf16 in some calls: see there), and the name of any.
[[nodiscard]] LEAN_API CpuIsa best_cpu_isa() noexcept;
[[nodiscard]] LEAN_API bool cpu_isa_available(CpuIsa isa) noexcept;
[[nodiscard]] LEAN_API const char* name_of(CpuIsa isa) noexcept;

}  // namespace lean

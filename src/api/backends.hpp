// The backends of this build, as the API sees them: one table of functions each.
#pragma once

#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "softmax/finished_states.hpp"
#include "tile/tiling.hpp"

namespace lean {

/// The memory of an exchange (lean/exchange.hpp), of arguments that are checked.
struct ExchangeMemory {
  /// Takes it, for the rank, the ranks and at least the bytes that are set.
  Status (*create)(Exchange&, ExchangeHandle&) noexcept;
  Status (*open)(Exchange&, std::int32_t rank, const ExchangeHandle&) noexcept;
  Status (*join)(Exchange&, const Exchange& other) noexcept;
  Status (*clear)(Exchange&) noexcept;
  Status (*close)(Exchange&) noexcept;
};

struct BackendEntry {
  /// What the backend does not do of a call, with the reason; the problem's and the options' own preconditions hold.
  Status (*supports)(const Problem&, const Options&) noexcept;
  /// What memory it needs, or the same.
  WorkspaceSize (*workspace_size)(const Problem&, const Options&) noexcept;
  /// The call, in a workspace that is yet to be checked.
  Status (*decode)(const Problem&, const Options&, const Workspace&) noexcept;
  Status (*clear_state)(const Workspace&, const Options&) noexcept;
  /// The header of the workspace's state, once what was enqueued is done.
  Status (*read_header)(const Workspace&, const Options&, fixup::StateHeader& header) noexcept;
  /// How the call would be cut up, refused or not.
  tile::Tiling (*tiling_of)(const Problem&, const Options&) noexcept;
  /// Two finished results as one, where the backend's memory has them; what they are was checked.
  Status (*merge_states)(const softmax::FinishedStates&, const Options&) noexcept;
  /// shard_lengths() of arrays that are checked, of one length at least.
  Status (*shard_lengths)(const std::int32_t*, std::int32_t*, std::int64_t, const TokenShard&, const Options&) noexcept;
  /// An exchange that is checked, of a row at least. Null: the backend has no memory that its devices share.
  Status (*exchange)(const Exchange&, const ExchangedStates&, const Options&) noexcept;
  const ExchangeMemory* exchange_memory;  // null where `exchange` is
};

/// Null when this build has no such backend.
[[nodiscard]] const BackendEntry* backend_of(Backend backend) noexcept;

/// The backend that options name, or that this build has none.
[[nodiscard]] Status find_backend(const Options& options, const BackendEntry*& backend) noexcept;

/// Defined in cuda_present.cpp or cuda_absent.cpp, whichever the build takes.
[[nodiscard]] const BackendEntry* cuda_backend() noexcept;

}  // namespace lean

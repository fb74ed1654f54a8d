// CallPlan: everything that is decided of a call, from its sizes, layouts and pointers, the options and the device; nothing from
// lengths, which the kernel reads. Made once a call; whoever refuses the call, measures its workspace or launches it only reads the
// plan.
#pragma once

#include <cstdint>

#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel_table.hpp"
#include "backends/cuda/plain.hpp"
#include "base/int_math.hpp"
#include "fixup/workspace.hpp"
#include "fixup/workspace_size.hpp"
#include "lean/lean.hpp"
#include "schedule/even_line.hpp"
#include "schedule/even_stair.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/side_by_side.hpp"
#include "tile/tiling.hpp"

namespace lean::cuda {

/// Workers of a launch: more would make bundles of partials longer than the kernel stages at once.
inline constexpr std::int32_t kMaxWorkers = fixup::kMaxOneLevel * fixup::kMaxOneLevel;

/// How K and V may come into shared memory, whichever kernel serves.
struct KvCopies {
  bool runs = false;               // by bulk copies (TMA): whole tiles, or what a page holds of them
  bool boxes = false;              // by its tensor copies, from where they lie
  std::int32_t thread_bytes = 16;  // by threads, so much at once: 16, 8, 4 or 1
};

/// Rules of scores that tiles have to apply. What no tile pays for, causality and the windows of a decode step, is none.
struct TileRules {
  bool beyond_softcap = false;  // ALiBi, or a mask of any kind
  bool every_tile = false;      // softcap, ALiBi, a mask, or a window whose left end differs from row to row
  bool some_tile = false;       // those, a tree mask, or pages, which may lie outside the pool
  bool hides_values = false;    // a mask, or a window that begins inside a tile, hides tokens: what V holds there must reach nobody

  /// A decode step has some.
  [[nodiscard]] bool in_step() const noexcept { return every_tile || hides_values; }
};

/// The stages of K and V tiles in shared memory.
struct Ring {
  std::int32_t stage_bytes = 0;
  std::int32_t stages = 0;
};

/// One launch of a call: all its sequences, or those with so many query tokens.
struct LaunchPlan {
  QueryRange queries{};
  const KernelEntry* any_call = nullptr;  // serves these queries whatever is asked; null: the build has none
  const KernelEntry* kernel = nullptr;    // serves them in this call; null: the call is plain
  schedule::LineShape line{};
  bool flat = false;  // the line is, whatever the lengths, or of many rows a stair, and the kernel walks it as such
  schedule::ShortStairStep stair_step{};  // of a stair
  std::int32_t most_outputs = 0;          // of a stair: more have only lengths that overlap
  std::int32_t part_tiles = 1;            // of a stair: CostModel's
  bool short_line = false;                // and warps build it
  schedule::EvenLine even{};              // and what is known of it, where it may be even
  schedule::EvenStair even_stair{};
  TileRules rules{};
  Ring ring{};
  bool tensor_copies = false;  // tensor maps are to be made
  std::int64_t outputs = 0;
  std::int32_t workers = 0;            // the grid
  fixup::WorkspaceLayout workspace{};  // of `kernel`: what the launch touches; the plain kernel touches the state's header alone
  /// Of whatever may serve calls of these sizes, wherever tensors lie: what is asked for. The header is everybody's.
  fixup::WorkspaceNeed reserved{.state_bytes = fixup::kStateHeaderBytes};

  [[nodiscard]] std::int64_t shared_bytes() const noexcept {
    return kernel->fixed_shared_bytes[flat ? 1 : 0] + std::int64_t{ring.stages} * ring.stage_bytes;
  }
};

struct CallPlan {
  Options options{};             // the workers are known: of a kernel that has a multiprocessor to itself; and what may overlap
  bool chooses_workers = false;  // nobody asked for so many
  Device device{};
  KvCopies copies{};
  bool vector_queries = false;  // eight neighbouring ones may be loaded at once, from where they lie once new tokens are appended
  bool plain = false;           // no variant serves the call's dims, how its rows lie, or fits the device: the plain kernel does
  bool own_values = false;      // values have dims of their own, and a latent, few-values or wide kernel serves the call
  tile::TileConfig plain_tile{};
  LaunchPlan launches[2]{};
  std::int32_t launch_count = 1;
  schedule::SideBySide sides{};  // of two launches that run beside each other

  [[nodiscard]] const LaunchPlan* begin() const noexcept { return launches; }
  [[nodiscard]] const LaunchPlan* end() const noexcept { return launches + launch_count; }

  /// The memory that the call is to be given. To be asked of a plan that was not refused: other sizes may overflow.
  [[nodiscard]] fixup::WorkspaceNeed need() const noexcept;

  /// Its kernels may be dependent launches: a host block's cooperative one has none.
  [[nodiscard]] bool may_overlap() const noexcept { return device.launches_dependents() && options.fixup != Fixup::kHostBlock; }

  [[nodiscard]] bool side_by_side() const noexcept { return sides.workers > 0; }

  [[nodiscard]] bool has_kernel() const noexcept { return plain || launches[0].kernel != nullptr; }

  /// The launch is a rank's part of an exchange.
  [[nodiscard]] bool exchanges() const noexcept {
    return !plain && launches[0].kernel != nullptr && launches[0].kernel->config.exchanges();
  }

  /// How a call is cut up whose plan has a kernel: by the launch that serves the longest queries.
  [[nodiscard]] tile::Tiling tiling() const noexcept {
    if (plain) return {.config = plain_tile, .cost_model = cost_model(plain_tile), .workers = options.workers};
    const KernelConfig& config = launches[0].kernel->config;
    tile::Tiling tiling{
        .config = config.tile(), .cost_model = cost_model(config, device.memory_share), .workers = options.workers * config.ctas()};
    tiling.cost_model.part_tiles = launches[0].part_tiles;
    tiling.stair = launches[0].flat && config.stairs();
    return tiling;
  }
};

/// The plan of any problem that keeps problem_preconditions(), so that a refused call is told how it would be cut up, too. Where
/// a launch lacks a kernel the rest of it is not worked out (refuse_plan()).
[[nodiscard]] CallPlan plan_call(const Problem& problem, const Options& options, const Device& device) noexcept;

}  // namespace lean::cuda

// peer_memory.hpp by CUDA's IPC handles, which open another process's allocation; peer access comes with the opening.
#include "integrations/runtime/peer_memory.hpp"

#include <cuda_runtime_api.h>

#include <bit>
#include <string>
#include <vector>

#include "integrations/runtime/cuda_memory.hpp"
#include "integrations/runtime/device.hpp"

namespace lean::runtime {
namespace {

using device::check;

/// An IPC handle opens the driver's whole block: of this size the block is the exchange's alone (CUDA C++ Programming Guide,
/// "Interprocess Communication").
constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

struct FreeHost {
  void operator()(std::uint32_t* word) const noexcept { cudaFreeHost(word); }
};
struct Close {
  void operator()(void* opened) const noexcept { cudaIpcCloseMemHandle(opened); }
};

static_assert(sizeof(PeerMemory::Handle) == sizeof(cudaIpcMemHandle_t));

}  // namespace

struct PeerMemory::State {
  std::int32_t device_index = 0;
  device::Memory own;
  std::unique_ptr<std::uint32_t, FreeHost> fault;
  std::vector<std::unique_ptr<void, Close>> opened;
  Exchange exchange{};
  Handle handle{};
};

PeerMemory::PeerMemory(const Asked& asked) : state_(std::make_unique<State>()) {
  State& state = *state_;
  if (asked.ranks < 1 || asked.ranks > Exchange::kMaxRanks)
    throw device::Error("exchange.ranks = " + std::to_string(asked.ranks) + ": allowed 1 to " +
                        std::to_string(Exchange::kMaxRanks));
  const device::Guard guard(asked.device_index);
  const std::size_t bytes = (asked.bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  state.device_index = asked.device_index;
  state.own = device::allocate_zeroed(bytes);
  void* word = nullptr;
  check(cudaHostAlloc(&word, sizeof(std::uint32_t), cudaHostAllocMapped | cudaHostAllocPortable), "exchange: cudaHostAlloc");
  state.fault.reset(static_cast<std::uint32_t*>(word));
  *state.fault = 0;
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, state.own.get()), "exchange: cudaIpcGetMemHandle");
  state.handle = std::bit_cast<Handle>(handle);
  state.exchange.rank = asked.rank;
  state.exchange.ranks = asked.ranks;
  state.exchange.memory[asked.rank] = state.own.get();
  state.exchange.memory_bytes = bytes;
  state.exchange.limit_ns = asked.limit_ns;
  state.exchange.fault = state.fault.get();
}

PeerMemory::~PeerMemory() {
  try {
    const device::Guard guard(state_->device_index);
    state_.reset();
  } catch (const device::Error&) {  // the driver is gone, and the memory with it
    state_.reset();
  }
}

const PeerMemory::Handle& PeerMemory::handle() const noexcept { return state_->handle; }
const Exchange& PeerMemory::exchange() const noexcept { return state_->exchange; }
std::int32_t PeerMemory::device_index() const noexcept { return state_->device_index; }

void PeerMemory::open(std::int32_t rank, const Handle& handle) {
  State& state = *state_;
  if (rank < 0 || rank >= state.exchange.ranks)
    throw device::Error("exchange.rank = " + std::to_string(rank) + ": allowed 0 to ranks - 1");
  const device::Guard guard(state.device_index);
  void* opened = nullptr;
  check(cudaIpcOpenMemHandle(&opened, std::bit_cast<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess),
        "exchange: cudaIpcOpenMemHandle");
  state.opened.emplace_back(opened);
  state.exchange.memory[rank] = opened;
}

void PeerMemory::clear() {
  const device::Guard guard(state_->device_index);
  device::zero(state_->own.get(), state_->exchange.memory_bytes);
  *state_->fault = 0;
}

}  // namespace lean::runtime

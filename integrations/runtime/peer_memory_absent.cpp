// peer_memory.hpp in a build without the CUDA backend.
#include "integrations/runtime/device.hpp"
#include "integrations/runtime/peer_memory.hpp"

namespace lean::runtime {

struct PeerMemory::State {};

PeerMemory::PeerMemory(const Asked&) { throw device::Absent("this build has no CUDA backend"); }
PeerMemory::~PeerMemory() = default;

const PeerMemory::Handle& PeerMemory::handle() const noexcept {
  static constexpr Handle kNone{};
  return kNone;
}
void PeerMemory::open(std::int32_t, const Handle&) {}
const Exchange& PeerMemory::exchange() const noexcept {
  static constexpr Exchange kNone{};
  return kNone;
}
std::int32_t PeerMemory::device_index() const noexcept { return -1; }
void PeerMemory::clear() {}

}  // namespace lean::runtime

// peer_memory.hpp by the library's own calls, whose refusals are thrown.
#include "integrations/runtime/peer_memory.hpp"

#include "integrations/runtime/device.hpp"

namespace lean::runtime {
namespace {

void check(const Status& status) {
  if (!status.ok()) throw device::Error(status.message);
}

}  // namespace

PeerMemory::PeerMemory(const Asked& asked) {
  if (!device::built()) throw device::Absent("this build has no CUDA backend");
  const device::Guard guard(asked.device_index);
  check(create_exchange(asked.rank, asked.ranks, asked.bytes, exchange_, &handle_));
  exchange_.limit_ns = asked.limit_ns;
}

/// Where the driver is gone, so is the memory.
PeerMemory::~PeerMemory() { static_cast<void>(close_exchange(exchange_)); }

void PeerMemory::open(std::int32_t rank, const ExchangeHandle& handle) { check(open_exchange(exchange_, rank, handle)); }

void PeerMemory::clear() { check(clear_exchange(exchange_)); }

}  // namespace lean::runtime

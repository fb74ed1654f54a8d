// The memory of an exchange by CUDA's run time: taken in whole blocks of the driver, shared by IPC handles between processes and by peer
// access within one.
#include "backends/cuda/exchange_memory.hpp"

#include <cuda_runtime_api.h>

#include <bit>

#include "backends/cuda/device.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"

namespace lean::cuda {
namespace {

/// An IPC handle opens the driver's whole block: of this size the block is the exchange's alone (CUDA C++ Programming Guide,
/// "Interprocess Communication").
constexpr std::int64_t kBlockBytes = std::int64_t{2} << 20;

static_assert(sizeof(ExchangeHandle) == sizeof(cudaIpcMemHandle_t));

/// A device made current for as long as this lives, by a thread whose calls disturb no capture of another one's.
class OnDevice {
 public:
  explicit OnDevice(std::int32_t device) noexcept {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
    status_ = cuda_status(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_.ok()) status_ = cuda_status(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() {
    if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  int before_ = -1;
  Status status_;
};

/// The first thing that went wrong of several that are all to be done.
void keep_first(Status& first, const Status& next) noexcept {
  if (first.ok()) first = next;
}

/// Beside whatever the device does; waits for this alone.
Status zero(const Exchange& exchange) noexcept {
  cudaStream_t stream = nullptr;
  Status status = cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "exchange: cudaStreamCreateWithFlags");
  if (!status.ok()) return status;
  void* const own = exchange.memory[exchange.rank];
  keep_first(status, cuda_status(cudaMemsetAsync(own, 0, exchange.memory_bytes, stream), "exchange: cudaMemsetAsync"));
  keep_first(status, cuda_status(cudaStreamSynchronize(stream), "exchange: cudaStreamSynchronize"));
  keep_first(status, cuda_status(cudaStreamDestroy(stream), "exchange: cudaStreamDestroy"));
  if (status.ok()) *exchange.fault = 0;
  return status;
}

/// What create_exchange() has taken so far becomes one's own side, ready for the first call.
Status prepare(Exchange& exchange, ExchangeHandle& handle) noexcept {
  void*& own = exchange.memory[exchange.rank];
  void* fault = nullptr;
  if (const Status s = cuda_status(cudaMalloc(&own, exchange.memory_bytes), "exchange: cudaMalloc"); !s.ok()) return s;
  constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
  if (const Status s = cuda_status(cudaHostAlloc(&fault, sizeof(std::uint32_t), kFlags), "exchange: cudaHostAlloc"); !s.ok())
    return s;
  exchange.fault = static_cast<std::uint32_t*>(fault);
  if (const Status s = zero(exchange); !s.ok()) return s;
  cudaIpcMemHandle_t told{};
  if (const Status s = cuda_status(cudaIpcGetMemHandle(&told, own), "exchange: cudaIpcGetMemHandle"); !s.ok()) return s;
  handle = std::bit_cast<ExchangeHandle>(told);
  return {};
}

}  // namespace

Status create_exchange(Exchange& exchange, ExchangeHandle& handle) noexcept {
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  exchange.device = device.ordinal;
  exchange.memory_bytes = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(exchange.memory_bytes), kBlockBytes));
  const OnDevice on_device(exchange.device);
  const Status status = on_device.status().ok() ? prepare(exchange, handle) : on_device.status();
  if (!status.ok()) static_cast<void>(cuda::close_exchange(exchange));
  return status;
}

Status open_exchange(Exchange& exchange, std::int32_t rank, const ExchangeHandle& handle) noexcept {
  const OnDevice on_device(exchange.device);
  if (!on_device.status().ok()) return on_device.status();
  void* opened = nullptr;
  const auto of_cuda = std::bit_cast<cudaIpcMemHandle_t>(handle);
  const Status status =
      cuda_status(cudaIpcOpenMemHandle(&opened, of_cuda, cudaIpcMemLazyEnablePeerAccess), "exchange: cudaIpcOpenMemHandle");
  if (!status.ok()) return status;
  exchange.memory[rank] = opened;
  exchange.opened |= std::uint32_t{1} << rank;
  return {};
}

Status join_exchange(Exchange& exchange, const Exchange& other) noexcept {
  const OnDevice on_device(exchange.device);
  if (!on_device.status().ok()) return on_device.status();
  if (other.device != exchange.device) {
    int reaches = 0;
    const cudaError_t asked = cudaDeviceCanAccessPeer(&reaches, exchange.device, other.device);
    if (const Status status = cuda_status(asked, "exchange: cudaDeviceCanAccessPeer"); !status.ok()) return status;
    if (reaches == 0)
      return refuse(StatusCode::kUnsupported, "other.device", other.device, "has memory that this rank's device does not reach");
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(other.device, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(cudaGetLastError());  // is no error
    } else if (const Status status = cuda_status(enabled, "exchange: cudaDeviceEnablePeerAccess"); !status.ok()) {
      return status;
    }
  }
  exchange.memory[other.rank] = other.memory[other.rank];
  return {};
}

Status clear_exchange(Exchange& exchange) noexcept {
  const OnDevice on_device(exchange.device);
  return on_device.status().ok() ? zero(exchange) : on_device.status();
}

Status close_exchange(Exchange& exchange) noexcept {
  const OnDevice on_device(exchange.device);
  Status status = on_device.status();
  for (std::int32_t rank = 0; rank < exchange.ranks; ++rank) {
    if ((exchange.opened >> rank & 1U) == 0) continue;
    keep_first(status, cuda_status(cudaIpcCloseMemHandle(exchange.memory[rank]), "exchange: cudaIpcCloseMemHandle"));
  }
  void* const own = exchange.memory[exchange.rank];
  if (own != nullptr) keep_first(status, cuda_status(cudaFree(own), "exchange: cudaFree"));
  if (exchange.fault != nullptr) keep_first(status, cuda_status(cudaFreeHost(exchange.fault), "exchange: cudaFreeHost"));
  exchange = {};
  return status;
}

}  // namespace lean::cuda

// A GPU's memory by CUDA's run time, in a build with the CUDA backend. A workspace's memory is given back by clear_workspaces()
// alone.
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "integrations/runtime/cuda_memory.hpp"
#include "integrations/runtime/device.hpp"

namespace lean::runtime::device {
namespace {

/// While it lives, this thread may allocate although a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(error));
}

Memory allocate_zeroed(std::size_t bytes) {
  const RelaxedCapture relaxed;
  void* allocated = nullptr;
  check(cudaMalloc(&allocated, bytes), "workspace: cudaMalloc");
  Memory memory(allocated);
  zero(memory.get(), bytes);
  return memory;
}

void zero(void* memory, std::size_t bytes) {
  const RelaxedCapture relaxed;
  cudaStream_t created = nullptr;
  check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "workspace: cudaStreamCreate");
  const Stream stream(created);
  check(cudaMemsetAsync(memory, 0, bytes, stream.get()), "workspace: cudaMemsetAsync");
  check(cudaStreamSynchronize(stream.get()), "workspace: cudaStreamSynchronize");
}

namespace {

/// Device memory that grows to at least twice its size, so that all it ever held is below twice what it holds.
struct Buffer {
  std::vector<Memory> held;  // the last is in use, those before may be by a captured graph
  std::size_t bytes = 0;

  [[nodiscard]] void* data() const noexcept { return held.empty() ? nullptr : held.back().get(); }
  void reserve(std::size_t wanted) {
    if (wanted <= bytes) return;
    const std::size_t larger = wanted > 2 * bytes ? wanted : 2 * bytes;
    held.push_back(allocate_zeroed(larger));
    bytes = larger;
  }
};

struct DeviceWorkspace {
  Buffer state;
  Buffer scratch;
  Buffer beside;  // what scratch_for() gives out
};

/// Device, stream, and for the handle of the per-thread default stream, which is another stream in each thread, the thread.
using Key = std::tuple<std::int32_t, void*, std::thread::id>;

Key key_of(std::int32_t index, void* stream) noexcept {
  return {index, stream, stream == cudaStreamPerThread ? std::this_thread::get_id() : std::thread::id()};
}

struct Workspaces {
  std::mutex mutex;
  std::map<Key, DeviceWorkspace> by_stream;
};

Workspaces& workspaces() {
  static auto* const all = new Workspaces;  // never destroyed: the driver may be gone at exit
  return *all;
}

}  // namespace

bool built() noexcept { return true; }

int count() noexcept {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

std::int32_t current() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

bool launches_dependents(std::int32_t index) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "cudaDeviceGetAttribute");
  return major >= 9 && LEAN_CUDA_NEWEST_COMPILED >= 90;  // older code has no wait for the kernels ahead
}

std::int32_t index_of(const void* memory) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, memory), "q: cudaPointerGetAttributes");
  return attributes.device;
}

Guard::Guard(std::int32_t index) {
  if (index < 0) return;
  int current = 0;
  check(cudaGetDevice(&current), "q: cudaGetDevice");
  if (current == index) return;
  const cudaError_t error = cudaSetDevice(index);
  if (error != cudaSuccess) cudaSetDevice(current);  // it may be current although it cannot be used
  check(error, "q: cudaSetDevice");
  previous_ = current;
}

Guard::~Guard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Workspace workspace_for(std::int32_t index, void* stream, const WorkspaceSize& need) {
  const std::lock_guard lock(workspaces().mutex);
  DeviceWorkspace& workspace = workspaces().by_stream[key_of(index, stream)];
  workspace.state.reserve(need.state_bytes);
  workspace.scratch.reserve(need.scratch_bytes);
  return {.state = workspace.state.data(),
          .state_bytes = workspace.state.bytes,
          .scratch = workspace.scratch.data(),
          .scratch_bytes = workspace.scratch.bytes};
}

void* scratch_for(std::int32_t index, void* stream, std::size_t bytes) {
  const std::lock_guard lock(workspaces().mutex);
  Buffer& buffer = workspaces().by_stream[key_of(index, stream)].beside;
  buffer.reserve(bytes);
  return buffer.data();
}

void clear_workspaces() noexcept {
  const std::lock_guard lock(workspaces().mutex);
  workspaces().by_stream.clear();
}

}  // namespace lean::runtime::device

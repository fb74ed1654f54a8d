// What GPU tests hold: device memory of exactly the size asked for, streams, graphs, host words that a kernel sees. CUDA
// errors are thrown, which fails the test.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lean/status.hpp"

namespace lean::gpu {

inline void demand(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
inline void demand(const Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(name_of(status.code)) + ": " + status.message);
}

/// One cudaMalloc, not a byte more, so that compute-sanitizer sees where it ends.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    if (bytes > 0) demand(cudaMalloc(&memory, bytes), "cudaMalloc");
    data_ = static_cast<std::byte*>(memory);
  }
  ~DeviceBuffer() { static_cast<void>(cudaFree(data_)); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return bytes_; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Both return when it is done: the streams below do not wait for the default stream, which does it.
  void fill(std::byte value) const {
    if (bytes_ > 0) demand(cudaMemset(data_, static_cast<int>(value), bytes_), "cudaMemset");
    demand(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  void copy_from(const void* host) const {
    if (bytes_ > 0) demand(cudaMemcpy(data_, host, bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
    demand(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  void copy_to(void* host) const {
    if (bytes_ > 0) demand(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Does not wait for the default stream, nor the default stream for it.
class Stream {
 public:
  Stream() { demand(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void wait() const { demand(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  [[nodiscard]] bool done() const {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error != cudaErrorNotReady) demand(error, "cudaStreamQuery");
    return error == cudaSuccess;
  }
  /// True once it is done; false after that long.
  [[nodiscard]] bool done_within(std::chrono::milliseconds limit) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `enqueue` does on the stream, as a graph.
class Graph {
 public:
  Graph(const Stream& stream, cudaStreamCaptureMode mode, const std::function<void()>& enqueue) {
    demand(cudaStreamBeginCapture(stream.get(), mode), "cudaStreamBeginCapture");
    enqueue();
    demand(cudaStreamEndCapture(stream.get(), &graph_), "cudaStreamEndCapture");
    demand(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    static_cast<void>(cudaGraphExecDestroy(executable_));
    static_cast<void>(cudaGraphDestroy(graph_));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const { demand(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch"); }
  [[nodiscard]] std::size_t nodes() const {
    std::size_t count = 0;
    demand(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// Words of host memory that kernels see while they run: `stop` is for them, `started` from each of their CTAs, a word each,
/// since not every host lets a GPU count in its memory.
class Signals {
 public:
  static constexpr std::int32_t kMaxCtas = 1024;

  Signals() {
    void* memory = nullptr;
    demand(cudaHostAlloc(&memory, (1 + kMaxCtas) * sizeof(std::uint32_t), cudaHostAllocMapped), "cudaHostAlloc");
    words_ = static_cast<volatile std::uint32_t*>(memory);
    reset();
  }
  ~Signals() { static_cast<void>(cudaFreeHost(const_cast<std::uint32_t*>(words_))); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  void reset() const {
    for (std::int32_t i = 0; i <= kMaxCtas; ++i) words_[i] = 0;
  }
  void stop() const { words_[0] = 1; }
  [[nodiscard]] std::uint32_t started() const {
    std::uint32_t count = 0;
    for (std::int32_t i = 1; i <= kMaxCtas; ++i) count += words_[i];
    return count;
  }
  [[nodiscard]] std::uint32_t* stop_word() const { return const_cast<std::uint32_t*>(words_); }
  [[nodiscard]] std::uint32_t* started_words() const { return const_cast<std::uint32_t*>(words_ + 1); }

 private:
  volatile std::uint32_t* words_ = nullptr;
};

[[nodiscard]] inline std::int32_t device_attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  demand(cudaGetDevice(&device), "cudaGetDevice");
  demand(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}
[[nodiscard]] inline std::int32_t multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }
[[nodiscard]] inline bool launches_dependents() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

}  // namespace lean::gpu

// A CUDA runtime without a GPU: what the CUDA backend's host code asks of the real one, written down, and made to fail when a test
// says so. Kernels do not run; memory is the host's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "timeline/timeline.hpp"

namespace lean::cuda_host {

struct FakeDevice {
  int major = 9;
  int minor = 0;
  int multiprocessors = 132;
  int shared_bytes = 227 * 1024;  // of a CTA, at most
  bool cooperative = true;
  int memory_khz = 2'619'000;  // an H100's; below 0: the driver does not say
  int memory_bits = 5120;
};

struct Call {
  std::string_view name{};  // these outlive the call
  // What a launch was told.
  std::string_view kernel{};
  unsigned grid = 0;
  unsigned threads = 0;
  std::size_t shared_bytes = 0;
  bool dependent = false;
  bool cooperative = false;
  // What a launch that decodes may touch of its workspace: addresses, and one past.
  std::uintptr_t counters = 0;
  std::uintptr_t counters_end = 0;
  std::uintptr_t scratch = 0;
  std::uintptr_t scratch_end = 0;
  bool short_line = false;  // as it is told
  bool may_be_even = false;
  timeline::Target timeline{};  // of a variant; empty but with LEAN_TIMELINE

  [[nodiscard]] bool launch() const { return !kernel.empty(); }
  [[nodiscard]] bool plain() const { return kernel.find("plain_kernel") != std::string_view::npos; }
  [[nodiscard]] bool decodes() const { return plain() || kernel.find("decode_kernel") != std::string_view::npos; }
  bool operator==(const Call&) const = default;
};

struct FakeRuntime {
  std::vector<FakeDevice> devices;
  int ordinal = 0;      // of the current one
  int fails_at = -1;    // which call from now on; -1: none
  bool sticks = false;  // every call after it fails too
  std::vector<Call> calls;
  std::map<void*, std::unique_ptr<std::byte[]>> memory;  // that nobody has freed yet
  std::multiset<void*> opened;                           // by an IPC handle, and not closed yet
  bool reaches_peers = true;                             // devices each other's memory
  std::set<std::pair<int, int>> peers;                   // which device was given access to which
  std::set<cudaStream_t> streams;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

  /// From here on calls are counted anew, and none fails.
  void begin() { calls.clear(), fails_at = -1, sticks = false; }
  [[nodiscard]] std::vector<Call> launches() const;
};

[[nodiscard]] FakeRuntime& runtime();

}  // namespace lean::cuda_host

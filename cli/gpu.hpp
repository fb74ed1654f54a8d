// The GPU, as the command needs it: memory, chains of calls in graphs, and three kernels. cuda/ defines these functions where
// the build has CUDA, gpu_absent.cpp where it has not; no other file of the command knows CUDA. All work goes to the
// current device. Errors are thrown as GpuError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/reference/reference.hpp"
#include "lean/problem.hpp"

namespace lean::cli {

class GpuError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lean::cli

namespace lean::cli::gpu {

struct Device {
  std::string name;
  std::string pci_bus_id;  // what NVML knows it by
  std::int32_t major = 0;  // compute capability
  std::int32_t minor = 0;
  std::int32_t multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
};

/// Every GPU this process may use; the first is the current device. Empty: why_none() says why.
[[nodiscard]] std::vector<Device> devices();
[[nodiscard]] std::string why_none();

/// Aligned to 256 bytes or more; throws std::bad_alloc when there is not enough.
[[nodiscard]] std::byte* allocate(std::int64_t bytes);
void release(std::byte* memory) noexcept;
[[nodiscard]] std::int64_t free_bytes();
/// Between any two places; waits for the result.
void copy(void* to, const void* from, std::int64_t bytes);
void set_bytes(void* memory, unsigned char value, std::int64_t bytes);
/// Waits for everything; throws what went wrong in it.
void synchronize();

/// data[i] = table[16 bits of a hash of key and i], as normal_fill.cpp does on the host (normal_hash.hpp). `table` lies on
/// the device and holds kQuantiles elements of `element_bytes` 2 or 4.
void fill_from_table(void* data, const void* table, std::int64_t element_bytes, std::int64_t elements, std::uint64_t key);

/// What `enqueue` enqueues on the stream it is given, captured once and replayed at will.
class Graph {
 public:
  explicit Graph(const std::function<void(void* stream)>& enqueue);
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;

  /// Enqueues so many replays, one behind the other, and returns.
  void launch(int replays) const;
  /// Launches so many replays, waits, and gives the time from the first's begin to the last's end.
  [[nodiscard]] double timed_us(int replays) const;
  /// The time of one replay that is enqueued while `other` still runs, so that the host's launch is not in it.
  [[nodiscard]] double timed_us_behind(const Graph& other) const;

 private:
  struct Handles;
  [[nodiscard]] double timed_us(const Handles* before, int replays) const;

  std::unique_ptr<Handles> handles_;
};

/// A kernel that reads `bytes` (a multiple of 16) once and does nothing else.
struct ReadKernel {
  std::string name;
  std::function<void(const void* data, std::int64_t bytes, void* stream)> enqueue;
};

/// All that run on the current device: no one of them is best for every size.
[[nodiscard]] std::vector<ReadKernel> read_kernels();

/// The fp64 answers to a problem whose tensors, lengths, slopes and sinks lie on the device, as reference::decode() gives them.
/// Serves what the command offers: uniform query tokens; a causal mask, windows, softcap, ALiBi and sinks.
[[nodiscard]] reference::Answer reference_answer(const Problem& problem);

}  // namespace lean::cli::gpu

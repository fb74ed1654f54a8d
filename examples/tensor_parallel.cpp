// Tensor parallel attention in one process: K/V heads, with the query heads that read them, dealt out over the GPUs there are. A share is
// a call over fewer heads on a device of its own, and nothing is exchanged inside attention; all shares compute at the same time. Where
// there is no GPU, or this or the library was built without CUDA, two shares on the CPU, one after the other. Both beside one call over all heads.
#include <lean/float_types.hpp>
#include <lean/lean.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#ifdef EXAMPLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr int kBatch = 3, kKvHeads = 5, kGroup = 4, kDim = 128, kTokens = 1000;  // 5 heads: shares need not be equal
constexpr int kLengths[kBatch] = {1000, 1, 333};

[[noreturn]] void fail(const char* what) { std::fprintf(stderr, "%s\n", what), std::exit(1); }

/// Memory and time of a device; below 0 it is the CPU.
struct Device {
  int index = -1;

#ifdef EXAMPLE_CUDA
  static void check(cudaError_t error) {
    if (error != cudaSuccess) fail(cudaGetErrorString(error));
  }
  static int count() {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
  }
  void make_current() const {
    if (index >= 0) check(cudaSetDevice(index));
  }
  [[nodiscard]] void* put(const void* from, std::size_t bytes) const {
    if (index < 0) return std::memcpy(std::aligned_alloc(256, (bytes + 255) / 256 * 256), from, bytes);
    void* memory = nullptr;
    make_current(), check(cudaMalloc(&memory, bytes)), check(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    return memory;
  }
  void get(void* to, const void* from, std::size_t bytes) const {  // waits for what was enqueued before
    if (index < 0) return void(std::memcpy(to, from, bytes));
    make_current(), check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
  void give_back(void* memory) const { index < 0 ? std::free(memory) : void(cudaFree(memory)); }
#else
  static int count() { return 0; }
  void make_current() const {}
  [[nodiscard]] void* put(const void* from, std::size_t bytes) const {
    return std::memcpy(std::aligned_alloc(256, (bytes + 255) / 256 * 256), from, bytes);
  }
  void get(void* to, const void* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }
  void give_back(void* memory) const { std::free(memory); }
#endif
};

bool library_has_cuda() { return lean::shard_lengths(nullptr, nullptr, 0, {}, {.backend = lean::Backend::kCuda}).ok(); }

/// bf16 numbers of [sequence][head][token][dim], of some heads: multiples of 1/64, exact in bf16, the same whoever holds the head.
std::vector<lean::BFloat16> numbers(std::uint32_t tensor, int first_head, int heads, int tokens) {
  std::vector<lean::BFloat16> all;
  for (int b = 0; b < kBatch; ++b) {
    for (int i = 0; i < heads * tokens * kDim; ++i) {
      const auto place = static_cast<std::uint32_t>((b * 1000 + first_head) * tokens * kDim + i);
      const std::uint32_t mixed = (place * 2654435761U) ^ (tensor * 40503U);
      const float number = static_cast<float>(static_cast<int>((mixed >> 13) % 129) - 64) / 64.0F;
      all.push_back(lean::from_float<lean::BFloat16>(number));
    }
  }
  return all;
}

/// The attention of some K/V heads on a device.
class Share {
 public:
  Share(Device device, int first, int heads)
      : device_(device), first_(first), heads_(heads), out_(static_cast<std::size_t>(kBatch * heads * kGroup * kDim)) {
    const auto put = [&](const auto& data) {
      memory_.push_back(device_.put(data.data(), data.size() * sizeof(data[0])));
      return memory_.back();
    };
    problem_ = {.batch = kBatch, .q_heads = heads * kGroup, .kv_heads = heads, .head_dim = kDim, .kv_capacity = kTokens};
    const long q_row = long{heads} * kGroup * kDim, kv_head = long{kTokens} * kDim;
    problem_.q = {.data = put(numbers(1, first * kGroup, heads * kGroup, 1)),
                  .dtype = lean::DType::kBFloat16,
                  .strides = {.sequence = q_row, .head = kDim, .token = q_row}};
    problem_.k = {.data = put(numbers(2, first, heads, kTokens)),
                  .dtype = lean::DType::kBFloat16,
                  .strides = {.sequence = heads * kv_head, .head = kv_head, .token = kDim}};
    problem_.v = problem_.k;
    problem_.v.data = put(numbers(3, first, heads, kTokens));
    problem_.o = {.data = put(out_), .dtype = lean::DType::kBFloat16, .strides = problem_.q.strides};
    problem_.kv_lengths = static_cast<const std::int32_t*>(put(std::vector<std::int32_t>(kLengths, kLengths + kBatch)));
    if (device_.index >= 0) options_.backend = lean::Backend::kCuda;
    device_.make_current();
    const lean::WorkspaceSize need = lean::workspace_size(problem_, options_);
    if (!need.status.ok()) fail(need.status.message);
    workspace_ = {put(std::vector<char>(need.state_bytes)), need.state_bytes, put(std::vector<char>(need.scratch_bytes)),
                  need.scratch_bytes};
  }
  ~Share() {
    for (void* memory : memory_) device_.give_back(memory);
  }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

  /// Enqueued on a GPU, done on the CPU.
  void begin() {
    device_.make_current();
    const lean::Status status = lean::decode(problem_, options_, workspace_);
    if (!status.ok()) fail(status.message);
  }
  /// The largest difference to the same heads of `whole`, once they are there.
  float difference_to(Share& whole) {
    float largest = 0;
    const long row = long{heads_} * kGroup * kDim, whole_row = long{whole.heads_} * kGroup * kDim;
    const std::vector<float> own = whole.result(), shared = result();
    for (long b = 0; b < kBatch; ++b) {
      for (long i = 0; i < row; ++i) {
        const auto at = static_cast<std::size_t>(b * whole_row + (first_ - whole.first_) * kGroup * kDim + i);
        largest = std::max(largest, std::abs(shared[static_cast<std::size_t>(b * row + i)] - own[at]));
      }
    }
    return largest;
  }

 private:
  std::vector<float> result() {
    device_.get(out_.data(), problem_.o.data, out_.size() * sizeof(out_[0]));
    std::vector<float> numbers;
    for (const lean::BFloat16 element : out_) numbers.push_back(lean::to_float(element));
    return numbers;
  }

  Device device_;
  int first_, heads_;
  std::vector<lean::BFloat16> out_;
  std::vector<void*> memory_;
  lean::Problem problem_{};
  lean::Options options_{};
  lean::Workspace workspace_{};
};

}  // namespace

int main() {
  const int gpus = library_has_cuda() ? std::min(Device::count(), kKvHeads) : 0, shares = gpus > 0 ? gpus : 2;
  std::vector<std::unique_ptr<Share>> parts;
  for (int i = 0; i < shares; ++i) {
    const int first = kKvHeads * i / shares, end = kKvHeads * (i + 1) / shares;
    parts.push_back(std::make_unique<Share>(Device{gpus > 0 ? i : -1}, first, end - first));
  }
  for (const auto& part : parts) part->begin();
  Share whole(Device{gpus > 0 ? 0 : -1}, 0, kKvHeads);
  whole.begin();
  float largest = 0;
  for (const auto& part : parts) largest = std::max(largest, part->difference_to(whole));
  std::printf("%d K/V heads on %d %s: largest difference to one call %.2g\n", kKvHeads, shares,
              gpus > 0 ? "GPUs" : "shares of a CPU", static_cast<double>(largest));
  return largest <= 0.01F ? 0 : 1;  // two roundings to bf16 of numbers below 1
}

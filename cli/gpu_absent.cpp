// The build without CUDA: there are no GPUs, so nothing but devices() and why_none() is ever called.
#include "cli/gpu.hpp"

namespace lean::cli::gpu {
namespace {

constexpr const char* kWhyNone = "this build has no CUDA backend";

}  // namespace

std::vector<Device> devices() { return {}; }
std::string why_none() { return kWhyNone; }

std::byte* allocate(std::int64_t) { throw GpuError(kWhyNone); }
void release(std::byte*) noexcept {}
std::int64_t free_bytes() { return 0; }
void copy(void*, const void*, std::int64_t) { throw GpuError(kWhyNone); }
void set_bytes(void*, unsigned char, std::int64_t) { throw GpuError(kWhyNone); }
void synchronize() {}
void fill_from_table(void*, const void*, std::int64_t, std::int64_t, std::uint64_t) { throw GpuError(kWhyNone); }

struct Graph::Handles {};
Graph::Graph(const std::function<void(void*)>&) { throw GpuError(kWhyNone); }
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
void Graph::launch(int) const {}
double Graph::timed_us(int) const { return 0.0; }
double Graph::timed_us_behind(const Graph&) const { return 0.0; }

std::vector<ReadKernel> read_kernels() { return {}; }
reference::Answer reference_answer(const Problem&) { throw GpuError(kWhyNone); }

}  // namespace lean::cli::gpu

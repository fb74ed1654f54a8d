// gpu.hpp in a build without the CUDA backend: no operator is registered for the CUDA provider there.
#include "gpu.hpp"
#include "integrations/runtime/device.hpp"

namespace lean::ort::gpu {
namespace {
[[noreturn]] void absent() { throw runtime::device::Absent("this build has no CUDA backend"); }
}  // namespace

void count(const Stream&, const GivenCounts&, std::int64_t, std::int32_t*) { absent(); }
void split_padding(const Stream&, const PaddedRows&) { absent(); }
void mark_seen(const Stream&, const SeenKeys&, bool*) { absent(); }
void to_floats(const Stream&, const void*, DType, std::int64_t, float*) { absent(); }
void copy(const Stream&, const void*, void*, std::size_t) { absent(); }
void move_tokens(const Stream&, std::span<const Move>) { absent(); }
void fill_mask(const Stream&, const RuleMask&, float*) { absent(); }
std::shared_ptr<const float> keep(const std::vector<float>&) { absent(); }
std::vector<std::byte> read_back(const void*, std::size_t) { absent(); }

}  // namespace lean::ort::gpu

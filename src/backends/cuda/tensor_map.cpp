// Encodes tensor maps by the driver's cuTensorMapEncodeTiled, on the host, once a launch (tensor_map.hpp).
#include "backends/cuda/tensor_map.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>

#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/wide_layout.hpp"
#include "base/int_math.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));

constexpr std::int64_t kStrideBytes = 16;                         // strides are multiples of this
constexpr std::int64_t kMostStrideBytes = std::int64_t{1} << 40;  // and below this

using Encode = decltype(&cuTensorMapEncodeTiled);

/// Asked of the driver, so that nothing is linked with it, until it is found.
Encode encode_function() noexcept {
  static std::atomic<Encode> known{nullptr};
  if (const Encode function = known.load(std::memory_order_relaxed); function != nullptr) return function;
  constexpr unsigned kSinceCuda12 = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSinceCuda12, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  known.store(reinterpret_cast<Encode>(found), std::memory_order_relaxed);
  return reinterpret_cast<Encode>(found);
}

/// Strides in bytes along tokens, heads, and sequences or pages.
struct ByteStrides {
  std::int64_t of[3];
};

ByteStrides byte_strides(const TensorView& tensor) noexcept {
  const std::int64_t element = bytes_of(tensor.dtype);
  return {{tensor.strides.token * element, tensor.strides.head * element, tensor.strides.sequence * element}};
}

bool takes_strides(const TensorView& tensor) noexcept {
  for (const std::int64_t stride : byte_strides(tensor).of) {
    if (stride < 0 || stride >= kMostStrideBytes || stride % kStrideBytes != 0) return false;
  }
  return true;
}

struct Tensor {
  const void* data = nullptr;
  cuuint64_t extents[4] = {};
  cuuint64_t strides[3] = {};  // bytes, of all extents but the first
  cuuint32_t box[4] = {};
};

/// The swizzle is that of a box's columns.
bool encode(const Tensor& tensor, TensorMap& map) noexcept {
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap encoded;
  const CUresult result = encode_function()(&encoded, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(tensor.data),
                                            tensor.extents, tensor.strides, tensor.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            tensor.box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  std::memcpy(map.bytes, &encoded, sizeof(encoded));
  return result == CUDA_SUCCESS;
}

/// Nothing outside what exists is ever asked for but pages outside the pool and dims that fill up a column, which become 0, so
/// dimensions without a known length end nowhere.
bool encode(const Problem& problem, bool keys, std::int32_t column_bytes, std::int32_t rows, TensorMap& map) noexcept {
  constexpr cuuint64_t kNoEnd = std::numeric_limits<std::int32_t>::max();
  const TensorView& tensor = keys ? problem.k : problem.v;
  const std::int32_t dims = keys ? problem.head_dim : value_dim_of(problem);
  const auto row_bytes = static_cast<cuuint64_t>(dims * bytes_of(tensor.dtype));
  const bool pages = is_paged(problem.pages);
  const ByteStrides bytes = byte_strides(tensor);
  return encode({.data = tensor.data,
                 .extents = {row_bytes, pages ? static_cast<cuuint64_t>(problem.pages.page_tokens) : kNoEnd,
                             static_cast<cuuint64_t>(problem.kv_heads),
                             static_cast<cuuint64_t>(pages ? problem.pages.page_count : problem.batch)},
                 .strides = {static_cast<cuuint64_t>(bytes.of[0]), static_cast<cuuint64_t>(bytes.of[1]),
                             static_cast<cuuint64_t>(bytes.of[2])},
                 .box = {static_cast<cuuint32_t>(column_bytes), static_cast<cuuint32_t>(rows), 1, 1}},
                map);
}

}  // namespace

bool takes_boxes(const Problem& problem) noexcept {
  if (is_paged(problem.pages) && problem.pages.page_tokens % kBoxRows != 0) return false;
  return takes_strides(problem.k) && takes_strides(problem.v);
}

std::int32_t tall_box_rows(const Problem& problem, std::int32_t tile_tokens) noexcept {
  const std::int32_t most = min_of(tile_tokens & -tile_tokens, kMostBoxRows);
  return is_paged(problem.pages) ? std::gcd(problem.pages.page_tokens, most) : most;
}

bool encode_queries(const Problem& problem, std::int32_t q_rows, TensorMap& map) noexcept {
  const std::int32_t group = problem.q_heads / problem.kv_heads;
  const std::int32_t heads = min_of(group, q_rows);  // of a box
  if (q_rows % heads != 0 || group % heads != 0 || !takes_strides(problem.q) || encode_function() == nullptr) return false;
  const bool packed = problem.cu_q_tokens != nullptr;
  const ByteStrides bytes = byte_strides(problem.q);
  return encode(
      {.data = problem.q.data,
       .extents = {static_cast<cuuint64_t>(problem.head_dim * bytes_of(problem.q.dtype)), static_cast<cuuint64_t>(problem.q_heads),
                   static_cast<cuuint64_t>(packed ? problem.total_q_tokens : problem.q_tokens),
                   static_cast<cuuint64_t>(packed ? 1 : problem.batch)},
       .strides = {static_cast<cuuint64_t>(bytes.of[1]), static_cast<cuuint64_t>(bytes.of[0]),
                   static_cast<cuuint64_t>(bytes.of[2])},
       .box = {static_cast<cuuint32_t>(wide::kColumnBytes), static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(q_rows / heads),
               1}},
      map);
}

bool encode(const Problem& problem, std::int32_t column_bytes, std::int32_t tall_rows, TensorMaps& maps) noexcept {
  if (encode_function() == nullptr) return false;
  const auto maps_of = [&](bool keys, BoxMaps& boxes) noexcept {
    return encode(problem, keys, column_bytes, tall_rows, boxes.tall) && encode(problem, keys, column_bytes, kBoxRows, boxes.low);
  };
  return maps_of(true, maps.k) && maps_of(false, maps.v);
}

}  // namespace lean::cuda

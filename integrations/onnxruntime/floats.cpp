#include "floats.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include "gpu.hpp"

namespace lean::ort {
namespace {

/// Every layer of a model has the same tables, megabytes for a long context. A session keeps its constants, and its kernels what is
/// made of them, so a table is known by its address as long as one of them lives.
Floats floats_of_constant(const Node& node, const Tensor& table, const char* name) {
  if (!table || table.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return nullptr;
  struct Known {
    std::weak_ptr<const float> floats;
    std::int64_t count = 0;
  };
  static std::mutex mutex;
  static std::map<const void*, Known> known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.floats.expired(); });
  if (const auto at = known.find(table.data); at != known.end() && at->second.count == table.elements())
    if (Floats floats = at->second.floats.lock()) return floats;
  Tensor on_host = table;
  std::vector<std::byte> bytes;
  if (node.on_gpu()) {
    bytes = gpu::read_back(table.data, static_cast<std::size_t>(table.elements() * bytes_of(dtype_of(table.type, name))));
    on_host.data = bytes.data();
  }
  const Floats made = keep(node, to_floats(on_host, name));
  known[table.data] = {made, table.elements()};
  return made;
}

}  // namespace

Floats keep(const Node& node, std::vector<float> values) {
  if (node.on_gpu()) return gpu::keep(values);
  const auto owner = std::make_shared<const std::vector<float>>(std::move(values));
  return {owner, owner->data()};
}

FloatsInput::FloatsInput(const Node& node, std::size_t index, const char* name)
    : index_(index),
      name_(name),
      constant_(node.has_input(index) ? floats_of_constant(node, node.constant(index), name) : nullptr) {}

const float* FloatsInput::of(Run& run, std::int64_t count) const {
  if (constant_ != nullptr) return constant_.get();
  const Tensor tensor = run.input(index_);
  const DType dtype = dtype_of(tensor.type, name_);
  if (dtype == DType::kFloat32) return tensor.as<float>();
  demand(bytes_of(dtype) == 2, name_, ": is ", tensor.type, ": allowed float32, float16, bfloat16");
  auto* const kept = run.scratch_of<float>(count);
  if (run.on_gpu()) {
    gpu::to_floats(run.stream(), tensor.data, dtype, count, kept);
  } else {
    const std::vector<float> floats = to_floats({tensor.data, tensor.type, {count}}, name_);
    std::copy(floats.begin(), floats.end(), kept);
  }
  return kept;
}

Rotary::Rotary(const Node& node, std::size_t cos, std::size_t sin, bool interleaved)
    : cos_index_(cos), sin_index_(sin), cos_(node, cos, "cos_cache"), sin_(node, sin, "sin_cache"), interleaved_(interleaved) {}

void Rotary::set(Run& run, std::int64_t tokens, Problem& problem) const {
  const Tensor cos = run.input(cos_index_);
  const Tensor sin = run.input(sin_index_);
  const std::int64_t head_dim = problem.head_dim;
  demand(cos.shape.size() == 2 && sin.shape == cos.shape, "cos_cache ", cos.shape, ", sin_cache ", sin.shape,
         ": both must be [tokens, rotary_dim / 2]");
  demand(cos.shape[0] >= tokens, "cos_cache: has ", cos.shape[0], " rows: ", tokens, " tokens are asked for");
  demand(cos.shape[1] > 0 && 2 * cos.shape[1] <= head_dim, "cos_cache: ", cos.shape[1], " columns: allowed 1 to ", head_dim / 2);
  problem.kv_capacity = static_cast<std::int32_t>(std::min<std::int64_t>(problem.kv_capacity, cos.shape[0]));
  const std::int64_t count = (run.on_gpu() ? problem.kv_capacity : tokens) * cos.shape[1];
  problem.append.rotary_cos = cos_.of(run, count);
  problem.append.rotary_sin = sin_.of(run, count);
  problem.append.rotary_dim = static_cast<std::int32_t>(2 * cos.shape[1]);
  problem.append.rotary_interleaved = interleaved_;
}

}  // namespace lean::ort

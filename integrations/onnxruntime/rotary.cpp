#include "rotary.hpp"

#include <algorithm>
#include <map>
#include <mutex>

namespace lean::ort {
namespace {

using Floats = std::shared_ptr<const std::vector<float>>;

/// Every layer of a model has the same tables, megabytes for a long context. A session keeps its constants, and its kernels what is
/// made of them, so a table is known by its address as long as one of them lives.
Floats floats_of_constant(const Tensor& table, const char* name) {
  if (!table || table.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return nullptr;
  static std::mutex mutex;
  static std::map<const void*, std::weak_ptr<const std::vector<float>>> known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  if (Floats floats = known[table.data].lock(); floats != nullptr && floats->size() == static_cast<std::size_t>(table.elements()))
    return floats;
  const Floats made = std::make_shared<const std::vector<float>>(to_floats(table, name));
  known[table.data] = made;
  return made;
}

}  // namespace

Rotary::Rotary(const Node& node, std::size_t cos, std::size_t sin, bool interleaved)
    : cos_(cos),
      sin_(sin),
      interleaved_(interleaved),
      constant_cos_(floats_of_constant(node.constant(cos), "cos_cache")),
      constant_sin_(floats_of_constant(node.constant(sin), "sin_cache")) {}

const float* Rotary::table_of(Run& run, const Tensor& table, const Floats& constant, std::int64_t tokens) const {
  if (constant != nullptr) return constant->data();
  if (table.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return table.as<float>();
  const std::vector<float> floats = to_floats({table.data, table.type, {tokens, table.shape[1]}}, "cos_cache, sin_cache");
  auto* const kept = static_cast<float*>(run.scratch(floats.size() * sizeof(float)));
  std::copy(floats.begin(), floats.end(), kept);
  return kept;
}

void Rotary::set(Run& run, std::int64_t tokens, std::int64_t head_dim, Append& append) const {
  const Tensor cos = run.input(cos_);
  const Tensor sin = run.input(sin_);
  demand(cos.shape.size() == 2 && sin.shape == cos.shape, "cos_cache ", cos.shape, ", sin_cache ", sin.shape,
         ": both must be [tokens, rotary_dim / 2]");
  demand(cos.shape[0] >= tokens, "cos_cache: has ", cos.shape[0], " rows: ", tokens, " tokens are asked for");
  demand(cos.shape[1] > 0 && 2 * cos.shape[1] <= head_dim, "cos_cache: ", cos.shape[1], " columns: allowed 1 to ", head_dim / 2);
  append.rotary_cos = table_of(run, cos, constant_cos_, tokens);
  append.rotary_sin = table_of(run, sin, constant_sin_, tokens);
  append.rotary_dim = static_cast<std::int32_t>(2 * cos.shape[1]);
  append.rotary_interleaved = interleaved_;
}

}  // namespace lean::ort

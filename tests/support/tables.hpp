// What conformance tests loop over.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
#include "lean/dtypes.hpp"
#include "lean/lean.hpp"
#include "support/layout.hpp"
#include "support/run_and_check.hpp"
#include "support/target.hpp"

namespace lean::support {

inline constexpr auto kDTypes = kQueryDTypes;

/// The head dimensions that kernels are made for on a GPU, and others.
inline std::vector<std::int32_t> head_dims_and(std::initializer_list<std::int32_t> others) {
  std::vector<std::int32_t> dims(std::begin(cuda::kHeadDims), std::end(cuda::kHeadDims));
  dims.insert(dims.end(), others);
  return dims;
}
inline constexpr Fixup kFixups[] = {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock};

/// The types that the target computes.
[[nodiscard]] inline std::vector<DType> dtypes() {
  std::vector<DType> served;
  for (const DType dtype : kDTypes) {
    if (target_serves({.dtype = dtype})) served.push_back(dtype);
  }
  return served;
}

/// Every instruction set this machine runs; kScalar always, but not under ThreadSanitizer. On a GPU there is nothing to choose.
[[nodiscard]] inline std::vector<CpuIsa> available_isas() {
  if (on_cuda()) return {CpuIsa::kBest};
#if defined(__SANITIZE_THREAD__)
  // Races are between workers, whatever their vectors; each scalar access would cost a look at its shadow.
  if (cpu_isa_available(CpuIsa::kAvx2)) return {CpuIsa::kAvx2, CpuIsa::kBest};
#endif
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa :
       {CpuIsa::kScalar, CpuIsa::kNative128, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16}) {
    if (cpu_isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

/// Every policy that the target has, with values that cut and values that do not.
[[nodiscard]] inline std::vector<Policy> all_policies() {
  std::vector<Policy> served;
  for (const Policy& policy :
       {Policy::lean(), Policy::fixed_split(), Policy::fixed_split(1), Policy::fixed_split(3), Policy::fixed_split(50),
        Policy::data_parallel(), Policy::fixed_chunk(), Policy::fixed_chunk(64), Policy::fixed_chunk(100)}) {
    if (target_serves({.policy = policy})) served.push_back(policy);
  }
  return served;
}

/// What a call may ask beyond plain attention: the field of Problem that a refusal names, and how a case asks for it.
struct Feature {
  const char* argument;
  void (*ask)(Case& c);
};

/// Pages have layouts with b: the page.
inline void ask_for_pages(Case& c, std::int32_t page_tokens) {
  c.page_tokens = page_tokens;
  if (is_packed(c.k_layout)) c.k_layout = "bshd";
  if (is_packed(c.v_layout)) c.v_layout = "bhsd";
}

/// A cache is written to: each of its elements has a place of its own.
inline void ask_to_append(Case& c, std::int32_t rotary_dim) {
  c.append = true;
  c.rotary_dim = rotary_dim;
  if (c.k_layout.find("bcast") != std::string::npos) c.k_layout = "bshd";
  if (c.v_layout.find("bcast") != std::string::npos) c.v_layout = "bhsd";
}

inline void ask_for_fp8(Case& c, KvType type, KvScales scales) {
  c.kv_type = type;
  c.kv_scales = scales;
}

[[nodiscard]] inline const std::vector<Feature>& features() {
  static const std::vector<Feature> kFeatures = {
      {"window_left", [](Case& c) { c.window_left = 16; }},
      {"window_left", [](Case& c) { c.window_left = 300; }},
      {"window_right", [](Case& c) { c.window_right = 1; }},
      {"softcap", [](Case& c) { c.softcap = 2.5F; }},
      {"alibi_slopes", [](Case& c) { c.alibi = true; }},
      {"alibi_slopes", [](Case& c) { c.alibi = c.alibi_per_sequence = true; }},
      {"sinks", [](Case& c) { c.sinks = true; }},
      {"mask", [](Case& c) { c.mask = Mask::kBoolean; }},
      {"mask", [](Case& c) { c.mask = Mask::kFloat32; }},
      {"mask", [](Case& c) { c.mask = Mask::kFloat16, c.mask_layout = "bhsd~off1"; }},
      {"mask", [](Case& c) { c.mask = Mask::kBFloat16, c.mask_layout = "bshd~inner2"; }},
      {"page", [](Case& c) { ask_for_pages(c, 16); }},
      {"page", [](Case& c) { ask_for_pages(c, 1), c.csr = true; }},
      {"k.dtype", [](Case& c) { ask_for_fp8(c, KvType::kE4M3, KvScales::kHead); }},
      {"k.dtype", [](Case& c) { ask_for_fp8(c, KvType::kE5M2, KvScales::kTensor); }},
      {"append.k", [](Case& c) { ask_to_append(c, 0); }},
      {"append.k", [](Case& c) { ask_to_append(c, c.head_dim / 2 * 2); }},
      {"append.k",
       [](Case& c) {
         ask_to_append(c, c.head_dim / 4 * 2), c.rotary_interleaved = c.rotary_absolute = true, c.append_layout = "bhsd~inner2";
       }},
      {"tree_mask", [](Case& c) { c.tree = true; }},
  };
  return kFeatures;
}

/// Not every pair of the two exists: dealt-out splits would make hosts wait for themselves.
[[nodiscard]] inline bool pairs(const Policy& policy, Fixup fixup) {
  return fixup != Fixup::kHostBlock || policy.kind != Policy::Kind::kFixedSplit;
}

}  // namespace lean::support

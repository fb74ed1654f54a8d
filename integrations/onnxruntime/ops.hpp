// The operators, one file each.
#pragma once

#include <vector>

#include "ort.hpp"

namespace lean::ort {

struct OpsOfProviders {
  std::vector<const OrtCustomOp*> cpu;
  std::vector<const OrtCustomOp*> cuda;
};

/// An operator, of one class.
struct Ops {
  OpsOfProviders inferring;  // one of any type, which says the types and shapes of its outputs
  OpsOfProviders typed;      // one of each type, which is that of all outputs; their shapes are not known before a run
};

[[nodiscard]] Ops group_query_attention();  // com.microsoft
[[nodiscard]] Ops attention();              // ONNX, opset 23 and newer
[[nodiscard]] Ops built_in_attention();     // the same under ONNX's own name
[[nodiscard]] Ops multi_head_attention();   // com.microsoft
[[nodiscard]] Ops paged_attention();        // com.microsoft

}  // namespace lean::ort

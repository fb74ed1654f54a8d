// The operators, one file each.
#pragma once

#include "ort.hpp"

namespace lean::ort {

/// An operator on either provider: one class, one definition.
struct Ops {
  const OrtCustomOp& cpu;
  const OrtCustomOp& cuda;
};

[[nodiscard]] Ops group_query_attention();  // com.microsoft
[[nodiscard]] Ops attention();              // ONNX, opset 23 and newer
[[nodiscard]] Ops multi_head_attention();   // com.microsoft
[[nodiscard]] Ops paged_attention();        // com.microsoft

}  // namespace lean::ort

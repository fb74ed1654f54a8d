// The operators, one file each.
#pragma once

#include "ort.hpp"

namespace lean::ort {

[[nodiscard]] const OrtCustomOp& group_query_attention();  // com.microsoft
[[nodiscard]] const OrtCustomOp& attention();              // ONNX, opset 23 and newer
[[nodiscard]] const OrtCustomOp& multi_head_attention();   // com.microsoft
[[nodiscard]] const OrtCustomOp& paged_attention();        // com.microsoft

}  // namespace lean::ort

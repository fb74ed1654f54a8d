// An operator as ONNX Runtime wants it described. `Kernel` is a class with
//   kName, kInputs, kOutputs          the operator's definition
//   static void infer(const Inference&)   types and shapes of the outputs
//   explicit Kernel(const Node&)      refuses what the model asks and the operator does not do: at session creation
//   void compute(Run&) const          any thread may call, several at a time
// Types are left open to ONNX Runtime and looked at by the kernel, so that a refusal can say what would work.
#pragma once

#include <iterator>
#include <string>

#include "ops.hpp"
#include "ort.hpp"

namespace lean::ort {

template <class Kernel>
struct MadeKernel {
  std::string where;  // before every message
  Kernel kernel;
};

template <class Kernel, Place kPlace, bool kInfers>
OrtStatus* create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) noexcept {
  std::string where = std::string("lean_attention: ") + Kernel::kName + ": ";
  return guarded(where, [&] {
    const Node node(*info, kPlace, kInfers);
    where = text("lean_attention: ", Kernel::kName, " node '", node.name(), "': ");
    node.refuse_unknown(Kernel::kName);
    *kernel = new MadeKernel<Kernel>{where, Kernel(node)};
  });
}

template <class Kernel, Place kPlace>
OrtStatus* compute(void* kernel, OrtKernelContext* context) noexcept {
  const auto& made = *static_cast<const MadeKernel<Kernel>*>(kernel);
  return guarded(made.where, [&] {
    Run run(*context, kPlace);
    made.kernel.compute(run);
  });
}

template <class Kernel>
OrtStatus* infer(const OrtCustomOp*, OrtShapeInferContext* context) noexcept {
  return guarded(text("lean_attention: ", Kernel::kName, ": "), [&] { Kernel::infer(Inference(*context)); });
}

/// The operator in the form of the C interface, for the CPU provider or that of CUDA.
template <class Kernel, Place kPlace, ONNXTensorElementDataType kType>
[[nodiscard]] const OrtCustomOp* op() {
  static const OrtCustomOp made = [] {
    constexpr bool kInfers = kType == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    OrtCustomOp op{};
    op.version = kApiVersion;
    op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) {
      return kPlace == Place::kGpu ? "CUDAExecutionProvider" : "CPUExecutionProvider";
    };
    op.GetInputType = [](const OrtCustomOp*, std::size_t i) { return i == 0 ? kType : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kInputs); };
    op.GetOutputType = [](const OrtCustomOp*, std::size_t) { return kType; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kOutputs); };
    op.KernelDestroy = [](void* kernel) { delete static_cast<MadeKernel<Kernel>*>(kernel); };
    op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
      return Kernel::kInputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
      return Kernel::kOutputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t i) {
      return Kernel::kInputs[i].on_host ? OrtMemTypeCPUInput : OrtMemTypeDefault;
    };
    op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.CreateKernelV2 = create<Kernel, kPlace, kInfers>;
    op.KernelComputeV2 = compute<Kernel, kPlace>;
    if (kInfers) op.InferOutputShapeFn = infer<Kernel>;
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
    return op;
  }();
  return &made;
}

template <class Kernel, ONNXTensorElementDataType... kTypes>
[[nodiscard]] OpsOfProviders ops_of_types() {
  return {{op<Kernel, Place::kCpu, kTypes>()...}, {op<Kernel, Place::kGpu, kTypes>()...}};
}

template <class Kernel>
[[nodiscard]] Ops ops() {
  return {ops_of_types<Kernel, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED>(),
          ops_of_types<Kernel, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                       ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16>()};
}

}  // namespace lean::ort

// A C++ host of ONNX Runtime that runs a model's attention on this library: onnxruntime_host MODEL.onnx liblean_attention_ort.so
#include <onnxruntime_cxx_api.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "lean_attention");
    Ort::SessionOptions options;
    options.AddConfigEntry("lean_attention.override", "1");  // without it, nodes of the domain lean_attention alone are ours
    options.RegisterCustomOpsLibrary(argv[2]);
    const Ort::Session session(env, argv[1], options);
    std::printf("%s: %zu inputs, %zu outputs\n", argv[1], session.GetInputCount(), session.GetOutputCount());
  } catch (const Ort::Exception& error) {  // also a node that asks what the operators do not do
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

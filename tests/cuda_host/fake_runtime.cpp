#include "cuda_host/fake_runtime.hpp"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "backends/cuda/kernel/device_call.hpp"

namespace lean::cuda_host {
namespace {

/// Kernels by the address of their host stub, as the compiled objects register them before main().
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> registered;
  return registered;
}

cudaError_t called(Call call) {
  FakeRuntime& fake = runtime();
  fake.calls.push_back(std::move(call));
  const int at = static_cast<int>(fake.calls.size()) - 1;
  const bool fails = fake.fails_at >= 0 && (fake.sticks ? at >= fake.fails_at : at == fake.fails_at);
  return fails ? cudaErrorMemoryAllocation : cudaSuccess;
}

CUresult encode_nothing(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                        const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill) {
  *map = {};
  return CUDA_SUCCESS;
}

int attribute_of(const FakeDevice& device, cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount: return device.multiprocessors;
    case cudaDevAttrComputeCapabilityMajor: return device.major;
    case cudaDevAttrComputeCapabilityMinor: return device.minor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return device.shared_bytes;
    case cudaDevAttrCooperativeLaunch: return device.cooperative ? 1 : 0;
    case cudaDevAttrMemoryClockRate: return device.memory_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return device.memory_bits;
    default: return 0;
  }
}

}  // namespace

FakeRuntime& runtime() {
  static FakeRuntime fake;
  return fake;
}

std::vector<Call> FakeRuntime::launches() const {
  std::vector<Call> found;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(found), [](const Call& call) { return call.launch(); });
  return found;
}

}  // namespace lean::cuda_host

// The runtime's names, all that the backend's objects ask for; a name that is missing here does not link.
using lean::cuda_host::called;
using lean::cuda_host::kernels;
using lean::cuda_host::runtime;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = runtime().ordinal;
  return called({.name = "cudaGetDevice"});
}

cudaError_t cudaSetDevice(int device) {
  runtime().ordinal = device;  // of a call that fails, too
  return called({.name = "cudaSetDevice"});
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(runtime().devices.size());
  return called({.name = "cudaGetDeviceCount"});
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  attributes->device = 0;
  return called({.name = "cudaPointerGetAttributes"});
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int ordinal) {
  const int known = lean::cuda_host::attribute_of(runtime().devices.at(static_cast<std::size_t>(ordinal)), which);
  if (which == cudaDevAttrMemoryClockRate || which == cudaDevAttrGlobalMemoryBusWidth) {  // for want of which no call fails
    *value = known;
    return known < 0 ? cudaErrorInvalidValue : cudaSuccess;
  }
  const cudaError_t error = called({.name = "cudaDeviceGetAttribute"});
  if (error == cudaSuccess) *value = known;
  return error;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return called({.name = "cudaFuncSetAttribute"}); }

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const cudaError_t error = called({.name = "cudaGetDriverEntryPointByVersion"});
  if (error != cudaSuccess) return error;
  *function = reinterpret_cast<void*>(lean::cuda_host::encode_nothing);
  *result = cudaDriverEntryPointSuccess;
  return error;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  lean::cuda_host::Call call{.name = "cudaLaunchKernelExC",
                             .kernel = kernels().at(kernel),
                             .grid = config->gridDim.x * config->gridDim.y * config->gridDim.z,
                             .threads = config->blockDim.x,
                             .shared_bytes = config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    call.dependent |= attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization;
    call.cooperative |= attribute.id == cudaLaunchAttributeCooperative;
  }
  if (call.decodes()) {
    const auto& asked = *static_cast<const lean::cuda::DeviceCall*>(arguments[0]);
    const lean::fixup::Slots& slots = asked.fixup.slots;
    call.counters = reinterpret_cast<std::uintptr_t>(slots.counters());
    call.counters_end = reinterpret_cast<std::uintptr_t>(slots.counters() + slots.layout.counters());
    call.scratch = reinterpret_cast<std::uintptr_t>(slots.scratch);
    call.scratch_end = reinterpret_cast<std::uintptr_t>(slots.scratch + slots.layout.scratch_bytes());
    call.short_line = asked.plan.short_line;
    call.may_be_even = asked.plan.even.outputs > 0;
#ifdef LEAN_TIMELINE
    if (!call.plain()) call.timeline = asked.timeline;
#endif
  }
  return called(call);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, std::size_t shared_bytes, cudaStream_t) {
  return called({.name = "cudaLaunchKernel",
                 .kernel = kernels().at(kernel),
                 .grid = grid.x,
                 .threads = block.x,
                 .shared_bytes = shared_bytes});
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  const cudaError_t error = called({.name = "cudaMemsetAsync"});
  if (error == cudaSuccess) std::memset(to, value, bytes);
  return error;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  const cudaError_t error = called({.name = "cudaMemcpyAsync"});
  if (error == cudaSuccess) std::memcpy(to, from, bytes);
  return error;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const cudaError_t error = called({.name = "cudaMalloc"});
  if (error != cudaSuccess) return error;
  auto allocated = std::make_unique<std::byte[]>(bytes);
  *memory = allocated.get();
  runtime().memory[*memory] = std::move(allocated);
  return error;
}

cudaError_t cudaFree(void* memory) {
  const cudaError_t error = called({.name = "cudaFree"});
  if (memory != nullptr && runtime().memory.erase(memory) == 0) return cudaErrorInvalidValue;
  return error;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const cudaError_t error = called({.name = "cudaHostAlloc"});
  if (error != cudaSuccess) return error;
  auto allocated = std::make_unique<std::byte[]>(bytes);
  *memory = allocated.get();
  runtime().memory[*memory] = std::move(allocated);
  return error;
}

cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t error = called({.name = "cudaFreeHost"});
  return runtime().memory.erase(memory) == 0 ? cudaErrorInvalidValue : error;
}

// A handle holds the address, which opens as itself: there is one process.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  std::memcpy(handle, &memory, sizeof(memory));
  return called({.name = "cudaIpcGetMemHandle"});
}

cudaError_t cudaIpcOpenMemHandle(void** opened, cudaIpcMemHandle_t handle, unsigned) {
  const cudaError_t error = called({.name = "cudaIpcOpenMemHandle"});
  if (error != cudaSuccess) return error;
  std::memcpy(opened, &handle, sizeof(*opened));
  runtime().opened.insert(*opened);
  return error;
}

cudaError_t cudaIpcCloseMemHandle(void* opened) {
  const cudaError_t error = called({.name = "cudaIpcCloseMemHandle"});
  const auto found = runtime().opened.find(opened);
  if (found == runtime().opened.end()) return cudaErrorInvalidValue;
  runtime().opened.erase(found);
  return error;
}

cudaError_t cudaDeviceCanAccessPeer(int* reaches, int, int) {
  *reaches = runtime().reaches_peers ? 1 : 0;
  return called({.name = "cudaDeviceCanAccessPeer"});
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const cudaError_t error = called({.name = "cudaDeviceEnablePeerAccess"});
  if (error != cudaSuccess) return error;
  return runtime().peers.emplace(runtime().ordinal, peer).second ? error : cudaErrorPeerAccessAlreadyEnabled;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const cudaError_t error = called({.name = "cudaStreamCreateWithFlags"});
  if (error != cudaSuccess) return error;
  *stream = reinterpret_cast<cudaStream_t>(runtime().calls.size());
  runtime().streams.insert(*stream);
  return error;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = called({.name = "cudaStreamDestroy"});
  return runtime().streams.erase(stream) == 0 ? cudaErrorInvalidValue : error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, runtime().capture_mode);
  return cudaSuccess;  // it has no reason to fail
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return called({.name = "cudaStreamSynchronize"}); }

const char* cudaGetErrorString(cudaError_t) { return "made to fail"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMadeToFail"; }

// What nvcc's host code calls by itself, which is not the same in every release.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 0; }  // of CUDA 12
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernels()[stub] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t) { return cudaErrorNotSupported; }
unsigned __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) { return 0; }

}  // extern "C"

// check(): every CUDA call of the command goes through it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cli/gpu.hpp"

namespace lean::cli::gpu {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // an error that does not stick is reported once
  throw GpuError(std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

}  // namespace lean::cli::gpu

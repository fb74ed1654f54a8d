// Where a run's work on a GPU goes.
#pragma once

namespace lean::ort::gpu {

struct Stream {
  void* handle = nullptr;   // a cudaStream_t
  bool dependents = false;  // kernels may be launched while those before them end (programmatic dependent launch)
};

}  // namespace lean::ort::gpu

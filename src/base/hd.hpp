// LEAN_HD: marks functions that compile for the host and, under nvcc, for the device.
// Rooms from problem to output are written with it, so the tests that run on a CPU test what a GPU runs.
#pragma once

#if defined(__CUDACC__)
#define LEAN_HD __host__ __device__
#else
#define LEAN_HD
#endif

// LEAN_OUTLINE: on a device, one copy that is called. For long code in many places that runs once or twice: there,
// instructions come from memory, and every inlined copy is fetched anew. Not for sm_90a: where functions are called, registers are
// not handed from warps to others.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LEAN_OUTLINE __noinline__
#else
#define LEAN_OUTLINE
#endif

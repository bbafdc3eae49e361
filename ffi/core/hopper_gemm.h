// Products on Hopper by CUTLASS: another choice beside those of cuBLASLt (core/gpu_gemm.h). Two
// that scatter are core/hopper_scatter.h.
//
// Two groups of warps take turns (pingpong): while one of them multiplies, the other adds c,
// which has been loaded meanwhile, and stores. cuBLASLt's kernels are as fast without a c;
// with one, which is what has come from a peer, they mostly are slower, by up to 9 %
// (benchmarks/hopper_gemm_h200.json).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/gpu_gemm_key.h"

namespace jax_overlap {

struct HopperGemmCall {
  const GemmKey& key;
  const void *x, *w, *c;
  void* d;
  int multiprocessors;
};

// Whether there is a kernel for it in this build, and `device` can run it.
bool HopperGemmTakes(const GemmKey& key, const cudaDeviceProp& device);
// What a file of measurements is called by that has it as a candidate; empty if there is none.
const char* HopperGemmName();
// Launches it. An error text.
std::string LaunchHopperGemm(const HopperGemmCall& call, cudaStream_t stream);

// By type, and whether w comes transposed: one a file, as each takes long to compile.
std::string LaunchHopperGemmBF16(const HopperGemmCall& call, cudaStream_t stream);
std::string LaunchHopperGemmBF16T(const HopperGemmCall& call, cudaStream_t stream);
std::string LaunchHopperGemmF16(const HopperGemmCall& call, cudaStream_t stream);
std::string LaunchHopperGemmF16T(const HopperGemmCall& call, cudaStream_t stream);

}  // namespace jax_overlap

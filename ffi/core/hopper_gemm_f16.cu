#include "core/hopper_gemm.cuh"

namespace jax_overlap {

std::string LaunchHopperGemmF16(const HopperGemmCall& call, cudaStream_t stream) {
  return HopperGemm<cutlass::half_t, false>::Launch(call, stream);
}

}  // namespace jax_overlap

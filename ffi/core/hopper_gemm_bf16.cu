#include "core/hopper_gemm.cuh"

namespace jax_overlap {

std::string LaunchHopperGemmBF16(const HopperGemmCall& call, cudaStream_t stream) {
  return HopperGemm<cutlass::bfloat16_t, false>::Launch(call, stream);
}

}  // namespace jax_overlap

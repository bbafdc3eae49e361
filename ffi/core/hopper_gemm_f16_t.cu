#include "core/hopper_gemm.cuh"

namespace jax_overlap {

std::string LaunchHopperGemmF16T(const HopperGemmCall& call, cudaStream_t stream) {
  return HopperGemm<cutlass::half_t, true>::Launch(call, stream);
}

}  // namespace jax_overlap

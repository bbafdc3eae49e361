#include "core/hopper_scatter.cuh"

namespace jax_overlap {

std::string LaunchHopperScatterBF16T(const HopperScatterCall* call, cudaStream_t stream) {
  using Scatter = HopperScatter<cutlass::bfloat16_t, true>;
  return call == nullptr ? Scatter::Load() : Scatter::Launch(*call, stream);
}

}  // namespace jax_overlap

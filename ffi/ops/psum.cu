// psum on NVIDIA GPUs, so far one thread block a rank over the peer link.
//
// The algorithms are those of psum.h that the CPU runs. Only psum_test.cu calls these
// kernels yet: on CUDA the op lowers to jax.lax.
#include <cuda_runtime.h>

#include "core/p2p_link.cuh"
#include "ops/psum_kernel.cuh"

namespace jax_overlap {

#define JO_INSTANTIATE(T)                                                            \
  template __global__ void PsumKernel<P2pLink, OneShot<T>, T>(PsumArguments);        \
  template __global__ void PsumKernel<P2pLink, TwoShot<T, false>, T>(PsumArguments); \
  template __global__ void PsumKernel<P2pLink, Nvrar<T, false>, T>(PsumArguments);

JO_INSTANTIATE(float)
JO_INSTANTIATE(double)
JO_INSTANTIATE(BFloat16)
JO_INSTANTIATE(Float16)
JO_INSTANTIATE(int32_t)
JO_INSTANTIATE(int8_t)

}  // namespace jax_overlap

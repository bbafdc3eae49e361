// psum on NVIDIA GPUs, so far one thread block a rank over the peer link.
//
// The algorithms are those of psum.h that the CPU runs. Nothing calls these
// kernels yet: on CUDA the op lowers to jax.lax. They are compiled so that the
// headers stay fit for both.
#include <cuda_runtime.h>

#include "core/p2p_link.cuh"
#include "ops/psum.h"

namespace jax_overlap {

struct PsumArguments {
  TeamShape shape;
  char* const* heaps;  // [rank], mapped into this device's address space
  size_t channel;      // its offset in every heap
  size_t capacity;     // elements in a chunk
  size_t count;
  uint64_t limit_ns;
  const void* in;
  void* out;
  Status* status;  // in mapped host memory
};

template <class Algorithm, class T>
__global__ void PsumKernel(PsumArguments a) {
  P2pLink link(a.shape.rank, a.shape.size, a.heaps, a.limit_ns);
  RunPsum<Algorithm>(BlockThreads{}, link, a.shape, a.heaps[a.shape.rank] + a.channel, a.capacity,
                     static_cast<const T*>(a.in), a.count, static_cast<T*>(a.out));
  if (link.failed()) *a.status = link.status();
}

#define JO_INSTANTIATE(T)                                                   \
  template __global__ void PsumKernel<OneShot<T>, T>(PsumArguments);        \
  template __global__ void PsumKernel<TwoShot<T, false>, T>(PsumArguments); \
  template __global__ void PsumKernel<Nvrar<T, false>, T>(PsumArguments);

JO_INSTANTIATE(float)
JO_INSTANTIATE(double)
JO_INSTANTIATE(BFloat16)
JO_INSTANTIATE(Float16)
JO_INSTANTIATE(int32_t)
JO_INSTANTIATE(int8_t)

}  // namespace jax_overlap

// The kernel of psum: one thread block a rank runs an algorithm of psum.h over a link.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"
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
  int32_t* broken;  // a word of the channel, in this device's memory: a call has failed
  Status* status;   // in mapped host memory
};

// What a failed call leaves as its result: NaN, or the smallest integer.
template <class T>
__device__ T Poison() {
  return Numeric<T>::Narrow(static_cast<Acc<T>>(NAN));
}
template <>
__device__ inline int32_t Poison() {
  return INT32_MIN;
}
template <>
__device__ inline int8_t Poison() {
  return INT8_MIN;
}

template <class Link, class Algorithm, class T>
__global__ void PsumKernel(PsumArguments a) {
  __shared__ Status status;
  Link link(a.shape.rank, a.shape.size, a.heaps, a.limit_ns, &status);
  T* const out = static_cast<T*>(a.out);
  // A channel is done for once a call on it has failed: slots are reused on the strength
  // of what was received before, so this rank could overwrite what a late peer still reads.
  const bool broken = *a.broken != 0;
  if (!broken) {
    RunPsum<Algorithm>(BlockThreads{}, link, a.shape, a.heaps[a.shape.rank] + a.channel, a.capacity,
                       static_cast<const T*>(a.in), a.count, out);
    __syncthreads();
    if (!link.failed()) return;
  }
  for (size_t i = threadIdx.x; i < a.count; i += blockDim.x) out[i] = Poison<T>();
  if (threadIdx.x == 0 && !broken) {
    *a.status = status;
    *a.broken = 1;
  }
}

}  // namespace jax_overlap

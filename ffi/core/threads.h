// Who runs one rank's part of an algorithm.
//
// An algorithm is written once, for any number of threads that share its loops:
//   threads.index(), threads.count()   this thread's place among them
//   threads.sync()                     all of them have come here, and see what
//                                      the others wrote before
#pragma once

#include <cstddef>
#include <cstring>

#include "core/annotations.h"

namespace jax_overlap {

// A rank is one thread (or one fibre): the CPU form.
struct OneThread {
  JO_HD int index() const { return 0; }
  JO_HD int count() const { return 1; }
  JO_HD void sync() const {}
};

#if defined(__CUDACC__)
// A rank is one thread block: the CUDA form.
struct BlockThreads {
  __device__ __forceinline__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int count() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};
#endif

// Copies `n` elements, by all threads together.
template <class T, class Threads>
JO_HD void Copy(const Threads& threads, const T* from, size_t n, T* to) {
#if defined(__CUDACC__)
  for (size_t i = threads.index(); i < n; i += threads.count()) to[i] = from[i];
#else
  if (threads.index() == 0) memcpy(to, from, n * sizeof(T));
#endif
}

}  // namespace jax_overlap

// Who runs one rank's part of an algorithm.
//
// An algorithm is written once, for any number of threads that share its loops:
//   threads.index(), threads.count()   this thread's place among them
//   threads.sync()                     all of them have come here, and see what
//                                      the others wrote before
#pragma once

#include <cstddef>
#include <cstdint>
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

#if defined(__CUDACC__)
// As many elements as one 16-byte access moves.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};
JO_HD bool IsPackAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
#endif

#if defined(__CUDACC__)
// Element `next` and each a `step` after the last, as long as there are kEach before `end`,
// whose loads are under way at once. Returns what is next then.
template <int kEach, class T>
JO_HD size_t CopySeveral(const T* from, size_t next, size_t step, size_t end, T* to) {
  for (; next + (kEach - 1) * step < end; next += kEach * step) {
    T some[kEach];
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) some[e] = from[next + e * step];
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) to[next + e * step] = some[e];
  }
  return next;
}
#endif

// Copies `n` elements, by all threads together.
template <class T, class Threads>
JO_HD void Copy(const Threads& threads, const T* from, size_t n, T* to) {
#if defined(__CUDACC__)
  size_t done = 0;
  if (IsPackAligned(from) && IsPackAligned(to)) {
    const auto* const sources = reinterpret_cast<const Pack<T>*>(from);
    auto* const targets = reinterpret_cast<Pack<T>*>(to);
    const size_t packs = n / Pack<T>::kCount, step = threads.count();
    size_t next = CopySeveral<4>(sources, threads.index(), step, packs, targets);
    next = CopySeveral<2>(sources, next, step, packs, targets);
    CopySeveral<1>(sources, next, step, packs, targets);
    done = packs * Pack<T>::kCount;
  }
  for (size_t i = done + threads.index(); i < n; i += threads.count()) to[i] = from[i];
#else
  if (threads.index() == 0) memcpy(to, from, n * sizeof(T));
#endif
}

}  // namespace jax_overlap

// Marks a function that runs on the host and, compiled by nvcc, on the device; and a loop
// that is unrolled there.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define JO_HD __host__ __device__ __forceinline__
#define JO_HD_NOINLINE __host__ __device__ __noinline__
#else
#define JO_HD inline
#define JO_HD_NOINLINE inline
#endif

// Counts elements of a piece of work. A GPU's are small, and its 64-bit arithmetic is slow.
namespace jax_overlap {
#if defined(__CUDACC__)
using Index = uint32_t;
#else
using Index = size_t;
#endif
}  // namespace jax_overlap

// Code that a small call runs is kept short on a GPU: it is fetched anew in each launch.
#if defined(__CUDA_ARCH__)
#define JO_UNROLL _Pragma("unroll")
#define JO_NO_UNROLL _Pragma("unroll 1")
#else
#define JO_UNROLL
#define JO_NO_UNROLL
#endif
#define JO_RARELY(condition) __builtin_expect(condition, 0)

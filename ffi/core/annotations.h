// Marks a function that runs on the host and, compiled by nvcc, on the device.
#pragma once

#if defined(__CUDACC__)
#define JO_HD __host__ __device__ __forceinline__
#else
#define JO_HD inline
#endif

// psum on NVIDIA GPUs where ranks are processes and some heap is not mapped: nvrar, whose
// steps in a node are those of psum.cu and whose steps across nodes are puts.
#include "ops/psum_nvshmem.h"

#include <algorithm>

#include "core/element_type.h"
#include "core/nvshmem_link.cuh"
#include "ops/psum_kernel.cuh"

namespace jax_overlap {
namespace {

using Kernel = void (*)(const PsumArguments);

template <class T>
constexpr Kernel kKernel = PsumKernel<NvshmemLink, Nvrar<T, Steps::kCells, true>, T>;

}  // namespace

cudaError_t LaunchPsumOverPut(int dtype, const PsumArguments* arguments, int grid, int threads,
                              cudaStream_t stream) {
  const int fewer = std::min(threads, NvshmemLink::kMaxThreads);
  const bool known = WithElementType(static_cast<xla::ffi::DataType>(dtype), [&](auto element) {
    kKernel<decltype(element)><<<grid, fewer, 0, stream>>>(*arguments);
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

cudaError_t LoadPsumOverPut() {
  cudaError_t error = cudaSuccess;
  ForElementTypes([&](auto element) {
    cudaFuncAttributes attributes;
    if (error != cudaSuccess) return;
    error = cudaFuncGetAttributes(&attributes, kKernel<decltype(element)>);
  });
  return error;
}

}  // namespace jax_overlap

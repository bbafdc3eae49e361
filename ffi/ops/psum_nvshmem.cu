// psum on NVIDIA GPUs where ranks are processes and some heap is not mapped: nvrar, whose
// steps in a node are those of psum.cu and whose steps across nodes are puts.
#include "ops/psum_nvshmem.h"

#include <algorithm>

#include "core/nvshmem_link.cuh"
#include "ops/psum_kernel.cuh"
#include "xla/ffi/api/c_api.h"

namespace jax_overlap {
namespace {

constexpr int kNvrarAttribute = 2;  // of `algorithm`; jax_overlap/_plan.py has the same

using Kernel = void (*)(const PsumArguments);

template <class T>
constexpr Kernel kNvrarKernel = PsumKernel<NvshmemLink, Nvrar<T, Steps::kCells, true>, T>;

struct Entry {
  int dtype;
  Kernel kernel;
};
constexpr Entry kKernels[] = {
    {XLA_FFI_DataType_F32, kNvrarKernel<float>},     {XLA_FFI_DataType_F64, kNvrarKernel<double>},
    {XLA_FFI_DataType_BF16, kNvrarKernel<BFloat16>}, {XLA_FFI_DataType_F16, kNvrarKernel<Float16>},
    {XLA_FFI_DataType_S32, kNvrarKernel<int32_t>},   {XLA_FFI_DataType_S8, kNvrarKernel<int8_t>},
};

}  // namespace

cudaError_t LaunchPsumOverPut(int algorithm, int dtype, const PsumArguments* arguments, int grid,
                              int threads, cudaStream_t stream) {
  for (const Entry& entry : kKernels) {
    if (algorithm != kNvrarAttribute || entry.dtype != dtype) continue;
    const int fewer = std::min(threads, NvshmemLink::kMaxThreads);
    entry.kernel<<<grid, fewer, 0, stream>>>(*arguments);
    return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadPsumOverPut() {
  for (const Entry& entry : kKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, entry.kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_overlap

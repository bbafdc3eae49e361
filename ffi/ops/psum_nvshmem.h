// What the library of the handlers takes from the one that has NVSHMEM in it: a function,
// handed over as an address, since that library is loaded only where there are several
// processes.
#pragma once

#include <cuda_runtime.h>

namespace jax_overlap {

struct PsumArguments;  // ops/psum_launch.h

// Starts psum for a team in which some peer's heap is not mapped: an algorithm that reaches
// those by puts, which is nvrar alone. `dtype` is an XLA_FFI_DataType. The channel is laid out by
// Nvrar<T, Steps::kCells, true>, on all ranks of the team: whether a team puts has to be agreed
// upon, as each sees only its own mappings.
using LaunchPsumOverPutFn = cudaError_t(int dtype, const PsumArguments* arguments, int grid,
                                        int threads, cudaStream_t stream);
LaunchPsumOverPutFn LaunchPsumOverPut;

// Loads the kernels now: loading one later may wait for a kernel that spins.
cudaError_t LoadPsumOverPut();

}  // namespace jax_overlap

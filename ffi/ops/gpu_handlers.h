// The GPU handlers and kernels of all ops: a line each.
#pragma once

#include <vector>

#include "ops/psum_nvshmem.h"

namespace jax_overlap {

struct Handler;  // core/handler.h

Handler AllGatherMatmulGpuHandler();
Handler MatmulAllReduceGpuHandler();
Handler MatmulReduceScatterGpuHandler();
Handler PsumGpuHandler();

// Where psum finds its kernels that put (ops/psum_nvshmem.h).
void UsePsumOverPut(LaunchPsumOverPutFn* launch);

// To be loaded before any runs: loading one while another spins may wait for that one.
std::vector<const void*> PsumKernels();

}  // namespace jax_overlap

// The GPU handlers of all ops: a line each.
#pragma once

#include "ops/psum_nvshmem.h"

namespace jax_overlap {

struct Handler;  // core/handler.h

Handler AllGatherMatmulGpuHandler();
Handler MatmulAllReduceGpuHandler();
Handler MatmulReduceScatterGpuHandler();
Handler PsumGpuHandler();

// Where psum finds its kernels that put (ops/psum_nvshmem.h).
void UsePsumOverPut(LaunchPsumOverPutFn* launch);

}  // namespace jax_overlap

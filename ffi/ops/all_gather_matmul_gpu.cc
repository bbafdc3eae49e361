// all_gather_matmul on NVIDIA GPUs: its handler. ops/matmul_program.h says what it does.
#include "ops/gpu_handlers.h"
#include "ops/matmul_gpu.h"

namespace jax_overlap {

JO_DEFINE_MATMUL_GPU_HANDLER(AllGatherMatmul, "jax_overlap.all_gather_matmul", MatmulKind::kGather)

}  // namespace jax_overlap

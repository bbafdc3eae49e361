// matmul_reduce_scatter on NVIDIA GPUs: its handler. ops/matmul_program.h says what it does.
#include "ops/gpu_handlers.h"
#include "ops/matmul_gpu.h"

namespace jax_overlap {

JO_DEFINE_MATMUL_GPU_HANDLER(MatmulReduceScatter, "jax_overlap.matmul_reduce_scatter",
                             MatmulKind::kScatter)

}  // namespace jax_overlap

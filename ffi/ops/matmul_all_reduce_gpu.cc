// matmul_all_reduce on NVIDIA GPUs: its handler. ops/matmul_program.h says what it does.
#include "ops/gpu_handlers.h"
#include "ops/matmul_gpu.h"

namespace jax_overlap {

JO_DEFINE_MATMUL_GPU_HANDLER(MatmulAllReduce, "jax_overlap.matmul_all_reduce", MatmulKind::kReduce)

}  // namespace jax_overlap

// matmul_all_reduce on the CPU.
#include "ops/matmul_all_reduce.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct MatmulAllReduceOp : MatmulAllReduce {
  static constexpr char kTarget[] = "jax_overlap.matmul_all_reduce";
  static constexpr int kChannel = 102;
};

JO_DEFINE_MATMUL_HANDLER(MatmulAllReduce, "jax_overlap.matmul_all_reduce")

}  // namespace jax_overlap

// matmul_reduce_scatter on the CPU.
#include "ops/matmul_reduce_scatter.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct MatmulReduceScatterOp : MatmulReduceScatter {
  static constexpr char kTarget[] = "jax_overlap.matmul_reduce_scatter";
  static constexpr int kChannel = 100;
};

JO_DEFINE_MATMUL_HANDLER(MatmulReduceScatter, "jax_overlap.matmul_reduce_scatter")

}  // namespace jax_overlap

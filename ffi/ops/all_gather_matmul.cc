// all_gather_matmul on the CPU.
#include "ops/all_gather_matmul.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct AllGatherMatmulOp : AllGatherMatmul {
  static constexpr char kTarget[] = "jax_overlap.all_gather_matmul";
  static constexpr int kChannel = 101;
};

JO_DEFINE_MATMUL_HANDLER(AllGatherMatmul, "jax_overlap.all_gather_matmul")

}  // namespace jax_overlap

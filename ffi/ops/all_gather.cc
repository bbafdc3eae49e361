// all_gather on the CPU.
#include "ops/all_gather.h"

#include "ops/block_handler.h"

namespace jax_overlap {

struct AllGatherOp {
  static constexpr char kTarget[] = "jax_overlap.all_gather";
  using Algorithm = AllGather;
};

JO_DEFINE_BLOCK_HANDLER(AllGather, "jax_overlap.all_gather")

}  // namespace jax_overlap

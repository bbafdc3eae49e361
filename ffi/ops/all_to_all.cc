// all_to_all on the CPU.
#include "ops/all_to_all.h"

#include "ops/block_handler.h"

namespace jax_overlap {

struct AllToAllOp {
  static constexpr char kTarget[] = "jax_overlap.all_to_all";
  using Algorithm = AllToAll;
};

JO_DEFINE_BLOCK_HANDLER(AllToAll, "jax_overlap.all_to_all")

}  // namespace jax_overlap

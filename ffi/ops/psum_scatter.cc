// psum_scatter on the CPU.
#include "ops/psum_scatter.h"

#include "ops/block_handler.h"

namespace jax_overlap {

struct PsumScatterOp {
  static constexpr char kTarget[] = "jax_overlap.psum_scatter";
  using Algorithm = PsumScatter;
};

JO_DEFINE_BLOCK_HANDLER(PsumScatter, "jax_overlap.psum_scatter")

}  // namespace jax_overlap

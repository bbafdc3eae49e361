// all_gather_matmul on the CPU.
#include "ops/all_gather_matmul.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct AllGatherMatmulOp {
  static constexpr char kTarget[] = "jax_overlap.all_gather_matmul";
  static constexpr int kChannel = 101;
  static constexpr bool kGathers = true;

  // The blocks of each rank's results, and if asked for a copy of each rank's x to each.
  static size_t Tasks(const MatmulShape& s, bool gathered) {
    return s.ranks * (GatherGrids(s).size() + (gathered ? s.ranks : 0));
  }
  template <class T, class Out>
  static void RunTask(const MatmulShape& s, const MatmulOperands& operands, size_t task, bool) {
    const int rank = static_cast<int>(task % s.ranks);
    const size_t index = task / s.ranks, blocks = GatherGrids(s).size();
    if (index < blocks) return AllGatherMatmulBlock<T, Out>(s, operands, rank, index);
    GatherOperand<T>(s, operands, rank, static_cast<int>(index - blocks));
  }

  template <class T>
  using Sliced = SlicedAllGatherMatmul<T>;
  template <class T, class Out, class Link>
  static void RunSliced(const Sliced<T>& sliced, Link& link, const MatmulShape& s,
                        const MatmulOperands& operands, bool gathered) {
    sliced.template Run<Out>(OneThread{}, link, s, operands, gathered);
  }
};

JO_DEFINE_MATMUL_HANDLER(AllGatherMatmulOp, "jax_overlap.all_gather_matmul_site",
                         AllGatherMatmulHandler)

}  // namespace jax_overlap

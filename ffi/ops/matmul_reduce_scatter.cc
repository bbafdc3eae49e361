// matmul_reduce_scatter on the CPU.
#include "ops/matmul_reduce_scatter.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct MatmulReduceScatterOp {
  static constexpr char kTarget[] = "jax_overlap.matmul_reduce_scatter";
  static constexpr int kChannel = 100;
  static constexpr bool kGathers = false;

  static size_t Tasks(const MatmulShape& s, bool) { return ScatteredPart(s, 0).grid.size() * s.ranks; }
  template <class T, class Out>
  static void RunTask(const MatmulShape& s, const MatmulOperands& operands, size_t task, bool) {
    MatmulReduceScatterBlock<T, Out>(s, operands, static_cast<int>(task % s.ranks), task / s.ranks);
  }

  template <class T>
  using Sliced = SlicedMatmulReduceScatter<T>;
  template <class T, class Out, class Link>
  static void RunSliced(const Sliced<T>& sliced, Link& link, const MatmulShape& s,
                        const MatmulOperands& operands, bool) {
    sliced.template Run<Out>(OneThread{}, link, s, operands);
  }
};

JO_DEFINE_MATMUL_HANDLER(MatmulReduceScatterOp, "jax_overlap.matmul_reduce_scatter_site",
                         MatmulReduceScatterHandler)

}  // namespace jax_overlap

// matmul_all_reduce on the CPU.
#include "ops/matmul_all_reduce.h"

#include "ops/matmul_handler.h"

namespace jax_overlap {

struct MatmulAllReduceOp {
  static constexpr char kTarget[] = "jax_overlap.matmul_all_reduce";
  static constexpr int kChannel = 102;
  static constexpr bool kGathers = false;

  static size_t Tasks(const MatmulShape& s, bool) {
    size_t tasks = 0;
    for (int rank = 0; rank < s.ranks; ++rank) tasks += ReducedPart(s, rank).grid.size();
    return tasks;
  }
  template <class T, class Out>
  static void RunTask(const MatmulShape& s, const MatmulOperands& operands, size_t task, bool) {
    int rank = 0;
    for (size_t n; task >= (n = ReducedPart(s, rank).grid.size()); ++rank) task -= n;
    MatmulAllReduceBlock<T, Out>(s, operands, rank, task);
  }

  template <class T>
  using Sliced = void;
};

JO_DEFINE_MATMUL_HANDLER(MatmulAllReduceOp, "jax_overlap.matmul_all_reduce_site",
                         MatmulAllReduceHandler)

}  // namespace jax_overlap

// psum_scatter.h over the host link: see block_op_test.h.
#include "ops/psum_scatter.h"

#include "ops/block_op_test.h"

namespace jax_overlap {
namespace {

struct Scatter {
  using Algorithm = PsumScatter;
  static size_t In(const Blocks& blocks) { return blocks.parts * blocks.part_size(); }
  static size_t Out(const Blocks& blocks) { return blocks.part_size(); }
  static int Expected(const Blocks& blocks, int rank, size_t i, int call) {
    int sum = 0;
    for (int r = 0; r < blocks.parts; ++r) sum += InputAt(r, InWhole(blocks, rank, i), call);
    return sum;
  }
};

}  // namespace
}  // namespace jax_overlap

int main() { jax_overlap::RunBlockTests<jax_overlap::Scatter>("psum_scatter_test"); }

// all_to_all.h over the host link: see block_op_test.h.
#include "ops/all_to_all.h"

#include "ops/block_op_test.h"

namespace jax_overlap {
namespace {

struct Exchange {
  using Algorithm = AllToAll;
  static size_t In(const Blocks& blocks) { return blocks.parts * blocks.part_size(); }
  static size_t Out(const Blocks& blocks) { return In(blocks); }
  static int Expected(const Blocks& blocks, int rank, size_t i, int call) {
    const InPart from(blocks, i);
    return InputAt(from.part, InWhole(blocks, rank, from.at), call);
  }
};

}  // namespace
}  // namespace jax_overlap

int main() { jax_overlap::RunBlockTests<jax_overlap::Exchange>("all_to_all_test"); }

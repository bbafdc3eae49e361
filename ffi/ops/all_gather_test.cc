// all_gather.h over the host link: see block_op_test.h.
#include "ops/all_gather.h"

#include "ops/block_op_test.h"

namespace jax_overlap {
namespace {

struct Gather {
  using Algorithm = AllGather;
  static size_t In(const Blocks& blocks) { return blocks.part_size(); }
  static size_t Out(const Blocks& blocks) { return blocks.parts * blocks.part_size(); }
  static int Expected(const Blocks& blocks, int /*rank*/, size_t i, int call) {
    const InPart from(blocks, i);
    return InputAt(from.part, from.at, call);
  }
};

}  // namespace
}  // namespace jax_overlap

int main() { jax_overlap::RunBlockTests<jax_overlap::Gather>("all_gather_test"); }

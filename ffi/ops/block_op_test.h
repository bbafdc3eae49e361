// The tests of the ops on blocks: an op says what its results are, and this runs its
// algorithm staged and direct, over many shapes, chunks and calls in a row.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "ops/block_op.h"
#include "ops/team_test.h"

namespace jax_overlap {

// An op under test has
//   Algorithm
//   In(blocks), Out(blocks)             elements of a rank's operand and result
//   Expected(blocks, rank, i, call)     element i of the result of `rank`

// Where element i of an array of all parts lies: in which part, and there at which.
struct InPart {
  InPart(const Blocks& blocks, size_t i)
      : part(static_cast<int>(i / blocks.inner % blocks.parts)),
        at(i / blocks.inner / blocks.parts * blocks.inner + i % blocks.inner) {}
  int part;
  size_t at;
};

// The other way round: element `at` of a part, in the array of all parts.
inline size_t InWhole(const Blocks& blocks, int part, size_t at) {
  return (at / blocks.inner * blocks.parts + part) * blocks.inner + at % blocks.inner;
}

struct BlockCase {
  int size;
  size_t capacity;                                // elements in a chunk
  std::vector<std::pair<size_t, size_t>> shapes;  // outer, inner: one call after the other
  bool fibers = false;
};

template <class Op, class T>
TestTeam<T> MakeTeam(const BlockCase& c) {
  TestTeam<T> team(c.size, BlockChannelBytes<T>(c.size, c.capacity),
                   "size " + std::to_string(c.size));
  for (const auto& [outer, inner] : c.shapes) {
    const Blocks blocks{c.size, outer, inner};
    team.AddCall(Op::In(blocks), Op::Out(blocks));
  }
  return team;
}

template <class Op, bool Direct, class T>
void CheckBlocks(const BlockCase& c, unsigned seed) {
  const auto blocks_of = [&](int call) {
    return Blocks{c.size, c.shapes[call].first, c.shapes[call].second};
  };
  auto team = MakeTeam<Op, T>(c);
  team.template RunCalls<Direct>(
      c.fibers, seed, [&](auto& link, char* heap, int call, const T* in, T* out) {
        RunBlocks<typename Op::Algorithm>(OneThread{}, link, heap, c.capacity, blocks_of(call), in,
                                          out);
      });
  team.Check(
      [&](int rank, size_t i, int call) { return Op::Expected(blocks_of(call), rank, i, call); });
}

// Runs of one element, one run, none at all; less than a chunk, a chunk, one more
// than a chunk; chunks that end in the middle of a run, and growing and shrinking.
template <class Op, class T>
int BlockShapes(bool fibers) {
  const std::vector<std::pair<size_t, size_t>> shapes = {
      {3, 50}, {1, 1}, {0, 5},  {129, 1}, {1, 300}, {5, 0},   {7, 3},
      {1, 64}, {1, 0}, {65, 1}, {2, 32},  {16, 4},  {13, 11}, {1, 63},
  };
  int cases = 0;
  for (int size = 1; size <= 8; ++size) {
    for (size_t capacity : {64, 1000}) {
      const BlockCase c{size, capacity, shapes, fibers};
      CheckBlocks<Op, false, T>(c, 17 * size);
      CheckBlocks<Op, true, T>(c, 17 * size);
      cases += 2;
    }
  }
  return cases;
}

// Slots are reused again and again, a chunk after the other and call after call.
template <class Op>
int ManyBlockCalls() {
  for (int size : {2, 3, 6}) {
    CheckBlocks<Op, false, float>({size, 32, {200, {12, 8}}}, size);
    CheckBlocks<Op, false, BFloat16>({size, 128, {200, {1, 96}}}, size);
  }
  return 6;
}

template <class Op>
int AbsentBlockPeerIsNamed() {
  const BlockCase c{3, 64, {{8, 8}}};
  MakeTeam<Op, float>(c).CheckAbsentPeerIsNamed(
      [&](auto& link, char* heap, const float* in, float* out) {
        RunBlocks<typename Op::Algorithm>(OneThread{}, link, heap, c.capacity, Blocks{3, 8, 8}, in,
                                          out);
      });
  return 1;
}

template <class Op>
void RunBlockTests(const char* name) {
  int passed = BlockShapes<Op, float>(false) + BlockShapes<Op, BFloat16>(false);
  passed += BlockShapes<Op, double>(false) + BlockShapes<Op, Float16>(false);
  passed += BlockShapes<Op, int32_t>(false) + BlockShapes<Op, int8_t>(false);
#if !defined(__SANITIZE_THREAD__)  // it does not know about switched stacks
  passed += BlockShapes<Op, float>(true);
#endif
  passed += ManyBlockCalls<Op>() + AbsentBlockPeerIsNamed<Op>();
  std::printf("%s: %d passed, 0 failed\n", name, passed);
}

}  // namespace jax_overlap

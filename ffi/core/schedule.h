// Who works on which elements, and who exchanges with whom: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/mutants.h"

namespace jax_overlap {

JO_HD size_t CeilDiv(size_t a, size_t b) {
#if defined(__CUDA_ARCH__)
  // A GPU divides 32 bits several times as fast, and that is on the way of each small call.
  if ((a + b) >> 32 == 0) {
    return (static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b);
  }
#endif
  return (a + b - 1) / b;
}
JO_HD size_t RoundUp(size_t a, size_t b) { return CeilDiv(a, b) * b; }
JO_HD size_t Min(size_t a, size_t b) { return a < b ? a : b; }

// A half-open range of elements.
struct Slice {
  size_t begin;
  size_t end;
  JO_HD size_t size() const { return end - begin; }
};

// The part of `n` elements that belongs to `index` of `parts`. Parts start at
// multiples of `align` elements, so only the last that is not empty is ragged.
JO_HD Slice SliceOf(size_t n, int parts, int index, size_t align) {
  if (JO_MUTANT("wrong_slice") && parts > 1 && index == 0) index = 1;
  const size_t step = RoundUp(CeilDiv(n, static_cast<size_t>(parts)), align);
  return {Min(n, step * static_cast<size_t>(index)),
          Min(n, step * (static_cast<size_t>(index) + 1))};
}

// The largest slice that SliceOf gives.
JO_HD size_t MaxSlice(size_t n, int parts, size_t align) {
  return Min(n, RoundUp(CeilDiv(n, static_cast<size_t>(parts)), align));
}

// The same of a slice, which stays what it is: `index` of its `parts`. All but the
// last that is not empty are multiples of `align` elements long.
JO_HD Slice SubSliceOf(Slice slice, int parts, int index, size_t align) {
  const Slice part = SliceOf(slice.size(), parts, index, align);
  return {slice.begin + part.begin, slice.begin + part.end};
}

// The k-th peer that `rank` serves, k = 1 .. size-1. Ranks start with different
// peers, so that no peer is written to by all of them at once.
JO_HD int Rotated(int rank, int k, int size) { return (rank + k) % size; }

// The order in which `rank` computes the slices of a matmul, so that no transfer is
// left over at the end (arXiv:2604.24013). Slice s belongs to rank s; `step` is 0 ..
// size-1. Of 4 ranks:
//
//            OwnFirst: gather, compute    OwnLast: compute, reduce-scatter
//   rank 0        0 3 2 1                      3 2 1 0
//   rank 1        1 0 3 2                      0 3 2 1
//   rank 2        2 1 0 3                      1 0 3 2
//   rank 3        3 2 1 0                      2 1 0 3
//
// The own slice comes first where the operand has to arrive: it needs nothing, and the
// others come meanwhile. It comes last where the result has to leave: nobody waits for
// it, and the others leave meanwhile. Down a column no slice repeats: in a step every
// rank reads from, or writes to, another one.
JO_HD int OwnFirst(int rank, int step, int size) { return (rank + size - step) % size; }
JO_HD int OwnLast(int rank, int step, int size) { return (rank + size - 1 - step) % size; }

// The step in which `rank` computes `slice`. In own-first order it is the step for which
// the slice has to have come: so its owner sends it to Rotated(owner, k, size), k = 1, 2,
// .., who need it in step k. In own-last order it is the step after which the partial
// result leaves for the slice's owner.
JO_HD int OwnFirstStep(int rank, int slice, int size) { return (rank + size - slice) % size; }
JO_HD int OwnLastStep(int rank, int slice, int size) { return (rank + size - 1 - slice) % size; }

// Recursive doubling for any number of nodes. With K the largest power of two
// that is not above `nodes`, node n >= K first gives its part to node n - K
// (fold in) and in the end gets the result back from it (fold out); the K nodes
// in between exchange with node XOR 2^step.
struct Doubling {
  int nodes;

  JO_HD int power() const {
    int k = 1;
    while (2 * k <= nodes) k *= 2;
    return k;
  }
  JO_HD int steps() const {
    int s = 0;
    while ((2 << s) <= nodes) ++s;
    return s;
  }
  // Whether `node` takes part only by giving its share to a partner.
  JO_HD bool folded(int node) const { return node >= power(); }
  // Whether a folded node gives its share to `node`.
  JO_HD bool hosts(int node) const { return node < nodes - power(); }
  JO_HD int fold_partner(int node) const { return folded(node) ? node - power() : node + power(); }
  static JO_HD int partner(int node, int step) { return node ^ (1 << step); }
};

// `size` ranks in nodes of `node_size`, numbered node by node.
struct TeamShape {
  int rank;
  int size;
  int node_size;

  JO_HD int nodes() const { return size / node_size; }
  JO_HD int node() const { return rank / node_size; }
  JO_HD int local() const { return rank % node_size; }
  JO_HD int first_of_node() const { return node() * node_size; }
};

}  // namespace jax_overlap

// Who works on which elements, and who exchanges with whom: pure functions.
#pragma once

#include <cstddef>

#include "core/annotations.h"
#include "core/mutants.h"

namespace jax_overlap {

JO_HD size_t CeilDiv(size_t a, size_t b) { return (a + b - 1) / b; }
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

// The k-th peer that `rank` serves, k = 1 .. size-1. Ranks start with different
// peers, so that no peer is written to by all of them at once.
JO_HD int Rotated(int rank, int k, int size) { return (rank + k) % size; }

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

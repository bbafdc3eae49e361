// Matmul and all-reduce: every rank gets the sum of the ranks' products.
//
// The result is cut in parts, of rows or (where these are few) of columns. The owner of
// a part reads the ranks' operands where they are, accumulates their products in rank
// order, and stores the sum in all ranks' results.
#pragma once

#include "ops/matmul.h"

namespace jax_overlap {

// The part of `rank`. A part may be smaller than others, or empty.
inline SumPart ReducedPart(const MatmulShape& s, int rank) {
  const size_t rows = s.outer * s.rows, cols = s.products[0].cols;
  const size_t parts = s.ranks;
  if (rows >= cols || rows >= parts * kBlockRows) {
    const Slice slice = SliceOf(rows, s.ranks, rank, 1);
    return {0, {slice.size(), rows, slice.begin}, 0, {s.batch, slice.size(), cols}};
  }
  const Slice slice = SliceOf(cols, s.ranks, rank, 16);
  return {0, {rows, rows, 0}, slice.begin, {s.batch, rows, slice.size()}};
}

// Block `index` of the part of `rank`.
template <class T, class Out>
void MatmulAllReduceBlock(const MatmulShape& s, const MatmulOperands& operands, int rank,
                          size_t index) {
  const SumPart part = ReducedPart(s, rank);
  const Block block = part.grid.At(index);
  const size_t cols = s.products[0].cols;
  Scratch<Acc<T>> scratch;
  Acc<T>* const sum = scratch.Get(block.rows * block.cols);
  SumBlocks<T>(s, operands, part, block, sum, block.cols);
  for (size_t r = 0; r < block.rows; ++r) {
    const size_t row = block.batch * s.outer * s.rows + part.row_map.At(block.row + r);
    const size_t at = row * cols + part.first_col + block.col;
    Out* const mine = operands.out<Out>(0, rank) + at;
    StoreRow<T>(sum + r * block.cols, block.cols, mine);
    for (int k = 1; k < s.ranks; ++k) {
      memcpy(operands.out<Out>(0, Rotated(rank, k, s.ranks)) + at, mine, block.cols * sizeof(Out));
    }
  }
}

// The op, as its handler and its test take it.
struct MatmulAllReduce {
  static constexpr bool kScatters = false, kGathers = false;

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

}  // namespace jax_overlap

// Matmul and reduce-scatter: rank r gets part r of the sum of the ranks' products.
//
// Sliced (arXiv:2604.24013), a rank computes its product part by part, its own part
// last, each straight into the slot that the part's owner has for it; the owner adds
// its slots in rank order. In place, the owner of a part reads the ranks' operands where
// they are, and accumulates their products of its part, in rank order: nothing is sent.
#pragma once

#include "ops/block_op.h"
#include "ops/matmul.h"

namespace jax_overlap {

// Block `index` of the part of `rank`.
template <class T, class Out>
void MatmulReduceScatterBlock(const MatmulShape& s, const MatmulOperands& operands, int rank,
                              size_t index) {
  const SumPart part = ScatteredPart(s, rank);
  const Block block = part.grid.At(index);
  const size_t stride = part.grid.cols;
  Out* out =
      operands.out<Out>(0, rank) + (block.batch * part.grid.rows + block.row) * stride + block.col;
  if constexpr (kInPlace<T, Out>) {
    SumBlocks<T>(s, operands, part, block, out, stride);
  } else {
    Scratch<Acc<T>> scratch;
    Acc<T>* const sum = scratch.Get(block.rows * block.cols);
    SumBlocks<T>(s, operands, part, block, sum, block.cols);
    for (size_t r = 0; r < block.rows; ++r) {
      StoreRow<T>(sum + r * block.cols, block.cols, out + r * stride);
    }
  }
}

template <class T>
struct SlicedMatmulReduceScatter {
  Word* last;
  Inbox<Acc<T>> inbox;

  static SlicedMatmulReduceScatter Carve(Carver& carver, int size, size_t capacity) {
    Word* const last = carver.Take<Word>(1);
    return {last, Inbox<Acc<T>>::Carve(carver, size, capacity)};
  }
  static size_t Capacity(const MatmulShape&) { return kBlockElements; }

  // Block by block of the parts; in each, part by part.
  template <class Out, class Threads, class Link>
  void Run(const Threads& threads, Link& link, const MatmulShape& s,
           const MatmulOperands& operands) const {
    const int rank = link.rank(), size = link.size();
    SumPart mine = ScatteredPart(s, rank);
    mine.grid.block_rows = TallBlockRows(mine.grid.cols);
    Scratch<T> scratch;
    ForChunksInSequence(
        threads, last, mine.grid.size(), 1, [&](uint64_t sequence, size_t i, size_t) {
          const Block block = mine.grid.At(i);
          const auto multiply = [&](int owner, Acc<T>* slot) {
            MultiplyBlock<T>(s, operands, rank, ScatteredPart(s, owner), block, false, slot,
                             block.cols, scratch);
          };
          for (int step = 0; step + 1 < size; ++step) {
            const int owner = OwnLast(rank, step, size);
            inbox.Send(threads, link, sequence, owner,
                       [&](Acc<T>* slot) { multiply(owner, slot); });
          }
          multiply(rank, inbox.slot(sequence, rank, size));
          for (int k = 1; k < size; ++k) {
            inbox.Receive(threads, link, sequence, Rotated(rank, k, size));
          }
          Sum<Out>(threads, sequence, size, mine, block, operands.out<Out>(0, rank));
        });
  }

 private:
  template <class Out, class Threads>
  void Sum(const Threads& threads, uint64_t sequence, int size, const SumPart& part,
           const Block& block, Out* out) const {
    Acc<T> row[kBlockCols];
    for (size_t r = 0; r < block.rows; ++r) {
      SumRows<Acc<T>>(
          threads, size,
          [&](int source) { return inbox.slot(sequence, source, size) + r * block.cols; },
          block.cols, row);
      const size_t at = (block.batch * part.grid.rows + block.row + r) * part.grid.cols;
      StoreRow<T>(row, block.cols, out + at + block.col);
    }
  }
};

// The op, as its handler and its test take it.
struct MatmulReduceScatter {
  static constexpr bool kScatters = true, kGathers = false;

  static size_t Tasks(const MatmulShape& s, bool) {
    return ScatteredPart(s, 0).grid.size() * s.ranks;
  }
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

}  // namespace jax_overlap

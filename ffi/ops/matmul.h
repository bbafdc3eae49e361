// What the fused matmuls share: the shapes of a call, and products of blocks of them.
//
//   y[g, a, q, n] = sum over k of x[g, a, q, k] * w[g, k, n]
//
// for batch g, outer a, row q, inner k, column n; w may come as [g, n, k]. A call has
// several products that share g, a and q: of pairs (x, w) whose results are added, or of
// one x with several w. What is cut in parts, one a rank, is the rows, the batch, the
// columns (of a result that is scattered) or the inner dimension (of an x that is
// gathered). The outer and row dimensions together are "rows" where nothing is cut.
//
// These are host algorithms: a rank is one thread or fibre. They work on blocks of a
// result, which is as fine as the work is cut, and small enough for a slot.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/gemm.h"
#include "core/mutants.h"
#include "core/schedule.h"
#include "core/sum.h"

namespace jax_overlap {

enum class Cut : int64_t { kRows = 0, kBatch = 1, kCols = 2, kInner = 3 };

struct Product {
  size_t inner;
  size_t cols;
  bool transposed;
};

struct MatmulShape {
  Cut cut;
  int ranks;
  size_t batch, outer, rows;  // of a rank's x
  std::vector<Product> products;
};

// The arrays of all ranks.
class MatmulOperands {
 public:
  // Entry i * ranks + r is array i of rank r; the inputs are `xs` xs, then the ws.
  MatmulOperands(const void* const* inputs, void* const* outputs, int ranks, size_t xs)
      : inputs_(inputs), outputs_(outputs), ranks_(ranks), xs_(xs) {}

  template <class T>
  const T* x(size_t i, int rank) const {
    return static_cast<const T*>(inputs_[i * ranks_ + rank]);
  }
  template <class T>
  const T* w(size_t i, int rank) const {
    return x<T>(xs_ + i, rank);
  }
  template <class T>
  T* out(size_t i, int rank) const {
    return static_cast<T*>(outputs_[i * ranks_ + rank]);
  }

 private:
  const void* const* const inputs_;
  void* const* const outputs_;
  const int ranks_;
  const size_t xs_;
};

constexpr size_t kBlockRows = 128;
constexpr size_t kBlockCols = 512;
constexpr size_t kBlockElements = kBlockRows * kBlockCols;

// A block of [batch, rows, cols].
struct Block {
  size_t batch;
  size_t row, rows;
  size_t col, cols;
};

// Rows of `width` elements that make a block where each block costs a message.
inline size_t TallBlockRows(size_t width) {
  constexpr size_t kMostRows = 4096;
  if (width * kBlockRows >= kBlockElements) return kBlockRows;
  return Min(kMostRows, kBlockElements / (width + (width == 0)));
}

// Cuts [batch, rows, cols] in blocks.
struct Grid {
  size_t batch, rows, cols;
  size_t block_rows = kBlockRows;

  size_t size() const { return batch * Down() * Across(); }
  Block At(size_t i) const {
    const size_t row = i / Across() % Down() * block_rows, col = i % Across() * kBlockCols;
    return {i / Across() / Down(), row, Min(block_rows, rows - row), col,
            Min(kBlockCols, cols - col)};
  }

 private:
  size_t Down() const { return CeilDiv(rows, block_rows); }
  size_t Across() const { return CeilDiv(cols, kBlockCols); }
};

// Which rows of an array are a part's: of every `stride` rows, `run` from `first` on.
struct RowMap {
  size_t run, stride, first;

  size_t At(size_t row) const { return row / run * stride + first + row % run; }
  bool InOneRun(size_t row, size_t rows) const {
    return run == stride || row / run == (row + rows - 1) / run;
  }
};

// Memory that a block needs for a while.
template <class T>
class Scratch {
 public:
  T* Get(size_t count) {
    if (count > count_) {
      data_.reset(new T[count]);
      count_ = count;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  size_t count_ = 0;
};

// `rows` rows of `width` elements from `row` on: in place, or one after the other in
// `scratch` where they lie apart.
template <class T>
const T* RowsOf(const T* array, size_t width, const RowMap& map, size_t row, size_t rows,
                Scratch<T>& scratch) {
  if (width == 0 || map.InOneRun(row, rows)) return array + map.At(row) * width;
  T* const packed = scratch.Get(rows * width);
  for (size_t r = 0; r < rows; ++r) {
    memcpy(packed + r * width, array + map.At(row + r) * width, width * sizeof(T));
  }
  return packed;
}

// Whether a result can be accumulated where it belongs.
template <class T, class Out>
constexpr bool kInPlace = std::is_same<Out, Acc<T>>::value;

// Stores a row of accumulators as results.
template <class T, class Out>
void StoreRow(const Acc<T>* row, size_t n, Out* out) {
  if constexpr (kInPlace<T, Out>) {
    memcpy(out, row, n * sizeof(Out));
  } else {
    NarrowTile(row, n, out);
  }
}

// A part of a sum of products: which batches, rows and columns of [batch, outer * rows,
// cols], the same on all ranks.
struct SumPart {
  size_t first_batch;
  RowMap row_map;
  size_t first_col;
  Grid grid;
};

// The part of `rank` of a scattered sum.
inline SumPart ScatteredPart(const MatmulShape& s, int rank) {
  if (JO_MUTANT("wrong_slice") && s.ranks > 1 && rank == 0) rank = 1;
  const size_t ranks = s.ranks, part = rank, cols = s.products[0].cols;
  const RowMap all{s.rows, s.rows, 0};
  switch (s.cut) {
    case Cut::kBatch: {
      const size_t n = s.batch / ranks;
      return {part * n, all, 0, {n, s.outer * s.rows, cols}};
    }
    case Cut::kCols: {
      const size_t n = cols / ranks;
      return {0, all, part * n, {s.batch, s.outer * s.rows, n}};
    }
    default: {
      const size_t n = s.rows / ranks;
      return {0, {n, s.rows, part * n}, 0, {s.batch, s.outer * n, cols}};
    }
  }
}

// One rank's part of a block of the sum: x_0 w_0 + x_1 w_1 + .. of `source`.
template <class T>
void MultiplyBlock(const MatmulShape& s, const MatmulOperands& operands, int source,
                   const SumPart& part, const Block& block, bool accumulate, Acc<T>* c, size_t ldc,
                   Scratch<T>& scratch) {
  const size_t batch = part.first_batch + block.batch, col = part.first_col + block.col;
  for (size_t i = 0; i < s.products.size(); ++i) {
    const auto [inner, cols, transposed] = s.products[i];
    const T* x = operands.x<T>(i, source) + batch * s.outer * s.rows * inner;
    const T* w = operands.w<T>(i, source) + batch * inner * cols + col * (transposed ? inner : 1);
    x = RowsOf(x, inner, part.row_map, block.row, block.rows, scratch);
    Gemm<T>({block.rows, block.cols, inner, inner, transposed ? inner : cols, ldc, transposed}, x,
            w, accumulate || i > 0, c);
  }
}

// The sum of all ranks' blocks, in rank order, in `c`.
template <class T>
void SumBlocks(const MatmulShape& s, const MatmulOperands& operands, const SumPart& part,
               const Block& block, Acc<T>* c, size_t ldc) {
  Scratch<T> scratch;
  const int sources = JO_MUTANT("skip_peer") && s.ranks > 1 ? s.ranks - 1 : s.ranks;
  for (int source = 0; source < sources; ++source) {
    MultiplyBlock<T>(s, operands, source, part, block, source > 0, c, ldc, scratch);
    if (JO_MUTANT("half_accumulate")) {
      for (size_t r = 0; r < block.rows; ++r) {
        for (size_t i = r * ldc; i < r * ldc + block.cols; ++i) {
          c[i] = Numeric<T>::Widen(Numeric<T>::Narrow(c[i]));
        }
      }
    }
  }
}

}  // namespace jax_overlap

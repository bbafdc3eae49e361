// All-gather and matmul: every rank gets the product of all ranks' x, put together,
// with its own w (or several), and if asked for the gathered x.
//
// Sliced (arXiv:2604.24013), a rank first sends its x to the others, block by block, to
// the slot that each has for it, and computes with its own; then with the others', as
// they come. In place, it reads the others' x where they are: nothing is sent.
#pragma once

#include "ops/block_op.h"
#include "ops/matmul.h"

namespace jax_overlap {

// Where the x of each rank is in the gathered one, [batches, total rows, total inner].
struct GatheredShape {
  explicit GatheredShape(const MatmulShape& s)
      : ranks(s.cut == Cut::kRows ? s.ranks : 1),
        batches(s.batch * (s.cut == Cut::kBatch ? s.ranks : 1)),
        rows(s.outer * s.rows * ranks),
        inner(s.products[0].inner * (s.cut == Cut::kInner ? s.ranks : 1)) {}

  size_t ranks;  // whose rows are put together
  size_t batches, rows, inner;

  RowMap RowsFrom(const MatmulShape& s, int source) const {
    return {s.rows, s.rows * ranks, s.cut == Cut::kRows ? source * s.rows : 0};
  }
  size_t BatchFrom(const MatmulShape& s, int source, size_t batch) const {
    return s.cut == Cut::kBatch ? source * s.batch + batch : batch;
  }
  // Of the first of the inner dimension that `source` has.
  size_t InnerFrom(const MatmulShape& s, int source) const {
    return s.cut == Cut::kInner ? source * s.products[0].inner : 0;
  }
};

// C (+)= `rows` rows of the x of `source` times columns of weight i of `rank`.
template <class T>
void MultiplyRows(const MatmulShape& s, const MatmulOperands& operands, int source, const T* x,
                  size_t rows, int rank, size_t i, size_t batch, size_t col, size_t cols,
                  bool accumulate, Acc<T>* c, size_t ldc) {
  const GatheredShape whole(s);
  const Product& p = s.products[i];
  const T* w = operands.w<T>(i, rank) + batch * whole.inner * p.cols;
  const size_t first = whole.InnerFrom(s, source);
  w += p.transposed ? col * whole.inner + first : first * p.cols + col;
  Gemm<T>({rows, cols, p.inner, p.inner, p.transposed ? whole.inner : p.cols, ldc, p.transposed}, x,
          w, accumulate, c);
}

// Copies rows of the x of `source` to their place in the gathered one.
template <class T>
void CopyGathered(const MatmulShape& s, int source, const T* x, size_t batch, size_t row,
                  size_t rows, T* gathered) {
  const GatheredShape whole(s);
  const size_t inner = s.products[0].inner;
  if (inner == 0) return;
  const RowMap map = whole.RowsFrom(s, source);
  gathered += whole.BatchFrom(s, source, batch) * whole.rows * whole.inner;
  gathered += whole.InnerFrom(s, source);
  for (size_t r = 0; r < rows; ++r) {
    memcpy(gathered + map.At(row + r) * whole.inner, x + r * inner, inner * sizeof(T));
  }
}

// --- In place -------------------------------------------------------------------

// Row `row` of batch `batch` of the gathered x, and in `source` whose it is.
template <class T>
const T* GatheredRow(const MatmulShape& s, const MatmulOperands& operands, size_t batch, size_t row,
                     int* source) {
  const size_t inner = s.products[0].inner, own_rows = s.outer * s.rows;
  if (s.cut == Cut::kRows) {
    const size_t outer = row / (s.rows * s.ranks), at = row % (s.rows * s.ranks);
    *source = static_cast<int>(at / s.rows);
    row = outer * s.rows + at % s.rows;
  } else if (s.cut == Cut::kBatch) {
    *source = static_cast<int>(batch / s.batch);
    batch %= s.batch;
  }
  if (JO_MUTANT("skip_peer") && *source == s.ranks - 1) *source = 0;
  return operands.x<T>(0, *source) + (batch * own_rows + row) * inner;
}

// A block of the product with weight i: of the gathered rows, from one rank or several.
template <class T>
void MultiplyGathered(const MatmulShape& s, const MatmulOperands& operands, int rank, size_t i,
                      const Block& block, Acc<T>* c, size_t ldc) {
  int source = 0;
  if (s.cut == Cut::kInner) {
    for (int p = 0; p < s.ranks; ++p) {
      source = p;
      const T* x = GatheredRow<T>(s, operands, block.batch, block.row, &source);
      MultiplyRows<T>(s, operands, p, x, block.rows, rank, i, block.batch, block.col, block.cols,
                      p > 0, c, ldc);
    }
    return;
  }
  const size_t inner = s.products[0].inner;
  Scratch<T> scratch;
  const T* x = GatheredRow<T>(s, operands, block.batch, block.row, &source);
  const RowMap runs{s.rows, s.cut == Cut::kRows ? s.rows * s.ranks : s.rows, 0};
  if (inner > 0 && !runs.InOneRun(block.row, block.rows)) {
    T* const packed = scratch.Get(block.rows * inner);
    for (size_t r = 0; r < block.rows; ++r) {
      x = GatheredRow<T>(s, operands, block.batch, block.row + r, &source);
      memcpy(packed + r * inner, x, inner * sizeof(T));
    }
    x = packed;
  }
  MultiplyRows<T>(s, operands, source, x, block.rows, rank, i, block.batch, block.col, block.cols,
                  false, c, ldc);
}

// The blocks of the results of a rank, those of one weight after the other's.
struct GatherGrids {
  explicit GatherGrids(const MatmulShape& s) {
    const GatheredShape whole(s);
    for (const Product& p : s.products) grids.push_back({whole.batches, whole.rows, p.cols});
  }
  size_t size() const {
    size_t n = 0;
    for (const Grid& grid : grids) n += grid.size();
    return n;
  }
  std::vector<Grid> grids;
};

// Block `index` of the results of `rank`, of `all` of them.
template <class T, class Out>
void AllGatherMatmulBlock(const MatmulShape& s, const MatmulOperands& operands,
                          const GatherGrids& all, int rank, size_t index) {
  size_t i = 0;
  for (; index >= all.grids[i].size(); ++i) index -= all.grids[i].size();
  const Grid& grid = all.grids[i];
  const Block block = grid.At(index);
  Out* out = operands.out<Out>(i, rank) + (block.batch * grid.rows + block.row) * grid.cols;
  out += block.col;
  if constexpr (kInPlace<T, Out>) {
    MultiplyGathered<T>(s, operands, rank, i, block, out, grid.cols);
  } else {
    Scratch<Acc<T>> scratch;
    Acc<T>* const c = scratch.Get(block.rows * block.cols);
    MultiplyGathered<T>(s, operands, rank, i, block, c, block.cols);
    for (size_t r = 0; r < block.rows; ++r) {
      StoreRow<T>(c + r * block.cols, block.cols, out + r * grid.cols);
    }
  }
}

// The x of `source`, at its place in the gathered one of `rank`.
template <class T>
void GatherOperand(const MatmulShape& s, const MatmulOperands& operands, int rank, int source) {
  const size_t rows = s.outer * s.rows, inner = s.products[0].inner;
  for (size_t g = 0; g < s.batch; ++g) {
    CopyGathered(s, source, operands.x<T>(0, source) + g * rows * inner, g, 0, rows,
                 operands.out<T>(s.products.size(), rank));
  }
}

// --- Sliced ---------------------------------------------------------------------

template <class T>
struct SlicedAllGatherMatmul {
  Word* last;
  Inbox<T> inbox;

  static SlicedAllGatherMatmul Carve(Carver& carver, int size, size_t capacity) {
    Word* const last = carver.Take<Word>(1);
    return {last, Inbox<T>::Carve(carver, size, capacity)};
  }
  // A slot has room for a row at least.
  static size_t Capacity(const MatmulShape& s) {
    return s.products[0].inner > kBlockElements ? RoundUp(s.products[0].inner, kBlockElements)
                                                : kBlockElements;
  }

  // Blocks of rows of x; in each, source by source.
  template <class Out, class Threads, class Link>
  void Run(const Threads& threads, Link& link, const MatmulShape& s, const MatmulOperands& operands,
           bool gathered) const {
    const int rank = link.rank(), size = link.size();
    const size_t inner = s.products[0].inner, rows = s.outer * s.rows;
    size_t widest = inner;
    for (const Product& p : s.products) widest = p.cols > widest ? p.cols : widest;
    const size_t fit = inner == 0 ? rows : inbox.capacity / inner;
    const size_t step_rows = Min(TallBlockRows(widest), fit + (fit == 0));
    const size_t steps = CeilDiv(rows, step_rows);
    Scratch<Acc<T>> scratch;
    ForChunksInSequence(
        threads, last, s.batch * steps, 1, [&](uint64_t sequence, size_t i, size_t) {
          const size_t batch = i / steps, row = i % steps * step_rows;
          const size_t n = Min(step_rows, rows - row);
          const T* const mine = operands.x<T>(0, rank) + (batch * rows + row) * inner;
          for (int k = 1; k < size; ++k) {
            inbox.Send(threads, link, sequence, Rotated(rank, k, size),
                       [&](T* slot) { Copy(threads, mine, n * inner, slot); });
          }
          for (int step = 0; step < size; ++step) {
            const int source = OwnFirst(rank, step, size);
            const T* const x =
                source == rank ? mine : inbox.Receive(threads, link, sequence, source);
            if (gathered) {
              CopyGathered(s, source, x, batch, row, n, operands.out<T>(s.products.size(), rank));
            }
            Multiply<Out>(s, operands, rank, step, source, x, batch, row, n, scratch);
          }
        });
  }

 private:
  // Where x is cut along the inner dimension, the sources' products are added.
  template <class Out>
  void Multiply(const MatmulShape& s, const MatmulOperands& operands, int rank, int step,
                int source, const T* x, size_t batch, size_t row, size_t rows,
                Scratch<Acc<T>>& scratch) const {
    const GatheredShape whole(s);
    const RowMap map = whole.RowsFrom(s, source);
    const bool adds = s.cut == Cut::kInner;
    const size_t g = whole.BatchFrom(s, source, batch);
    size_t all_cols = 0, before = 0;
    for (const Product& p : s.products) all_cols += p.cols;
    for (size_t i = 0; i < s.products.size(); ++i) {
      const size_t cols = s.products[i].cols;
      if (cols == 0) continue;
      Out* const out = operands.out<Out>(i, rank) + g * whole.rows * cols;
      if constexpr (kInPlace<T, Out>) {
        if (map.InOneRun(row, rows)) {
          MultiplyRows<T>(s, operands, source, x, rows, rank, i, g, 0, cols, adds && step > 0,
                          out + map.At(row) * cols, cols);
          continue;
        }
      }
      Acc<T>* const c = scratch.Get(rows * all_cols) + rows * before;
      before += cols;
      MultiplyRows<T>(s, operands, source, x, rows, rank, i, g, 0, cols, adds && step > 0, c, cols);
      if (adds && step + 1 < s.ranks) continue;
      for (size_t r = 0; r < rows; ++r) {
        StoreRow<T>(c + r * cols, cols, out + map.At(row + r) * cols);
      }
    }
  }
};

// The op, as its handler and its test take it.
struct AllGatherMatmul {
  static constexpr bool kScatters = false, kGathers = true;

  // The blocks of each rank's results, and if asked for a copy of each rank's x to each.
  static size_t Tasks(const MatmulShape& s, bool gathered) {
    return s.ranks * (GatherGrids(s).size() + (gathered ? s.ranks : 0));
  }
  template <class T, class Out>
  static void RunTask(const MatmulShape& s, const MatmulOperands& operands, size_t task, bool) {
    const int rank = static_cast<int>(task % s.ranks);
    const GatherGrids all(s);
    const size_t index = task / s.ranks, blocks = all.size();
    if (index < blocks) return AllGatherMatmulBlock<T, Out>(s, operands, all, rank, index);
    GatherOperand<T>(s, operands, rank, static_cast<int>(index - blocks));
  }

  template <class T>
  using Sliced = SlicedAllGatherMatmul<T>;
  template <class T, class Out, class Link>
  static void RunSliced(const Sliced<T>& sliced, Link& link, const MatmulShape& s,
                        const MatmulOperands& operands, bool gathered) {
    sliced.template Run<Out>(OneThread{}, link, s, operands, gathered);
  }
};

}  // namespace jax_overlap

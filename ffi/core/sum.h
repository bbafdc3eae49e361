// Sums of rows in rank order: the one place where the ops add.
//
// out[i] = row(0)[i] + row(1)[i] + ... from left to right, each element widened
// to its accumulator and rounded once at the end. The order depends on ranks
// only, so every rank that sums the same rows gets the same bits, in every run.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/annotations.h"
#include "core/dtype.h"
#include "core/mutants.h"
#include "core/schedule.h"
#include "core/threads.h"

namespace jax_overlap {

// On the host: memcpy past the caches, for outputs that do not fit into them: it saves reading
// the lines that are overwritten. StreamFence() orders it before a later release.
void StreamCopy(const void* from, size_t bytes, void* to);
void StreamFence();

#if !defined(__CUDACC__)
// Vectorised loops over one tile, compiled in sum.cc for several instruction sets.
#define JO_DECLARE_TILE_KERNELS(T)                                                      \
  void WidenTile(const T* row, size_t n, Acc<T>* acc);                                  \
  void AddTile(const T* row, size_t n, Acc<T>* acc);                                    \
  void AddTile4(const T* a, const T* b, const T* c, const T* d, size_t n, Acc<T>* acc); \
  void NarrowTile(const Acc<T>* acc, size_t n, T* out);
JO_DECLARE_TILE_KERNELS(float)
JO_DECLARE_TILE_KERNELS(double)
JO_DECLARE_TILE_KERNELS(BFloat16)
JO_DECLARE_TILE_KERNELS(Float16)
JO_DECLARE_TILE_KERNELS(int32_t)
JO_DECLARE_TILE_KERNELS(int8_t)
#undef JO_DECLARE_TILE_KERNELS

constexpr size_t kSumTile = 1024;  // elements; the accumulators stay in the L1 cache
#endif

// Adds `x` to `acc` as the accumulator does (or, as a mutant, in the type of the data).
template <class T>
JO_HD Acc<T> Accumulate(Acc<T> acc, T x) {
  const Acc<T> sum = Add(acc, Numeric<T>::Widen(x));
  return JO_MUTANT("half_accumulate") ? Numeric<T>::Widen(Numeric<T>::Narrow(sum)) : sum;
}

// Stores an accumulator as T, or as itself where partial sums travel on.
template <class T>
JO_HD void StoreSum(Acc<T> sum, T* out) {
  *out = Numeric<T>::Narrow(sum);
}
template <class T, class A, class = std::enable_if_t<!std::is_same<T, A>::value>>
JO_HD void StoreSum(A sum, A* out) {
  *out = sum;
}

#if !defined(__CUDACC__)
// The sum of elements [begin, begin + n) of the rows, several rows in one pass.
template <class T, class Row>
inline void SumTile(int rows, Row row, size_t begin, size_t n, Acc<T>* acc) {
  WidenTile(row(0) + begin, n, acc);
  if (JO_MUTANT("half_accumulate")) {
    for (int r = 1; r < rows; ++r) {
      for (size_t i = 0; i < n; ++i) acc[i] = Accumulate<T>(acc[i], row(r)[begin + i]);
    }
    return;
  }
  int r = 1;
  for (; r + 4 <= rows; r += 4) {
    AddTile4(row(r) + begin, row(r + 1) + begin, row(r + 2) + begin, row(r + 3) + begin, n, acc);
  }
  for (; r < rows; ++r) AddTile(row(r) + begin, n, acc);
}
#endif

#if defined(__CUDACC__)
// Pack `first` of the sum and each a `step` after the last, kEach in all. The loads of kRows
// rows are under way at once.
template <class T, int kEach, int kRows, class Out, class Row>
JO_HD void SumSomePacks(int rows, Row row, size_t first, size_t step, Out* out) {
  constexpr int kCount = Pack<T>::kCount;
  struct alignas(16) Sums {
    Out values[kCount];
  };
  const auto load = [&](int r, int e) {
    return reinterpret_cast<const Pack<T>*>(row(r))[first + e * step];
  };
  Pack<T> own[kEach];
  Acc<T> sums[kEach][kCount];
  const auto start = [&](int e) {
    for (int j = 0; j < kCount; ++j) sums[e][j] = Numeric<T>::Widen(own[e].values[j]);
  };
  JO_UNROLL
  for (int e = 0; e < kEach; ++e) own[e] = load(0, e);
  for (int begin = 1; begin < rows; begin += kRows) {
    Pack<T> some[kRows][kEach];
    JO_UNROLL
    for (int k = 0; k < kRows; ++k) {
      JO_UNROLL
      for (int e = 0; e < kEach; ++e) {
        if (begin + k < rows) some[k][e] = load(begin + k, e);
      }
    }
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (begin == 1) start(e);  // after the loads, as it waits for one
      JO_UNROLL
      for (int k = 0; k < kRows; ++k) {
        if (begin + k >= rows) break;
        for (int j = 0; j < kCount; ++j) {
          sums[e][j] = Accumulate<T>(sums[e][j], some[k][e].values[j]);
        }
      }
    }
  }
  JO_UNROLL
  for (int e = 0; e < kEach; ++e) {
    if (rows == 1) start(e);
    Sums result;
    for (int j = 0; j < kCount; ++j) StoreSum<T>(sums[e][j], result.values + j);
    reinterpret_cast<Sums*>(out)[first + e * step] = result;
  }
}

// The elements that can be read 16 bytes at a time; returns how many these are.
template <class T, class Out, class Threads, class Row>
JO_HD size_t SumPacks(const Threads& threads, int rows, Row row, size_t n, Out* out) {
  bool aligned = IsPackAligned(out);
  for (int r = 0; r < rows; ++r) aligned = aligned && IsPackAligned(row(r));
  if (!aligned) return 0;
  // As much at once as fits into the registers.
  constexpr int kRows = sizeof(T) == 1 ? 2 : 4;
  const size_t packs = n / Pack<T>::kCount, step = threads.count();
  size_t next = threads.index();
  if (rows == 2) {
    if constexpr (sizeof(T) != 1) {
      for (; next + 3 * step < packs; next += 4 * step) {
        SumSomePacks<T, 4, 1>(2, row, next, step, out);
      }
    }
    for (; next + step < packs; next += 2 * step) {
      SumSomePacks<T, 2, 1>(2, row, next, step, out);
    }
  }
  for (; next < packs; next += step) SumSomePacks<T, 1, kRows>(rows, row, next, step, out);
  return packs * Pack<T>::kCount;
}
#endif

template <class T, class Out, class Threads, class Row>
JO_HD void SumRows(const Threads& threads, int rows, Row row, size_t n, Out* out) {
  if (JO_MUTANT("skip_peer") && rows > 1) --rows;
#if defined(__CUDACC__)
  const size_t packed = SumPacks<T>(threads, rows, row, n, out);
  for (size_t i = packed + threads.index(); i < n; i += threads.count()) {
    Acc<T> sum = Numeric<T>::Widen(row(0)[i]);
    for (int r = 1; r < rows; ++r) sum = Accumulate<T>(sum, row(r)[i]);
    StoreSum<T>(sum, out + i);
  }
#else
  constexpr bool kInPlace = std::is_same<Out, Acc<T>>::value;
  static_assert(kInPlace || std::is_same<Out, T>::value,
                "a sum is stored as the data or as its accumulator");
  Acc<T> accumulators[kInPlace ? 1 : kSumTile];
  for (size_t begin = threads.index() * kSumTile; begin < n; begin += threads.count() * kSumTile) {
    const size_t m = Min(kSumTile, n - begin);
    if constexpr (kInPlace) {
      SumTile<T>(rows, row, begin, m, out + begin);
    } else {
      SumTile<T>(rows, row, begin, m, accumulators);
      NarrowTile(accumulators, m, out + begin);
    }
  }
#endif
}

}  // namespace jax_overlap

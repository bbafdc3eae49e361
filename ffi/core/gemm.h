// The matmul of one thread on the host, by Eigen: the one place where ops multiply.
//
// Half types are widened, so that every type accumulates in Acc<T>. The order in which
// the products of an element are added depends on the sizes only.
#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace jax_overlap {

// C[m, n] = A[m, k] B, of rows that are lda, ldb and ldc elements apart. B is [k, n],
// or if `transposed` [n, k].
struct GemmShape {
  size_t m, n, k;
  size_t lda, ldb, ldc;
  bool transposed;
};

// Stores the product in `c`, or adds it if `accumulate`.
template <class T>
void Gemm(const GemmShape& shape, const T* a, const T* b, bool accumulate, Acc<T>* c);

}  // namespace jax_overlap

// Eigen's product, compiled once for each instruction set (see gemm.cc), each time under
// other names: JO_GEMM is the kernel's, and Eigen's namespace is renamed by the build
// too, as the linker would otherwise keep one version of each of its templates.
#include <Eigen/Core>

#include "core/gemm.h"

namespace jax_overlap {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class M>
using View = Eigen::Map<M, Eigen::Unaligned, Eigen::OuterStride<>>;
using Eigen::Index;

template <class T, class B>
void Store(const View<const Matrix<T>>& a, const B& b, bool accumulate, View<Matrix<T>>& c) {
  if (accumulate) {
    c.noalias() += a * b;
  } else {
    c.noalias() = a * b;
  }
}

template <class T>
void Product(const GemmShape& s, const T* a, const T* b, bool accumulate, T* c) {
  const auto i = [](size_t n) { return static_cast<Index>(n); };
  const View<const Matrix<T>> left(a, i(s.m), i(s.k), Eigen::OuterStride<>(i(s.lda)));
  View<Matrix<T>> out(c, i(s.m), i(s.n), Eigen::OuterStride<>(i(s.ldc)));
  const Eigen::OuterStride<> stride(i(s.ldb));
  if (s.transposed) {
    const View<const Matrix<T>> right(b, i(s.n), i(s.k), stride);
    Store<T>(left, right.transpose(), accumulate, out);
  } else {
    const View<const Matrix<T>> right(b, i(s.k), i(s.n), stride);
    Store<T>(left, right, accumulate, out);
  }
}

}  // namespace

void JO_GEMM(const GemmShape& s, const float* a, const float* b, bool accumulate, float* c) {
  Product(s, a, b, accumulate, c);
}
void JO_GEMM(const GemmShape& s, const double* a, const double* b, bool accumulate, double* c) {
  Product(s, a, b, accumulate, c);
}

}  // namespace jax_overlap

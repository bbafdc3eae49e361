#include "core/gemm.h"

#include <algorithm>
#include <memory>

#include "core/schedule.h"
#include "core/sum.h"

namespace jax_overlap {

// gemm_kernels.cc, for any processor and (JO_GEMM_X86) for x86-64-v3 and -v4.
#define JO_DECLARE_GEMM(name)                                                               \
  void name(const GemmShape& s, const float* a, const float* b, bool accumulate, float* c); \
  void name(const GemmShape& s, const double* a, const double* b, bool accumulate, double* c);
JO_DECLARE_GEMM(GemmBase)
#if defined(JO_GEMM_X86)
JO_DECLARE_GEMM(GemmV3)
JO_DECLARE_GEMM(GemmV4)
#endif
#undef JO_DECLARE_GEMM

namespace {

template <class T>
using Kernel = void (*)(const GemmShape&, const T*, const T*, bool, T*);

template <class T>
Kernel<T> BestKernel() {
#if defined(JO_GEMM_X86)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return &GemmV4;
  if (v3) return &GemmV3;
#endif
  return &GemmBase;
}

template <class T>
void CallKernel(const GemmShape& s, const T* a, const T* b, bool accumulate, T* c) {
  static const Kernel<T> kernel = BestKernel<T>();
  kernel(s, a, b, accumulate, c);
}

// A block of a matrix of half floats, widened into `out`, row after row.
template <class T>
void Widen(const T* from, size_t stride, size_t rows, size_t cols, float* out) {
  for (size_t r = 0; r < rows; ++r) WidenTile(from + r * stride, cols, out + r * cols);
}

constexpr size_t kBlock = 512;  // of k and of n: a widened block of B is 1 MB

template <class T>
void WidenedGemm(const GemmShape& s, const T* a, const T* b, bool accumulate, float* c) {
  const size_t depth = Min(s.k, kBlock), width = Min(s.n, kBlock);
  const std::unique_ptr<float[]> left(new float[s.m * depth]), right(new float[depth * width]);
  if (s.k == 0) return CallKernel<float>(s, nullptr, nullptr, accumulate, c);
  for (size_t k = 0; k < s.k; k += kBlock) {
    const size_t dk = Min(kBlock, s.k - k);
    Widen(a + k, s.lda, s.m, dk, left.get());
    for (size_t n = 0; n < s.n; n += kBlock) {
      const size_t dn = Min(kBlock, s.n - n);
      if (s.transposed) {
        Widen(b + n * s.ldb + k, s.ldb, dn, dk, right.get());
      } else {
        Widen(b + k * s.ldb + n, s.ldb, dk, dn, right.get());
      }
      const GemmShape block{s.m, dn, dk, dk, s.transposed ? dk : dn, s.ldc, s.transposed};
      CallKernel<float>(block, left.get(), right.get(), accumulate || k > 0, c + n);
    }
  }
}

}  // namespace

template <>
void Gemm(const GemmShape& s, const float* a, const float* b, bool accumulate, float* c) {
  CallKernel(s, a, b, accumulate, c);
}
template <>
void Gemm(const GemmShape& s, const double* a, const double* b, bool accumulate, double* c) {
  CallKernel(s, a, b, accumulate, c);
}
template <>
void Gemm(const GemmShape& s, const BFloat16* a, const BFloat16* b, bool accumulate, float* c) {
  WidenedGemm(s, a, b, accumulate, c);
}
template <>
void Gemm(const GemmShape& s, const Float16* a, const Float16* b, bool accumulate, float* c) {
  WidenedGemm(s, a, b, accumulate, c);
}

}  // namespace jax_overlap

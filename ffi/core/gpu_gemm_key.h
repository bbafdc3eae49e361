// What a product of core/gpu_gemm.h is, apart from where its matrices are.
#pragma once

#include <cstdint>
#include <string>

namespace jax_overlap {

enum class GemmType : int32_t { kF32 = 0, kF64 = 1, kBF16 = 2, kF16 = 3, kE4M3 = 4, kE5M2 = 5 };

inline bool IsFloat8(GemmType type) { return type == GemmType::kE4M3 || type == GemmType::kE5M2; }

inline int64_t SizeOf(GemmType type) {
  return type == GemmType::kF64 ? 8 : type == GemmType::kF32 ? 4 : IsFloat8(type) ? 1 : 2;
}

struct GemmKey {
  int64_t m, n, k, batch;
  int64_t ldx, ldw, ldc, ldd;                  // elements from row to row
  int64_t x_block, w_block, c_block, d_block;  // from matrix to matrix
  GemmType in, in_w, out;                      // of x, w, c and d; only float8 types may differ
  int32_t transposed;                          // w is [n, k]
  int32_t accumulates;                         // there is a c
  int32_t fast;                                // float32 as TF32; float8 in short accumulators
  int32_t x_align, w_align, c_align, d_align;  // bytes at which all matrices begin

  // For a file; without the distances, which do not matter.
  std::string Text() const {
    std::string text;
    for (const int64_t value :
         {m, n, k, batch, ldx, ldw, ldc, ldd, static_cast<int64_t>(in), static_cast<int64_t>(in_w),
          static_cast<int64_t>(out), int64_t{transposed}, int64_t{accumulates}, int64_t{fast},
          int64_t{x_align}, int64_t{w_align}, int64_t{c_align}, int64_t{d_align},
          int64_t{w_block == 0}}) {
      text += std::to_string(value) + ',';
    }
    return text;
  }
  // With all.
  std::string FullText() const {
    std::string text = Text();
    for (const int64_t value : {x_block, w_block, c_block, d_block}) {
      text += std::to_string(value) + ',';
    }
    return text;
  }
};

}  // namespace jax_overlap

// What the benchmarks of the fused matmuls' launches measure.
#pragma once

#include <cstdint>

#include "ops/matmul_launch.h"

namespace jax_overlap {

// M, K, N of the whole problem: K is cut for sums, N for gathers.
struct Problem {
  int64_t m, k, n;
};
constexpr Problem kProblems[] = {{8192, 8192, 8192},  {8192, 28672, 8192}, {4096, 14336, 4096},
                                 {16384, 4096, 4096}, {2048, 8192, 8192},  {512, 8192, 8192},
                                 {64, 8192, 8192}};

struct Kind {
  MatmulKind kind;
  const char* op;
};
constexpr Kind kKinds[] = {{MatmulKind::kScatter, "matmul_reduce_scatter"},
                           {MatmulKind::kGather, "all_gather_matmul"},
                           {MatmulKind::kReduce, "matmul_all_reduce"}};

// Of bfloat16, by rows; m, k and n are those of a rank's plain product.
inline MatmulSpec SpecOf(MatmulKind kind, int ranks, int64_t m, int64_t k, int64_t n) {
  const size_t rows = kind == MatmulKind::kGather ? m / ranks : m;
  const MatmulShape shape{
      Cut::kRows, ranks, 1, 1, rows, {{static_cast<size_t>(k), static_cast<size_t>(n), false}}};
  return {kind, shape, 1, GemmType::kBF16, GemmType::kBF16, GemmType::kBF16, false, false};
}

inline MatmulStep PlainProduct(int64_t m, int64_t k, int64_t n) {
  MatmulStep step = {};
  step.kind = StepKind::kProduct;
  step.m = m;
  step.n = n;
  step.k = k;
  step.x = {{Space::kX, 0, 0, 0}, 0, k};
  step.w = {{Space::kW, 0, 0, 0}, 0, n};
  step.c = step.d = {{Space::kOut, 0, 0, 0}, 0, n};
  return step;
}

}  // namespace jax_overlap

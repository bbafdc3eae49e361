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

}  // namespace jax_overlap

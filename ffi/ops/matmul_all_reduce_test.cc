#include "ops/matmul_all_reduce.h"

#include "ops/matmul_test.h"

int main() { jax_overlap::RunMatmulTests<jax_overlap::MatmulAllReduce>("matmul_all_reduce_test"); }

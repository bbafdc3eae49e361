#include "ops/matmul_reduce_scatter.h"

#include "ops/matmul_test.h"

int main() {
  jax_overlap::RunMatmulTests<jax_overlap::MatmulReduceScatter>("matmul_reduce_scatter_test");
}

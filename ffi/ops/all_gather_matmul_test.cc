#include "ops/all_gather_matmul.h"

#include "ops/matmul_test.h"

int main() { jax_overlap::RunMatmulTests<jax_overlap::AllGatherMatmul>("all_gather_matmul_test"); }

"""Faults between GPU ranks that call the fused matmuls: gpu_faults_contract.py.

Every case for one op; for the others those in which ranks wait, each in its own way. In
ONE process:

    JAX_PLATFORMS=cuda pytest tests/gpu/matmuls_faults_test.py
"""

import gpu_faults_contract
from absl.testing import absltest, parameterized

others = parameterized.parameters("all_gather_matmul", "matmul_all_reduce")


class MatmulReduceScatterFaults(gpu_faults_contract.EveryFault):
    op = "matmul_reduce_scatter"
    # A rank says where it arrives what it calls, so nobody waits for it in vain.
    other_shape = "rank {other} .*a mismatch"


class OtherMatmulsFaults(gpu_faults_contract.Faults):
    @others
    def test_a_rank_that_dies(self, op):
        self.check_a_rank_that_dies(op, 3)

    @others
    def test_a_rank_that_dies_in_a_psum(self, op):
        """What small ones are: NaN for what is gathered as bits, too."""
        self.check_a_rank_that_dies(op, 2, by_psum=True)

    @others
    def test_a_rank_that_never_calls_again(self, op):
        self.check_a_rank_that_never_calls(op, "again")


if __name__ == "__main__":
    absltest.main()

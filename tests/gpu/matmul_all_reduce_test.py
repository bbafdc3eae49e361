"""jax_overlap.matmul_all_reduce on GPUs: matmul_all_reduce_contract.py."""

from absl.testing import absltest
from matmul_all_reduce_contract import (
    MatmulAllReduceBatching as MatmulAllReduceBatching,
)
from matmul_all_reduce_contract import MatmulAllReduceBits as MatmulAllReduceBits
from matmul_all_reduce_contract import MatmulAllReduceForms as MatmulAllReduceForms
from matmul_all_reduce_contract import (
    MatmulAllReducePrograms as MatmulAllReducePrograms,
)
from matmul_all_reduce_contract import (
    MatmulAllReduceTransforms as MatmulAllReduceTransforms,
)
from matmul_all_reduce_contract import MatmulAllReduceValues as MatmulAllReduceValues

if __name__ == "__main__":
    absltest.main()

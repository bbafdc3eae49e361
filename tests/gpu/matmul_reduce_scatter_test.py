"""jax_overlap.matmul_reduce_scatter on GPUs: matmul_reduce_scatter_contract.py.

Not its programs forced to be "sliced": there they are anyway.
"""

from absl.testing import absltest
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterBatching as MatmulReduceScatterBatching,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterForms as MatmulReduceScatterForms,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterLastBatching as MatmulReduceScatterLastBatching,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterLastTransforms as MatmulReduceScatterLastTransforms,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterPrograms as MatmulReduceScatterPrograms,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterTransforms as MatmulReduceScatterTransforms,
)
from matmul_reduce_scatter_contract import (
    MatmulReduceScatterValues as MatmulReduceScatterValues,
)
from matmul_reduce_scatter_contract import ScatteredBits as ScatteredBits

if __name__ == "__main__":
    absltest.main()

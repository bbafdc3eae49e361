"""jax_overlap.all_gather_matmul on CPU: all_gather_matmul_contract.py."""

from absl.testing import absltest
from all_gather_matmul_contract import (
    AllGatherMatmulBatching as AllGatherMatmulBatching,
)
from all_gather_matmul_contract import AllGatherMatmulForms as AllGatherMatmulForms
from all_gather_matmul_contract import (
    AllGatherMatmulLastBatching as AllGatherMatmulLastBatching,
)
from all_gather_matmul_contract import (
    AllGatherMatmulLastTransforms as AllGatherMatmulLastTransforms,
)
from all_gather_matmul_contract import (
    AllGatherMatmulPrograms as AllGatherMatmulPrograms,
)
from all_gather_matmul_contract import (
    AllGatherMatmulSlicedPrograms as AllGatherMatmulSlicedPrograms,
)
from all_gather_matmul_contract import (
    AllGatherMatmulTransforms as AllGatherMatmulTransforms,
)
from all_gather_matmul_contract import AllGatherMatmulTypes as AllGatherMatmulTypes
from all_gather_matmul_contract import AllGatherMatmulValues as AllGatherMatmulValues

if __name__ == "__main__":
    absltest.main()

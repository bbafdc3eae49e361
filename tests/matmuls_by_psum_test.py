"""The fused matmuls by one psum on CPU: matmuls_by_psum_contract.py.

Without the forms of matmul_all_reduce, of which nothing is left but a matmul and a
psum: they run on GPUs.
"""

from absl.testing import absltest
from matmuls_by_psum_contract import AllReduceValues as AllReduceValues
from matmuls_by_psum_contract import Bits as Bits
from matmuls_by_psum_contract import Default as Default
from matmuls_by_psum_contract import GatherForms as GatherForms
from matmuls_by_psum_contract import GatherTransforms as GatherTransforms
from matmuls_by_psum_contract import GatherValues as GatherValues
from matmuls_by_psum_contract import Groups as Groups
from matmuls_by_psum_contract import ScatterForms as ScatterForms
from matmuls_by_psum_contract import ScatterPrograms as ScatterPrograms
from matmuls_by_psum_contract import ScatterValues as ScatterValues

if __name__ == "__main__":
    absltest.main()

"""The fused matmuls by one psum on CPU: matmuls_by_psum_contract.py.

Without the forms of matmul_all_reduce, of which nothing is left but a matmul and a
psum, and without the values of all but one op: they run on GPUs.
"""

from absl.testing import absltest
from matmuls_by_psum_contract import Bits as Bits
from matmuls_by_psum_contract import Default as Default
from matmuls_by_psum_contract import GatherForms as GatherForms
from matmuls_by_psum_contract import GatherTransforms as GatherTransforms
from matmuls_by_psum_contract import GatherValues as GatherValues
from matmuls_by_psum_contract import Groups as Groups
from matmuls_by_psum_contract import ScatterForms as ScatterForms
from matmuls_by_psum_contract import ScatterPrograms as ScatterPrograms

if __name__ == "__main__":
    absltest.main()

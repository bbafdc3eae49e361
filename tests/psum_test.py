"""jax_overlap.psum on CPU: psum_contract.py."""

from absl.testing import absltest
from psum_contract import PsumBatching as PsumBatching
from psum_contract import PsumBits as PsumBits
from psum_contract import PsumPrograms as PsumPrograms
from psum_contract import PsumTransforms as PsumTransforms
from psum_contract import PsumValues as PsumValues

if __name__ == "__main__":
    absltest.main()

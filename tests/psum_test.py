"""jax_overlap.psum: the contract of all ops, and the bits that psum promises."""

import op_contract
import op_contract_batching
import op_contract_programs
import op_contract_transforms
import psum_bits
from absl.testing import absltest
from op_descriptions import PSUM


class PsumValues(op_contract.Values):
    op = PSUM


class PsumPrograms(op_contract_programs.Programs):
    op = PSUM


class PsumTransforms(op_contract_transforms.Transforms):
    op = PSUM


class PsumBatching(op_contract_batching.Batching):
    op = PSUM


class PsumBits(psum_bits.PsumBits):
    pass


if __name__ == "__main__":
    absltest.main()

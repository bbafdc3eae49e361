"""Faults between GPU ranks that call psum: gpu_faults_contract.py. In ONE process:

JAX_PLATFORMS=cuda pytest tests/gpu/psum_faults_test.py
"""

import gpu_faults_contract
from absl.testing import absltest


class PsumFaults(gpu_faults_contract.EveryFault):
    op = "psum"


if __name__ == "__main__":
    absltest.main()

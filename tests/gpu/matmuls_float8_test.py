"""The fused matmuls of float8 on GPUs: matmuls_float8_contract.py."""

from absl.testing import absltest
from matmuls_float8_contract import AllGather as AllGather
from matmuls_float8_contract import AllReduce as AllReduce
from matmuls_float8_contract import ReduceScatter as ReduceScatter

if __name__ == "__main__":
    absltest.main()

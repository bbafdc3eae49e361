"""Collectives and collective matmuls for JAX that hide communication behind compute.

Inside `jax.shard_map`, write `jax_overlap.psum(x, "tp")` for `jax.lax.psum(x, "tp")`:
same values, same gradients, same sharding types. For a function that uses `jax.lax`
there is `overlap(fn)`, for global arrays `jax_overlap.sharded`. `explain(fn, *args)`
says what each op will do and why; `info()` what is loaded.
"""

from jax_overlap import sharded as sharded
from jax_overlap._info import info as info
from jax_overlap._init import init as init
from jax_overlap.errors import OverlapError as OverlapError
from jax_overlap.errors import clear_errors as clear_errors
from jax_overlap.errors import last_errors as last_errors
from jax_overlap.explain import explain as explain
from jax_overlap.ops.all_gather import all_gather as all_gather
from jax_overlap.ops.all_gather_matmul import all_gather_matmul as all_gather_matmul
from jax_overlap.ops.all_to_all import all_to_all as all_to_all
from jax_overlap.ops.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
from jax_overlap.ops.matmul_reduce_scatter import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from jax_overlap.ops.psum import psum as psum
from jax_overlap.ops.psum_scatter import psum_scatter as psum_scatter
from jax_overlap.rewrite import overlap as overlap

__version__ = "0.1.0"

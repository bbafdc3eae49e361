"""Time of `matmul_reduce_scatter` against `jax.lax.psum_scatter` of a matmul."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from jax import lax
from jax.sharding import PartitionSpec as P

from jax_overlap.bench import gpu_matmuls, matmuls

add_arguments = matmuls.add_arguments

_OP = gpu_matmuls.Op(
    "matmul_reduce_scatter",
    specs=(P(None, "x"), P("x"), P("x")),
    collective=partial(lax.psum_scatter, tiled=True),
    gathers=False,
)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices."""
    return matmuls.run(_OP, args, ("in_place", "sliced"))

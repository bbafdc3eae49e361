"""Time of `all_gather_matmul` against `jax.lax.all_gather` and a matmul."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from jax import lax
from jax.sharding import PartitionSpec as P

from jax_overlap.bench import gpu_matmuls, matmuls

add_arguments = partial(matmuls.add_arguments, peers=("xla_windowed", "pallas"))

_OP = gpu_matmuls.Op(
    "all_gather_matmul",
    specs=(P("x"), P(None, "x"), P(None, "x")),
    collective=partial(lax.all_gather, tiled=True),
    gathers=True,
)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices."""
    return matmuls.run(_OP, args, ("in_place", "sliced"))

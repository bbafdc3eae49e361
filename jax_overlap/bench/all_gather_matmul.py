"""Time of `all_gather_matmul` against `jax.lax.all_gather` and a matmul."""

from __future__ import annotations

import argparse
from functools import partial

from jax import lax
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap.bench import matmuls

add_arguments = matmuls.add_arguments


def run(args: argparse.Namespace) -> list[dict]:
    """Measures and prints; one row for each size and number of devices."""
    calls = {
        "lax": lambda x, w, axis: lax.all_gather(x, axis, tiled=True) @ w,
        "in_place": partial(jax_overlap.all_gather_matmul, algorithm="in_place"),
        "sliced": partial(jax_overlap.all_gather_matmul, algorithm="sliced"),
    }
    return matmuls.run(
        "all_gather_matmul", args, calls, (P("x"), P(None, "x"), P(None, "x"))
    )

"""Time of `matmul_reduce_scatter` against `jax.lax.psum_scatter` of a matmul."""

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
        "lax": lambda x, w, axis: lax.psum_scatter(x @ w, axis, tiled=True),
        "in_place": partial(jax_overlap.matmul_reduce_scatter, algorithm="in_place"),
        "sliced": partial(jax_overlap.matmul_reduce_scatter, algorithm="sliced"),
    }
    return matmuls.run(
        "matmul_reduce_scatter", args, calls, (P(None, "x"), P("x"), P("x"))
    )

"""Time of `matmul_all_reduce` against `jax.lax.psum` of a matmul."""

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
        "lax": lambda x, w, axis: lax.psum(x @ w, axis),
        "in_place": partial(jax_overlap.matmul_all_reduce, algorithm="in_place"),
    }
    return matmuls.run("matmul_all_reduce", args, calls, (P(None, "x"), P("x"), P()))

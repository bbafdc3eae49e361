"""Time of `psum_scatter` against `jax.lax.psum_scatter`, over sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from jax_overlap.bench import collectives

add_arguments = collectives.add_arguments


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices."""
    return collectives.run("psum_scatter", args, cut=True, tiled=True)

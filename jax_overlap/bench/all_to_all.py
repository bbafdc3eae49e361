"""Time of `all_to_all` against `jax.lax.all_to_all`, over sizes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from jax_overlap.bench import collectives

add_arguments = collectives.add_arguments


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices."""
    return collectives.run(
        "all_to_all", args, cut=True, split_axis=0, concat_axis=0, tiled=True
    )

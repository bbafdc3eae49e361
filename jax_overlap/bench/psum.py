"""Time of `psum` against `jax.lax.psum`, over sizes and algorithms."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from jax_overlap.bench import collectives, gpu_calls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    collectives.add_arguments(parser)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=["auto"],
        choices=["auto", "one_shot", "two_shot", "nvrar"],
    )
    gpu_calls.add_arguments(parser)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices."""
    variants = {
        name: {"algorithm": None if name == "auto" else name}
        for name in args.algorithms
    }
    if args.gpu:
        return gpu_calls.run("psum", args, variants)
    return collectives.run("psum", args, variants)

"""The command `python -m jax_overlap.plan`, which draws who does what when.

    python -m jax_overlap.plan --op matmul_reduce_scatter --ranks 8 --out plan.png

`Plan`, what `jax_overlap.explain` returns, is at home in a module of its own: `-m`
warns of one that the package has imported already.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from jax_overlap import _timeline
from jax_overlap._plan import Plan as Plan

_DPI = 120


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_overlap.plan",
        description="Draws the timeline of an op: what each rank computes and sends "
        "when, by a model of jax_overlap.schedule. Nothing is run or measured.",
    )
    parser.add_argument("--op", choices=_timeline.OPS, default="matmul_reduce_scatter")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--sub-slices", type=int, default=1, help="pieces of a slice, sent one by one"
    )
    parser.add_argument(
        "--ratio",
        type=float,
        help="time to send a slice over time to compute it, of the matmuls (default "
        f"{_timeline.DEFAULT_RATIO})",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("plan.png"),
        help="a .png, .svg or .pdf (default %(default)s)",
    )
    return parser


def _summary(timeline: _timeline.Timeline) -> str:
    waits = max(timeline.time(rank, "wait") for rank in range(timeline.ranks))
    plural = "" if timeline.ranks == 1 else "s"
    return (
        f"{timeline.op}, {timeline.ranks} rank{plural}: {timeline.total:.2f} x the "
        f"{timeline.unit}, of which a rank waits {waits:.2f}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the picture; its arguments are those of the command."""
    args = _parser().parse_args(argv)
    try:
        timeline = _timeline.timeline(args.op, args.ranks, args.sub_slices, args.ratio)
    except ValueError as error:
        sys.exit(f"jax_overlap.plan: {error}")
    try:
        from jax_overlap import _plot
    except ModuleNotFoundError as error:
        sys.exit(
            f"jax_overlap.plan: drawing needs matplotlib ({error}). Install it: pip "
            "install matplotlib, or jax-overlap with the extra 'plot'."
        )
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        _plot.draw(timeline).savefig(args.out, dpi=_DPI)
    except (OSError, ValueError) as error:  # no such format, or nowhere to write
        sys.exit(f"jax_overlap.plan: --out {args.out}: {error}")
    print(_summary(timeline))
    print(f"Wrote {args.out}.")


if __name__ == "__main__":
    main()

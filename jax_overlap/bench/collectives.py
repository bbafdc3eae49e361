"""What the benchmarks of the collectives share: ours against that of `jax.lax`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap.bench import harness, rows

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BASELINE = "lax"


def parse_size(text: str) -> int:
    """Bytes of "64K", "4M" and the like."""
    unit = text[-1].upper() if text[-1].isalpha() else ""
    return int(text[: len(text) - len(unit)]) * _UNITS[unit]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all benchmarks of collectives."""
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[1 << k for k in range(10, 23, 2)],
        help="of one rank's operand, in bytes, such as 64K",
    )
    parser.add_argument("--dtype", type=harness.dtype_name, default="float32")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")


def run(
    op: str,
    args: argparse.Namespace,
    variants: dict[str, dict] | None = None,
    cut: bool = False,
    **options,
) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices.

    Args:
      op: the name of the function in `jax_overlap` and in `jax.lax`, called on vectors.
      args: what `add_arguments` has asked for.
      variants: options of `jax_overlap`'s function, by the name of the variant.
      cut: whether the length has to be a multiple of the ranks; if so, it is.
      **options: options of both functions.
    """
    harness.use_cpu_devices(max(args.devices))
    calls: dict[str, Callable] = {
        _BASELINE: functools.partial(getattr(jax.lax, op), **options)
    }
    for name, own in (variants or {"auto": {}}).items():
        calls[name] = functools.partial(getattr(jax_overlap, op), **options, **own)
    rows.say(
        f"time of jax_overlap.{op} over that of lax.{op}, {args.dtype}, awaited, "
        "medians of interleaved calls"
    )
    tasks = (
        _task(op, calls, Mesh(jax.devices()[:count], ("x",)), nbytes, args, cut)
        for count in args.devices
        for nbytes in args.sizes
    )
    yield from rows.measured(tasks, _line)


def _task(
    op: str,
    calls: dict[str, Callable],
    mesh: Mesh,
    nbytes: int,
    args: argparse.Namespace,
    cut: bool,
) -> rows.Task:
    dtype = jnp.dtype(args.dtype)
    ranks = mesh.devices.size
    unit = ranks if cut else 1
    length = max(1, nbytes // dtype.itemsize // unit) * unit
    about = {
        "op": op,
        "ranks": ranks,
        "bytes": length * dtype.itemsize,
        "dtype": args.dtype,
    }

    def make():
        values = np.random.default_rng(0).standard_normal(ranks * length)
        x = jax.device_put(values.astype(dtype), NamedSharding(mesh, P("x")))
        variants = {
            name: harness.on_ranks(call, mesh, [x], P("x"), P("x"))
            for name, call in calls.items()
        }
        return harness.compare(variants, _BASELINE, args.seconds)

    return about, make


def _line(row: dict) -> str:
    base = row["times"][_BASELINE]
    return (
        f"{row['ranks']} ranks {row['bytes'] / 1024:7.0f} KB  "
        f"lax {base['median_us']:8.1f} us "
        f"({base['p10_us']:.0f}-{base['p90_us']:.0f})  {harness.ratios(row)}"
    )

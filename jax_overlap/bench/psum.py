"""Time of `psum` against `jax.lax.psum`, over sizes and algorithms."""

from __future__ import annotations

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap.bench import harness

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BASELINE = "lax"


def parse_size(text: str) -> int:
    """Bytes of "64K", "4M" and the like."""
    unit = text[-1].upper() if text[-1].isalpha() else ""
    return int(text[: len(text) - len(unit)]) * _UNITS[unit]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[1 << k for k in range(10, 23, 2)],
        help="of one rank's operand, in bytes, such as 64K",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=["auto"],
        choices=["auto", "one_shot", "two_shot", "nvrar"],
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")


def run(args: argparse.Namespace) -> list[dict]:
    """Measures and prints; one row for each size and number of devices."""
    harness.use_cpu_devices(max(args.devices))
    rows = []
    print(
        f"time of jax_overlap.psum over that of lax.psum, {args.dtype}, awaited, "
        "medians of interleaved calls"
    )
    for count in args.devices:
        mesh = Mesh(jax.devices()[:count], ("x",))
        for nbytes in args.sizes:
            rows.append(_row(mesh, nbytes, args))
            print(_line(rows[-1]), flush=True)
    return rows


def _row(mesh: Mesh, nbytes: int, args: argparse.Namespace) -> dict:
    dtype = jnp.dtype(args.dtype)
    ranks = mesh.devices.size
    values = np.random.default_rng(0).standard_normal(ranks * nbytes // dtype.itemsize)
    x = jax.device_put(values.astype(dtype), NamedSharding(mesh, P("x")))

    def compiled(body):
        f = jax.shard_map(
            body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        f = jax.jit(f)
        return lambda: f(x)

    variants = {_BASELINE: compiled(lambda v: jax.lax.psum(v, "x"))}
    for name in args.algorithms:
        algorithm = None if name == "auto" else name
        variants[name] = compiled(
            lambda v, a=algorithm: jax_overlap.psum(v, "x", algorithm=a)
        )
    times = harness.interleave(variants, args.seconds)
    base = statistics.median(times[_BASELINE])
    return {
        "op": "psum",
        "ranks": ranks,
        "bytes": nbytes,
        "dtype": args.dtype,
        "times": {name: harness.summary(t) for name, t in times.items()},
        "ratio": {n: statistics.median(times[n]) / base for n in args.algorithms},
    }


def _line(row: dict) -> str:
    ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())
    base = row["times"][_BASELINE]
    return (
        f"{row['ranks']} ranks {row['bytes'] / 1024:7.0f} KB  "
        f"lax {base['median_us']:8.1f} us "
        f"({base['p10_us']:.0f}-{base['p90_us']:.0f})  {ratios}"
    )

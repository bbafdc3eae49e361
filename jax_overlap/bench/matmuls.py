"""What the benchmarks of the fused matmuls share: ours against those of `jax.lax`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_overlap.bench import harness

_BASELINE = "lax"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all benchmarks of fused matmuls."""
    parser.add_argument("--devices", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[512, 1024, 2048],
        help="m = n = k of the matmul of all ranks together",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")


def run(
    op: str,
    args: argparse.Namespace,
    calls: dict[str, Callable],
    specs: tuple[P, P, P],
) -> list[dict]:
    """Measures and prints; one row for each size and number of devices.

    Args:
      op: the public name.
      args: what `add_arguments` has asked for.
      calls: functions of (x, w, axis_name), by name; "lax" is the baseline.
      specs: the shardings of x, w and the result, of axis "x".
    """
    harness.use_cpu_devices(max(args.devices))
    print(
        f"time of jax_overlap.{op} over that of lax, {args.dtype}, m = n = k, awaited"
    )
    rows = []
    for count in args.devices:
        mesh = Mesh(jax.devices()[:count], ("x",))
        for size in args.sizes:
            rows.append(_row(op, calls, specs, mesh, size, args))
            print(_line(rows[-1]), flush=True)
    return rows


def _row(op, calls, specs, mesh, size: int, args) -> dict:
    random = np.random.default_rng(0)

    def operand(spec):
        values = random.standard_normal((size, size)).astype(jnp.dtype(args.dtype))
        return jax.device_put(values, NamedSharding(mesh, spec))

    operands = [operand(spec) for spec in specs[:2]]

    variants = {
        name: harness.on_ranks(call, mesh, operands, specs[:2], specs[2])
        for name, call in calls.items()
    }
    return {
        "op": op,
        "ranks": mesh.devices.size,
        "size": size,
        "dtype": args.dtype,
        **harness.compare(variants, _BASELINE, args.seconds, at_least=11),
    }


def _line(row: dict) -> str:
    base = row["times"][_BASELINE]
    return (
        f"{row['ranks']} ranks {row['size']:5d}  lax {base['median_us'] / 1e3:8.2f} ms "
        f"({base['p10_us'] / 1e3:.2f}-{base['p90_us'] / 1e3:.2f})  "
        f"{harness.ratios(row)}"
    )

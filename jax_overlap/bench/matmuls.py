"""What the benchmarks of the fused matmuls share: ours against those of `jax.lax`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import jax_overlap
from jax_overlap.bench import gpu_matmuls, harness, rows

_BASELINE = "lax"


def add_arguments(
    parser: argparse.ArgumentParser, peers: Sequence[str] = ("xla_windowed",)
) -> None:
    """The options of all benchmarks of fused matmuls; peers: those on GPUs."""
    parser.add_argument("--devices", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[512, 1024, 2048],
        help="m = n = k of the matmul of all ranks together",
    )
    parser.add_argument(
        "--dtype",
        type=harness.dtype_name,
        help="default: float32, on GPUs bfloat16",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    gpu_matmuls.add_arguments(parser, peers)


def run(
    op: gpu_matmuls.Op, args: argparse.Namespace, algorithms: Iterable[str]
) -> Iterator[dict]:
    """Measures and prints; one row for each size and number of devices.

    Args:
      op: the op, and what it is made of.
      args: what `add_arguments` has asked for.
      algorithms: those to measure on CPU.
    """
    if args.gpu:
        yield from gpu_matmuls.run(op, args)
        return
    args.dtype = args.dtype or "float32"
    ours = getattr(jax_overlap, op.name)
    calls: dict[str, Callable] = {_BASELINE: op.serial}
    calls |= {name: partial(ours, algorithm=name) for name in algorithms}
    harness.use_cpu_devices(max(args.devices))
    rows.say(
        f"time of jax_overlap.{op.name} over that of lax, {args.dtype}, m = n = k, "
        "awaited"
    )
    tasks = (
        _task(op, calls, Mesh(jax.devices()[:count], ("x",)), size, args)
        for count in args.devices
        for size in args.sizes
    )
    yield from rows.measured(tasks, _line)


def _task(op, calls, mesh, size: int, args) -> rows.Task:
    about = {
        "op": op.name,
        "ranks": mesh.devices.size,
        "size": size,
        "dtype": args.dtype,
    }
    return about, partial(_row, op, calls, mesh, size, args)


def _row(op, calls, mesh, size: int, args) -> dict:
    random = np.random.default_rng(0)

    def operand(spec):
        values = random.standard_normal((size, size)).astype(jnp.dtype(args.dtype))
        return jax.device_put(values, NamedSharding(mesh, spec))

    operands = [operand(spec) for spec in op.specs[:2]]

    variants = {
        name: harness.on_ranks(call, mesh, operands, op.specs[:2], op.specs[2])
        for name, call in calls.items()
    }
    return harness.compare(variants, _BASELINE, args.seconds, at_least=11)


def _line(row: dict) -> str:
    base = row["times"][_BASELINE]
    return (
        f"{row['ranks']} ranks {row['size']:5d}  lax {base['median_us'] / 1e3:8.2f} ms "
        f"({base['p10_us'] / 1e3:.2f}-{base['p90_us'] / 1e3:.2f})  "
        f"{harness.ratios(row)}"
    )

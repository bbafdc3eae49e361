"""What a call of a collective costs in a program for GPUs: ours against `jax.lax`.

A program makes the call again and again, on its own result, and the time of a short
program is taken from that of a long one. XLA captures the calls in a graph, so what is
left is what a call costs in a model.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
import jax_overlap.testing
from jax_overlap.bench import harness

_SHORT, _LONG = 10, 110  # calls
_PASSES = 10  # of which the median is a round's


def add_arguments(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    """The options for GPUs."""
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="on all GPUs of the program: of one process, or of the ranks of "
        "`python -m jax_overlap.testing.launch`",
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="for each row, on GPUs"
    )


def start() -> tuple[Mesh, bool]:
    """The mesh of all GPUs, of axis "x", and whether ranks share one of them."""
    jax_overlap.testing.initialize()
    jax_overlap.init()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return mesh, jax_overlap.info()["gpu"]["ranks_on_a_gpu"] > 1


def run(op: str, args: argparse.Namespace, variants: dict[str, dict]) -> list[dict]:
    """Measures and prints; a row for each size, without and with a multiply between."""
    mesh, shared = start()
    # XLA's own kernels instead of NCCL: XLA_FLAGS, another run.
    baselines = [] if shared else ["lax"]
    rows = []
    if jax.process_index() == 0:
        print(
            f"us a call of {op} in a program, {args.dtype}, {mesh.devices.size} ranks, "
            f"median of {args.rounds} rounds (least-most)"
        )
        if shared:
            print("no jax.lax beside it: ranks share a GPU, where NCCL is slow")
    for nbytes in args.sizes:
        for multiply in (False, True):
            rows.append(_row(op, mesh, nbytes, multiply, variants, baselines, args))
            if jax.process_index() == 0:
                print(_line(rows[-1]), flush=True)
    return rows


def _row(op, mesh, nbytes, multiply, variants, baselines, args) -> dict:
    dtype = jnp.dtype(args.dtype)
    length = max(1, nbytes // dtype.itemsize)
    rows = np.random.default_rng(0).standard_normal((mesh.devices.size, length))
    x = jax.make_array_from_callback(
        rows.shape,
        NamedSharding(mesh, P("x")),
        lambda index: rows[index].astype(dtype),
    )
    calls: dict = {
        name: functools.partial(
            getattr(jax_overlap, op), implementation="native", **own
        )
        for name, own in variants.items()
    }
    calls |= {name: getattr(jax.lax, op) for name in baselines}
    programs = {
        name: [
            harness.on_ranks(
                _repeated(call, multiply, count), mesh, [x], P("x"), P("x")
            )
            for count in (_SHORT, _LONG)
        ]
        for name, call in calls.items()
    }
    for pair in programs.values():
        for program in pair * 2:
            jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds):  # as many on all ranks, and in one order
        for name, (short, long) in programs.items():
            difference = _seconds(long) - _seconds(short)
            times[name].append(difference / (_LONG - _SHORT) * 1e6)
    return {
        "op": op,
        "ranks": mesh.devices.size,
        "processes": jax.process_count(),
        "bytes": length * dtype.itemsize,
        "dtype": args.dtype,
        "multiply": multiply,
        "us_a_call": {
            name: {"median": statistics.median(t), "least": min(t), "most": max(t)}
            for name, t in times.items()
        },
    }


def _repeated(call, multiply, count):
    def local(x, axis_name):
        for _ in range(count):
            x = call(x, axis_name)
            if multiply:
                x = x * jnp.asarray(0.5, x.dtype)
        return x

    return local


def _seconds(program) -> float:
    times = []
    for _ in range(_PASSES):
        start = time.perf_counter()
        jax.block_until_ready(program())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _line(row: dict) -> str:
    times = ", ".join(
        f"{name} {t['median']:.2f} ({t['least']:.2f}-{t['most']:.2f})"
        for name, t in row["us_a_call"].items()
    )
    between = " and a multiply" if row["multiply"] else ""
    return f"{row['bytes'] / 1024:7.0f} KB{between}: {times}"

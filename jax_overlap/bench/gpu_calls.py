"""What a call of a collective costs in a program for GPUs: ours against `jax.lax`.

A program makes the call again and again, on its own result, and the time of a short
program is taken from that of a long one. XLA captures the calls in a graph, so what is
left is what a call costs in a model.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
import jax_overlap.testing
from jax_overlap.bench import gpu_values, harness, rows

# Calls of the two programs, and passes of each, of which the median is a round's.
_CALLS, _PASSES = (10, 110), 10
_LARGE_BYTES, _LARGE_CALLS, _LARGE_PASSES = 64 << 20, (2, 12), 3
_DEFAULT, _BASELINE = "default", "lax"


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


def require_gpus() -> None:
    """Ends the program if JAX has no GPUs, or native ops none that they can use."""
    jax_overlap.testing.initialize()
    try:
        platform = jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise SystemExit(
            f"--gpu: JAX has no device of JAX_PLATFORMS={asked!r} here. {error}"
        ) from None
    if platform != "gpu":
        raise SystemExit(
            f"--gpu: JAX has no GPU here, its devices are {jax.devices()}. Install "
            "jax[cuda13], or leave out --gpu."
        )
    jax_overlap.init()
    if why := jax_overlap.info()["gpu"]["why_not"]:
        raise SystemExit(f"--gpu: native ops cannot run here: {why}.")


def run(op: str, args: argparse.Namespace, variants: dict[str, dict]) -> Iterator[dict]:
    """Measures and prints; a row for each size, without and with a multiply between.

    Args:
      op: the name of the function in `jax_overlap` and in `jax.lax`.
      args: what `add_arguments` has asked for.
      variants: options of `jax_overlap`'s function, by the name of the variant;
        beside them it is measured as it is without options.
    """
    mesh, shared = start()
    ours = getattr(jax_overlap, op)
    calls = {
        name: functools.partial(ours, implementation="native", **own)
        for name, own in variants.items()
    }
    # XLA's own kernels instead of NCCL: XLA_FLAGS, another run.
    if not shared:
        calls |= {_DEFAULT: ours, _BASELINE: getattr(jax.lax, op)}
    rows.say(
        f"us a call of {op} in a program, {args.dtype}, {mesh.devices.size} ranks, "
        f"median of {args.rounds} rounds (least-most)"
    )
    if shared:
        rows.say("no jax.lax beside it: ranks share a GPU, where NCCL is slow")
    ratios = [] if shared else [f"{name} / lax" for name in calls if name != _BASELINE]
    rows.say(rows.table_head(["op", "bytes", "between", *calls, *ratios]))
    tasks = (
        _task(op, mesh, nbytes, multiply, calls, args)
        for nbytes in args.sizes
        for multiply in (False, True)
    )
    yield from rows.measured(tasks, _line)


def _task(op, mesh, nbytes, multiply, calls, args) -> rows.Task:
    dtype = jnp.dtype(args.dtype)
    length = max(1, nbytes // dtype.itemsize)
    about = {
        "op": op,
        "ranks": mesh.devices.size,
        "processes": jax.process_count(),
        "bytes": length * dtype.itemsize,
        "dtype": args.dtype,
        "multiply": multiply,
    }
    return about, lambda: _row(mesh, dtype, length, multiply, calls, args.rounds)


def _row(mesh, dtype, length, multiply, calls, rounds: int) -> dict:
    x = gpu_values.operand(mesh, 0, (mesh.devices.size, length), P("x"), dtype)
    large = length * dtype.itemsize >= _LARGE_BYTES
    counts, passes = (_LARGE_CALLS, _LARGE_PASSES) if large else (_CALLS, _PASSES)
    programs = {
        name: [
            harness.on_ranks(
                _repeated(call, multiply, count), mesh, [x], P("x"), P("x")
            )
            for count in counts
        ]
        for name, call in calls.items()
    }
    for pair in programs.values():
        for program in pair * 2:
            jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    seconds = functools.partial(_seconds, passes=passes)
    for turn in range(rounds):  # as many on all ranks, and in one order
        for name in harness.shuffled(programs, turn):
            short, long = programs[name]
            more = harness.difference(seconds, short, long, turn)
            times[name].append(more / (counts[1] - counts[0]) * 1e6)
    row = {
        "algorithms": {
            name: plan.algorithm or plan.implementation
            for name, call in calls.items()
            for plan in jax_overlap.explain(
                harness.sharded(call, mesh, P("x"), P("x")), x
            )
        },
        "calls": counts,
        "passes": passes,
        "us_a_call": {name: harness.spread(t) for name, t in times.items()},
        "us_by_round": {name: [round(us, 3) for us in t] for name, t in times.items()},
    }
    if base := times.get(_BASELINE):
        row["over_lax"] = {
            name: harness.by_round(t, base)
            for name, t in times.items()
            if name != _BASELINE
        }
    return row


def _repeated(call, multiply, count):
    def local(x, axis_name):
        for _ in range(count):
            x = call(x, axis_name)
            if multiply:
                x = x * jnp.asarray(0.5, x.dtype)
        return x

    return local


def _seconds(program, passes: int) -> float:
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        jax.block_until_ready(program())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _line(row: dict) -> str:
    between = "a multiply" if row["multiply"] else ""
    spread = "{median:.2f} ({least:.2f}-{most:.2f})"
    return rows.table_line(
        [
            *(row["op"], row["bytes"], between),
            *(
                f"{spread.format(**t)} {row['algorithms'].get(name, '')}"
                for name, t in row["us_a_call"].items()
            ),
            *(spread.format(**r) for r in row.get("over_lax", {}).values()),
        ]
    )

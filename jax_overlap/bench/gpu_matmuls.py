"""What a fused matmul costs in a program for GPUs, and what its parts cost alone.

Variants take turns in one run, as clocks and temperatures move all of them:

    ours           jax_overlap's op
    lax            the matmul and the collective of jax.lax, one after the other
    matmul         the matmul alone, of the same shape on each rank
    communication  the collective alone

and, if asked for, those of bench/gpu_peers.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap.bench import gpu_calls, gpu_peers, gpu_values, harness, shapes
from jax_overlap.bench.repeated import Variant, attempted, programs, times

_SHORT = 5  # calls; a long program has as many more as take about _MORE_US
_MORE_US = 10_000
_MORE_CALLS = (20, 50)
_FLOPS_A_US = 600e6  # about what a GPU makes, for the number of calls only
_TRIALS = 3  # rounds, to choose among configurations


@dataclasses.dataclass(frozen=True)
class Op:
    """A fused matmul, and its parts.

    Attributes:
      name: the public name.
      specs: the shardings of x, w and the result, of axis "x".
      collective: that of `jax.lax`, a function of (array, axis name).
      gathers: whether it comes before the matmul, on x, or after it.
    """

    name: str
    specs: tuple[P, P, P]
    collective: Callable
    gathers: bool

    def serial(self, x, w, axis):
        """The op by `jax.lax`."""
        if self.gathers:
            return self.collective(x, axis) @ w
        return self.collective(x @ w, axis)


def add_arguments(
    parser: argparse.ArgumentParser, peers: Sequence[str] = ("xla_windowed",)
) -> None:
    """The options for GPUs."""
    gpu_calls.add_arguments(parser, rounds=21)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "peers on GPUs; one that cannot run says so in its row:\n\n" + (
        "\n".join(gpu_peers.HELP[name] for name in peers)
    )
    parser.add_argument(
        "--shapes",
        type=shapes.parse,
        nargs="+",
        default=[],
        metavar="MxKxN",
        help="of the matmul of all ranks together, on GPUs "
        f"(default: {' '.join(map(str, shapes.LARGE))})",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        choices=list(shapes.MODELS),
        help="the matmuls in a block of these, on GPUs",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        help="tokens for the models (default: decode and prefill, a DiT has its own)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        choices=list(peers),
        help="to measure as well, on GPUs; see below",
    )
    parser.add_argument(
        "--calls",
        type=int,
        nargs=2,
        metavar=("SHORT", "LONG"),
        help="in the two programs whose times are compared, on GPUs "
        "(default: by the shape)",
    )


def run(op: Op, args: argparse.Namespace) -> list[dict]:
    """Measures and prints; a row for each shape."""
    mesh, shared = gpu_calls.start()
    args.dtype = args.dtype or "bfloat16"
    say = partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    say(
        f"us a call of {op.name} in a program, {args.dtype}, {mesh.devices.size} "
        f"ranks, median of {args.rounds} rounds (least-most)"
    )
    if shared:
        say("no jax.lax beside it: ranks share a GPU, where NCCL is slow")
    rows = []
    for shape in _wanted(op, args):
        rows.append(_row(op, mesh, shape, shared, args))
        say(_line(rows[-1]))
    return rows


def _wanted(op: Op, args) -> list[shapes.Matmul]:
    of_model = shapes.column_parallel if op.gathers else shapes.row_parallel
    wanted = list(args.shapes)
    for model in args.models:
        wanted += of_model(model, args.rows)
    return wanted or list(shapes.LARGE)


def _row(op: Op, mesh: Mesh, shape: shapes.Matmul, shared: bool, args) -> dict:
    row = {
        "op": op.name,
        "ranks": mesh.devices.size,
        "processes": jax.process_count(),
        "ranks_share_a_gpu": shared,
        "dtype": args.dtype,
        **dataclasses.asdict(shape),
    }
    try:
        for whole, spec in zip(shape.arrays, op.specs, strict=True):
            gpu_values.local_shape(whole, spec, mesh.devices.size)
    except ValueError as error:
        return {**row, "left_out": str(error)}
    short, long = args.calls or _calls(shape, mesh.devices.size)
    calls = (short, long)
    operands = tuple(
        gpu_values.operand(mesh, seed, whole, spec, jnp.dtype(args.dtype))
        for seed, (whole, spec) in enumerate(
            zip(shape.arrays[:2], op.specs[:2], strict=True)
        )
    )
    variants = _variants(op, mesh, shape, shared, operands)
    check = _check(op, mesh, shape, variants.get("lax"), operands)
    check(variants["ours"])
    pairs = {name: programs(v, mesh, calls) for name, v in variants.items()}
    peers = {}
    for name in args.peers:
        pair, peers[name] = _peer(name, op, mesh, operands, calls, check, shared)
        pairs |= {name: pair} if pair else {}
    measured = times(pairs, mesh, args.rounds, calls)
    return {
        **row,
        "calls": calls,
        "rounds": args.rounds,
        "us_a_call": {
            name: {"median": statistics.median(t), "least": min(t), "most": max(t)}
            for name, t in measured.items()
        },
        **_judged({name: statistics.median(t) for name, t in measured.items()}),
        "tflops_a_rank": {
            name: shape.flops / mesh.devices.size / statistics.median(t) / 1e6
            for name, t in measured.items()
            if name != "communication"
        },
        "peers": peers,
    }


def _variants(op: Op, mesh, shape: shapes.Matmul, shared: bool, operands) -> dict:
    """The variants, by name; each rank's part of an operand is as in the fused op."""
    x, w = operands
    x_spec, w_spec, out_spec = op.specs

    def variant(call, *arrays_and_specs, out):
        arrays, specs = zip(*arrays_and_specs, strict=True)
        step = harness.sharded(call, mesh, specs, out)
        return Variant(step, arrays, (specs[0], out))

    def of_each_rank(seed, rows, cols):
        whole = (mesh.devices.size * rows, cols)
        return gpu_values.operand(mesh, seed, whole, stacked, x.dtype), stacked

    stacked = P("x")
    ours = partial(getattr(jax_overlap, op.name), implementation="native")
    fused = ((x, x_spec), (w, w_spec))
    moved, multiplied = fused[0], fused[0]
    if op.gathers:
        multiplied = of_each_rank(2, shape.rows, shape.inner)
    elif not shared:
        moved = of_each_rank(2, shape.rows, shape.cols)
    variants = {"ours": variant(ours, *fused, out=out_spec)}
    if not shared:
        variants["lax"] = variant(op.serial, *fused, out=out_spec)
    variants["matmul"] = variant(
        lambda x, w, axis: x @ w, multiplied, fused[1], out=stacked
    )
    if not shared:
        variants["communication"] = variant(op.collective, moved, out=stacked)
    return variants


def _check(op: Op, mesh, shape: shapes.Matmul, serial: Variant | None, operands):
    """A function that raises if a variant of the op has wrong values on a rank here."""
    dtype = operands[0].dtype
    allowed = gpu_values.tolerance(dtype, mesh.devices.size)
    if serial is not None:
        error_of = partial(
            gpu_values.error_to_lax,
            reference=jax.jit(serial.step)(*operands),
            mesh=mesh,
            spec=op.specs[2],
        )
    else:
        x, w = (
            gpu_values.on_host(mesh, seed, shape.arrays[seed], op.specs[seed], dtype)
            for seed in (0, 1)
        )
        error_of = partial(gpu_values.error_to_numpy, x=x, w=w)

    def check(variant: Variant) -> None:
        error = error_of(jax.jit(variant.step)(*operands))
        if error > allowed:
            raise AssertionError(
                f"{op.name} of {shape} is off by {error:.2g} of the largest element, "
                f"where {allowed:.2g} is allowed"
            )

    return check


def _peer(name, op: Op, mesh, operands, calls, check, shared: bool):
    """(programs of the fastest configuration, what there is to say of it)."""
    if shared:
        return None, {"error": "ranks share a GPU"}
    candidates, error = attempted(
        lambda: gpu_peers.PEERS[name](mesh, operands, op.specs)
    )
    pairs = {}
    for configuration, variant in (candidates or {}).items():
        pair, why = attempted(partial(programs, variant, mesh, calls))
        if pair and not (why := attempted(partial(check, variant))[1]):
            pairs[configuration] = pair
        error = error or why
    if not pairs:
        return None, {"error": error}
    tried = times(pairs, mesh, _TRIALS, calls) if len(pairs) > 1 else {}
    best = min(pairs, key=lambda c: statistics.median(tried.get(c, [0])))
    return pairs[best], {"configuration": best} | ({"error": error} if error else {})


def _calls(shape: shapes.Matmul, ranks: int) -> tuple[int, int]:
    us = shape.flops / ranks / _FLOPS_A_US
    least, most = _MORE_CALLS
    return _SHORT, _SHORT + min(max(round(_MORE_US / us), least), most)


def _judged(us: dict[str, float]) -> dict[str, float]:
    """How good ours is, of the medians."""
    judged = {"over_matmul": us["ours"] / us["matmul"]}
    if "lax" in us:
        # Not less than the longer of its parts can take, if all else is hidden.
        ideal = max(us["matmul"], us["communication"])
        judged |= {"efficiency": ideal / us["ours"], "speedup": us["lax"] / us["ours"]}
    return judged


def _line(row: dict) -> str:
    head = "{rows}x{inner}x{cols} {name}".format(**row).strip()
    if "left_out" in row:
        return f"{head}: left out, {row['left_out']}"
    measured = ", ".join(
        f"{name} {t['median']:.1f} ({t['least']:.1f}-{t['most']:.1f})"
        for name, t in row["us_a_call"].items()
    )
    judged = f"{row['over_matmul']:.2f} x matmul"
    if "speedup" in row:
        judged += f", efficiency {row['efficiency']:.2f}, speedup {row['speedup']:.2f}"
    peers = "".join(
        f"; {name}: {what}"
        for name, peer in row["peers"].items()
        if (what := peer.get("error") or peer["configuration"])
    )
    tflops = row["tflops_a_rank"]["ours"]
    return f"{head}: {measured}; {judged}, {tflops:.0f} TFLOP/s a rank{peers[:200]}"

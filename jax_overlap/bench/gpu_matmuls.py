"""What a fused matmul costs in a program for GPUs, and what its parts cost alone.

Variants take turns in one run, as clocks and temperatures move all of them:

    ours           jax_overlap's op
    lax            the matmul and the collective of jax.lax, one after the other
    matmul         the matmul alone, of the same shape on each rank
    communication  the collective alone

and, if asked for, other algorithms of ours and those of bench/gpu_peers.py. Beside
what was measured stands what ops/_gpu_cost.py predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap import config
from jax_overlap.bench import gpu_calls, gpu_peers, gpu_values, harness, rows, shapes
from jax_overlap.bench.repeated import Variant, attempted, everyone, programs, times
from jax_overlap.ops import _gpu_cost

_SHORT = 5  # calls; a long program has as many more as take about _MORE_US
_MORE_US = 10_000
_MORE_CALLS = (20, 50)
_FLOPS_A_US = 600e6  # about what a GPU makes, for the number of calls only
_TRIALS = 3  # rounds, to choose among configurations
_PARTS = ("lax", "matmul", "communication")
_OURS = {"auto": "ours", "sliced": "sliced", "by_psum": "by_psum"}  # variants


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
        "--algorithms",
        nargs="+",
        default=["auto"],
        choices=list(_OURS),
        help="of ours, measured beside each other, on GPUs (default: auto)",
    )
    parser.add_argument(
        "--calls",
        type=int,
        nargs=2,
        metavar=("SHORT", "LONG"),
        help="in the two programs whose times are compared, on GPUs "
        "(default: by the shape)",
    )


def run(op: Op, args: argparse.Namespace) -> Iterator[dict]:
    """Measures and prints; a row for each shape."""
    mesh, shared = gpu_calls.start()
    args.dtype = args.dtype or "bfloat16"
    wanted = _wanted(op, args)
    rows.say(
        f"us a call of {op.name} in a program, {args.dtype}, {mesh.devices.size} "
        f"ranks, median of {args.rounds} rounds (least-most)"
    )
    if shared:
        rows.say("no jax.lax beside it: ranks share a GPU, where NCCL is slow")
    if small := [s for s in wanted if _heap_wanted(op, s, args) > _heap_bytes()]:
        most = max(_heap_wanted(op, shape, args) for shape in small)
        rows.say(
            f"{config.HEAP_BYTES.name} is {_heap_bytes()}: sliced, {len(small)} of "
            f"{len(wanted)} shapes go in more rounds than they need, and take longer. "
            f"Set it to {most}."
        )
    rows.say(rows.table_head(_columns(args)))
    tasks = (_task(op, mesh, shape, shared, args) for shape in wanted)
    yield from rows.measured(tasks, partial(_lines, args=args))


def _wanted(op: Op, args) -> list[shapes.Matmul]:
    of_model = shapes.column_parallel if op.gathers else shapes.row_parallel
    wanted = list(args.shapes)
    for model in args.models:
        wanted += of_model(model, args.rows)
    return wanted or list(shapes.LARGE)


def _heap_bytes() -> int:
    return config.HEAP_BYTES.read(on_gpus=jax.default_backend() == "gpu")


def _heap_wanted(op: Op, shape: shapes.Matmul, args) -> int:
    """The heap of which a slot is as large as what a rank has for another.

    Programs over a mesh have half of the heap, and slots half of that, in two sets of
    one for each rank.
    """
    exchanged = shape.rows * (shape.inner if op.gathers else shape.cols)
    if op.name == "matmul_all_reduce" and shape.rows > 1024:
        exchanged //= 4  # which goes in rounds in any case
    least = 8 * exchanged * jnp.dtype(args.dtype).itemsize
    return 1 << least.bit_length()  # there are flags, too


def _task(op: Op, mesh: Mesh, shape: shapes.Matmul, shared: bool, args) -> rows.Task:
    about = {
        "op": op.name,
        "ranks": mesh.devices.size,
        "processes": jax.process_count(),
        "ranks_share_a_gpu": shared,
        "dtype": args.dtype,
        **dataclasses.asdict(shape),
        "heap_bytes": _heap_bytes(),
        "heap_bytes_wanted": _heap_wanted(op, shape, args),
    }
    return about, lambda: _row(op, mesh, shape, shared, args)


def _row(op: Op, mesh: Mesh, shape: shapes.Matmul, shared: bool, args) -> dict:
    try:
        for whole, spec in zip(shape.arrays, op.specs, strict=True):
            gpu_values.local_shape(whole, spec, mesh.devices.size)
    except ValueError as error:
        return {"left_out": str(error)}
    short, long = args.calls or _calls(shape, mesh.devices.size)
    calls = (short, long)
    operands = tuple(
        gpu_values.operand(mesh, seed, whole, spec, jnp.dtype(args.dtype))
        for seed, (whole, spec) in enumerate(
            zip(shape.arrays[:2], op.specs[:2], strict=True)
        )
    )
    variants = _variants(op, mesh, shape, shared, operands, args.algorithms)
    check = _check(op, mesh, shape, variants.get("lax"), operands)
    plans = {}
    for name in _ours(args):
        check(variants[name])
        (plans[name],) = jax_overlap.explain(variants[name].step, *operands)
    pairs = {name: programs(v, mesh, calls) for name, v in variants.items()}
    peers = {}
    for name in args.peers:
        pair, peers[name] = _peer(name, op, mesh, operands, calls, check, shared)
        pairs |= {name: pair} if pair else {}
    measured = times(pairs, mesh, args.rounds, calls)
    predicted = _predicted(op, mesh, operands)
    return {
        "calls": calls,
        "rounds": args.rounds,
        "us_a_call": {name: harness.spread(t) for name, t in measured.items()},
        "us_by_round": {
            name: [round(us, 2) for us in t] for name, t in measured.items()
        },
        "predicted_us": {
            "sliced": predicted.fused_us,
            "lax": predicted.apart_us,
        },
        "ours": {
            name: {
                "implementation": plan.implementation,
                "algorithm": plan.algorithm,
                "reason": plan.reason,
                **_judged(name, measured),
                **_foreseen(plan, predicted, statistics.median(measured[name])),
            }
            for name, plan in plans.items()
        },
        "tflops_a_rank": {
            name: shape.flops / mesh.devices.size / statistics.median(t) / 1e6
            for name, t in measured.items()
            if name != "communication"
        },
        "peers": peers,
    }


def _ours(args) -> list[str]:
    return [_OURS[name] for name in args.algorithms]


def _predicted(op: Op, mesh: Mesh, operands) -> _gpu_cost.Prediction:
    """Of the sliced form, and of the parts by NCCL."""
    ranks, dtype = mesh.devices.size, operands[0].dtype
    (m, k), (_, n) = (
        gpu_values.local_shape(a.shape, spec, ranks)
        for a, spec in zip(operands, op.specs[:2], strict=True)
    )
    x = jax.ShapeDtypeStruct((1, 1, m, k), dtype)
    w = jax.ShapeDtypeStruct((1, k, n), dtype)
    # The type of x is that of the result, and products are those of the default.
    return _gpu_cost.predict(op.name, [x], [w], x, [False], ranks, True)


def _foreseen(plan, predicted: _gpu_cost.Prediction, us: float) -> dict[str, float]:
    if plan.algorithm != "sliced":  # of the others there is no model
        return {}
    return {"predicted_over_measured": predicted.fused_us / us}


def _variants(
    op: Op, mesh, shape: shapes.Matmul, shared: bool, operands, algorithms
) -> dict:
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
    forced = {name: None if name == "auto" else name for name in algorithms}
    fused = ((x, x_spec), (w, w_spec))
    moved, multiplied = fused[0], fused[0]
    if op.gathers:
        multiplied = of_each_rank(2, shape.rows, shape.inner)
    elif not shared:
        moved = of_each_rank(2, shape.rows, shape.cols)
    variants = {
        _OURS[name]: variant(partial(ours, algorithm=a), *fused, out=out_spec)
        for name, a in forced.items()
    }
    if not shared:
        variants["lax"] = variant(op.serial, *fused, out=out_spec)
    variants["matmul"] = variant(
        lambda x, w, axis: x @ w, multiplied, fused[1], out=stacked
    )
    if not shared:
        variants["communication"] = variant(op.collective, moved, out=stacked)
    return variants


def _check(op: Op, mesh, shape: shapes.Matmul, serial: Variant | None, operands):
    """A function that raises if a variant of the op has wrong values on a rank.

    In all processes, so that none of them goes on without the others.
    """
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
        error = max(everyone(error_of(jax.jit(variant.step)(*operands))))
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
    pairs, refused = {}, {}
    for configuration, variant in (candidates or {}).items():
        pair, why = attempted(partial(programs, variant, mesh, calls))
        if pair and not (why := attempted(partial(check, variant))[1]):
            pairs[configuration] = pair
        else:
            refused[configuration] = why
    told = {"refused": refused} if refused else {}
    if not pairs:
        return None, {"error": error or next(iter(refused.values())), **told}
    tried = times(pairs, mesh, _TRIALS, calls) if len(pairs) > 1 else {}
    best = min(pairs, key=lambda c: statistics.median(tried.get(c, [0])))
    return pairs[best], {"configuration": best, **told}


def _calls(shape: shapes.Matmul, ranks: int) -> tuple[int, int]:
    us = shape.flops / ranks / _FLOPS_A_US
    least, most = _MORE_CALLS
    return _SHORT, _SHORT + min(max(round(_MORE_US / us), least), most)


def _judged(name: str, measured: dict[str, list[float]]) -> dict:
    """How good one of ours is, of the medians, and round by round."""
    us = {other: statistics.median(t) for other, t in measured.items()}
    judged: dict = {"over_matmul": us[name] / us["matmul"]}
    if "lax" in us:
        # Not less than the longer of its parts can take, if all else is hidden.
        ideal = [
            max(parts)
            for parts in zip(measured["matmul"], measured["communication"], strict=True)
        ]
        judged |= {
            "efficiency": max(us["matmul"], us["communication"]) / us[name],
            "speedup": us["lax"] / us[name],
            "by_round": {
                "efficiency": harness.by_round(ideal, measured[name]),
                "speedup": harness.by_round(measured["lax"], measured[name]),
            },
        }
    return judged


def _columns(args) -> list[str]:
    return [
        *("op", "shape", "ours", "us"),
        *_PARTS,
        *args.peers,
        *("/ matmul", "speedup", "efficiency", "by round"),
        *("predicted us", "/ measured", "TFLOP/s a rank"),
    ]


def _lines(row: dict, args) -> str:
    """A line of the table for each of ours."""
    head = [row["op"], "{rows}x{inner}x{cols} {name}".format(**row).strip()]
    if "left_out" in row:
        return rows.table_line([*head, f"left out, {row['left_out']}"])
    measured = row["us_a_call"]

    def us(name):
        return "{median:.1f} ({least:.1f}-{most:.1f})".format(**measured[name])

    def ratio(ours, name):
        return f"{ours[name]:.2f}" if name in ours else "-"

    def by_round(ours):
        if "by_round" not in ours:
            return "-"
        return "{median:.2f} ({least:.2f}-{most:.2f})".format(
            **ours["by_round"]["efficiency"]
        )

    def peer(name):
        told = row["peers"][name]
        if "configuration" not in told:
            return told["error"][:80]
        return f"{us(name)} {told['configuration']}"

    return "\n".join(
        rows.table_line(
            [
                *head,
                ours["algorithm"] or ours["implementation"],
                us(name),
                *(us(part) if part in measured else "-" for part in _PARTS),
                *(peer(name) for name in args.peers),
                *(ratio(ours, n) for n in ("over_matmul", "speedup", "efficiency")),
                by_round(ours),
                f"{row['predicted_us']['sliced']:.1f}",
                ratio(ours, "predicted_over_measured"),
                f"{row['tflops_a_rank'][name]:.0f}",
            ]
        )
        for name, ours in row["ours"].items()
    )

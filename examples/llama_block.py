"""Times one block of Llama 3.1 with our collectives and with those of XLA.

    python examples/llama_block.py --model tiny

or, on GPUs or in several processes (examples/devices.py says how), with `--model 8b`,
`70b` or `405b`. Tensor parallel: forward, forward and backward, both sequence
parallel, and decode steps with a cache. Both forms have the same weights and inputs;
their outputs and gradients have to agree, and those of `--model tiny` with a reference
by jax.numpy: if not, the exit code is 1, once all is timed. A time is that of a step of
this process until its results are there, the median of --repeats; the forms take turns.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
from importlib import import_module
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import devices


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a block, and how many tokens are usual."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    tokens: int = 4096


MODELS = {
    "tiny": Shape(64, 192, 8, 4, tokens=64),
    "8b": Shape(4096, 14336, 32, 8),
    "70b": Shape(8192, 28672, 64, 8),
    "405b": Shape(16384, 53248, 128, 8),
}
FORMS = {"overlap": ["overlap"], "xla": ["xla"], "both": ["overlap", "xla"]}
WARM_UP = 2


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Times a tensor-parallel block of Llama 3.1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, usual = parser.add_argument, "(default: 64 for tiny, else 4096)"
    devices.add_argument(parser)
    add("--model", choices=tuple(MODELS), default="tiny", help="whose sizes")
    add("--collectives", choices=tuple(FORMS), default="both", help="whose to use")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all")
    add(
        "--tokens",
        type=devices.whole,
        default=argparse.SUPPRESS,
        help=f"length of the sequence; 0: only decode steps {usual}",
        metavar="N",
    )
    add(
        "--decode",
        type=devices.positive,
        nargs="*",
        default=[8],
        help="sequences that get a token in a decode step; none: no such step",
        metavar="BATCH",
    )
    add(
        "--cache",
        type=devices.positive,
        default=argparse.SUPPRESS,
        help=f"tokens of a sequence in a decode step {usual}",
        metavar="N",
    )
    add("--repeats", type=devices.positive, default=20, help="of a step", metavar="N")
    add(
        "--in-flight",
        type=devices.positive,
        default=1,
        help="steps sent off before they are awaited; on CPU leave it at 1",
        metavar="N",
    )
    add("--seed", default=0, type=int, help="of weights and inputs")
    add("--json", help="write the results there, too", metavar="FILE")
    args = parser.parse_args(argv)
    usual = MODELS[args.model].tokens
    args.tokens, args.cache = (
        getattr(args, name, usual) for name in ("tokens", "cache")
    )
    return args


def tolerance(dtype: str, ranks: int, platform: str) -> float:
    """How large |a - b| / |b| of two ways to round may be.

    A sum of ranks that is rounded after each has an error of about sqrt(ranks)
    roundings; a result is behind four such sums, or a few more roundings. Measured is
    much less, so from 4 ranks on it stays the same: without the part of one of 64 a
    result is off by some 0.09, and that has to be seen.
    """
    if dtype == "bfloat16":
        rounding = 2.0**-8
    elif platform == "cpu":
        rounding = 2.0**-18  # a float32 product of thousands of terms
    else:
        rounding = 2.0**-11  # TF32, in which GPUs multiply float32
    return 4 * min(ranks, 4) ** 0.5 * rounding


def largest(errors: dict[str, float]) -> tuple[str, float]:
    """Of what, and how large; a NaN is larger than any number."""
    return max(errors.items(), key=lambda e: math.inf if math.isnan(e[1]) else e[1])


def disagreement(step: str, who: str, errors: dict[str, float], allowed: float) -> str:
    """What to say if not all errors are small, else ""."""
    what, error = largest(errors)
    if error <= allowed:  # asked this way round, as a NaN compares false
        return ""
    return (
        f"{step}: {what} of {who} differ by {error:.2g} (of their norm); at most "
        f"{allowed:.2g} is allowed."
    )


def medians(calls: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of each form; that which goes first changes."""
    import jax

    times: dict[str, list[float]] = {form: [] for form in calls}
    for i in range(WARM_UP + args.repeats):
        for form in list(calls)[:: 1 if i % 2 else -1]:
            start, result = time.perf_counter(), None
            for _ in range(args.in_flight):
                result = calls[form]()
            jax.block_until_ready(result)
            took = (time.perf_counter() - start) / args.in_flight
            times[form].append(1e3 * took)
    return {form: statistics.median(ms[WARM_UP:]) for form, ms in times.items()}


def measure(model, reference, step, args: argparse.Namespace) -> dict[str, Any]:
    """Compares the results of a step, then times it."""
    llama = import_module("llama")
    forms = FORMS[args.collectives]
    inputs = reference.whole(step.inputs) if reference else ()
    calls = {form: llama.Call(model, step, form) for form in forms}
    results = {form: llama.named(call()) for form, call in calls.items()}
    pairs = {"overlap and xla": forms} if len(forms) == 2 else {}
    if reference:
        wanted = llama.named(reference(step.method, *inputs))
        results["the reference"] = wanted
        pairs |= {
            f"{form} and the reference": [form, "the reference"] for form in forms
        }
    errors, disagreements = {}, []
    for who, (ours, theirs) in pairs.items():
        found = llama.relative_errors(results[ours], results[theirs])
        found = {what: float(error) for what, error in found.items()}
        _, errors[who] = largest(found)
        if why := disagreement(step.name, who, found, args.tolerance):
            disagreements.append(why)
    del results  # before the memory is needed
    return {
        "step": step.name,
        "calls": {form: devices.carried_out(c.plans) for form, c in calls.items()},
        "errors": errors,
        "disagreements": disagreements,
        "ms": medians(calls, args),
    }


def show(row: dict[str, Any]) -> None:
    devices.say(f"\n{row['step']}")
    for form, ms in row["ms"].items():
        ratio = ms / row["ms"].get("xla", float("nan"))
        ratio = "" if len(row["ms"]) < 2 else f"{ratio:8.3f}"
        devices.say(f"  {form:<8}{ms:12.3f} ms{ratio}   {row['calls'][form]}")
    for who, error in row["errors"].items():
        devices.say(f"  {who} differ by {error:.2g}")
    for why in row["disagreements"]:
        devices.say(f"  FAILED: {why}")


def as_json(errors: dict[str, float]) -> dict[str, float | str]:
    """JSON has no NaN."""
    return {who: e if math.isfinite(e) else str(e) for who, e in errors.items()}


def write(args: argparse.Namespace, kind: str, rows: list[dict[str, Any]]) -> None:
    """Writes what there is; a file that is there stays whole, whatever happens."""
    import jax

    if not (args.json and devices.writes()):
        return
    about = {
        "device": kind,
        "processes": jax.process_count(),
        "jax": jax.__version__,
    }
    steps = [row | {"errors": as_json(row["errors"])} for row in rows]
    text = json.dumps({**vars(args), **about, "steps": steps}, indent=1)
    part = pathlib.Path(f"{args.json}.part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, args.json)


def main(argv=None) -> None:
    args = parse_arguments(argv)
    devices.set_up(args)
    import jax

    llama = import_module("llama")
    if args.tokens % args.devices:
        up = -(-args.tokens // args.devices) * args.devices
        sys.exit(
            f"--tokens {args.tokens} is not divisible by the {args.devices} ranks, "
            f"over which they are cut. Use {up}, or 0."
        )
    chosen = jax.devices()[: args.devices]
    mesh = jax.make_mesh((args.devices,), ("tp",), devices=chosen)
    model = llama.Model(MODELS[args.model], args.dtype, mesh, args.seed)
    reference = None
    if args.model == "tiny":
        reference = import_module("llama_reference").Reference(model)
    platform, kind = chosen[0].platform, chosen[0].device_kind
    args.tolerance = tolerance(args.dtype, args.devices, platform)
    devices.say(
        f"A block of Llama 3.1 {args.model}, {args.dtype}, {args.devices} ranks on "
        f"{kind}, processes: {jax.process_count()}. Medians of {args.repeats} steps, "
        f"and their ratios to those of xla."
    )
    rows = []
    for step in llama.steps(model, args.tokens, args.decode, args.cache):
        rows.append(measure(model, reference, step, args))
        show(rows[-1])
        write(args, kind, rows)  # now, as the next step may end the program
    if args.json:
        devices.say(f"\nWrote {args.json}.")
    if failed := [why for row in rows for why in row["disagreements"]]:
        sys.exit("\n".join(f"FAILED: {why}" for why in failed))
    if any(row["errors"] for row in rows):
        devices.say(f"\nResults agree (allowed: {args.tolerance:.2g} of their norm).")
    else:
        devices.say("\nNothing was compared: ask for both, or for --model tiny.")


if __name__ == "__main__":
    main()

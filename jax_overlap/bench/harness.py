"""How the benchmarks measure: variants in turn, in one process, as ratios."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import jax

import jax_overlap
from jax_overlap import config
from jax_overlap._plan import NATIVE_DTYPES


def use_cpu_devices(count: int) -> None:
    """Asks for virtual CPU devices; call before JAX's backend starts."""
    # XLA sizes its pools by the processors; few of them starve many devices.
    os.environ.setdefault("NPROC", str(max(16, 2 * count)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def dtype_name(text: str) -> str:
    """The name of a dtype that native ops take."""
    if text not in NATIVE_DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(NATIVE_DTYPES)}, got {text}"
        )
    return text


def interleave(
    variants: dict[str, Callable[[], object]], seconds: float, at_least: int = 25
) -> dict[str, list[float]]:
    """Times each variant again and again, in random order, for `seconds` in all.

    Args:
      variants: functions that start work and return its result, by name. A call is
        timed until its result is there.
      seconds: the budget, of all variants together.
      at_least: rounds, even if the budget is spent.

    Returns:
      The times in seconds, by name, one a round.
    """
    for variant in variants.values():
        for _ in range(5):
            jax.block_until_ready(variant())
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[names[0]]) < at_least:
        random.shuffle(names)
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            times[name].append(time.perf_counter() - start)
    return times


def sharded(call: Callable, mesh, in_specs, out_specs):
    """`call(*shards, "x")` as a function of global arrays."""
    return jax.shard_map(
        lambda *shards: call(*shards, "x"),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def on_ranks(call: Callable, mesh, operands, in_specs, out_specs):
    """A function that runs `call(*shards, "x")` on the ranks of a mesh."""
    f = jax.jit(sharded(call, mesh, in_specs, out_specs))
    return lambda: f(*operands)


def shuffled(names: Iterable[str], turn: int) -> list[str]:
    """The names in another order each round, the same in all processes."""
    order = list(names)
    random.Random(turn).shuffle(order)
    return order


def difference(
    seconds: Callable[[Callable], float], short: Callable, long: Callable, turn: int
) -> float:
    """What a long program takes more than a short one; which goes first alternates."""
    if turn % 2:
        least = seconds(short)
        return seconds(long) - least
    return seconds(long) - seconds(short)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
    }


def by_round(over: list[float], under: list[float]) -> dict[str, float]:
    """The ratios of what was measured in the same round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def compare(
    variants: dict[str, Callable[[], object]],
    baseline: str,
    seconds: float,
    at_least: int = 25,
) -> dict[str, dict]:
    """{"times": a summary of each variant, "ratio": its median over the baseline's}."""
    times = interleave(variants, seconds, at_least)
    base = statistics.median(times[baseline])
    return {
        "times": {name: summary(t) for name, t in times.items()},
        "ratio": {
            name: statistics.median(t) / base
            for name, t in times.items()
            if name != baseline
        },
    }


def ratios(row: dict) -> str:
    """The ratios of a row, for people."""
    return "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())


def summary(times: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile in microseconds, and the number of rounds."""
    cuts = statistics.quantiles(times, n=10)
    return {
        "median_us": statistics.median(times) * 1e6,
        "p10_us": cuts[0] * 1e6,
        "p90_us": cuts[-1] * 1e6,
        "rounds": len(times),
    }


def write_json(path: str, rows: list[dict]) -> None:
    """Writes rows with the machine, the versions and the command that made them."""
    if jax.process_index() > 0:  # the ranks have the same rows
        return
    # Where this machine keeps the file is nobody else's business.
    options = [os.path.basename(a) if a == path else a for a in sys.argv[1:]]
    about = jax_overlap.info()
    record = {
        "command": " ".join(["python -m jax_overlap.bench", *options]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cpus": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.machine()}",
            "devices": [str(d) for d in jax.devices()],
            "kind": jax.devices()[0].device_kind,
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": {
            name: value
            for name, value in about["settings"].items()
            if name != config.TUNING_DIR.name
        },
        "versions": {k: v for k, v in about["versions"].items() if v is not None},
        "rows": rows,
    }
    # What is there stays whole, should the program end meanwhile.
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(part, path)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()

"""Programs for GPUs that repeat a step, and the time that one step takes in them.

Each step works on what the last one has made, and the time of a short program is taken
from that of a long one: what is left is what a step costs in a model. Of several
processes each takes its own time, from when all are ready; that of the slowest counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap._agreement import exchange
from jax_overlap.bench import harness

_ERROR_LENGTH = 500  # XLA's can have pages
_PATIENCE_S = 600  # with other processes
_exchanges = itertools.count()


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step to be repeated.

    Attributes:
      step: a function of global arrays.
      operands: these; the first changes a little from step to step.
      specs: the shardings of the first operand and of the result.
    """

    step: Callable
    operands: tuple[jax.Array, ...]
    specs: tuple[P, P]


def compiled(variant: Variant, mesh: Mesh, calls: int):
    """The program that takes the step this many times."""
    tie = harness.sharded(_tie, mesh, variant.specs, variant.specs[0])

    def repeat(x, *others):
        y = variant.step(x, *others)
        for _ in range(calls - 1):
            x = tie(x, y)
            y = variant.step(x, *others)
        return y

    return jax.jit(repeat).lower(*variant.operands).compile()


def programs(variant: Variant, mesh: Mesh, calls: tuple[int, int]) -> list[Callable]:
    """The short and the long program, without arguments."""
    return [partial(compiled(variant, mesh, n), *variant.operands) for n in calls]


def _tie(x, y, axis):
    """Changes one element of x, by y, which XLA must not take apart for that."""
    last = lax.optimization_barrier(y)[:1, :1]
    first = x[:1, :1] + last.astype(x.dtype) * jnp.asarray(1e-30, x.dtype)
    return lax.dynamic_update_slice(x, first, (0, 0))


def times(
    pairs: dict[str, list[Callable]], mesh: Mesh, rounds: int, calls: tuple[int, int]
) -> dict[str, list[float]]:
    """Microseconds a step by name, one a round, in which all take turns."""
    ones = jnp.ones(mesh.devices.size, jnp.float32)
    ready = harness.on_ranks(jax_overlap.psum, mesh, [ones], P("x"), P())
    for pair in pairs.values():
        for program in pair:
            _seconds(program, ready)
    own: dict[str, list[float]] = {name: [] for name in pairs}
    seconds = partial(_seconds, ready=ready)
    for turn in range(rounds):
        for name in harness.shuffled(pairs, turn):
            short, long = pairs[name]
            more = harness.difference(seconds, short, long, turn)
            own[name].append(more / (calls[1] - calls[0]) * 1e6)
    everybody = everyone(own)
    return {
        name: [max(t) for t in zip(*(e[name] for e in everybody), strict=True)]
        for name in pairs
    }


def _seconds(program, ready) -> float:
    jax.block_until_ready(ready())
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


class OthersFailed(RuntimeError):
    """What went wrong in another process, of which it has told all."""


def everyone(value) -> list:
    """What all processes say, in their order, in an exchange that all come to.

    Raises:
      OthersFailed: a process is in `attempted` instead, as it has failed.
    """
    said = _exchanged({"value": value})
    if error := _error_in(said):
        raise OthersFailed(error)
    return [each["value"] for each in said]


def attempted(make: Callable):
    """(make(), "") in all processes, or (None, what went wrong in one of them)."""
    value, error = None, ""
    try:
        value = make()
    except OthersFailed as e:
        return None, str(e)
    except Exception as e:  # of XLA or of Pallas, which have many
        error = f"{type(e).__name__}: {e}"[:_ERROR_LENGTH]
    error = _error_in(_exchanged({"error": error} if error else {"value": None}))
    return (None, error) if error else (value, "")


def _exchanged(said: dict) -> list[dict]:
    if jax.process_count() == 1:
        return [said]
    topic = f"bench/{next(_exchanges)}"
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            everybody = exchange(topic, said)
            return [everybody[process] for process in sorted(everybody)]
        except RuntimeError:  # others may still compile what has failed here
            if time.monotonic() > end:
                raise


def _error_in(said: list[dict]) -> str:
    return next((each["error"] for each in said if "error" in each), "")

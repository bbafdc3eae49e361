r"""Calls the ops at random while ranks come late, and checks every element.

    python -m jax_overlap.testing.soak --cpu 8
    python -m jax_overlap.testing.soak --minutes 8       on all devices of this process
    python -m jax_overlap.testing.launch -n 8 --timeout 900 -- \
      python -m jax_overlap.testing.soak --minutes 8

A program is a few calls in a row, of random ops, algorithms, types, sizes and axes. It
is run again and again among others, each time with new data and with some ranks late.
Data are small integers, so that sums are exact in every type and order: each rank makes
those of all its peers and computes what it should have got, without communication.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
import jax_overlap.testing
from jax_overlap.bench import harness, rows

MATMULS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
_PSUM = (None, "one_shot", "two_shot", "nvrar")
# What is native there, with its algorithms.
ON_GPU: Mapping[str, tuple[str | None, ...]] = {
    "psum": _PSUM,
    **dict.fromkeys(MATMULS, (None, "sliced", "by_psum")),
}
ON_CPU: Mapping[str, tuple[str | None, ...]] = {
    **ON_GPU,
    "matmul_all_reduce": (None, "by_psum"),
    **dict.fromkeys(("psum_scatter", "all_gather", "all_to_all"), (None,)),
}

_TYPES = ("float32", "bfloat16", "float16")
_MORE_TYPES = ("int32", "int8")  # of what does not multiply
_MAX_ROW, _MAX_ELEMENTS = 64, 2**20  # of the operand of a collective
_MAX_ROWS, _MAX_K, _MAX_COLUMNS = 2048, 1024, 1024  # of a matmul
# Of w's rows: with -1, 0 and 1 alone the sum of 16 ranks is exact in bfloat16, too.
_NOT_ZERO = 16

_PROGRAMS = 64  # at most, so that the time goes into calls and not into compiling
_NEW_EVERY = 12  # rounds
_MAX_LATE = 2000  # turns of a loop: up to 20 ms
_SAY_EVERY_S = 20.0
_MAX_REPORTS = 20


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: an op with its options, and the shapes of one rank's operands."""

    op: str
    algorithm: str | None
    dtype: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        shapes = " ".join(f"{self.dtype}{list(s)}" for s in self.shapes)
        how = "" if self.algorithm is None else f" by {self.algorithm}"
        return f"{self.op}{how} over {self.axes} of {shapes}"


@dataclasses.dataclass
class Result:
    """What a soak did."""

    rounds: int = 0
    programs: int = 0
    calls: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    wrong: int = 0  # calls, of all ranks
    reports: list[str] = dataclasses.field(default_factory=list)  # the first ones here

    def __str__(self) -> str:
        calls = ", ".join(f"{n} {op}" for op, n in sorted(self.calls.items()))
        return (
            f"{self.rounds} rounds of {self.programs} programs, {calls}; "
            f"{self.wrong} wrong"
        )


def meshes(devices: Sequence) -> list[Mesh]:
    """A line of the devices, and a grid for each way to factor their number."""
    every = np.array(devices)
    factors = [
        n for n in range(2, math.isqrt(len(devices)) + 1) if len(devices) % n == 0
    ]
    grids = [Mesh(every.reshape(n, -1), ("a", "b")) for n in factors]
    return [Mesh(every, ("x",)), *grids]


def random_call(rng: random.Random, ops: Mapping[str, tuple], mesh: Mesh) -> Call:
    """A call of one of `ops` on `mesh`; small ones come more often than large ones."""
    names = mesh.axis_names
    axes = rng.choice([names, *((name,) for name in names if len(names) > 1)])
    size = math.prod(mesh.shape[name] for name in axes)
    op = rng.choice(list(ops))
    if op in MATMULS:
        types = _TYPES
        m, k, n = (_up_to(rng, most) for most in (_MAX_ROWS, _MAX_K, _MAX_COLUMNS))
        if op == "matmul_reduce_scatter":
            m = math.ceil(m / size) * size
        shapes = ((m, k), (k, n))
    else:
        types = _TYPES + _MORE_TYPES
        columns = _up_to(rng, _MAX_ROW)
        m = math.ceil(_up_to(rng, _MAX_ELEMENTS) / (columns * size)) * size
        shapes = ((m, columns),)
    return Call(op, rng.choice(ops[op]), rng.choice(types), axes, shapes)


def _up_to(rng: random.Random, most: int) -> int:
    return int(2 ** rng.uniform(0, math.log2(most)))


def called(call: Call, *operands):
    """The op itself."""
    options: dict = {"implementation": "native"}
    if call.algorithm is not None:
        options["algorithm"] = call.algorithm
    if call.op in ("psum_scatter", "all_gather", "all_to_all"):
        options["tiled"] = True
    if call.op == "all_to_all":
        options |= {"split_axis": 0, "concat_axis": 0}
    return getattr(jax_overlap, call.op)(*operands, call.axes, **options)


def expected(call: Call, own, operands):
    """What rank `own` of the team should get of `operands`, stacked over the team."""
    size = operands[0].shape[0]
    wide = jnp.int32 if call.dtype.startswith("int") else jnp.float32
    x, *ws = (a.astype(wide) for a in operands)
    exact = lax.Precision.HIGHEST
    if call.op == "all_gather_matmul":
        return jnp.dot(_rows(x), ws[0][own], precision=exact)
    if call.op in MATMULS:
        y = jnp.einsum("pmk,pkn->mn", x, ws[0], precision=exact)
        return y if call.op == "matmul_all_reduce" else _parts(y, size)[own]
    if call.op == "psum":
        return x.sum(0)
    if call.op == "psum_scatter":
        return _parts(x.sum(0), size)[own]
    if call.op == "all_gather":
        return _rows(x)
    return _rows(jax.vmap(lambda a: _parts(a, size)[own])(x))  # all_to_all


def _rows(a):
    return a.reshape(-1, a.shape[-1])


def _parts(a, size):
    return a.reshape(size, -1, a.shape[-1])


def data(call: Call, seed, rank) -> list[jax.Array]:
    """The operands of the rank at flat position `rank` of the mesh."""
    operands = []
    for i, shape in enumerate(call.shapes):
        salt = _mixed(_mixed(jnp.uint32(seed) * 16 + i) ^ jnp.uint32(rank))
        place = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        a = (_mixed(place ^ salt) % 3).astype(jnp.int8) - 1
        if i == 1:  # w: a few rows, others in each rank and round
            row = (lax.iota(jnp.uint32, shape[0]) + salt % 2**16) % shape[0]
            a = jnp.where((row < _NOT_ZERO)[:, None], a, 0)
        operands.append(a.astype(call.dtype))
    return operands


def _mixed(bits):
    """A hash of uint32, the end of MurmurHash3: jax.random takes seconds to compile."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def make_program(calls: Sequence[Call], mesh: Mesh):
    """A jitted function of (seeds, late, stop), each with one int32 for each rank.

    Returns how many elements of each call were wrong on each rank, and for each rank
    what all ranks add up to: `stop`, and wrong calls.
    """
    names = mesh.axis_names

    def on_rank(seeds, late, stop):
        wrong = []
        for i, call in enumerate(calls):
            make = functools.partial(data, call, seeds[0] * len(calls) + i)
            own = lax.axis_index(call.axes)
            size = math.prod(mesh.shape[name] for name in call.axes)
            # The last axis of the call is the one along which neighbours lie.
            after = names[names.index(call.axes[-1]) + 1 :]
            stride = math.prod(mesh.shape[name] for name in after)
            rank = lax.axis_index(names)
            team = rank + (jnp.arange(size) - own) * stride
            operands = make(rank)
            if i == 0:
                operands = after_turns(late[0], operands)
            got = called(call, *operands)
            want = expected(call, own, jax.vmap(make)(team)).astype(got.dtype)
            if want.shape != got.shape:
                raise AssertionError(f"{call}: {got.shape}, expected {want.shape}")
            wrong.append(jnp.sum(got != want, dtype=jnp.int32))
        wrong = jnp.stack(wrong)
        total = jnp.stack([stop[0], jnp.sum(wrong > 0, dtype=jnp.int32)])
        return wrong[None], jax_overlap.psum(total, names)[None]

    spec = P(names)
    return jax.jit(
        jax.shard_map(
            on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


def after_turns(count, tree):
    """`tree`, once the device has gone round so often: some 10 us for each."""
    half = jnp.eye(64) / 2
    turned = lax.fori_loop(0, count, lambda _, a: a @ half + 1.0, jnp.ones((64, 64)))
    # Not so, but XLA does not know: what is not needed it leaves out.
    never = turned[0, 0] < 0
    return jax.tree.map(lambda a: jnp.where(never, jnp.ones_like(a), a), tree)


def run(
    *, seconds: float = math.inf, rounds: float = math.inf, seed: int = 0
) -> Result:
    """Soaks for so many seconds, or rounds, on all devices.

    Every process has to call it with the same arguments, and ends in the same round.
    """
    rng = random.Random(seed)
    devices = jax.devices()
    ops = ON_CPU if devices[0].platform == "cpu" else ON_GPU
    places = meshes(devices)
    programs = []
    result = Result()
    start = said = time.monotonic()
    over = False
    while not over and result.rounds < rounds:
        if result.rounds % _NEW_EVERY < 2 and len(programs) < _PROGRAMS:
            mesh = rng.choice(places)
            calls = [random_call(rng, ops, mesh) for _ in range(rng.randint(1, 3))]
            programs.append((calls, mesh, make_program(calls, mesh)))
            result.programs += 1
            calls, mesh, program = programs[-1]
        else:
            calls, mesh, program = rng.choice(programs)
        # The same on all ranks, but for the time.
        seeds = np.full(len(devices), rng.randrange(2**24), np.int32)
        late = np.zeros(len(devices), np.int32)
        for rank in rng.sample(range(len(devices)), rng.randint(0, len(devices) - 1)):
            late[rank] = rng.randint(0, _MAX_LATE)
        stop = np.full(len(devices), time.monotonic() - start > seconds, np.int32)
        wrong, totals = program(*_placed((seeds, late, stop), mesh))
        here = _report(result, calls, wrong, f"round {result.rounds}, data {seeds[0]}")
        stops, everywhere = np.asarray(totals.addressable_shards[0].data)[0]
        over = stops > 0
        result.wrong += max(here, int(everywhere))
        result.calls.update(call.op for call in calls)
        result.rounds += 1
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            rows.say(f"{said - start:.0f} s: {result}")
    return result


def _placed(arrays: Sequence[np.ndarray], mesh: Mesh) -> list[jax.Array]:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return [
        jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in arrays
    ]


def _report(result: Result, calls: Sequence[Call], wrong: jax.Array, when: str) -> int:
    """Tells what was wrong on ranks of this process; how many calls it was."""
    found = 0
    for shard in wrong.addressable_shards:
        for call, count in zip(calls, np.asarray(shard.data)[0], strict=True):
            if not count:
                continue
            found += 1
            if len(result.reports) < _MAX_REPORTS:
                rank = shard.index[0].start or 0
                text = f"{when}, rank {rank}: {count} wrong elements of {call}"
                result.reports.append(text)
                print(text, file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks as `argv` tells; returns 1 if an element was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_overlap.testing.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="how long (default: %(default)s)")
    add("--seed", type=int, default=0, help="of what is called (default: %(default)s)")
    add("--cpu", type=int, metavar="N", help="on N virtual CPU devices")
    args = parser.parse_args(argv)
    if args.cpu is not None:
        harness.use_cpu_devices(args.cpu)
    jax_overlap.testing.initialize()
    start = time.monotonic()
    result = run(seconds=60 * args.minutes, seed=args.seed)
    rows.say(
        f"{jax.device_count()} ranks, {time.monotonic() - start:.0f} s, "
        f"seed {args.seed}: {result}"
    )
    return int(result.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What goes wrong with psum on GPUs only: ranks that run ahead, and captured graphs.

No step waits for the host here, except on CPU, where XLA takes few programs at once.
"""

import hashlib
import os
from unittest import mock

import contract_devices as devices
import contract_processes as processes
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from contract_devices import Layout, grid, line
from contract_stragglers import Counting, on_cpu, wait_on_cpu
from contract_tools import BF16, F16
from jax import lax
from op_contract import Contract, named, node_size
from op_descriptions import PSUM

import jax_overlap
from jax_overlap import _native
from jax_overlap.testing.soak import after_turns

N = devices.ranks(8)
SIZES = (1, 3, 8, 63, 256, 257, 1000, 4096, 4099, 20_000, 65_537, 131_072, 300_000)
RUNS = 500
CALLS = 20  # of psum, in a run


def value(step, rank, size):
    """Small integers that differ by step, rank and element, on the device."""
    i = lax.iota(jnp.int32, size)
    return ((7 * i + 5 * rank + 3 * step) % 11 - 3).astype(jnp.float32)


def wrong(y, step, size, factor=1):
    """How many elements of `y` are not `factor` times the sum of the ranks' values."""
    right = lax.fori_loop(
        0,
        N,
        lambda rank, total: total + value(step, rank, size),
        jnp.zeros(size, jnp.float32),
    )
    return jnp.sum(jnp.logical_not(y == factor * right), dtype=jnp.int32)  # NaN too


class Case(Counting):
    op = PSUM


class Stragglers(Case):
    TIME_LIMIT_S = 480

    def test_10000_calls_of_changing_sizes(self):
        """One rank is late before each run, up to 10 ms, and the others run ahead."""
        rng = np.random.default_rng(20)  # alike in all processes

        def run(size):
            def fn(mistakes, first, late):
                rank = lax.axis_index("x")

                def step(i, mistakes):
                    y = jax_overlap.psum(value(first + i, rank, size), "x")
                    return mistakes + wrong(y, first + i, size)

                return lax.fori_loop(0, CALLS, step, after_turns(late, mistakes))

            return self.program(fn)

        programs = [run(size) for size in SIZES]
        mistakes = self.everywhere(0)
        for i in range(48 if on_cpu() else RUNS):
            which = i if i < len(SIZES) else int(rng.integers(len(SIZES)))
            late = self.one_late(rng, 0.01)
            mistakes = programs[which % len(SIZES)](
                mistakes, self.everywhere(CALLS * i), late
            )
            wait_on_cpu(mistakes)
        self.assert_none(mistakes)

    def test_200_rounds_in_which_the_operand_is_overwritten(self):
        """The sum is used at once, and NaN is written where the operand was."""
        size = 5000
        fill = self.program(lambda step: value(step, lax.axis_index("x"), size))

        def fn(x, step, late, mistakes):
            y = jax_overlap.psum(after_turns(late, x), "x")
            twice = y * 2
            after = jax_overlap.psum(twice, "x")  # needs y, in another call
            mistakes += wrong(twice, step, size, 2) + wrong(after, step, size, 2 * N)
            return jnp.where(after == 0, jnp.nan, x * jnp.nan), mistakes

        program = self.program(fn, donate_argnums=(0, 3))
        mistakes = self.everywhere(0)
        for step in range(200):
            x = fill(self.everywhere(step))
            late = self.everywhere(200 * (np.arange(N) == step % N))  # some ms
            poison, mistakes = program(x, self.everywhere(step), late, mistakes)
            wait_on_cpu(mistakes)
        self.assert_none(mistakes)
        for part in tools.fetch(poison).values():
            self.assertTrue(np.isnan(part).all())

    def test_one_helper_twice_and_two_sizes_in_50_runs(self):
        """Independent calls, which XLA may run in any order on any rank."""
        layout = self.layout
        helper = jax.jit(lambda x: jax_overlap.psum(x, "x"))
        xs = [
            tools.exact(self.seed + i, (N, size), np.float32)
            for i, size in enumerate((700, 700, 100_000, 3))
        ]

        def fn(*xs):
            return [helper(x) for x in xs[:2]] + [
                jax_overlap.psum(x, "x") for x in xs[2:]
            ]

        want = [self.want(layout, (x,), np.float32) for x in xs]
        self.check(fn, layout, tuple(xs), want, calls=4, repeats=50, replicas=True)


class Grids(Contract):
    """Teams over the two axes of one mesh, in one program."""

    op = PSUM
    TURNS = ("a", "b", "ab", "a")

    def turns(self):
        if N == 6:  # 3 x 2: the longer axis first
            return [Layout((3, 2), ("a", "b"), tuple(axes)) for axes in self.TURNS]
        return [grid(*axes) for axes in self.TURNS]

    def right(self, layout, x):
        return self.want(layout, (x,), np.float32)

    def test_axes_in_turn_and_independent_calls_between(self):
        turns = self.turns()
        sizes = (90, 5000, 1, 90)
        xs = [
            tools.exact(self.seed + i, (turns[0].size, size), np.float32)
            for i, size in enumerate(sizes)
        ]

        def fn(*xs):
            chain, between = xs[0], []
            for x, turn in zip(xs, turns, strict=True):
                between.append(jax_overlap.psum(x, turn.axis_name))
                chain = jax_overlap.psum(chain % 5, turn.axis_name)
            return chain, between

        chain = xs[0]
        for turn in turns:
            chain = self.right(turn, chain % 5)
        want = (chain, [self.right(t, x) for t, x in zip(turns, xs, strict=True)])
        calls = 2 * sum(turn.team > 1 for turn in turns)
        self.check(fn, turns[0], tuple(xs), want, calls=calls, repeats=20)

    def test_axes_in_turn_in_a_scan(self):
        turns, steps = self.turns(), 25
        x = tools.exact(self.seed, (turns[0].size, 300), np.float32)

        def fn(x):
            def step(carry, i):
                for turn in turns:
                    beside = jax_overlap.psum(carry + i, turn.axis_name)
                    carry = jax_overlap.psum(carry % 5, turn.axis_name)
                return carry, beside

            return lax.scan(step, x, jnp.arange(steps, dtype=np.float32))

        carry, beside = x, []
        for i in range(steps):
            for turn in turns:
                last = self.right(turn, carry + i)
                carry = self.right(turn, carry % 5)
            beside.append(last)
        want = (carry, np.stack(beside, 1))
        self.check(fn, turns[0], (x,), want, check_vma=False, repeats=5)

    def test_a_condition_of_which_the_ranks_take_different_branches(self):
        """What a rank leaves out must not shift what it calls afterwards."""
        along, across = self.turns()[1], self.turns()[0]  # over "b", over "a"
        x = tools.exact(self.seed, (along.size, 700), np.float32)
        first = np.arange(along.size) < along.shape[1]  # those at 0 of "a"

        def fn(x):
            def summed(x):
                return jax_overlap.psum(x[:500], "b").sum() + x

            y = lax.cond(lax.axis_index("a") == 0, summed, lambda x: x, x)
            return jax_overlap.psum(y, "a")

        part = self.want(along, (x[:, :500],), np.float32).sum(1, keepdims=True)
        want = self.right(across, np.where(first[:, None], part + x, x))
        calls = (along.team > 1) + (across.team > 1)
        self.check(fn, along, (x,), want, check_vma=False, calls=calls, repeats=5)


class Puts(Contract):
    """Between nodes NVSHMEM puts, here as on several hosts, where no store arrives."""

    op = PSUM
    SIZES = (1, 257, 5001, 300_000)

    @named(f32=(np.float32,), bf16=(BF16,))
    def test_between_nodes(self, dtype):
        if jax.process_count() == 1:
            self.skipTest("needs several processes, for NVSHMEM")
        if not _native.ffi.testing:  # a build for users has no such switch
            self.skipTest("needs a test build")
        layout = line(N)
        xs = [tools.exact(self.seed + n, (N, n), dtype) for n in self.SIZES]
        want = [self.want(layout, [x], dtype) for x in xs]
        switch = mock.patch.dict(os.environ, JAX_OVERLAP_PUT_ACROSS_NODES="1")
        for split in devices.divisors(N)[:-1]:
            with self.subTest(node=split), node_size(str(split)), switch:
                self.assertTrue(_native.test_switch("PUT_ACROSS_NODES"))
                self.check(
                    lambda *xs: [jax_overlap.psum(x, "x") for x in xs],
                    layout,
                    xs,
                    want,
                    calls=len(xs),
                    replicas=True,
                    repeats=20,
                )


class Hashes(Contract):
    """The same bits whatever XLA does with a program, such as capture it in a graph.

    Writes hashes of many results; compare_hashes.py compares two runs.
    """

    op = PSUM

    TIME_LIMIT_S = 480
    SIZES = (1, 1000, 5001, 300_000)

    def test_hashes_of_a_list_of_programs(self):
        layout, lines = line(N), []
        for dtype in (np.float32, BF16, F16):
            for split in devices.divisors(N):
                seed = 100 * split
                xs = [
                    tools.normal(seed + i, (N, size), dtype)
                    for i, size in enumerate(self.SIZES)
                ]
                with node_size(str(split)):
                    results = self.results(layout, xs)
                for (algorithm, size, what), got in results.items():
                    parts = tools.fetch(got)
                    self.assert_replicas(parts, layout)
                    text = b"".join(
                        tools.bits(part) for _, part in sorted(parts.items())
                    )
                    name = f"{np.dtype(dtype).name} {split} {algorithm} {size} {what}"
                    lines.append(f"{name}: {hashlib.sha256(text).hexdigest()}")
        processes.write_hashes("psum", lines)

    def results(self, layout, xs):
        """{(algorithm, size, what): result}; each algorithm is a program of its own."""
        results = {}
        for algorithm in self.algorithms:

            def fn(xs, algorithm=algorithm):
                def psum(x):
                    return jax_overlap.psum(x, "x", algorithm=algorithm)

                def each(x):
                    first = psum(x)
                    looped = lax.fori_loop(0, 4, lambda i, v: psum(v / 8 + x * i), x)
                    return {"one": first, "two": psum(first / 2 + x), "loop": looped}

                return [each(x) for x in xs]

            program = jax.jit(tools.stacked(fn, layout, check_vma=False))
            placed = tools.place(xs, layout)
            for _ in range(3):  # a graph is not captured at the first run
                got = jax.block_until_ready(program(placed))
            for size, of_size in zip(self.SIZES, got, strict=True):
                for what, result in of_size.items():
                    results[algorithm, size, what] = result
        return results


if __name__ == "__main__":
    absltest.main()

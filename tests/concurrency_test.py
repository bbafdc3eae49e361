"""Ops from several threads, many in flight, ranks that come late, programs that go."""

import threading
import time

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from contract_tools import Layout, line
from jax import lax
from op_contract import Contract, named
from op_descriptions import PSUM

import jax_overlap


def in_threads(*functions, limit=60):
    """Runs the functions at once, from one start; returns their exceptions."""
    start, errors = threading.Barrier(len(functions)), []

    def body(function):
        try:
            start.wait(limit)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in threads)
    return errors + [TimeoutError(f"{hanging} threads hang")] * bool(hanging)


def psum(x, axis="x", **kw):
    return jax_overlap.psum(x, axis, **kw)


class Threads(Contract):
    op = PSUM

    def work(self, program, layout, shape, seed, rounds=40, awaited=True):
        """A function that runs `program`, which sums once, and checks every result."""

        def run():
            rng = np.random.default_rng(seed)
            kept = []
            for _ in range(rounds):
                x = rng.integers(-3, 4, (layout.size, *shape)).astype(np.float32)
                got = program(tools.place(x, layout))
                kept.append((got, x))
                if awaited:
                    jax.block_until_ready(got)
            for got, x in kept:
                self.assert_stacked(got, self.want(layout, (x,), np.float32))

        return run

    def assert_threads(self, *functions):
        for error in in_threads(*functions):
            raise error

    @named(
        **{
            f"{name}_{size}": (algorithm, size)
            for name, algorithm in (
                ("chosen", None),
                ("one_shot", "one_shot"),
                ("two_shot", "two_shot"),
                ("nvrar", "nvrar"),
            )
            for size in (3, 3000)
        }
    )
    def test_one_program_from_two_threads(self, algorithm, size):
        program = jax.jit(
            tools.stacked(lambda x: psum(x, algorithm=algorithm), line(8))
        )
        self.assert_threads(
            *(self.work(program, line(8), (size,), seed) for seed in range(2))
        )

    def test_two_programs_from_four_threads(self):
        small = jax.jit(tools.stacked(psum, line(8)))
        large = jax.jit(tools.stacked(lambda x: psum(2 * x) / 2, line(8)))
        self.assert_threads(
            self.work(small, line(8), (5,), 1),
            self.work(large, line(8), (40_000,), 2, rounds=15),
            self.work(small, line(8), (5,), 3),
            self.work(large, line(8), (40_000,), 4, rounds=15),
        )

    def test_ours_in_one_thread_and_that_of_lax_in_another(self):
        ours = jax.jit(tools.stacked(psum, line(8)))
        theirs = jax.jit(tools.stacked(lambda x: lax.psum(x, "x"), line(8)))
        self.assert_threads(
            self.work(ours, line(8), (500,), 1), self.work(theirs, line(8), (500,), 2)
        )

    def test_disjoint_overlapping_and_turned_teams(self):
        layouts = (
            line(3, order=(0, 1, 2)),
            line(4, order=(3, 4, 5, 6)),
            line(4, order=(5, 4, 3, 2)),
            line(8, order=(7, 6, 5, 4, 3, 2, 1, 0)),
        )
        self.assert_threads(
            *(
                self.work(jax.jit(tools.stacked(psum, layout)), layout, (700,), i)
                for i, layout in enumerate(layouts)
            )
        )

    def test_axes_of_one_mesh_from_two_threads(self):
        layouts = [Layout((2, 4), ("a", "b"), (axis,)) for axis in "ab"]
        self.assert_threads(
            *(
                self.work(
                    jax.jit(tools.stacked(lambda x, t=t: psum(x, t.axis_name), t)),
                    t,
                    (99,),
                    i,
                )
                for i, t in enumerate(layouts)
            )
        )

    def test_compiling_in_one_thread_while_another_runs(self):
        program = jax.jit(tools.stacked(psum, line(8)))

        def compile_many():
            for size in range(1, 13):
                fresh = jax.jit(tools.stacked(lambda x: psum(x + 0), line(8)))
                self.work(fresh, line(8), (size,), size, rounds=2)()

        self.assert_threads(compile_many, self.work(program, line(8), (500,), 1))

    def test_programs_that_are_dropped_while_they_run(self):
        """What a call needs lives until the call has ended, not its program."""
        for i in range(15):
            program = jax.jit(tools.stacked(lambda x, i=i: psum(x * i), line(8)))
            x = tools.exact(self.seed + i, (8, 50_000), np.float32)
            got = program(tools.place(x, line(8)))
            del program
            jax.clear_caches()
            self.assert_stacked(got, self.want(line(8), (x * i,), np.float32))

    def test_results_dropped_while_they_are_made(self):
        program = jax.jit(tools.stacked(psum, line(8)))
        x = tools.exact(self.seed, (8, 50_000), np.float32)
        for _ in range(20):
            program(tools.place(x, line(8)))  # its result and operand die at once
        got = program(tools.place(x, line(8)))
        self.assert_stacked(got, self.want(line(8), (x,), np.float32))


class Late(Contract):
    op = PSUM

    def after(self, seconds_of, x, tag=0):
        """x, once rank r has slept seconds_of(r, tag)."""

        def sleep(rank, tag):
            time.sleep(seconds_of(int(rank), int(tag)))
            return np.float32(0)

        zero = jax.pure_callback(
            sleep, jax.ShapeDtypeStruct((), np.float32), lax.axis_index("x"), tag
        )
        return x + zero

    @named(first=(0,), middle=(2,), last=(3,))
    def test_one_rank_that_is_late(self, who):
        x = tools.exact(self.seed, (4, 300), np.float32)
        for algorithm in (None, *PSUM.algorithms):

            def fn(x, algorithm=algorithm):
                x = self.after(lambda rank, _: 0.3 * (rank == who), x)
                return psum(x, algorithm=algorithm)

            want = self.want(line(4), (x,), np.float32)
            self.check(fn, line(4), (x,), want, check_vma=False, repeats=1, calls=1)

    def test_ranks_that_are_late_in_turn_over_many_steps(self):
        """A fast rank must not overwrite what a slow one still needs."""
        x = tools.exact(self.seed, (4, 300), np.float32)
        delays = np.random.default_rng(0).integers(0, 4, (30, 4)) / 500

        def fn(x):
            def step(carry, i):
                y = psum(self.after(lambda rank, i: delays[i, rank], x * i, i))
                return carry, (y, psum(x + i, algorithm="one_shot"))

            return lax.scan(step, 0, jnp.arange(30))[1]

        steps = np.arange(30, dtype=np.float32)[None, :, None]
        total = np.broadcast_to(x.sum(0), x.shape)[:, None]
        want = (total * steps, total + 4 * steps)
        self.check(fn, line(4), (x,), want, check_vma=False, repeats=1)


MANY_IN_FLIGHT = """
import contract_tools as tools, jax, numpy as np, jax_overlap
from contract_tools import line
program = jax.jit(tools.stacked(lambda x: jax_overlap.psum(x, "x"), line(8)))
x = tools.exact(0, (8, 100), np.float32)
placed = [tools.place(x * i, line(8)) for i in range(20)]
jax.block_until_ready(program(placed[0]))
try:
    results = [program(placed[i % 20]) for i in range({steps})]
    for i, result in enumerate(results):
        for part in tools.fetch(result).values():
            np.testing.assert_array_equal(part, x.sum(0) * (i % 20))
    print("all right")
except jax.errors.JaxRuntimeError as error:
    assert "JAX_OVERLAP_WAIT_TIMEOUT_S" in str(error), error
    jax_overlap.clear_errors()
    print("limit passed")
"""

# XLA's own collectives block the thread that runs into them. The thread that
# completes a result of ours runs into what comes next, so it may be blocked for
# ranks that it has yet to complete.
LAX_RIGHT_AFTER = """
import contract_tools as tools, jax, numpy as np, jax_overlap
from contract_tools import line
from jax import lax
for n in (2, 4, 8):
    x = tools.exact(n, (n, 6), np.float32)
    def fn(x):
        y = jax_overlap.psum(x, "x")
        z = lax.psum(y + x, "x")
        beside = jax_overlap.psum(x + 1, "x"), lax.psum(3 * x, "x")
        return (y, z, *beside, jax_overlap.psum(z * x, "x"))
    program = jax.jit(tools.stacked(fn, line(n), check_vma=False))
    s, operand = x.sum(0), tools.place(x, line(n))
    want = (s, n * s + s, s + n, 3 * s, (n * s + s) * s)
    for _ in range(300):
        for result, right in zip(program(operand), want, strict=True):
            for part in tools.fetch(result).values():
                np.testing.assert_array_equal(part, right)
print("all right")
"""


class Children(absltest.TestCase):
    """In processes of their own, as XLA ends a process whose collective is stuck."""

    def test_lax_right_after_ours(self):
        child = tools.run_child("-c", LAX_RIGHT_AFTER, limit=100)
        self.assertFalse(child.timed_out, child.err)
        self.assertEqual((child.code, child.out.strip()), (0, "all right"), child.err)

    def test_500_steps_that_nobody_awaits(self):
        """All right, or an error in time; never an abort, as with lax on few cores."""
        child = tools.run_child(
            "-c",
            MANY_IN_FLIGHT.format(steps=500),
            env={"JAX_OVERLAP_WAIT_TIMEOUT_S": "20"},
            limit=100,
        )
        self.assertFalse(child.timed_out, child.err)
        self.assertEqual(child.code, 0, child.err)
        self.assertIn(child.out.strip(), ("all right", "limit passed"))


if __name__ == "__main__":
    absltest.main()

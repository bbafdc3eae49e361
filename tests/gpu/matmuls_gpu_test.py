"""What goes wrong with the fused matmuls on GPUs only: ranks that run ahead, chunks.

No step waits for the host here, except on CPU, where XLA takes few programs at once.
"""

import functools
import hashlib

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
from matmul_descriptions import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    ON_GPU,
)
from op_contract import Contract, lowered, named, over_teams

import jax_overlap
from jax_overlap.testing.soak import after_turns

N = devices.ranks(8)
OPS = (MATMUL_REDUCE_SCATTER, ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE)
BY_NAME = {op.name: (op,) for op in OPS}
GATHERS = ALL_GATHER_MATMUL.name


def small(step, rank, shape, dtype, salt=0):
    """Integers from -1 to 1 that differ by step, rank and element, on the device."""
    i = sum(
        (lax.broadcasted_iota(jnp.int32, shape, d) * p for d, p in enumerate((7, 3))),
        start=5 * rank + 11 * step + salt,
    )
    return ((i * i + i // 3) % 3 - 1).astype(dtype)


def cut_rows(op):
    """Whether a rank has the result's rows of its own only."""
    return op.name == MATMUL_REDUCE_SCATTER.name


def summed(part, shape):
    """The sum over the ranks of `part(rank)`, in float32."""
    zero = jnp.zeros(shape, jnp.float32)
    return lax.fori_loop(0, N, lambda rank, y: y + part(rank), zero)


def mistakes_in(y, right):
    """How many elements are not the right ones, once these are of the type of `y`."""
    return jnp.sum(jnp.logical_not(y == right.astype(y.dtype)), dtype=jnp.int32)


class Case(Counting):
    op = MATMUL_REDUCE_SCATTER

    def assert_native(self, program, *placed, ops=OPS):
        hlo = program.lower(*placed).compile().as_text()
        self.assertEqual(tools.collectives(hlo), [])
        for op in ops:
            self.assertGreater(tools.custom_calls(hlo, op.target), 0, op.name)


class Stragglers(Case):
    TIME_LIMIT_S = 480
    # Rows (of a rank, or of its part), what is contracted, columns. Sums of as many
    # products, of -1 to 1, are exact in bfloat16 for one rank.
    SHAPES = ((1, 3, 5), (16, 32, 24), (129, 17, 65), (256, 128, 384), (40, 256, 1000))

    def run_of(self, op, shape, dtype):
        rows, k, columns = shape
        whole = rows if op.name == GATHERS or not cut_rows(op) else N * rows

        def fn(mistakes, step, late):
            me, step = lax.axis_index("x"), after_turns(late, step)
            of_x = lambda rank: small(step, rank, (whole, k), dtype)  # noqa: E731
            of_w = lambda rank: small(step, rank, (k, columns), dtype, 1)  # noqa: E731
            y = op.call(of_x(me), of_w(me), "x")
            dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
            if op.name == GATHERS:
                right = lax.map(lambda rank: dot(of_x(rank), of_w(me)), jnp.arange(N))
                right = right.reshape(N * rows, columns)
            elif cut_rows(op):

                def mine(rank):
                    x = lax.dynamic_slice_in_dim(of_x(rank), me * rows, rows)
                    return dot(x, of_w(rank))

                right = summed(mine, (rows, columns))
            else:
                both = lambda rank: dot(of_x(rank), of_w(rank))  # noqa: E731
                right = summed(both, (rows, columns))
            return mistakes + mistakes_in(y, right)

        return self.program(fn)

    def test_300_calls_in_random_order(self):
        """One rank is late before each, up to 5 ms, and the others run ahead."""
        rng = np.random.default_rng(21)  # alike in all processes
        kinds = [
            (op, s, t) for op in OPS for s in self.SHAPES for t in (np.float32, BF16)
        ]
        programs = [self.run_of(*kind) for kind in kinds]
        mistakes = self.everywhere(0)
        for program, (op, *_) in zip(programs, kinds, strict=True):
            self.assert_native(program, *[mistakes] * 3, ops=(op,))
        for i in range(100 if on_cpu() else 300):
            which = i if i < len(kinds) else int(rng.integers(len(kinds)))
            late = self.one_late(rng, 0.005)
            mistakes = programs[which](mistakes, self.everywhere(i), late)
            wait_on_cpu(mistakes)
        self.assert_none(mistakes)


class Grids(Contract):
    """Teams over the axes of one mesh, in one program."""

    op = MATMUL_REDUCE_SCATTER
    TURNS = (
        (ALL_GATHER_MATMUL, "b"),
        (MATMUL_REDUCE_SCATTER, "b"),
        (MATMUL_ALL_REDUCE, "a"),
        (ALL_GATHER_MATMUL, "a"),
        (MATMUL_REDUCE_SCATTER, "ab"),
        (MATMUL_ALL_REDUCE, "ab"),
        (ALL_GATHER_MATMUL, "ba"),
        (MATMUL_REDUCE_SCATTER, "a"),
    )

    def turns(self):
        """(op, layout), of a mesh of 2 x 2, of 2 x 4, or what there is."""
        if N == 6:  # 3 x 2: the longer axis first
            shape, names = (3, 2), ("a", "b")
            return [(op, Layout(shape, names, tuple(a))) for op, a in self.TURNS]
        return [(op, grid(*axes)) for op, axes in self.TURNS]

    def right(self, op, layout, *operands):
        return over_teams(layout, op.reference, *operands).astype(np.float32)

    def test_all_ops_over_each_axis_and_over_both(self):
        turns = self.turns()
        layout = turns[0][1]
        cases = [
            op.operands(turn, 90 * (1 + i % 3), np.float32, self.seed + i)
            for i, (op, turn) in enumerate(turns)
        ]

        def fn(*cases):
            return [
                op.call(*case, turn.axis_name)
                for case, (op, turn) in zip(cases, turns, strict=True)
            ]

        want = [
            self.right(op, turn, *case)
            for case, (op, turn) in zip(cases, turns, strict=True)
        ]
        calls = sum(op == self.op and turn.team > 1 for op, turn in turns)
        self.check(fn, layout, tuple(cases), want, calls=calls, repeats=20)

    def test_a_chain_over_both_axes(self):
        """Tensor parallel over "b", then a sum over "a": each needs the last."""
        turns = self.turns()[:3]
        layout = turns[0][1]
        a, b = layout.shape
        x = tools.exact(self.seed, (a * b, 6, 5), np.float32)
        ws = [
            tools.exact(self.seed + i, (a * b, *shape), np.float32)
            for i, shape in enumerate(((5, 12), (12, 7), (7, 9)))
        ]

        def fn(x, *ws):
            for (op, turn), w in zip(turns, ws, strict=True):
                x = op.call(x % 5 - 2, w, turn.axis_name)
            return x

        want = x
        for (op, turn), w in zip(turns, ws, strict=True):
            want = self.right(op, turn, want % 5 - 2, w)
        self.check(fn, layout, (x, *ws), want, calls=int(b > 1) or None, repeats=20)


class Layers(Contract):
    op = MATMUL_REDUCE_SCATTER

    @named(f32=(np.float32,), bf16=(BF16,))
    def test_a_scan_over_8_layers(self, dtype):
        """Each gathers, multiplies, bends, multiplies and scatters, as in a model."""
        layers, rows, k, hidden = 8, 24, 16, 40
        layout = line(N)
        data = [
            tools.exact(self.seed + i, (N, *shape), dtype)
            for i, shape in enumerate(
                ((rows, k), (layers, k, hidden), (layers, hidden, k))
            )
        ]

        def bent(y):
            """Integers from -1 to 1."""
            return y % 3 - 1

        def fn(x, up, down):
            def layer(x, ws):
                h = bent(jax_overlap.all_gather_matmul(x, ws[0], "x"))
                y = jax_overlap.matmul_reduce_scatter(h, ws[1], "x")
                return bent(y), y

            return lax.scan(layer, x, (up, down))

        x, up, down = (tools.wide(a) for a in data)
        ys = []
        for i in range(layers):
            h = bent(ALL_GATHER_MATMUL.reference(x, up[:, i]))
            y = MATMUL_REDUCE_SCATTER.reference(h, down[:, i]).astype(dtype)
            ys.append(y)
            x = bent(tools.wide(y))
        want = (x.astype(dtype), np.stack(ys, 1))
        self.check(fn, layout, tuple(data), want, check_vma=False, repeats=5)


class Large(Case):
    """More than the slots of the heap hold at once, so the work is cut in chunks."""

    TIME_LIMIT_S = 300

    @named(
        **{
            f"{op.name}_{np.dtype(dtype).name}": (op, dtype)
            for op in OPS
            for dtype in (BF16, np.float32)
        }
    )
    def test_chunks(self, op, dtype):
        # What is sent has 256 MiB in bfloat16, of all ranks together. A heap of 1 GiB,
        # which is the default, has 128 MiB for it at a time.
        k, columns = (512, 4096) if ON_GPU else (64, 96)
        if op.name == GATHERS:
            k, columns = columns, k
        rows = 32_768 if ON_GPU else 1024
        rows -= rows % N
        mine = rows if op.name != GATHERS else rows // N

        def where(step, rank, first, count):
            """Column and value of the only element, in each row, that is not 0."""
            i = first + jnp.arange(count)
            return (7 * i + 5 * rank + 3 * step) % k, 1 - 2 * ((i + rank) % 2)

        def of_x(step, rank):
            at, value = where(step, rank, 0, mine)
            i = lax.broadcasted_iota(jnp.int32, (mine, k), 1)
            return jnp.where(i == at[:, None], value[:, None], 0).astype(dtype)

        def of_w(step, rank):
            return small(step, rank, (k, columns), dtype)

        def product(step, x_rank, w_rank, first, count):
            """Rows of x @ w, without a matmul."""
            at, value = where(step, x_rank, first, count)
            w = of_w(step, w_rank)
            return value[:, None].astype(jnp.float32) * w[at].astype(jnp.float32)

        def fn(mistakes, step):
            me = lax.axis_index("x")
            y = op.call(of_x(step, me), of_w(step, me), "x")
            if op.name == GATHERS:

                def wrong(rank):
                    part = lax.dynamic_slice_in_dim(y, rank * mine, mine)
                    return mistakes_in(part, product(step, rank, me, 0, mine))

                zero = jnp.int32(0)
                add = lambda rank, total: total + wrong(rank)  # noqa: E731
                return mistakes + lax.fori_loop(0, N, add, zero)
            count = rows // N if cut_rows(op) else rows
            first = me * count if cut_rows(op) else 0
            part = lambda rank: product(step, rank, rank, first, count)  # noqa: E731
            return mistakes + mistakes_in(y, summed(part, (count, columns)))

        program, mistakes = self.program(fn), self.everywhere(0)
        self.assert_native(program, mistakes, mistakes, ops=(op,))
        for step in range(4):
            mistakes = program(mistakes, self.everywhere(step))
            wait_on_cpu(mistakes)
        self.assert_none(mistakes)


class Choices(Contract):
    """What only the GPU's forms leave to lax; it is planned, not run."""

    op = MATMUL_REDUCE_SCATTER

    def plan(self, op, shapes, dtype=np.float32, **options):
        n = line(N)
        operands = [jax.ShapeDtypeStruct((N, *shape), dtype) for shape in shapes]
        call = getattr(jax_overlap, op.name)
        fn = tools.stacked(lambda *a: call(*a, "x", **options), n)
        (plan,) = jax_overlap.explain(fn, *operands)
        before = lowered(op.name, plan.implementation)
        jax.jit(fn).lower(*operands)
        self.assertEqual(lowered(op.name, plan.implementation), before + 1)
        return plan

    @named(**BY_NAME)
    def test_in_place_is_not_possible(self, op):
        shapes = op.shapes(N, 600)
        options = {"scatter_dimension": 0} if cut_rows(op) else {}
        plan = self.plan(op, shapes, algorithm="in_place", **options)
        kind = (plan.implementation, plan.algorithm)
        self.assertEqual(kind, ("lax", None) if ON_GPU else ("native", "in_place"))
        self.assertRegex(plan.reason, "addressed" if ON_GPU else "in_place")

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,))
    def test_gathered_along_what_is_contracted(self, dtype):
        """Half types would be rounded once a rank."""
        shapes = ((6, 8), (8 * N, 5))
        half = np.dtype(dtype).itemsize == 2
        plan = self.plan(ALL_GATHER_MATMUL, shapes, dtype, gather_dimension=1)
        left = ON_GPU and half
        self.assertEqual(plan.implementation, "lax" if left else "native", plan)
        wide = {"preferred_element_type": np.float32, "gather_dimension": 1}
        plan = self.plan(ALL_GATHER_MATMUL, shapes, dtype, **wide)
        self.assertEqual(plan.implementation, "native", plan)


class Hashes(Contract):
    """The same bits whatever XLA does with a program, such as capture it in a graph.

    Writes hashes of many results; compare_hashes.py compares two runs.
    """

    op = MATMUL_REDUCE_SCATTER
    TIME_LIMIT_S = 480
    SIZES = (1, 1000, 5001, 100_000)

    def test_hashes_of_a_list_of_programs(self):
        layout, lines = line(N), []
        for op in OPS:
            for dtype in (np.float32, BF16, F16):
                cases = [
                    op.operands(layout, size, dtype, self.seed + i, tools.normal)
                    for i, size in enumerate(self.SIZES)
                ]
                for algorithm in (None, *op.algorithms):
                    got = self.results(op, layout, cases, algorithm)
                    for size, of_size in zip(self.SIZES, got, strict=True):
                        for what, result in of_size.items():
                            name = f"{op.name} {np.dtype(dtype).name} {algorithm}"
                            digest = self.digest(op, layout, result)
                            lines.append(f"{name} {size} {what}: {digest}")
        processes.write_hashes("matmuls", lines)

    def digest(self, op, layout, result):
        parts = tools.fetch(result)
        if op.invariant:
            self.assert_replicas(parts, layout)
        text = b"".join(tools.bits(part) for _, part in sorted(parts.items()))
        return hashlib.sha256(text).hexdigest()

    def results(self, op, layout, cases, algorithm):
        """For each case {what: result}, all by one program."""

        def each(x, w):
            run = functools.partial(op.run, axis_name="x", algorithm=algorithm)
            first = run(x, w)

            def step(i, total):
                return total / 8 + run(x / 4, w + i.astype(w.dtype))

            two = run(x / 2 + first.ravel()[0], w)
            return {"one": first, "two": two, "loop": lax.fori_loop(0, 4, step, first)}

        fn = tools.stacked(lambda *cs: [each(*c) for c in cs], layout, check_vma=False)
        program, placed = jax.jit(fn), tools.place(tuple(cases), layout)
        for _ in range(3):  # a graph is not captured at the first run
            got = jax.block_until_ready(program(*placed))
        return got


if __name__ == "__main__":
    absltest.main()

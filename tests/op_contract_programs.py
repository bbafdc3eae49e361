"""The contract, second part: an op among others, again and again, on any mesh.

What goes wrong here is not arithmetic: data of an earlier call, of another call
site, or of a rank that runs ahead.
"""

import functools

import contract_devices as devices
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_devices import grid
from contract_tools import line
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from op_contract import Contract, named

# Or as many as there are.
EIGHT, FOUR = line(devices.ranks(8)), line(devices.ranks(4))


class Programs(Contract):
    def exact(self, layout, size, i=0, dtype=np.float32):
        """Operands for `size` elements and the right results, unlike for each i."""
        operands = self.op.operands(layout, size, dtype, self.seed + 7 * i)
        return operands, self.want(layout, operands, dtype)

    def call(self, *operands, axis_name="x", **kw):
        return self.op.call(*operands, axis_name, **kw)

    def test_eager(self):
        for check_vma in (True, False):
            operands, want = self.exact(FOUR, 33)
            fn = tools.stacked(self.call, FOUR, check_vma=check_vma)
            self.assert_stacked(fn(*tools.place(operands, FOUR)), want)

    def test_jit_of_jit(self):
        operands, want = self.exact(EIGHT, 33)
        inner = jax.jit(lambda *a: jax.jit(self.call)(*a))
        self.check(inner, EIGHT, operands, want, calls=1)

    def test_ahead_of_time(self):
        operands, want = self.exact(EIGHT, 65)
        program = jax.jit(tools.stacked(self.call, EIGHT))
        shaped = jax.eval_shape(program, *operands)
        self.assertEqual((shaped.shape, shaped.dtype), (want.shape, want.dtype))
        compiled = program.lower(*tools.place(operands, EIGHT)).compile()
        self.assert_stacked(compiled(*tools.place(operands, EIGHT)), want)

    def test_compiled_before_and_run_on_other_data_later(self):
        program = jax.jit(tools.stacked(self.call, EIGHT))
        for i in range(5):
            operands, want = self.exact(EIGHT, 100, i)
            self.assert_stacked(program(*tools.place(operands, EIGHT)), want)

    @named(**{str(n): (n,) for n in devices.team_sizes((2, 8))})
    def test_shrinking_and_growing_sizes(self, n):
        fn = jax.jit(tools.stacked(self.call, line(n)))
        for i, size in enumerate((64, 8, 70_000, 64, 1, 3, 70_000, 17)):
            operands, want = self.exact(line(n), size, i)
            got = jax.block_until_ready(fn(*tools.place(operands, line(n))))
            self.assert_stacked(got, want)

    def test_between_collectives_of_lax(self):
        self.need_lax()
        layout, n = EIGHT, EIGHT.team
        a, want_a = self.exact(layout, 500, 1)
        b, want_b = self.exact(layout, 70, 2)
        x = tools.exact(self.seed, (n, 31), np.float32)

        def fn(a, x, b):
            first = lax.psum(x, "x")
            one = self.call(*a)
            shifted = lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)])
            two = self.call(*b)
            return first, one, shifted, two, lax.psum(shifted, "x")

        total = np.broadcast_to(x.sum(0), x.shape)
        want = (total, want_a, np.roll(x, 1, 0), want_b, total)
        self.check(fn, layout, (a, x, b), want, calls=2, foreign=True, repeats=10)

    def test_two_independent_ops_of_unlike_sizes(self):
        layout = EIGHT
        a, want_a = self.exact(layout, 40_000, 1)
        b, want_b = self.exact(layout, 5, 2)
        self.check(
            lambda a, b: (self.call(*a), self.call(*b)),
            layout,
            (a, b),
            (want_a, want_b),
            calls=2,
            repeats=20,
        )

    @named(twice=(2,), eight_times=(8,))
    def test_one_jitted_helper_called(self, times):
        """The helper is lowered once and inlined, so the sites look all alike."""
        layout = EIGHT
        cases = [self.exact(layout, 600, i) for i in range(times)]
        helper = jax.jit(self.call)
        self.check(
            lambda *cases: [helper(*c) for c in cases],
            layout,
            tuple(c[0] for c in cases),
            [c[1] for c in cases],
            calls=times,
            repeats=20,
        )

    @named(small=(33,), chunked=(70_000,))
    def test_200_calls_back_to_back(self, size):
        """The operand lies in the same memory in each step: a rank that is ahead
        writes the next step's values there while others may still read."""
        layout, steps = FOUR, 200 if size < 1000 else 20
        operands, want = self.exact(layout, size)
        factors = np.arange(1, steps + 1, dtype=np.float32)

        def fn(*operands):
            def step(carry, factor):
                first, *rest = operands
                return carry, self.call(first * factor, *rest)

            return lax.scan(step, 0, factors)[1]

        shape = (1, steps) + (1,) * (want.ndim - 1)
        want = want[:, None] * factors.reshape(shape)
        self.check(fn, layout, operands, want, repeats=2)

    def test_a_chain_in_which_each_call_needs_the_last(self):
        """No rank may run ahead into the data of a step that others still read."""
        layout = EIGHT
        operands, want = self.exact(layout, 257)

        def fn(*operands):
            first, *rest = operands
            zero = jnp.zeros((), first.dtype)
            results = []
            for i in range(12):
                y = self.call(first + zero, *rest)
                results.append(y)
                zero = 0 * y.reshape(-1)[i]
            return results

        self.check(fn, layout, operands, [want] * 12, calls=12, repeats=5)

    def test_16_independent_ops_with_matmuls_and_lax_psums_between(self):
        self.need_lax()
        layout, n = EIGHT, EIGHT.team
        w = np.broadcast_to(np.eye(64, dtype=np.float32), (n, 64, 64))
        cases = [self.exact(layout, 64 * 4, i) for i in range(16)]
        x = [tools.exact(self.seed + i, (n, 64, 64), np.float32) for i in range(16)]

        def fn(w, x, cases):
            return [
                (self.call(*c), lax.psum(v @ w, "x"))
                for v, c in zip(x, cases, strict=True)
            ]

        want = [
            (right, np.broadcast_to(v.sum(0), v.shape))
            for v, (_, right) in zip(x, cases, strict=True)
        ]
        operands = (w, x, [c[0] for c in cases])
        self.check(fn, layout, operands, want, calls=16, foreign=True, repeats=6)

    def test_axes_in_turn_in_one_program(self):
        turns = [grid(*axes) for axes in ("a", "b", "ab", "a")]
        calls = sum(t.team > 1 for t in turns)
        operands = [
            self.op.operands(t, 90, np.float32, self.seed + i)
            for i, t in enumerate(turns)
        ]
        want = [
            self.want(t, o, np.float32) for t, o in zip(turns, operands, strict=True)
        ]

        def fn(*operands):
            return [
                self.call(*o, axis_name=t.axis_name)
                for o, t in zip(operands, turns, strict=True)
            ]

        self.check(fn, turns[0], tuple(operands), want, calls=calls, repeats=10)

    def test_a_loop_over_two_axes(self):
        a, b = grid("a"), grid("b")
        x = self.op.operands(a, 90, np.float32, self.seed)
        y = self.op.operands(b, 90, np.float32, self.seed + 1)

        def fn(x, y):
            def step(_, i):
                over_a = self.call(x[0] * i, *x[1:], axis_name="a")
                return 0, (over_a, self.call(y[0] + i, *y[1:], axis_name="b"))

            return lax.scan(step, 0, jnp.arange(10, dtype=np.float32))[1]

        def right(layout, first, rest, combine):
            steps = [
                self.want(layout, (combine(first, np.float32(i)), *rest), np.float32)
                for i in range(10)
            ]
            return np.stack(steps, 1)

        want = (right(a, x[0], x[1:], np.multiply), right(b, y[0], y[1:], np.add))
        self.check(fn, a, (x, y), want)

    @named(auto=(AxisType.Auto,), explicit=(AxisType.Explicit,))
    def test_mesh_from_the_context(self, axis_type):
        layout = grid("b", axis_type=axis_type)
        operands, want = self.exact(layout, 24)
        spec = P(("a", "b"))
        with jax.set_mesh(layout.mesh):
            fn = jax.shard_map(
                lambda *a: self.call(*(v[0] for v in a), axis_name="b")[None],
                in_specs=spec,
                out_specs=spec,
            )
            program = jax.jit(fn).lower(*tools.place(operands, layout)).compile()
            self.assertEqual(tools.custom_calls(program.as_text(), self.op.target), 1)
            self.assertEqual(tools.collectives(program.as_text()), [])
            got = program(*tools.place(operands, layout))
        self.assert_stacked(got, want)

    def test_shard_map_within_shard_map(self):
        """One axis made manual outside, the other inside: all are, so ours runs.

        On GPUs in a context that has the devices of the mesh: what is inside is lowered
        with an abstract one.
        """
        layout = grid("b")
        if jax.default_backend() == "gpu":
            self.enterContext(jax.set_mesh(layout.mesh))
        operands, want = self.exact(layout, 24)

        def inner(*operands):
            return self.call(*(v[0] for v in operands), axis_name="b")[None]

        def outer(*operands):
            return jax.shard_map(
                inner, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}
            )(*operands)

        fn = jax.jit(
            jax.shard_map(
                outer,
                mesh=layout.mesh,
                in_specs=P("a"),
                out_specs=P("a"),
                axis_names={"a"},
            )
        )
        placed = tools.place(operands, layout)
        hlo = fn.lower(*placed).compile().as_text()
        self.assertEqual(tools.custom_calls(hlo, self.op.target), 1)
        self.assertEqual(tools.collectives(hlo), [])
        self.assert_stacked(fn(*placed), want)

    def test_typed_as_lax_types_it(self):
        """The same varying axes, shape and dtype as the lax op, for what goes in."""
        for axes in ("b", "a", ("a", "b"), ("b", "a")):
            layout = grid(*axes)
            operands = self.op.operands(layout, 24, np.float32, self.seed)
            for check_vma in (True, False):
                seen = []

                def fn(*operands, axes=axes, seen=seen):
                    ours = self.call(*operands, axis_name=axes)
                    lax_ = self.op.lax(*operands, axes)
                    seen.append((jax.typeof(ours), jax.typeof(lax_)))
                    return ours

                jax.eval_shape(
                    tools.stacked(fn, layout, check_vma=check_vma), *operands
                )
                ours, theirs = seen[0]
                self.assertEqual(ours, theirs)
                self.assertEqual(ours.mat.varying, theirs.mat.varying)
                varying = {"a", "b"} - (set(axes) if self.op.invariant else set())
                self.assertEqual(ours.mat.varying, varying if check_vma else set())

    def test_out_specs_take_or_refuse_the_result_as_lax_does(self):
        layout = EIGHT
        operands = self.op.operands(layout, 24, np.float32, self.seed)
        fn = jax.shard_map(
            lambda *a: self.call(*(v[0] for v in a)),
            mesh=layout.mesh,
            in_specs=P("x"),
            out_specs=P(),
        )
        if not self.op.invariant:
            with self.assertRaisesRegex(ValueError, "out_specs"):
                jax.eval_shape(fn, *operands)
            return
        got = jax.jit(fn)(*tools.place(operands, layout))
        self.assertTrue(
            got.sharding.is_equivalent_to(NamedSharding(layout.mesh, P()), got.ndim)
        )
        want = self.want(layout, operands, np.float32)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[0])

    def test_operands_survive_and_may_be_donated(self):
        layout = EIGHT
        operands, want = self.exact(layout, 5000)
        program = jax.jit(
            tools.stacked(self.call, layout),
            donate_argnums=tuple(range(len(operands))),
        )
        for _ in range(5):
            placed = tools.place(operands, layout)
            self.assert_stacked(program(*placed), want)

    def test_outside_of_shard_map_as_lax(self):
        operands = [a[0] for a in self.op.operands(line(2), 4, np.float32, 1)]
        for call in (self.op.lax, self.op.call):
            with self.assertRaisesRegex(NameError, "unbound axis name"):
                call(*operands, "x")
            with self.assertRaisesRegex(NameError, "unbound axis name"):
                jax.jit(functools.partial(call, axis_name="x"))(*operands)

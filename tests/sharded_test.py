"""jax_overlap.sharded: the ops on global arrays, by plain jit and outside of it."""

import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import Layout
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_tools import (
    A2A,
    AG,
    AR,
    AUTO_GRID,
    GRID,
    LAYOUTS,
    RS,
    Case,
    TestCase,
    calls,
    compiled,
)

import jax_overlap
from jax_overlap import sharded


class Sharded(TestCase):
    @parameterized.product(op=(RS, AR, AG, A2A), layout=tuple(LAYOUTS))
    def test_values_gradients_and_shardings(self, op, layout):
        case = Case(op, LAYOUTS[layout])
        arrays = case.operands()
        want = case.numpy(*arrays)
        c = tools.exact(9, want.shape, np.float32)
        which = tuple(range(len(arrays)))

        def program(fn, c, *arrays):
            def loss(*arrays):
                y = fn(*arrays)
                return (y * c).sum(), y

            return jax.grad(loss, which, has_aux=True)(*arrays)

        placed = case.place(arrays)
        ours = jax.jit(functools.partial(program, case.call))
        with jax.set_mesh(case.layout.mesh):
            got, y = ours(case.put(c, case.out), *placed)
        np.testing.assert_array_equal(y, want)
        self.assert_lies(y, case, case.out)
        grads, _ = program(case.numpy, c, *map(jnp.asarray, arrays))
        for g, a, theirs in zip(got, placed, grads, strict=True):
            np.testing.assert_array_equal(g, theirs)
            self.assert_lies(g, case, a.sharding.spec)
        with jax.set_mesh(case.layout.mesh):
            hlo = compiled(case.call, *placed)
        self.assertEqual(calls(hlo, op), 1)
        self.assertEqual(tools.collectives(hlo), [])

    @parameterized.product(
        op=(RS, AG, A2A), layout=("line", "grid_permuted", "grid_auto_permuted")
    )
    def test_outside_of_jit_and_with_no_mesh_set(self, op, layout):
        """The mesh is that of the arrays, or an argument."""
        case = Case(op, LAYOUTS[layout])
        arrays = case.operands()
        placed = case.place(arrays)
        for y in (
            case.call(*placed),
            jax.jit(case.call)(*placed),
            case.call(*arrays, mesh=case.layout.mesh, x_spec=P(case.dp)),
        ):
            np.testing.assert_array_equal(y, case.numpy(*arrays))
            self.assert_lies(y, case, case.out)

    @parameterized.parameters(RS, AR, AG, A2A)
    def test_auto_axes_that_nobody_told_of(self, op):
        """The op lowers to lax, as explain says; values are the same."""
        case = Case(op, AUTO_GRID)
        placed = case.place(case.operands())
        untold = functools.partial(case.call, x_spec=None)
        (plan,) = jax_overlap.explain(untold, *placed)
        self.assertEqual(plan.implementation, "lax")
        self.assertIn("['dp'] are automatic", plan.reason)
        (plan,) = jax_overlap.explain(case.call, *placed)
        self.assertEqual(plan.implementation, "native")
        y = jax.jit(untold)(*placed)
        np.testing.assert_array_equal(y, case.numpy(*case.operands()))
        with self.assertRaisesRegex(NotImplementedError, "automatic"):
            jax.jit(functools.partial(untold, implementation="native"))(*placed)

    def test_an_auto_axis_of_one_device_hides_nothing(self):
        case = Case(RS, Layout((1, 4), ("dp", "tp"), ("tp",)))
        untold = functools.partial(case.call, x_spec=None)
        (plan,) = jax_overlap.explain(untold, *case.place(case.operands()))
        self.assertEqual(plan.implementation, "native")

    @parameterized.product(op=(RS, AG, A2A), kind=(GRID, AUTO_GRID))
    def test_under_vmap_and_scan(self, op, kind):
        case = Case(op, kind)
        arrays = case.operands()
        x, *w = case.place(arrays)
        want = case.numpy(*arrays)
        xs = jnp.stack([x, 2 * x, 3 * x])
        one = lambda x: case.call(x, *w)  # noqa: E731
        scanned = lambda xs: lax.scan(lambda c, x: (c, one(x)), 0, xs)[1]  # noqa: E731
        for fn in (jax.vmap(one), scanned):
            ys = jax.jit(fn)(xs)
            np.testing.assert_array_equal(ys, np.stack([want, 2 * want, 3 * want]))
        if w:
            ws = jnp.stack([w[0], 2 * w[0]])
            ys = jax.jit(jax.vmap(lambda w: case.call(x, w)))(ws)
            np.testing.assert_array_equal(ys, np.stack([want, 2 * want]))

    @parameterized.parameters(RS, AR, AG, A2A)
    def test_under_vmap_of_an_explicit_axis(self, op):
        """Which cannot be manual: jax.lax does it, and "native" says why not."""
        case = Case(op, GRID)
        arrays = case.operands()
        placed = case.place(arrays)
        specs = (0, None)[: len(arrays)]
        options = {RS: "scatter_dimension", AG: "gather_dimension"}
        case.options = {options[op]: 0} if op in options else {}

        def call(*arrays, **kw):
            args = (1, 0) if op == A2A else ()
            fn = getattr(sharded, op)
            return fn(*arrays, "tp", *args, **case.options, **kw)

        def program(fn, *arrays):
            y = fn(*arrays)
            return (y**2).sum(), y

        which = tuple(range(len(arrays)))
        run = functools.partial(program, jax.vmap(call, specs))
        got, y = jax.jit(jax.grad(run, which, has_aux=True))(*placed)
        run = functools.partial(program, case.numpy)
        want, values = jax.grad(run, which, has_aux=True)(*map(jnp.asarray, arrays))
        np.testing.assert_array_equal(y, values)
        self.assert_lies(y, case, case.out)
        for g, a, theirs in zip(got, placed, want, strict=True):
            np.testing.assert_array_equal(g, theirs)
            self.assert_lies(g, case, a.sharding.spec)
        with self.assertRaisesRegex(NotImplementedError, "under jax.vmap"):
            native = functools.partial(call, implementation="native")
            jax.vmap(native, specs)(*placed)

    @parameterized.parameters(RS, AR, AG)
    def test_forward_mode_and_second_derivatives(self, op):
        case = Case(op, GRID)
        arrays = case.operands()
        tangents = case.operands(5)
        fn = lambda *a: case.call(*a)  # noqa: E731
        got = jax.jit(lambda a, t: jax.jvp(fn, a, t))(
            case.place(arrays), case.place(tangents)
        )
        want = jax.jvp(case.numpy, arrays, tangents)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)

        def curved(fn):
            loss = lambda *a: (fn(*a) ** 2).sum()  # noqa: E731
            return lambda a, t: jax.jvp(jax.grad(loss, (0, 1)), a, t)[1]

        got = jax.jit(curved(fn))(case.place(arrays), case.place(tangents))
        want = curved(case.numpy)([*map(jnp.asarray, arrays)], tangents)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)

    def test_inside_shard_map_over_another_axis(self):
        case = Case(RS, GRID)
        placed = case.place(case.operands())
        with jax.set_mesh(GRID.mesh):
            fn = jax.shard_map(
                case.call,
                in_specs=(P("dp"), P()),
                out_specs=P("dp"),
                axis_names={"dp"},
            )
            y = jax.jit(fn)(*placed)
            self.assertEqual(calls(compiled(fn, *placed), RS), 1)
        np.testing.assert_array_equal(y, case.numpy(*case.operands()))
        self.assert_lies(y, case, case.out)


if __name__ == "__main__":
    absltest.main()

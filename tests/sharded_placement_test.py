"""jax_overlap.sharded: where operands and results lie, and what is refused."""

import doctest
import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import Layout, line
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_tools import (
    A2A,
    AG,
    AR,
    AUTO_GRID,
    EXPLICIT,
    GRID,
    RS,
    Case,
    TestCase,
    W,
    calls,
    compiled,
)

from jax_overlap import sharded


class Placement(TestCase):
    """Operands that lie otherwise: cut first if replicated, kept, or refused."""

    def test_replicated_operands_are_cut(self):
        for op in (RS, AR, AG, A2A):
            case = Case(op, GRID)
            arrays = case.operands()
            with self.subTest(op), jax.set_mesh(GRID.mesh):
                replicated = [case.put(a, P()) for a in arrays]
                y = jax.jit(case.call)(*replicated)
                np.testing.assert_array_equal(y, case.numpy(*arrays))
                self.assertEqual(
                    tools.collectives(compiled(case.call, *replicated)), []
                )
        case = Case(RS, GRID)
        x, w = case.operands()
        for placed in ((case.put(x, case.x), w), (x, case.put(w, case.w))):
            with jax.set_mesh(GRID.mesh):
                y = case.call(*placed)
            np.testing.assert_array_equal(y, case.numpy(x, w))

    def test_other_axes_are_kept(self):
        """Rows over "dp" are cut again by the scatter, columns over "dp" stay."""
        x, w = (tools.exact(i, s, np.float32) for i, s in enumerate(((16, 16), W)))
        put = Case(RS, GRID).put
        for call, out in (
            (
                lambda: sharded.matmul_reduce_scatter(
                    put(x, P("dp", "tp")), put(w, P("tp")), "tp"
                ),
                P(("dp", "tp"), None),
            ),
            (
                lambda: sharded.matmul_reduce_scatter(
                    put(x, P(None, "tp")), put(w, P("tp", "dp")), "tp"
                ),
                P("tp", "dp"),
            ),
            (
                lambda: sharded.matmul_reduce_scatter(
                    put(x, P("dp", "tp")),
                    put(w, P("tp")),
                    "tp",
                    scatter_dimension=-1,
                ),
                P("dp", "tp"),
            ),
            (
                lambda: sharded.all_gather_matmul(
                    put(x, P(("dp", "tp"))), put(w, P(None, "tp")), "tp"
                ),
                P("dp", "tp"),
            ),
            (
                lambda: sharded.all_gather_matmul(
                    put(x, P("dp")), put(w, P(None, "tp")), "tp"
                ),
                P("dp", "tp"),
            ),
            (
                lambda: sharded.all_gather_matmul(
                    put(x, P("dp", "tp")),
                    put(w, P(None, "tp")),
                    "tp",
                    gather_dimension=1,
                ),
                P("dp", "tp"),
            ),
            (
                lambda: sharded.matmul_all_reduce(
                    put(x, P(None, ("dp", "tp"))),
                    put(w, P(("dp", "tp"))),
                    ("tp", "dp"),
                ),
                P(None, None),
            ),
        ):
            y = call()
            np.testing.assert_array_equal(y, x @ w)
            self.assertEqual(y.sharding.spec, out)
        x = tools.exact(3, (16, 8, 3), np.float32)
        y = sharded.all_to_all(put(x, P(("dp", "tp"))), "tp", 1, 0)
        np.testing.assert_array_equal(y, x)
        self.assertEqual(y.sharding.spec, P("dp", "tp", None))
        y = sharded.all_to_all(put(x, P("tp", "dp")), "tp", 1, 0)
        np.testing.assert_array_equal(y, x)
        self.assertEqual(y.sharding.spec, P(None, ("dp", "tp"), None))

    def test_specs_of_auto_axes(self):
        """x_spec and w_spec leave nothing automatic, and keep what they say."""
        x, w = (tools.exact(i, s, np.float32) for i, s in enumerate(((16, 16), W)))
        put = Case(RS, AUTO_GRID).put
        fn = functools.partial(
            sharded.matmul_reduce_scatter,
            axis_name="tp",
            x_spec=P(None, "tp"),
            w_spec=P("tp", "dp"),
        )
        args = put(x, P(None, "tp")), put(w, P("tp", "dp"))
        y = jax.jit(fn)(*args)
        np.testing.assert_array_equal(y, x @ w)
        self.assertTrue(
            y.sharding.is_equivalent_to(NamedSharding(AUTO_GRID.mesh, P("tp", "dp")), 2)
        )
        hlo = compiled(fn, *args)
        self.assertEqual((calls(hlo, RS), tools.collectives(hlo)), (1, []))

    def test_a_mesh_with_both_kinds_of_axes(self):
        types = (AxisType.Explicit, AxisType.Auto)
        devices = np.array(jax.devices()).reshape(2, 4)
        mesh = jax.sharding.Mesh(devices, ("dp", "tp"), types)
        case = Case(RS, GRID)
        x, w = case.operands()
        with jax.set_mesh(mesh):
            args = jax.device_put(x, P("dp")), jax.device_put(w, P())
            fn = functools.partial(case.call)
            y = jax.jit(fn)(*args)
            self.assertEqual(calls(compiled(fn, *args), RS), 1)
        np.testing.assert_array_equal(y, case.numpy(x, w))
        self.assertEqual(str(jax.typeof(y)), "float32[2@dp,16,24]")

    def test_other_dimension_numbers(self):
        x, w = (
            tools.exact(i, s, np.float32)
            for i, s in enumerate(((16, 8, 4), (24, 4, 8)))
        )
        put = Case(RS, GRID).put
        dims = (((1, 2), (2, 1)), ((), ()))
        want = np.einsum("mhd,ndh->mn", x, w)
        x, w = put(x, P("dp", "tp")), put(w, P(None, None, "tp"))
        y = sharded.matmul_reduce_scatter(x, w, "tp", dimension_numbers=dims)
        np.testing.assert_array_equal(y, want)
        self.assertEqual(y.sharding.spec, P(("dp", "tp"), None))

    def test_an_axis_of_one_device_and_arrays_without_elements(self):
        for kind in (AxisType.Auto, AxisType.Explicit):
            one = Layout((2, 1), ("dp", "tp"), ("tp",), axis_type=kind)
            for op in (RS, AR, AG, A2A):
                case = Case(op, one)
                arrays = case.operands()
                y = jax.jit(case.call)(*case.place(arrays))
                np.testing.assert_array_equal(y, case.numpy(*arrays))
                self.assert_lies(y, case, case.out)
        for op in (RS, AR, AG):
            case = Case(op, GRID)
            for shape in ((2, 0, 16), (2, 16, 0)):
                arrays = [
                    np.ones(shape, np.float32),
                    np.ones((shape[2], 24), np.float32),
                ]
                y = jax.jit(case.call)(*case.place(arrays))
                self.assertEqual(y.shape, case.numpy(*arrays).shape)
                if y.size:  # JAX 0.10.2 cannot fetch one without elements
                    np.testing.assert_array_equal(y, case.numpy(*arrays))

    def test_batch_dimensions_lie_alike(self):
        """A replicated operand is cut as the other one; another sharding is refused."""
        x, w = (
            tools.exact(i, s, np.float32)
            for i, s in enumerate(((4, 8, 16), (4, 16, 8)))
        )
        put = Case(RS, GRID).put
        dims = (((2,), (1,)), ((0,), (0,)))
        for op, xs, ws in (
            (sharded.matmul_reduce_scatter, P("dp", None, "tp"), P("dp", "tp")),
            (sharded.all_gather_matmul, P("dp", "tp"), P("dp", None, "tp")),
        ):
            option = "scatter" if op is sharded.matmul_reduce_scatter else "gather"
            fn = functools.partial(op, axis_name="tp", dimension_numbers=dims)
            fn = functools.partial(fn, **{f"{option}_dimension": 1})
            sharding = fn(put(x, xs), put(w, ws)).sharding
            for args in (
                (put(x, xs), put(w, P(None, *ws[1:]))),
                (put(x, P(None, *xs[1:])), put(w, ws)),
            ):
                y = fn(*args)
                np.testing.assert_array_equal(y, x @ w)
                self.assertEqual(y.sharding, sharding)
            cube = Case(RS, Layout((2, 2, 2), ("a", "b", "tp"), ("tp",), **EXPLICIT))
            with self.assertRaisesRegex(ValueError, "batch dimensions alike"):
                fn(cube.put(x, P("a")), cube.put(w, P("b")))

    def test_several_weights_share_a_gather(self):
        x = tools.exact(0, (16, 16), np.float32)
        ws = [tools.exact(i, (16, 4, n), np.float32) for i, n in enumerate((2, 3, 1))]
        put = Case(AG, GRID).put

        def fn(x, *ws):
            return sharded.all_gather_matmul(
                x, ws, "tp", dimension_numbers=(((1,), (0,)), ((), ()))
            )

        args = put(x, P(("dp", "tp"))), *(put(w, P(None, "tp")) for w in ws)
        self.assertEqual(calls(compiled(fn, *args), AG), 1)
        for y, w in zip(jax.jit(fn)(*args), ws, strict=True):
            np.testing.assert_array_equal(y, np.einsum("mk,khd->mhd", x, w))
            self.assertEqual(y.sharding.spec, P("dp", "tp", None))

    def test_types(self):
        case = Case(RS, GRID)
        x, w = case.operands()
        placed = case.place([x.astype(tools.BF16), w.astype(tools.BF16)])
        self.assertEqual(case.call(*placed).dtype, tools.BF16)
        y = case.call(*placed, preferred_element_type=jnp.float32, precision="highest")
        np.testing.assert_array_equal(y, case.numpy(x, w))
        self.assertEqual(y.dtype, jnp.float32)
        y = case.call(*case.place([x.astype(tools.BF16), w]))
        self.assertEqual(y.dtype, jnp.float32)


class Errors(parameterized.TestCase):
    def error(self, fn, kind=ValueError) -> str:
        with self.assertRaises(kind) as caught:
            fn()
        return str(caught.exception)

    def test_no_mesh_or_another_one(self):
        x = np.ones((8, 8), np.float32)
        for op in (RS, AR, AG):
            fn = getattr(sharded, op)
            text = self.error(lambda fn=fn: fn(x, x, "tp"))
            self.assertIn(f"sharded.{op}: needs a mesh with the axis 'tp'", text)
            self.assertIn("jax.set_mesh", text)
            with jax.set_mesh(line(4).mesh):
                text = self.error(lambda fn=fn: fn(x, x, "tp"))
            self.assertIn("'tp' is not an axis of the mesh, which has ('x',)", text)

    def test_where_the_axis_is_bound(self):
        fn = jax.shard_map(
            lambda x: sharded.matmul_all_reduce(x, x, "x"),
            mesh=line(4).mesh,
            in_specs=P(),
            out_specs=P(),
        )
        text = self.error(lambda: fn(jnp.ones((8, 8))))
        self.assertIn("'x' is bound here", text)
        self.assertIn("Call jax_overlap.matmul_all_reduce.", text)

    @parameterized.parameters(
        (RS, P("tp", None), P("tp", None), "over 'tp' twice"),
        (RS, P(None, "tp"), P(None, "tp"), "over 'tp' twice"),
        (RS, P(None, "dp"), P("dp", None), "cut over ('tp',) and nothing else"),
        (RS, P(None, ("dp", "tp")), P(("tp", "dp"), None), "nothing else"),
        (RS, P(None, ("dp", "tp")), P(("dp", "tp"), None), "nothing else"),
        (AR, P("dp", "tp"), P("tp", "dp"), "over 'dp' twice"),
        (AG, P("tp", None), P("tp", None), "columns of w have to be cut"),
        (AG, P("tp", None), P("dp", "tp"), "columns of w have to be cut"),
        (AG, P(None, "tp"), P(None, "tp"), "dimension 0 of x has to be cut"),
        (AG, P(("tp", "dp"), None), P(None, "tp"), "the minor axes"),
    )
    def test_operands_that_lie_otherwise(self, op, x, w, words):
        case = Case(RS, GRID)
        a = np.ones((16, 16), np.float32)
        fn = getattr(sharded, op)
        text = self.error(lambda: fn(case.put(a, x), case.put(a, w), "tp"))
        self.assertIn(f"sharded.{op}: ", text)
        self.assertIn(words, text)
        self.assertIn("jax.sharding.reshard", text)

    def test_sizes_that_cannot_be_cut(self):
        a, w = np.ones((6, 16), np.float32), np.ones((16, 4), np.float32)
        with jax.set_mesh(line(4).mesh):
            text = self.error(lambda: sharded.matmul_reduce_scatter(a, w, "x"))
            self.assertIn("dimension 0 of the result has size 6, not divisible", text)
            self.assertIn(
                "by the 4 ranks of P('x',). Pad it to 8.",
                text.replace("P('x')", "P('x',)"),
            )
            text = self.error(lambda: sharded.all_gather_matmul(a, w, "x"))
            self.assertIn("dimension 0 of x has size 6", text)
            text = self.error(lambda: sharded.all_to_all(w, "x", 0, 0))
            self.assertIn("are both 0", text)

    def test_specs_that_do_not_fit(self):
        a = np.ones((8, 8), np.float32)
        call = functools.partial(sharded.matmul_reduce_scatter, a, a, "tp")
        with jax.set_mesh(AUTO_GRID.mesh):
            self.assertIn("'no'", self.error(lambda: call(x_spec=P("no"))))
            text = self.error(lambda: call(w_spec=P("tp", "dp")))
            self.assertIn("needs x_spec, too", text)
            text = self.error(lambda: call(x_spec=P(), w_spec=P(None, None, "dp")))
            self.assertIn("has more entries than w of shape", text)
        with jax.set_mesh(GRID.mesh):
            x = jax.device_put(a, P(None, "dp"))
            text = self.error(
                lambda: sharded.matmul_all_reduce(x, a, "tp", x_spec=P("dp"))
            )
            self.assertIn("nothing else", text)

    def test_of_the_ops_themselves(self):
        case = Case(RS, GRID)
        placed = case.place(case.operands())
        self.error(lambda: case.call(*placed, implementation="nope"))
        self.error(lambda: case.call(*placed, scatter_dimension=3))
        a = np.ones((8, 8), np.float32)
        with jax.set_mesh(GRID.mesh):
            self.error(lambda: sharded.matmul_reduce_scatter(a, a[:4], "tp"), TypeError)
            self.error(lambda: sharded.all_gather_matmul(a, a[0], "tp"))
            self.error(lambda: sharded.all_gather_matmul(a, a, ()))

    def test_the_examples(self):
        self.assertEqual(doctest.testmod(sharded).failed, 0)


if __name__ == "__main__":
    absltest.main()

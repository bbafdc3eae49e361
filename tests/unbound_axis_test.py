"""Ops called where nothing binds their axis: the error says what to do."""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap import sharded

CALLS = {
    "psum": jax_overlap.psum,
    "psum_scatter": jax_overlap.psum_scatter,
    "all_gather": jax_overlap.all_gather,
    "all_to_all": lambda x, axis: jax_overlap.all_to_all(x, axis, 0, 0, tiled=True),
    "matmul_reduce_scatter": lambda x, axis: jax_overlap.matmul_reduce_scatter(
        x, x, axis
    ),
    "all_gather_matmul": lambda x, axis: jax_overlap.all_gather_matmul(x, (x, x), axis),
    "matmul_all_reduce": lambda x, axis: jax_overlap.matmul_all_reduce(x, x, axis),
}
every_op = parameterized.parameters(*CALLS)
X = np.ones((8, 8), np.float32)


class UnboundAxis(parameterized.TestCase):
    def message(self, fn, *args) -> str:
        with self.assertRaises(NameError) as caught:
            fn(*args)
        text = str(caught.exception)
        self.assertTrue(text.startswith("unbound axis name: "), text)
        return text

    def calls(self, op):
        """The call, by itself and under transformations that bind nothing."""
        call = lambda x: CALLS[op](x, "tp")  # noqa: E731
        loss = lambda x: jax.tree.leaves(call(x))[0].sum()  # noqa: E731
        return (
            call,
            jax.jit(call),
            jax.grad(loss),
            jax.vmap(call),
            jax.vmap(call, axis_name="other"),
            jax.checkpoint(call),
            lambda x: jax.eval_shape(call, x),
        )

    @every_op
    def test_what_to_do(self, op):
        for fn in self.calls(op):
            text = self.message(fn, X)
            self.assertIn("unbound axis name: tp", text)
            self.assertIn(f"jax_overlap.{op} ", text)
            self.assertIn("inside jax.shard_map over 'tp'", text)
            self.assertIn("jax.vmap with axis_name='tp'", text)
            self.assertIn("jax_overlap.flax", text)
            self.assertIn("jax_overlap.overlap", text)
            name = f"jax_overlap.sharded.{op}"
            self.assertEqual(name in text, op in sharded.__all__, text)
            self.assertNotIn("The mesh has", text)

    @every_op
    def test_inside_shard_map_over_another_axis(self, op):
        layout = tools.Layout((2, 4), ("dp", "tp"), ("tp",))
        for axes, axis in (({"dp"}, "tp"), ({"dp", "tp"}, "nope")):
            fn = jax.shard_map(
                lambda x, axis=axis: CALLS[op](x, axis),
                mesh=layout.mesh,
                in_specs=P("dp"),
                out_specs=P("dp"),
                axis_names=axes,
            )
            text = self.message(jax.jit(fn), X)
            self.assertIn(f"shard_map over '{axis}'", text)
            self.assertEqual("The mesh has 'tp'" in text, axis == "tp")

    @every_op
    def test_an_axis_of_the_mesh_under_plain_jit(self, op):
        call = jax.jit(lambda x: CALLS[op](x, "tp"))
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = tools.Layout((2, 4), ("dp", "tp"), ("tp",), axis_type=kind).mesh
            cut = jax.device_put(X, NamedSharding(mesh, P("dp", "tp")))
            text = self.message(call, cut)
            if kind == AxisType.Explicit:
                self.assertIn("float32[8@dp,8@tp], sharded over 'tp'", text)
            else:
                self.assertIn("The mesh has 'tp', but only jax.shard_map", text)
            with jax.set_mesh(mesh):
                self.assertIn("The mesh has 'tp'", self.message(call, jnp.ones((8, 8))))

    def test_one_axis_of_a_tuple(self):
        fn = jax.vmap(lambda x: jax_overlap.psum(x, ("i", "j")), axis_name="i")
        self.assertIn("unbound axis name: j\n", self.message(fn, X))

    def test_constants_and_trees(self):
        for x in (1, 2.5, {"a": X, "b": 1}, [], None):
            text = self.message(lambda x=x: jax_overlap.psum(x, "x"))
            self.assertIn("jax_overlap.psum ", text)

    def test_options_are_checked_first(self):
        with self.assertRaisesRegex(ValueError, "implementation='no'"):
            jax_overlap.psum(X, "x", implementation="no")


class BoundAxis(absltest.TestCase):
    """What binds an axis, or needs none, still does."""

    def test_vmap_and_pmap(self):
        for bind in (jax.vmap, jax.pmap):
            total = bind(lambda x: jax_overlap.psum(x, "i"), axis_name="i")(X)
            np.testing.assert_array_equal(total, 8 * X)
            count = bind(lambda _: jax_overlap.psum(1, "i"), axis_name="i")(X)
            np.testing.assert_array_equal(count, np.full(8, 8))

    def test_axis_env_of_make_jaxpr(self):
        trace = jax.make_jaxpr(lambda x: jax_overlap.psum(x, "i"), axis_env=[("i", 4)])
        self.assertIn("psum", str(trace(X)))

    def test_no_axes(self):
        for op in ("psum", "all_gather", "psum_scatter"):
            for axes in ((), []):
                y = getattr(jax_overlap, op)(X, axes)
                np.testing.assert_array_equal(y, X)

    def test_dimensions_for_names(self):
        """As lax.psum takes them."""
        for axes in (0, (0,), (1, 0)):
            np.testing.assert_array_equal(
                jax_overlap.psum(X, axes), jax.lax.psum(X, axes)
            )

    def test_bound_further_out_than_the_jit(self):
        inner = jax.jit(lambda x: jax_overlap.psum(x, "x"))
        fn = tools.stacked(lambda x: inner(x), tools.line(4))
        np.testing.assert_array_equal(fn(np.ones((4, 3))), np.full((4, 3), 4))


if __name__ == "__main__":
    absltest.main()

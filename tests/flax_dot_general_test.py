"""jax_overlap.flax.dot_general: which op it takes, for which shardings."""

import contextlib
import doctest
import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax_dot_general_tools import AG, AR, GRID, RS, TURNED, compiled, custom_calls, put
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_overlap.flax import dot_general

ROWS = (((2,), (0,)), ((), ()))  # [batch, sequence, k] @ [k, n]
HEADS = (((2, 3), (0, 1)), ((), ()))  # [batch, sequence, heads, d] @ [heads, d, n]
GROUPS = (((2,), (1,)), ((0,), (0,)))  # [g, rows, k] @ [g, k, n]
X, W = (4, 8, 16), (16, 24)
XH, WH = (4, 8, 8, 2), (8, 2, 24)

# name: (op, shapes, dimension numbers, specs of lhs, rhs and the result)
CASES = {
    "scatter_sequence": (
        *(RS, (X, W), ROWS),
        *(P("dp", None, "tp"), P("tp"), P("dp", "tp")),
    ),
    "scatter_batch_below_dp": (
        *(RS, ((8, 8, 16), W), ROWS),
        *(P("dp", None, "tp"), P("tp"), P(("dp", "tp"))),
    ),
    "scatter_columns": (
        *(RS, (X, W), ROWS),
        *(P("dp", None, "tp"), P("tp"), P("dp", None, "tp")),
    ),
    "scatter_of_heads": (
        *(RS, (XH, WH), HEADS),
        *(P("dp", None, "tp"), P("tp"), P("dp", "tp")),
    ),
    "scatter_both_axes": (
        *(RS, (X, W), ROWS),
        *(P(None, None, ("tp", "dp")), P(("tp", "dp")), P(None, ("dp", "tp"))),
    ),
    "scatter_in_groups": (
        *(RS, (X, (4, 16, 24)), GROUPS),
        *(P("dp", None, "tp"), P("dp", "tp"), P("dp", "tp")),
    ),
    "sum": (AR, (X, W), ROWS, P("dp", None, "tp"), P("tp"), P("dp")),
    "sum_of_heads": (
        *(AR, (XH, WH), HEADS),
        *(P("dp", None, "tp"), P("tp"), P("dp")),
    ),
    "gather_sequence": (
        *(AG, (X, W), ROWS),
        *(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    ),
    "gather_rows_below_dp": (
        *(AG, ((8, 8, 16), W), ROWS),
        *(P(("dp", "tp")), P(None, "tp"), P("dp", None, "tp")),
    ),
    "gather_heads": (
        *(AG, (X, (16, 8, 3)), ROWS),
        *(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    ),
    "gather_and_cut_the_kernel": (
        *(AG, (X, W), ROWS),
        *(P("dp", "tp"), P(), P("dp", None, "tp")),
    ),
    "gather_features": (
        *(AG, (X, W), ROWS),
        *(P("dp", None, "tp"), P(None, "tp"), P("dp", None, "tp")),
    ),
    "gather_without_out_sharding": (
        *(AG, (X, W), ROWS),
        *(P("dp", "tp"), P(None, "tp"), None),
    ),
    "gather_and_cut_the_kernel_further": (
        *(AG, (X, W), ROWS),
        *(P(None, "tp"), P(), P(None, None, ("tp", "dp"))),
    ),
    "kernel_is_cut_inside_too": (
        *(None, (X, W), ROWS),
        *(P(None, "tp"), P("dp", "tp"), P(None, None, "tp")),
    ),
    "columns_move": (
        *(None, (X, W), ROWS),
        *(P(None, "tp"), P(None, "dp"), P(None, None, "tp")),
    ),
    "groups_lie_otherwise": (
        *(None, (X, (4, 16, 24)), GROUPS),
        *(P("dp", "tp"), P(None, None, "tp"), P("dp", None, "tp")),
    ),
    "groups_of_sums_lie_otherwise": (
        *(None, (X, (4, 16, 24)), GROUPS),
        *(P("dp", None, "tp"), P(None, "tp"), P("dp", "tp")),
    ),
    "not_cut": (None, (X, W), ROWS, P("dp"), P(), P("dp")),
    "columns_stay_cut": (
        *(None, (X, W), ROWS),
        *(P("dp"), P(None, "tp"), P("dp", None, "tp")),
    ),
    "rows_stay_cut": (
        *(None, (X, W), ROWS),
        *(P("dp", "tp"), P(), P("dp", "tp")),
    ),
    "kernel_is_gathered": (
        *(None, (X, W), ROWS),
        *(P("dp"), P("tp"), P("dp")),
    ),
    "gather_for_nothing": (
        *(None, (X, W), ROWS),
        *(P("dp", "tp"), P(), P("dp")),
    ),
    "one_axis_of_two": (
        *(None, (X, W), ROWS),
        *(P(None, None, ("tp", "dp")), P(("tp", "dp")), P("dp")),
    ),
    "another_dimension_changes": (
        *(None, (X, W), ROWS),
        *(P("dp", None, "tp"), P("tp"), P(None, "tp")),
    ),
    "major_axis_is_gathered": (
        *(None, ((8, 8, 16), W), ROWS),
        *(P(("tp", "dp")), P(None, "tp"), P("dp", None, "tp")),
    ),
}
TAKEN = {name: case for name, case in CASES.items() if case[0]}


def data(name):
    """(lhs, rhs, weights of the result, dimension numbers, specs)."""
    _, shapes, dims, *specs = CASES[name]
    lhs, rhs = (tools.exact(i, s, np.float32) for i, s in enumerate(shapes))
    shape = jax.eval_shape(
        functools.partial(lax.dot_general, dimension_numbers=dims), lhs, rhs
    )
    return lhs, rhs, tools.exact(2, shape.shape, np.float32), dims, specs


class Choice(parameterized.TestCase):
    def check(self, case, layout):
        op = CASES[case][0]
        lhs, rhs, c, dims, (ls, rs, out) = data(case)

        def loss(fn, c, out, x, w):
            y = fn(x, w, dims, out_sharding=out)
            return (y * c).sum(), y

        def both(fn, c, out=None):
            run = functools.partial(loss, fn, c, out)
            return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)

        (_, want), grads = both(lax.dot_general, c)(lhs, rhs)
        with jax.set_mesh(layout.mesh):
            spec = P("dp", None, "tp") if out is None else out
            x, w = put(lhs, ls), put(rhs, rs)
            fn = functools.partial(
                dot_general, dimension_numbers=dims, out_sharding=out
            )
            self.assertEqual(
                jax.typeof(jax.eval_shape(fn, x, w)), jax.typeof(put(c, spec))
            )
            if op:
                program = both(dot_general, put(c, spec), out)
                (_, y), got = jax.jit(program)(x, w)
                for g, a, theirs in zip(got, (x, w), grads, strict=True):
                    self.assertEqual(jax.typeof(g), jax.typeof(a))
                    np.testing.assert_array_equal(g, theirs)
                hlo = compiled(fn, x, w)
                self.assertEqual(custom_calls(hlo), {op: 1})
                self.assertEqual(tools.collectives(hlo), [])
            else:
                y = fn(x, w)
                text = jax.jit(fn).lower(x, w).as_text()
                self.assertNotIn("custom_call @jax_overlap", text)
            np.testing.assert_array_equal(y, want)
            self.assertEqual(jax.typeof(y), jax.typeof(put(c, spec)))

    @parameterized.parameters(*CASES)
    def test_op_values_gradients_and_types(self, case):
        self.check(case, GRID)

    @parameterized.parameters(*list(TAKEN)[::3])
    def test_devices_in_another_order(self, case):
        self.check(case, TURNED)

    def test_outside_of_jit(self):
        lhs, rhs, _, dims, (ls, rs, out) = data("scatter_sequence")
        with jax.set_mesh(GRID.mesh):
            y = dot_general(put(lhs, ls), put(rhs, rs), dims, out_sharding=out)
            self.assertEqual(jax.typeof(y), jax.typeof(put(np.asarray(y), out)))
            np.testing.assert_array_equal(y, lax.dot_general(lhs, rhs, dims))

    def test_the_program_of_the_gradient(self):
        """Each op's transpose is the other; XLA only sums the kernel's over "dp"."""
        for case in ("scatter_sequence", "gather_sequence"):
            lhs, rhs, c, dims, (ls, rs, out) = data(case)
            with jax.set_mesh(GRID.mesh), self.subTest(case):
                fn = lambda x, w: dot_general(x, w, dims, out_sharding=out)  # noqa: B023, E731

                def pull(x, w, ct, fn=fn):
                    y, pull = jax.vjp(fn, x, w)
                    return y, pull(ct)

                hlo = compiled(pull, put(lhs, ls), put(rhs, rs), put(c, out))
                self.assertEqual(custom_calls(hlo), {AG: 1, RS: 1})
                kinds = {line.split()[0] for line in tools.collectives(hlo)}
                self.assertEqual(kinds, {"all-reduce"})

    def test_gathered_again_for_the_gradient(self):
        lhs, rhs, _, dims, (ls, rs, out) = data("gather_sequence")
        grads = []
        with jax.set_mesh(GRID.mesh):
            for save in (True, False):
                fn = functools.partial(dot_general, save_gathered=save)

                def loss(x, w, fn=fn):
                    return (fn(x, w, dims, out_sharding=out) ** 2).sum()

                grad = jax.grad(loss, 1)
                grads.append(jax.jit(grad)(put(lhs, ls), put(rhs, rs)))
                hlo = compiled(grad, put(lhs, ls), put(rhs, rs))
                self.assertEqual(custom_calls(hlo).get("all_gather", 0), not save)
        np.testing.assert_array_equal(*grads)

    @parameterized.parameters("scatter_sequence", "sum", "gather_sequence")
    def test_under_vmap_scan_and_checkpoint(self, case):
        lhs, rhs, _, dims, (ls, rs, out) = data(case)
        with jax.set_mesh(GRID.mesh):
            x, w = put(lhs, ls), put(rhs, rs)
            fn = jax.checkpoint(lambda x, w: dot_general(x, w, dims, out_sharding=out))
            want = np.asarray(lax.dot_general(lhs, rhs, dims))
            both = jnp.stack([x, 2 * x])
            mapped = jax.jit(jax.vmap(fn, (0, None)))(both, w)
            scanned = jax.jit(lambda xs: lax.scan(lambda c, x: (c, fn(x, w)), 0, xs)[1])
            for got in (mapped, scanned(both)):
                np.testing.assert_array_equal(got, np.stack([want, 2 * want]))

    def test_only_the_axes_that_were_asked_for(self):
        lhs, rhs, _, dims, (ls, rs, out) = data("scatter_sequence")
        for axis_name, ours in (("tp", {RS: 1}), (("tp", "dp"), {RS: 1}), ("dp", {})):
            fn = functools.partial(dot_general, axis_name=axis_name)
            with jax.set_mesh(GRID.mesh), self.subTest(axis_name=axis_name):
                hlo = compiled(
                    lambda x, w: fn(x, w, dims, out_sharding=out),  # noqa: B023
                    put(lhs, ls),
                    put(rhs, rs),
                )
                self.assertEqual(custom_calls(hlo), ours)

    def test_types_and_precision(self):
        lhs, rhs, _, dims, (ls, rs, out) = data("scatter_sequence")
        with jax.set_mesh(GRID.mesh):
            x, w = put(lhs.astype(tools.BF16), ls), put(rhs.astype(tools.BF16), rs)
            fn = functools.partial(
                dot_general, dimension_numbers=dims, out_sharding=out
            )
            y = fn(x, w, preferred_element_type=jnp.float32, precision="highest")
            self.assertEqual(y.dtype, jnp.float32)
            np.testing.assert_array_equal(y, lax.dot_general(lhs, rhs, dims))
            self.assertEqual(fn(x, w).dtype, tools.BF16)
            mixed = fn(x, put(rhs, rs), preferred_element_type=jnp.float32)
            np.testing.assert_array_equal(mixed, y)
            hlo = compiled(
                lambda x, w: fn(x, w, preferred_element_type=jnp.float32),
                *(x, put(rhs, rs)),
            )
            self.assertEqual(custom_calls(hlo), {})

    def test_a_sharding_on_a_mesh_that_is_not_set(self):
        lhs, rhs, _, dims, (ls, rs, out) = data("scatter_sequence")
        x, w = (
            jax.device_put(a, NamedSharding(TURNED.mesh, s))
            for a, s in ((lhs, ls), (rhs, rs))
        )
        sharding = NamedSharding(TURNED.mesh, out)
        fn = functools.partial(
            dot_general, dimension_numbers=dims, out_sharding=sharding
        )
        self.assertEqual(custom_calls(compiled(fn, x, w)), {RS: 1})
        np.testing.assert_array_equal(fn(x, w), lax.dot_general(lhs, rhs, dims))


class AsLax(parameterized.TestCase):
    """Where types tell nothing, or ask for something else: lax itself."""

    def test_without_a_mesh_and_on_an_auto_mesh(self):
        lhs, rhs, _, dims, (ls, rs, _) = data("scatter_sequence")
        auto = tools.Layout(GRID.shape, GRID.names, GRID.axes).mesh
        for mesh in (None, auto):
            with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
                args = (put(lhs, ls), put(rhs, rs)) if mesh else (lhs, rhs)
                ours, theirs = (
                    jax.make_jaxpr(lambda x, w, f=f: f(x, w, dims))(*args)
                    for f in (dot_general, lax.dot_general)
                )
            self.assertEqual(str(ours), str(theirs))

    def test_inside_shard_map(self):
        lhs, rhs, _, dims, (ls, rs, _) = data("sum")
        with jax.set_mesh(GRID.mesh):
            fn = jax.shard_map(
                lambda x, w: lax.psum(dot_general(x, w, dims), "tp"),
                in_specs=(ls, rs),
                out_specs=P("dp"),
            )
            x, w = put(lhs, ls), put(rhs, rs)
            np.testing.assert_array_equal(fn(x, w), lax.dot_general(lhs, rhs, dims))

    def test_inside_shard_map_over_the_other_axis(self):
        """There the axis "tp" is Explicit still, and the op is taken."""
        lhs, rhs, _, dims, (ls, rs, _) = data("scatter_sequence")
        with jax.set_mesh(GRID.mesh):
            fn = jax.shard_map(
                lambda x, w: dot_general(x, w, dims, out_sharding=P(None, "tp")),
                in_specs=(P("dp"), P()),
                out_specs=P("dp"),
                axis_names={"dp"},
            )
            x, w = put(lhs, ls), put(rhs, rs)
            self.assertEqual(custom_calls(compiled(fn, x, w)), {RS: 1})
            got = jax.jit(fn)(x, w)
            np.testing.assert_array_equal(got, lax.dot_general(lhs, rhs, dims))

    def test_under_vmap_of_an_explicit_axis(self):
        lhs, rhs, _, dims, (ls, rs, _) = data("scatter_sequence")
        with jax.set_mesh(GRID.mesh):
            one = functools.partial(
                dot_general,
                dimension_numbers=(((1,), (0,)), ((), ())),
                out_sharding=P("tp"),
            )
            y = jax.jit(jax.vmap(one, (0, None)))(put(lhs, ls), put(rhs, rs))
            self.assertEqual(y.sharding.spec, P("dp", "tp", None))
        np.testing.assert_array_equal(y, lax.dot_general(lhs, rhs, dims))

    def test_unreduced(self):
        lhs, rhs, _, dims, (ls, rs, _) = data("sum")
        with jax.set_mesh(GRID.mesh):
            y = jax.jit(
                lambda x, w: jax.sharding.reshard(
                    dot_general(x, w, dims, out_sharding=P("dp", unreduced={"tp"})),
                    P("dp"),
                )
            )(put(lhs, ls), put(rhs, rs))
        np.testing.assert_array_equal(y, lax.dot_general(lhs, rhs, dims))

    def test_errors_are_those_of_lax(self):
        x, w = np.ones(X, np.float32), np.ones(W, np.float32)
        calls = (
            (P(None, None, "tp"), P("tp"), ROWS, None),  # ambiguous
            (P(None, None, "tp"), P("tp"), ROWS, P(None, None, None, "tp")),
            (P(None, None, "tp"), P("tp"), ROWS, P("nope")),
            (P(), P("tp"), (((1,), (0,)), ((), ())), P()),
            (P("dp", None, "tp"), P("tp"), ROWS, P(("dp", "tp"))),  # 4 rows by 8
            (P("dp", None, "tp"), P("tp"), ROWS, P("dp", P.UNCONSTRAINED)),
            (
                *(P("dp", None, "tp"), P("tp"), ROWS),
                NamedSharding(TURNED.mesh, P("dp", "tp")),
            ),
        )
        with jax.set_mesh(GRID.mesh):
            for ls, rs, dims, out in calls:
                texts = []
                for fn in (dot_general, lax.dot_general):
                    with self.assertRaises(Exception) as caught:
                        fn(put(x, ls), put(w, rs), dims, out_sharding=out)
                    text = str(caught.exception).split("at source")[0]
                    texts.append((type(caught.exception), text))
                self.assertEqual(*texts)


class Module(absltest.TestCase):
    def test_imports_no_flax(self):
        code = (
            "import sys, jax_overlap.flax as f; assert callable(f.dot_general);"
            "assert 'flax' not in sys.modules; print(sorted(f.__all__))"
        )
        done = tools.run_child("-c", code)
        self.assertEqual(done.out.strip(), "['dot_general', 'linen', 'nnx']", done.err)

    def test_the_example(self):
        from jax_overlap.flax import _dot_general

        self.assertEqual(doctest.testmod(_dot_general).failed, 0)


if __name__ == "__main__":
    absltest.main()

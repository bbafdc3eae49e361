"""jax_overlap.overlap: the same values, gradients and types, by our ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import BF16
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from overlap_tools import (
    GRID,
    MESH,
    OverlapCase,
    both,
    exact,
    names_of,
    of_lax,
    ours,
    quick,
    shard,
    to_varying,
    with_gradients,
)

import jax_overlap

# ------------------------------------------------------------- each collective alone
ALONE = {
    "psum": (lambda x: lax.psum(x, "x"), "psum"),
    "psum_of_tree": (lambda x: lax.psum({"a": x, "b": (2 * x,)}, "x"), "psum"),
    "psum_of_psum": (
        lambda x: lax.psum(to_varying(lax.psum(x, "x")), "x"),
        "psum psum",
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
        "psum_scatter",
    ),
    "psum_scatter_untiled": (
        lambda x: lax.psum_scatter(x[:4], "x", tiled=False),
        "psum_scatter",
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "x", axis=1, tiled=True),
        "all_gather",
    ),
    "all_gather_untiled": (lambda x: lax.all_gather(x, "x", axis=1), "all_gather"),
    "all_to_all": (lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), "all_to_all"),
    "all_to_all_untiled": (lambda x: lax.all_to_all(x[:4], "x", 0, 1), "all_to_all"),
    "jnp_mean": (lambda x: lax.pmean(x, "x"), "psum"),
    "tuple_of_axes": (lambda x: lax.psum(x, ("x",)), "psum"),
}


def local_all(fn):
    """Results of each rank, made varying so that they can be stacked."""
    return lambda x: jax.tree.map(lambda y: to_varying(y)[None], fn(x))


class Alone(OverlapCase):
    @parameterized.product(name=list(ALONE), check_vma=[True, False])
    def test_same_as_lax(self, name, check_vma):
        fn, became = ALONE[name]
        fn = shard(local_all(fn), check_vma=check_vma)
        # jax.lax gets the shape of the gradient wrong in this case.
        grad = name != "all_to_all_untiled"
        self.check(fn, (exact(32, 8),), became.split(), grad=grad)

    @parameterized.named_parameters(
        ("bf16", BF16), ("f16", np.float16), ("i32", np.int32), ("i8", np.int8)
    )
    def test_dtypes(self, dtype):
        fn = shard(local_all(lambda x: lax.psum(x, "x")))
        self.check(fn, (exact(8, 3, dtype=dtype),), ["psum"], grad=False)

    def test_a_dtype_that_is_not_native_is_given_to_the_op_which_leaves_it_to_lax(self):
        fn = shard(local_all(lambda x: lax.psum(x, "x")))
        x = exact(8, 3).astype(np.complex64)
        self.check(fn, (x,), ["psum"], grad=False)
        (plan,) = jax_overlap.explain(jax_overlap.overlap(fn), x)
        self.assertEqual(plan.implementation, "lax")

    @parameterized.named_parameters(
        ("y", "y"), ("x", "x"), ("both", ("y", "x")), ("reversed", ("x", "y"))
    )
    def test_axes_of_a_grid(self, axes):
        def fn(x):
            return lax.psum(x, axes)[None], lax.all_gather(x, axes, tiled=True)[None]

        def stacked(x):
            return jax.tree.map(lambda y: to_varying(y, ("y", "x")), fn(x))

        for check_vma in (True, False):
            program = shard(stacked, GRID, P(("y", "x")), P(("y", "x")), check_vma)
            self.check(program, (exact(16, 3),), ["psum", "all_gather"])

    def test_groups(self):
        groups = [[0, 3], [1, 2]]
        for op in (
            functools.partial(lax.psum, axis_name="x", axis_index_groups=groups),
            lambda x: lax.all_gather(x, "x", axis_index_groups=groups, tiled=True),
            lambda x: lax.psum_scatter(x, "x", axis_index_groups=groups, tiled=True),
            lambda x: lax.all_to_all(
                x, "x", 0, 1, axis_index_groups=groups, tiled=True
            ),
        ):
            fn = shard(lambda x, op=op: op(x)[None], check_vma=False)
            name = ours(names_of(jax_overlap.overlap(fn), exact(16, 4)))
            self.assertLen(name, 1)
            self.check(fn, (exact(16, 4),), name)

    def test_an_axis_of_size_one(self):
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
        for check_vma in (True, False):
            fn = shard(lambda x: lax.psum(x * x, "x"), mesh, P("x"), P(), check_vma)
            x = exact(8, 3)
            self.assert_same(quick(jax_overlap.overlap(fn))(x), quick(fn)(x))

    def test_no_elements(self):
        self.check(
            shard(lambda x: lax.psum(x, "x"), out_specs=P()), (exact(4, 0),), ["psum"]
        )


# --------------------------------------------------------------- what programs are of
@jax.custom_jvp
def jvp_total(x):
    return lax.psum(x * x, "x")


@jvp_total.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jvp_total(x), lax.psum(2 * x * t, "x")


@jax.custom_vjp
def vjp_total(x):
    return lax.psum(x * x, "x")


def _vjp_backward(x, ct):
    # Not the gradient: to be seen in it.
    return (
        7 * x * lax.psum_scatter(lax.all_gather(ct * to_varying(1.0 * x), "x"), "x"),
    )


vjp_total.defvjp(lambda x: (lax.psum(x * x, "x"), x), _vjp_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def vjp_of_some(x, scale, i):
    return lax.psum(x * x, "x") * (scale * i)


def _backward_of_some(scale, residuals, ct):
    x, i = residuals
    return 2 * x * to_varying(ct) * (scale * i), np.zeros((), jax.dtypes.float0)


vjp_of_some.defvjp(
    lambda x, scale, i: (vjp_of_some(x, scale, i), (x, i)), _backward_of_some
)


@jax.custom_vjp
def vjp_of_zeros(x, y):
    return lax.psum(x * x, "x"), lax.psum(y, "x")


def _backward_of_zeros(x, cts):
    """The cotangent of the second result is a symbolic zero."""
    assert isinstance(cts[1], jax.custom_derivatives.SymbolicZero)
    return 2 * x * to_varying(cts[0]), None


vjp_of_zeros.defvjp(
    lambda x, y: (vjp_of_zeros(x.value, y.value), x.value),
    _backward_of_zeros,
    symbolic_zeros=True,
)


def solved(x):
    def times_two(x):
        return 2 * x + 0 * to_varying(lax.psum(x, "x"))

    def halved(_, x):
        return x / 2 + 0 * to_varying(lax.psum(x, "x"))

    return total(lax.custom_linear_solve(times_two, 4 * x, halved, halved))


def total(x):
    return lax.psum(x * x, "x")


def scanned(x):
    def step(carry, y):
        return carry + total(y), lax.psum(y, "x")

    return lax.scan(step, jnp.zeros(x.shape[1:]), x)


def looped(x):
    def more(state):
        return lax.psum(state[0], "x")[0, 0] * 0 + state[1] < 3

    _, _, y = lax.while_loop(
        more, lambda s: (s[0], s[1] + 1, s[2] + total(s[0])), (x, 0, 0 * total(x))
    )
    return y


def branched(x):
    return lax.cond(
        lax.psum(x[0, 0], "x") > 0,
        lambda x: total(x),
        lambda x: lax.psum(3 * x, "x"),
        x,
    )


PROGRAMS = {
    "jit": (jax.jit(total), 1),
    "jit_twice": (lambda x: _helper(x) + _helper(2 * x), 2),
    "jit_in_jit": (jax.jit(lambda x: jax.jit(total)(x) + total(3 * x)), 2),
    "scan": (scanned, 2),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, y: y + total(x), 0 * total(x)), 2),
    "cond": (branched, 3),
    "switch": (lambda x: lax.switch(1, [total, lambda x: 2 * total(x)], x), 2),
    "remat": (jax.checkpoint(lambda x: total(jnp.square(x))), 1),
    "remat_dots": (
        jax.checkpoint(
            lambda x: total(x @ x.T), policy=jax.checkpoint_policies.dots_saveable
        ),
        1,
    ),
    "remat_in_scan": (
        lambda x: lax.scan(
            lambda c, y: (c + jax.checkpoint(total)(y), ()), 0 * total(x[0]), x
        ),
        2,
    ),
    "custom_jvp": (jvp_total, 1),
    "custom_vjp": (vjp_total, 1),
    "custom_jvp_in_scan": (
        lambda x: lax.scan(lambda c, y: (c, jvp_total(y)), 0, x)[1],
        1,
    ),
    "custom_vjp_in_jit": (jax.jit(lambda x: vjp_total(2 * x)), 1),
    "custom_vjp_in_remat": (jax.checkpoint(lambda x: vjp_total(2 * x)), 1),
    "custom_vjp_of_some": (lambda x: vjp_of_some(x, 3, jnp.int32(2)), 1),
    "custom_vjp_of_zeros": (lambda x: vjp_of_zeros(x, 2 * x)[0], 1),
    "linear_solve": (solved, 5),
    "constants": (jax.jit(lambda x: total(x) * jnp.asarray([1.0, 2, 3])), 1),
    "vmap": (jax.vmap(total), 1),
    "vmap_of_scan": (
        jax.vmap(lambda x: lax.scan(lambda c, y: (c, total(y)), 0, x)[1]),
        1,
    ),
    "map": (lambda x: lax.map(total, x), 1),
    "jvp": (lambda x: jax.jvp(total, (x,), (x + 1,)), 1),
    "grad_inside": (lambda x: total(jax.grad(lambda x: total(x).sum())(x)), 2),
}
_helper = jax.jit(total)


class Programs(OverlapCase):
    @parameterized.product(name=list(PROGRAMS), check_vma=[True, False])
    def test_same_around_and_inside(self, name, check_vma):
        fn, count = PROGRAMS[name]
        if name == "grad_inside" and not check_vma:
            count += 1  # lax.psum is transposed to itself there
        x = exact(16, 3)
        whole = shard(fn, out_specs=P(), check_vma=check_vma)
        want = self.check(whole, (x,), ["psum"] * count)
        if not check_vma:
            return
        # And where the function inside of shard_map is what is rewritten.
        inside = shard(jax_overlap.overlap(fn), out_specs=P(), check_vma=check_vma)
        self.assertEmpty(of_lax(names_of(inside, x)))
        self.assert_same(quick(with_gradients(inside, (x,)))(x), want)

    @both
    def test_while_loop(self, check_vma):
        fn = shard(looped, out_specs=P(), check_vma=check_vma)
        x = exact(16, 3)
        self.check(fn, (x,), ["psum"] * 3, grad=False)
        got, want = (
            quick(lambda x, f=f: jax.jvp(f, (x,), (x + 1,)))(x)
            for f in (jax_overlap.overlap(fn), fn)
        )
        self.assert_same(got, want)

    @both
    def test_rules_of_custom_derivatives_are_rewritten(self, check_vma):
        """Under grad(overlap(f)), too, where a rule runs after the call."""
        x = exact(16, 3)
        for fn, want in (
            (jvp_total, ["psum", "psum", "psum"]),
            (vjp_total, ["psum", "all_gather", "psum_scatter"]),
        ):
            whole = shard(fn, out_specs=P(), check_vma=check_vma)
            new = jax_overlap.overlap(whole)
            names = names_of(jax.grad(lambda x, new=new: new(x).sum()), x)
            self.assertEmpty(of_lax(names))
            self.assertContainsSubset(want, ours(names))

    @both
    def test_jvp_vmap_and_higher_derivatives_around(self, check_vma):
        fn = shard(lambda x: total(x * x), out_specs=P(), check_vma=check_vma)

        def around(fn, x, many):
            gradient = jax.grad(lambda x: fn(x).sum())
            return (
                jax.jvp(fn, (x,), (x,)),
                jax.vmap(fn)(many),
                jax.jvp(gradient, (x,), (x,)),
                jax.vmap(gradient)(many),
                jax.jit(fn)(x),
            )

        new, args = jax_overlap.overlap(fn), (exact(8, 3), exact(2, 8, 3))
        got, want = (quick(functools.partial(around, f))(*args) for f in (new, fn))
        self.assert_same(got, want)
        self.assertEmpty(of_lax(names_of(functools.partial(around, new), *args)))

    @both
    def test_sums_of_cotangents_are_ours(self, check_vma):
        """The transpose of the cast of w to varying is a psum."""
        fn = shard(
            lambda x, w: lax.psum(jnp.sin(x * w), "x"),
            MESH,
            (P("x"), P()),
            P(),
            check_vma,
        )
        args = exact(8, 3), exact(1, 3)
        gradient = jax.grad(lambda *a: jax_overlap.overlap(fn)(*a).sum(), 1)
        # Unchecked, shard_map itself adds what the ranks have for w.
        left = [] if check_vma else ["psum"]
        self.assertEqual(of_lax(names_of(gradient, *args)), left)
        whole = jax_overlap.overlap(jax.grad(lambda *a: fn(*a).sum(), 1))
        self.assertEmpty(of_lax(names_of(whole, *args)))

    def test_shard_map_in_shard_map(self):
        def inner(x):
            return lax.psum(x * lax.psum(x, "y"), "x")

        def outer(x):
            nested = jax.shard_map(
                inner, in_specs=P("x"), out_specs=P(), axis_names={"x"}
            )
            return lax.psum(nested(x), "y")

        fn = shard(outer, GRID, P("y"), P(), axis_names={"y"})
        # JAX cannot lower the gradient of the function as it is.
        self.check(fn, (exact(16, 3),), ["psum"] * 3, grad=False)

    @both
    def test_partly_manual(self, check_vma):
        fn = shard(total, GRID, P("x"), P(), check_vma, axis_names={"x"})
        self.check(fn, (exact(16, 3),), ["psum"])

    @both
    def test_explicit_mesh(self, check_vma):
        mesh = jax.sharding.Mesh(MESH.devices, ("x",), (AxisType.Explicit,))
        x = jax.device_put(exact(16, 3), NamedSharding(mesh, P("x")))
        for fn, count in (PROGRAMS["scan"], PROGRAMS["custom_vjp"]):
            whole = shard(fn, mesh, P("x"), P(), check_vma)
            self.check(whole, (x,), ["psum"] * count)

    def test_two_shard_maps_and_code_between(self):
        fn = shard(total, out_specs=P())
        gather = shard(lambda x: lax.all_gather(x, "x", axis=0, tiled=True)[None])
        self.check(lambda x: gather(fn(x) + 1), (exact(16, 3),), ["psum", "all_gather"])

    def test_inside_of_pmap_like_vmap(self):
        """An axis of jax.vmap that the traced function sees is not one of a mesh."""
        report = []

        def fn(x):
            f = jax_overlap.overlap(lambda x: lax.psum(x, "i"))
            report.extend(f.report(x))
            return f(x)

        got = jax.vmap(fn, axis_name="i")(exact(4, 3))
        self.assert_same(got, jnp.broadcast_to(exact(4, 3).sum(0), (4, 3)))
        self.assertIsNone(report[0].became)
        self.assertIn("not manual axes", report[0].reason)


class Literals(absltest.TestCase):
    def test_a_scalar_beside_what_varies_is_cast_to_varying(self):
        """Such as in a mask: the cast's operand is a literal, of no mesh."""
        fn = jax.shard_map(
            lambda x: jnp.where(x > 1, x, -1e30),
            mesh=jax.sharding.Mesh(jax.devices()[:4], ("x",)),
            in_specs=P("x"),
            out_specs=P("x"),
        )
        x = jnp.arange(4.0)
        ours = jax_overlap.overlap(fn)
        for transform in (
            lambda f: jax.jvp(f, (x,), (x,)),
            lambda f: jax.vmap(f)(x[None]),
            lambda f: jax.grad(lambda x: f(x)[2:].sum())(x),
        ):
            jax.tree.map(np.testing.assert_array_equal, transform(ours), transform(fn))

    def test_only_functions(self):
        with self.assertRaisesRegex(TypeError, "expected a function, but got int"):
            jax_overlap.overlap(3)


if __name__ == "__main__":
    absltest.main()

"""The tests of jax_overlap.all_gather_matmul on every backend."""

import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import op_contract
import op_contract_batching
import op_contract_matmul
import op_contract_programs
import op_contract_transforms
from contract_devices import Layout, grid, line
from contract_tools import BF16
from jax import lax
from jax.sharding import PartitionSpec as P
from matmul_descriptions import (
    ALL_GATHER_MATMUL,
    ALL_GATHER_MATMUL_LAST,
    ALL_GATHER_MATMUL_SLICED,
)
from op_contract import named
from op_contract_matmul_forms import (
    BATCHED,
    MIDDLE,
    NEGATIVE,
    OUTER,
    RANKS,
    VECTOR,
    W_TURNED,
    WILD,
    X_TURNED,
    dot_general,
    form,
    lax_dot,
    with_elements,
)

import jax_overlap


class AllGatherMatmulValues(op_contract.Values):
    op = ALL_GATHER_MATMUL


class AllGatherMatmulPrograms(op_contract_programs.Programs):
    op = ALL_GATHER_MATMUL


class AllGatherMatmulSlicedPrograms(op_contract_programs.Programs):
    op = ALL_GATHER_MATMUL_SLICED


class AllGatherMatmulTransforms(op_contract_transforms.Transforms):
    op = ALL_GATHER_MATMUL


class AllGatherMatmulBatching(op_contract_batching.Batching):
    op = ALL_GATHER_MATMUL


class AllGatherMatmulLastTransforms(op_contract_transforms.Transforms):
    op = ALL_GATHER_MATMUL_LAST


class AllGatherMatmulLastBatching(op_contract_batching.Batching):
    op = ALL_GATHER_MATMUL_LAST


class AllGatherMatmulForms(op_contract_matmul.Matmuls):
    op = ALL_GATHER_MATMUL
    adds_ranks = False
    refused = (
        form((2, 3), (3, 4), gather_dimension=2),
        form((2, 3), (3, 4), gather_dimension=-3),
        form((2, 3), (4, 4)),
        form((2, 3), (3, 4), gather_dimension=1),
        form((2, 3), (11, 4), gather_dimension=-1),
        form((2, 3), (3, 4), W_TURNED),
        form((2, 3, 5), (2, 5, 4), BATCHED),
        form((2, 3), (3, 4), (((2,), (0,)), ((), ()))),
        form((2, 3), (3, 3), (((1, 1), (0, 1)), ((), ()))),
    )
    empty = (
        form((0, 3), (3, 4)),
        form((2, 3), (3, 0)),
        form((2, 0), (0, 4)),
        form((2, 0), (0, 4), gather_dimension=1),
        form((0, 3), (3 * RANKS, 4), gather_dimension=1),
        form((2, 3), ((3, 0), (3, 0))),
        form((2, 0), ((0, 3), (0, 0)), return_gathered=True),
    )

    @staticmethod
    def forms(n):
        x = (4, 2, 2, 3, 5)
        return with_elements(
            form((3, 5), (5, 6)),
            form((2, 3, 5), (5, 6), gather_dimension=1),
            form((2, 3, 5), (5, 6)),
            form((2, 2, 3, 5), (5, 6), gather_dimension=-2),
            form((3, 5), (5 * n, 6), gather_dimension=-1),
            form((5,), (5 * n, 6)),
            form((3, 5), (6, 5), W_TURNED),
            form((3, 5), (6, 5 * n), W_TURNED, gather_dimension=1),
            form((5, 3), (5, 6), X_TURNED, gather_dimension=1),
            form((5, 3), (5 * n, 6), X_TURNED),
            form((3, 5, 2), (6, 5), MIDDLE, gather_dimension=2),
            form((3, 5, 2), (6, 5), NEGATIVE),
            form((3, 5, 2), (6, 5 * n), MIDDLE, gather_dimension=1),
            form((2, 5), (5,), VECTOR),
            form((2,), (3,), OUTER),
            form((2, 3, 5), (2 * n, 5, 6), BATCHED),
            form((2, 3, 5), (2, 5, 6), BATCHED, gather_dimension=1),
            form((2, 3, 5), (2, 5 * n, 6), BATCHED, gather_dimension=2),
            form(x, (3, 2, 4 * n, 2, 5), WILD),
            form(x, (3, 2, 4, 2 * n, 5), WILD, gather_dimension=1),
            form(x, (3, 2 * n, 4, 2, 5), WILD, gather_dimension=2),
            form(x, (3 * n, 2, 4, 2, 5), WILD, gather_dimension=3),
            form(x, (3, 2, 4, 2, 5), WILD, gather_dimension=-1),
            form((3, 5), (5, 6), save_gathered=False),
            form((3, 5), (5 * n, 6), gather_dimension=1, save_gathered=False),
            form((3, 5), ((5, 6), (5, 2), (5, 33))),
            form((3, 5), ((5, 6), (5, 2)), save_gathered=False),
            form((3, 5), ((5, 6), (5, 0), (5, 1)), return_gathered=True),
            form((3, 5), (5, 2), return_gathered=True, save_gathered=False),
            form((3, 5), (5, 0), return_gathered=True),
            form(
                (3, 5),
                ((5 * n, 2), (6, 5 * n)),
                [(((1,), (0,)), ((), ())), W_TURNED],
                gather_dimension=1,
                return_gathered=True,
            ),
            form(
                x, (3, 2, 4, 2 * n, 5), WILD, gather_dimension=1, return_gathered=True
            ),
            form((3, 5), (5, 7), precision=lax.Precision.HIGHEST),
        )

    @staticmethod
    def each_dims(dims, ws):
        """Those of each weight; where they are unlike, `forms` has them in a list."""
        return dims if isinstance(dims, list) else [dims] * len(ws)

    @classmethod
    def numpy(
        cls,
        x,
        *ws,
        dimension_numbers=None,
        gather_dimension=0,
        return_gathered=False,
        save_gathered=True,
        precision=None,
    ):
        full = np.concatenate(list(x), gather_dimension)
        ys = [
            np.stack([dot_general(full, one, dims) for one in w])
            for w, dims in zip(ws, cls.each_dims(dimension_numbers, ws), strict=True)
        ]
        return [*ys, np.stack([full] * len(x))] if return_gathered else ys

    @classmethod
    def lax(
        cls,
        x,
        *ws,
        axis_name,
        dimension_numbers=None,
        gather_dimension=0,
        return_gathered=False,
        save_gathered=True,
        precision=None,
        **groups,
    ):
        full = lax.all_gather(x, axis_name, axis=gather_dimension, tiled=True, **groups)
        ys = [
            lax_dot(full, w, dims, precision)
            for w, dims in zip(ws, cls.each_dims(dimension_numbers, ws), strict=True)
        ]
        return [*ys, full] if return_gathered else ys

    def ragged(self, n):
        return [
            form((rows, k), (k, columns))
            for rows, k, columns in (
                (1, 129, 130),
                (127, 3, 1),
                (129, 17, 15),
                (300, 5, 33),
            )
        ] + [
            form((130, 33), (33 * n, 129), gather_dimension=1),
            form((65, 7), (17, 7 * n), W_TURNED, gather_dimension=1),
            form((3, 70_001), (70_001, 2)),  # a row is more than a slot holds
        ]

    def large(self, n):
        return form((100, 1000), (1000, 700))

    def test_results_are_a_tuple_where_weights_are(self):
        x, w = jnp.ones((2, 3)), jnp.ones((3, 4))

        def fn(_):
            call = functools.partial(jax_overlap.all_gather_matmul, x)
            return (
                call(w, "x"),
                call((w,), "x"),
                call([w, w], "x"),
                call(w, "x", return_gathered=True),
                call((w,), "x", return_gathered=True),
            )

        got = jax.eval_shape(tools.stacked(fn, line(RANKS)), jnp.ones(RANKS))
        y = full = 0
        want = (y, (y,), (y, y), (y, full), ((y,), full))
        self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))

    def test_weights_that_contract_unlike_dimensions(self):
        dims = ((((1,), (0,)), ((), ())), X_TURNED)
        error, text = self.refusal(
            self.call, ((3, 3), (3, 4), (3 * RANKS, 4)), dimension_numbers=dims
        )
        self.assertEqual(error, ValueError)
        self.assertIn("all weights have to contract the same dimensions", text)

    def test_biases(self):
        x, *ws = self.data([form((2, 5), ((5, 6), (5, 3)))])[0]
        b, c = (
            tools.exact(self.seed + i, (RANKS, n), np.float32)
            for i, n in enumerate((6, 3))
        )

        def fn(x, v, w, b, c):
            one, vjp = jax.vjp(lambda b: self.call(x, v, bias=b)[0], b)
            return (
                one,
                vjp(one)[0],
                self.call(x, v, w, bias=(b, c)),
                self.call(x, v, w, bias=(None, c)),
                self.call(x.astype(BF16), v.astype(BF16), bias=b)[0],
            )

        y, z = self.numpy(x, *ws)
        yb, zc = y + b[:, None], z + c[:, None]
        want = [yb, yb.sum(1), [yb, zc], [y, zc], yb.astype(BF16)]
        self.check(fn, line(RANKS), (x, *ws, b, c), want, repeats=1)

    # What the gradient gathers.

    def plans(self, fn, operands):
        return sorted(self.gathers(tools.stacked(fn, line(RANKS)), operands))

    @named(saved=(True,), gathered_again=(False,))
    def test_how_often_the_gradient_gathers(self, save):
        operands = self.data([form((2, 5), ((5, 6), (5, 3)))])[0]
        loss = lambda *a: sum(  # noqa: E731
            (y**2).sum() for y in self.call(*a, save_gathered=save)
        )
        again = [] if save else ["all_gather"]
        forward, backward = "all_gather_matmul", "matmul_reduce_scatter"
        for argnums, want in (
            ((0, 1, 2), [*again, forward, backward]),
            ((1, 2), [*again, forward]),
            (0, [forward, backward]),
        ):
            got = self.plans(jax.grad(loss, argnums), operands)
            self.assertEqual(got, want, argnums)

    def test_what_a_forward_pass_keeps(self):
        """save_gathered=False keeps the operand only; True the gathered one."""
        x, w = (jnp.asarray(a[0]) for a in self.data(self.forms(RANKS)[:1])[0])
        for save, rows in ((True, RANKS * len(x)), (False, len(x))):
            sizes = []

            def fn(x, w, save=save, sizes=sizes):
                loss = lambda w: self.call(x, w, save_gathered=save)[0].sum()  # noqa: E731
                y, vjp = jax.vjp(loss, w)
                sizes += [a.size for a in jax.tree.leaves(vjp)]
                return vjp(jnp.ones_like(y))[0]

            stacked = tools.stacked(lambda x, w, fn=fn: fn(x, w), line(RANKS))
            jax.eval_shape(stacked, *(jnp.stack([a] * RANKS) for a in (x, w)))
            self.assertEqual(sizes, [rows * x.shape[1]])

    def test_remat_gathers_anew(self):
        operands = self.data(self.forms(RANKS)[:1])[0]
        loss = jax.checkpoint(lambda *a: (jnp.sin(self.call(*a)[0])).sum())
        plans = self.plans(jax.value_and_grad(loss, (0, 1)), operands)
        self.assertEqual(plans, ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"])

    @named(saved=(True,), gathered_again=(False,))
    def test_second_order_in_both_operands(self, save):
        """As that of lax, and no more gathers than the first order needs twice."""
        self.need_lax()
        self.multiply_exactly()
        operands = tools.place(self.data(self.forms(RANKS)[:1])[0], line(RANKS))

        def twice(call, **kw):
            first = jax.grad(lambda *a: (call(*a, **kw)[0] ** 3).sum() / 8, (0, 1))
            loss = lambda *a: sum((g**2).sum() for g in first(*a)) / 2**20  # noqa: E731
            return jax.jit(tools.stacked(jax.grad(loss, (0, 1)), line(RANKS)))

        ours = twice(self.call, save_gathered=save)(*operands)
        theirs = twice(functools.partial(self.lax, axis_name="x"))(*operands)
        for pair in zip(ours, theirs, strict=True):
            a, b = (np.stack([*tools.fetch(a).values()]) for a in pair)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * abs(b).max())


class AllGatherMatmulTypes(op_contract.Contract):
    op = ALL_GATHER_MATMUL
    layout = Layout(grid("b").shape, ("dp", "tp"), ("tp",))

    def types(self, call):
        """What each result varies over, x being cut over tp and one weight over dp."""
        seen = []

        def fn(x, w):
            (y, z), gathered = call(x, w)
            seen[:] = [jax.typeof(a).mat.varying for a in (y, z, gathered)]
            return y + z

        specs = {"in_specs": (P("tp"), P("dp")), "out_specs": P(("dp", "tp"))}
        fn = jax.shard_map(fn, mesh=self.layout.mesh, **specs)
        dp, tp = self.layout.shape
        jax.eval_shape(fn, jnp.ones((2 * tp, 3)), jnp.ones((3 * dp, 5)))
        return seen

    def test_each_result_varies_as_in_lax(self):
        constant = np.ones((3, 5), np.float32)

        def lax_call(x, w):
            g = lax.all_gather(x, "tp", tiled=True)
            return (g @ w, g @ constant), g

        def our_call(x, w):
            return jax_overlap.all_gather_matmul(
                x, (w, constant), "tp", return_gathered=True
            )

        self.assertEqual(self.types(our_call), self.types(lax_call))

    def test_weights_that_see_x_unlike_are_refused(self):
        rows = (((2,), (0,)), ((), ()))
        for dims, shape in (
            ((((2,), (1,)), ((0,), (0,))), (2, 4, 5)),
            ((((1, 2), (0, 1)), ((), ())), (3 * RANKS, 4, 5)),
        ):

            def fn(x, dims=dims, shape=shape):
                ws = jnp.ones((4, 5)), jnp.ones(shape)
                return jax_overlap.all_gather_matmul(
                    x, ws, "x", gather_dimension=1, dimension_numbers=(rows, dims)
                )[0]

            with self.assertRaisesRegex(ValueError, "contract the same dimensions"):
                jax.eval_shape(
                    tools.stacked(fn, line(RANKS)), jnp.ones((RANKS, 2, 3, 4))
                )

    def test_one_bias_for_several_weights_is_refused(self):
        def fn(x):
            w = jnp.ones((4, 2))
            return jax_overlap.all_gather_matmul(x, (w, w), "x", bias=jnp.ones(2))[0]

        with self.assertRaisesRegex(ValueError, "tuple, of an array for each weight"):
            jax.eval_shape(tools.stacked(fn, line(RANKS)), jnp.ones((RANKS, 3, 4)))

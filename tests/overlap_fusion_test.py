"""jax_overlap.overlap: which matmuls are fused with which collectives."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from contract_tools import BF16
from jax import lax
from jax.sharding import PartitionSpec as P
from overlap_tools import GRID, OverlapCase, X, exact, shard

import jax_overlap

R = P()  # the same on all ranks
C = P(None, "x")  # cut along the second dimension
HIGHEST = lax.Precision.HIGHEST
RS, AR, AG = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"


def scatter(y, dimension=0):
    return lax.psum_scatter(y, "x", scatter_dimension=dimension, tiled=True)


def gather(x, dimension=0):
    return lax.all_gather(x, "x", axis=dimension, tiled=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one rank does, the whole operands, how they are cut, and what it becomes."""

    fn: Callable
    shapes: tuple
    specs: tuple
    out: P | tuple
    became: str
    reason: str = ""
    dtype: type = jnp.float32
    grad: bool = True


x2, w2 = (8, 16), (16, 12)

FUSED = {
    "rows_scattered": Case(lambda x, w: scatter(x @ w), (x2, w2), (C, X), X, RS),
    "columns_scattered": Case(lambda x, w: scatter(x @ w, 1), (x2, w2), (C, X), C, RS),
    "batch_scattered": Case(
        lambda x, w: scatter(jnp.einsum("bik,bkj->bij", x, w)),
        ((4, 3, 8), (4, 8, 5)),
        (P(None, None, "x"), P(None, "x")),
        X,
        RS,
    ),
    "middle_scattered": Case(
        lambda x, w: scatter(x @ w, 1),
        ((2, 8, 16), w2),
        (P(None, None, "x"), X),
        C,
        RS,
    ),
    "transposed_on_the_way": Case(
        lambda x, w: scatter((x @ w).T), (x2, w2), (C, X), X, RS
    ),
    "reshaped_on_the_way": Case(
        lambda x, w: scatter((x @ w).reshape(2, 3, 12), 2),
        ((6, 16), w2),
        (C, X),
        P(None, None, "x"),
        RS,
    ),
    "reshaped_to_rows": Case(
        lambda x, w: scatter((x @ w).reshape(8, 3, 4)), (x2, w2), (C, X), X, RS
    ),
    "squeezed_on_the_way": Case(
        lambda x, w: scatter((x[None] @ w)[0], 1), (x2, w2), (C, X), C, RS
    ),
    "summed": Case(lambda x, w: lax.psum(x @ w, "x"), (x2, w2), (C, X), R, AR),
    "summed_after_einsum": Case(
        lambda x, w: lax.psum(jnp.einsum("bshk,hkd->dbs", x, w), "x"),
        ((2, 3, 4, 5), (4, 5, 6)),
        (P(None, None, "x"), X),
        R,
        AR,
    ),
    "summed_with_options": Case(
        lambda x, w: lax.psum(
            lax.dot_general(
                x,
                w,
                (((1,), (1,)), ((), ())),
                precision=HIGHEST,
                preferred_element_type=jnp.float32,
            ),
            "x",
        ),
        (x2, (12, 16)),
        (C, C),
        R,
        AR,
        dtype=BF16,
    ),
    "gathered_rows": Case(lambda x, w: gather(x) @ w, (x2, w2), (X, C), C, AG),
    "gathered_batch": Case(
        lambda x, w: jnp.einsum("bik,bkj->bij", gather(x), w),
        ((4, 3, 8), (4, 8, 8)),
        (X, P(None, None, "x")),
        P(None, None, "x"),
        AG,
    ),
    "gathered_contraction": Case(
        lambda x, w: gather(x, 1) @ w, (x2, w2), (C, C), C, AG
    ),
    "three_weights": Case(
        lambda x, q, k, v: (lambda g: (g @ q, g @ k, jnp.sin(g @ v)))(gather(x)),
        (x2, w2, w2, (16, 4)),
        (X, C, C, C),
        C,
        AG,
        grad=False,
    ),
    "weights_computed_between": Case(
        lambda x, a, b: (lambda g: (g @ (a + 1)) * (g @ (b * b).T))(gather(x)),
        (x2, w2, (12, 16)),
        (X, C, X),
        C,
        AG,
    ),
    "gathered_used_elsewhere": Case(
        lambda x, w: (lambda g: (g @ w) + g.sum())(gather(x)), (x2, w2), (X, C), C, AG
    ),
    "gathered_used_before": Case(
        lambda x, w: (lambda g: (lambda s: g @ w + s)(g.sum()))(gather(x)),
        (x2, w2),
        (X, C),
        C,
        AG,
    ),
    "gathered_returned": Case(
        lambda x, w: (lambda g: (g @ w, g))(gather(x)), (x2, w2), (X, C), (C, X), AG
    ),
    "second_needs_the_first": Case(
        lambda x, w: (lambda g: g @ (w + (g @ w)[:1, :1]))(gather(x)),
        (x2, w2),
        (X, C),
        C,
        AG,
    ),
    "of_another_precision": Case(
        lambda x, a, b: (lambda g: g @ a + jnp.dot(g, b, precision=HIGHEST))(gather(x)),
        (x2, w2, w2),
        (X, C, C),
        C,
        AG,
    ),
    "gather_and_scatter": Case(
        lambda x, w: scatter(gather(x) @ w),
        (x2, (16, 12)),
        (X, R),
        X,
        f"{RS} all_gather",
    ),
    "gather_in_gather": Case(
        lambda x, y: (lambda g, h: (g @ h, h @ g))(gather(x), gather(y)),
        ((8, 8), (8, 8)),
        (X, X),
        X,
        f"all_gather {AG}",
        grad=False,
    ),
    "gather_feeds_a_fused_matmul": Case(
        lambda x, y, w: (lambda g, h: (g @ h, h @ w))(gather(x), gather(y)),
        ((8, 8), (8, 8), (8, 4)),
        (X, X, C),
        X,
        f"all_gather {AG}",
        grad=False,
    ),
    "layers_in_a_scan": Case(
        lambda x, up, down: lax.scan(
            jax.checkpoint(
                lambda x, w: (x + scatter(jax.nn.relu(gather(x) @ w[0]) @ w[1]), ())
            ),
            x,
            (up, down),
        )[0],
        ((8, 4), (3, 4, 16), (3, 16, 4)),
        (X, P(None, None, "x"), C),
        X,
        f"{AG} {RS}",
    ),
    "a_layer": Case(
        lambda x, up, down: scatter((lambda h: h * h)(gather(x) @ up) @ down),
        ((8, 4), (4, 16), (16, 4)),
        (X, C, X),
        X,
        f"{AG} {RS}",
    ),
}

UNFUSED = {
    "no_matrix_product": Case(
        lambda x, w: lax.psum(jnp.vdot(x, w), "x"),
        (x2, x2),
        (C, C),
        R,
        "psum",
        "no matrix product",
    ),
    "result_used_elsewhere": Case(
        lambda x, w: (lambda y: scatter(y) + y[:2])(x @ w),
        (x2, w2),
        (C, X),
        X,
        "psum_scatter",
        "used elsewhere too",
    ),
    "untiled": Case(
        lambda x, w: lax.psum_scatter(x @ w, "x"),
        ((4, 16), w2),
        (C, X),
        X,
        "psum_scatter",
        "tiled=False",
    ),
    "integers": Case(
        lambda x, w: lax.psum(x @ w, "x"),
        (x2, w2),
        (C, X),
        R,
        "psum",
        "of int32",
        dtype=jnp.int32,
        grad=False,
    ),
    "mixed_types": Case(
        lambda x, w: lax.psum(
            lax.dot(x, w.astype(jnp.float32), preferred_element_type=jnp.float32), "x"
        ),
        (x2, w2),
        (C, X),
        R,
        "psum",
        "of bfloat16 and float32",
        dtype=BF16,
    ),
    "rounded_between": Case(
        lambda x, w: lax.psum((x @ w).astype(BF16), "x"),
        (x2, w2),
        (C, X),
        R,
        "psum",
        "converted before",
    ),
    "scattered_dimension_was_split": Case(
        lambda x, w: scatter((x @ w).reshape(4, 2, 12)),
        (x2, w2),
        (C, X),
        X,
        "psum_scatter",
        "reshape cuts",
    ),
    "right_operand": Case(
        lambda x, w: x @ gather(w),
        (x2, w2),
        (X, X),
        X,
        "all_gather",
        "right operand",
    ),
    "both_operands": Case(
        lambda x, w: (lambda g: g @ g)(gather(x)),
        ((8, 8), w2),
        (X, X),
        X,
        "all_gather",
        "both operands",
        grad=False,
    ),
    "weight_gathered_later": Case(
        lambda x, w: (lambda g: (g.sum(), g @ gather(w, 1))[1])(gather(x)),
        (x2, w2),
        (X, C),
        X,
        "all_gather all_gather",
        "computed later",
        grad=False,
    ),
    "weight_needs_a_sum_that_waits": Case(
        lambda x, y, w: (
            lambda g: (lambda s: g @ (w * s[0]) + s[1].sum())(lax.psum((y, g), "x"))
        )(gather(x)),
        ((8, 8), (4,), (8, 4)),
        (X, X, C),
        C,
        "psum all_gather",
        "computed later",
        grad=False,
    ),
    "dots_saved_by_a_policy": Case(
        jax.checkpoint(
            lambda x, w: lax.psum(x @ w, "x"),
            policy=jax.checkpoint_policies.dots_saveable,
        ),
        (x2, w2),
        (C, X),
        R,
        "psum",
        "policy of jax.checkpoint",
    ),
}


class Fusion(OverlapCase):
    def run_case(self, case: Case, check_vma: bool):
        args = [
            exact(*shape, seed=i).astype(case.dtype)
            for i, shape in enumerate(case.shapes)
        ]
        fn = shard(
            case.fn, in_specs=case.specs, out_specs=case.out, check_vma=check_vma
        )
        rows = jax_overlap.overlap(fn).report(*args)
        self.check(fn, args, [r.became for r in rows], grad=case.grad)
        self.assertCountEqual([r.became for r in rows], case.became.split())
        return rows

    @parameterized.product(name=list(FUSED), check_vma=[True, False])
    def test_fused(self, name, check_vma):
        rows = self.run_case(FUSED[name], check_vma)
        for row in rows:
            if row.became in (RS, AR, AG):
                self.assertIn("dot_general", row.primitives)

    @parameterized.product(name=list(UNFUSED), check_vma=[True, False])
    def test_not_fused(self, name, check_vma):
        rows = self.run_case(UNFUSED[name], check_vma)
        self.assertRegex(" ".join(row.reason for row in rows), UNFUSED[name].reason)

    def test_what_the_weights_of_one_gather_are(self):
        for name, dots in (
            ("three_weights", 3),
            ("weights_computed_between", 2),
            ("second_needs_the_first", 1),
            ("of_another_precision", 1),
            ("gathered_used_before", 1),
        ):
            (row,) = self.run_case(dataclasses.replace(FUSED[name], grad=False), True)
            self.assertEqual(row.primitives.count("dot_general"), dots, name)

    def test_the_backward_pass_is_fused_where_it_is_seen(self):
        case = FUSED["a_layer"]
        fn = shard(case.fn, in_specs=case.specs, out_specs=case.out)
        args = [exact(*shape) for shape in case.shapes]
        rows = jax_overlap.overlap(jax.grad(lambda *a: fn(*a).sum(), (0, 1, 2)))
        became = [row.became for row in rows.report(*args)]
        self.assertCountEqual(became, [AG, RS, AG, RS])

    def test_not_where_an_axis_is_automatic(self):
        fn = shard(lambda x, w: lax.psum(x @ w, "x"), GRID, (C, X), R, axis_names={"x"})
        args = exact(8, 16), exact(16, 12)
        (row,) = jax_overlap.overlap(fn).report(*args)
        self.assertIn("axes ['y'] are automatic", row.reason)
        self.check(fn, args, ["psum"])

    def test_a_deep_chain_of_matmuls_between(self):
        """A right operand that is a long computation is moved as a whole."""

        def fn(x, w):
            g = gather(x)
            y = g @ w
            for i in range(20):
                w = w * (1 + i % 2) - 1
            return y + g @ w

        fn = shard(fn, in_specs=(X, C), out_specs=C)
        args = exact(8, 16), exact(16, 12)
        self.check(fn, args, [AG], grad=False)


if __name__ == "__main__":
    absltest.main()

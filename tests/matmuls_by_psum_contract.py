"""The tests of the fused matmuls by one psum, on every backend."""

import os
from unittest import mock

import contract_devices as devices
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import op_contract
import op_contract_matmul
import op_contract_programs
import op_contract_transforms
from all_gather_matmul_contract import AllGatherMatmulForms
from contract_tools import BF16, F16, line
from matmul_all_reduce_contract import MatmulAllReduceForms
from matmul_descriptions import (
    ALL_GATHER_MATMUL_BY_PSUM,
    BY_PSUM,
    MATMUL_ALL_REDUCE_BY_PSUM,
    MATMUL_REDUCE_SCATTER_BY_PSUM,
    ON_GPU,
)
from matmul_reduce_scatter_contract import MatmulReduceScatterForms
from op_contract import lowered, named
from op_contract_matmul_forms import RANKS
from op_contract_transforms import both_modes

import jax_overlap
from jax_overlap.ops import _by_psum

OPS = (
    MATMUL_REDUCE_SCATTER_BY_PSUM,
    ALL_GATHER_MATMUL_BY_PSUM,
    MATMUL_ALL_REDUCE_BY_PSUM,
)
EACH = named(**{op.name: (op,) for op in OPS})
TYPES = named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))


class ByPsum:
    """Of the algorithms this one alone, on every backend."""

    @property
    def algorithms(self):
        return (BY_PSUM,)


class ScatterValues(ByPsum, op_contract.Values):
    op = MATMUL_REDUCE_SCATTER_BY_PSUM


class GatherValues(ByPsum, op_contract.Values):
    op = ALL_GATHER_MATMUL_BY_PSUM


class AllReduceValues(ByPsum, op_contract.Values):
    op = MATMUL_ALL_REDUCE_BY_PSUM


class ScatterPrograms(op_contract_programs.Programs):
    op = MATMUL_REDUCE_SCATTER_BY_PSUM


class GatherTransforms(op_contract_transforms.Transforms):
    op = ALL_GATHER_MATMUL_BY_PSUM


class Forms(ByPsum, op_contract_matmul.Matmuls):
    takes_groups = False  # see Groups
    rounds_ranks = True

    def call(self, x, *ws, axis_name="x", algorithm=BY_PSUM, **options):
        return super().call(x, *ws, axis_name=axis_name, algorithm=algorithm, **options)


class ScatterForms(Forms, MatmulReduceScatterForms):
    op = MATMUL_REDUCE_SCATTER_BY_PSUM


class GatherForms(Forms, AllGatherMatmulForms):
    op = ALL_GATHER_MATMUL_BY_PSUM


class AllReduceForms(Forms, MatmulAllReduceForms):
    op = MATMUL_ALL_REDUCE_BY_PSUM


class Bits(op_contract.Contract):
    op = ALL_GATHER_MATMUL_BY_PSUM

    @TYPES
    def test_what_is_gathered_keeps_its_bits(self, dtype):
        """Of NaNs, infinities, -0 and the rest, in rows of even and odd lengths."""
        rng = np.random.default_rng(self.seed)
        unsigned = f"u{np.dtype(dtype).itemsize}"
        special = np.array([-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf], dtype)
        others = np.array([1, np.iinfo(unsigned).max], unsigned)
        special = np.concatenate([special.view(unsigned), others])
        with jax.enable_x64(dtype == np.float64):
            for shape, dimension in (((3, 8), 0), ((2, 7), 0), ((3, 5), 1), ((4,), 0)):
                x = rng.integers(
                    0, np.iinfo(unsigned).max, (RANKS, *shape), unsigned, endpoint=True
                )
                x.reshape(-1)[: len(special)] = special
                self.check_bits(x, dtype, dimension)

    def check_bits(self, x, dtype, dimension):
        columns = x.shape[-1] * (RANKS if dimension == x.ndim - 2 else 1)
        w = np.zeros((RANKS, columns, 2), dtype)

        def fn(bits, w):
            # As integers outside: what moves floats may make NaNs quiet.
            x = jax.lax.bitcast_convert_type(bits, dtype)
            _, full = self.op.call(
                x, w, "x", gather_dimension=dimension, return_gathered=True
            )
            return jax.lax.bitcast_convert_type(full, bits.dtype)

        want = np.stack([np.concatenate(list(x), dimension)] * RANKS)
        with self.subTest(shape=x.shape, dimension=dimension):
            self.check(fn, line(RANKS), (x, w), want, calls=1, repeats=1)

    @TYPES
    def test_what_did_not_arrive_is_nan(self, dtype):
        """A psum on GPUs leaves the smallest integer for it, which would be -0."""
        with jax.enable_x64(dtype == np.float64):
            x = tools.exact(self.seed, (2, 3, 5), dtype)
            bits = _by_psum._bits(x)
            back = _by_psum._values(bits, x.dtype, 5)
            self.assertTrue(tools.bits(np.asarray(back)) == tools.bits(x))
            lost = jnp.full_like(bits, np.iinfo(np.int32).min)
            self.assertTrue(jnp.isnan(_by_psum._values(lost, x.dtype, 5)).all())

    @both_modes
    def test_a_sum_has_the_bits_of_psum(self, check_vma):
        self.multiply_exactly()
        for dtype in (np.float32, BF16, F16):
            x, w = (
                tools.normal(self.seed + i, (RANKS, *shape), dtype)
                for i, shape in enumerate(((2 * RANKS, 33), (33, 5)))
            )

            def fn(x, w):
                whole = jax_overlap.psum(x @ w, "x")
                own = jax.lax.axis_index("x") * 2
                scattered = jax.lax.dynamic_slice_in_dim(whole, own, 2)
                by = {"algorithm": BY_PSUM}
                return (
                    (jax_overlap.matmul_all_reduce(x, w, "x", **by), whole),
                    (jax_overlap.matmul_reduce_scatter(x, w, "x", **by), scattered),
                )

            program = jax.jit(tools.stacked(fn, line(RANKS), check_vma=check_vma))
            for ours, theirs in program(*tools.place((x, w), line(RANKS))):
                ours, theirs = tools.fetch(ours), tools.fetch(theirs)
                self.assertEqual(
                    {p: tools.bits(a) for p, a in ours.items()},
                    {p: tools.bits(a) for p, a in theirs.items()},
                )


class Groups(op_contract.Contract):
    op = ALL_GATHER_MATMUL_BY_PSUM
    # A pair of each, or all of them in another order.
    GROUPS = devices.groups(RANKS)[-2]

    @named(**{op.name: (op,) for op in OPS[:2]})
    def test_they_are_fused(self, op):
        size = len(self.GROUPS[0])
        operands = [
            tools.exact(self.seed + i, (RANKS, *shape), np.float32)
            for i, shape in enumerate(op.shapes(size, 60))
        ]
        wide = [tools.wide(a) for a in operands]
        want = np.zeros((RANKS, *op.reference(*(a[:size] for a in wide)).shape[1:]))
        for group in self.GROUPS:
            want[group] = op.reference(*(a[group] for a in wide))
        fn = tools.stacked(
            lambda *a: op.call(*a, "x", axis_index_groups=self.GROUPS), line(RANKS)
        )
        (plan,) = jax_overlap.explain(fn, *operands)
        self.assertEqual(plan.algorithm, "sliced" if ON_GPU else "in_place")
        self.assertIn("by_psum takes no axis_index_groups", plan.reason)
        got = jax.jit(fn)(*tools.place(operands, line(RANKS)))
        self.assert_stacked(got, want.astype(np.float32))


class Default(op_contract.Contract):
    """What is chosen on GPUs as long as nothing is set, here for what is small."""

    op = ALL_GATHER_MATMUL_BY_PSUM

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, JAX_OVERLAP_BY_PSUM_MAX_BYTES=""))

    @EACH
    def test_small_ones(self, op):
        layout = line(devices.ranks(8))
        operands = op.operands(layout, 600, BF16, self.seed)
        want = op_contract.over_teams(layout, op.reference, *operands).astype(BF16)

        def fn(*operands):
            return op.call(*operands, layout.axis_name, algorithm=None)

        before = [lowered(name, "native") for name in (op.name, "psum")]
        stacked = tools.stacked(fn, layout)
        (plan,) = jax_overlap.explain(stacked, *operands)
        self.assertEqual(plan.algorithm, BY_PSUM if ON_GPU else "in_place", plan)
        placed = tools.place(operands, layout)
        compiled = jax.jit(stacked).lower(*placed).compile()
        after = [lowered(name, "native") for name in (op.name, "psum")]
        self.assertEqual(after, [before[0] + 1, before[1] + ON_GPU])
        for _ in range(5):
            self.assert_stacked(jax.block_until_ready(compiled(*placed)), want)

    @EACH
    def test_gradients_of_small_ones(self, op):
        self.multiply_exactly()
        layout = line(devices.ranks(4))
        operands = op.operands(layout, 60, np.float32, self.seed)
        right = op_contract.over_teams(layout, op.reference, *operands)
        cts = tools.exact(self.seed + 5, right.shape, np.float32)

        def fn(*both):
            *operands, ct = both
            call = lambda *a: op.call(*a, "x", algorithm=None)  # noqa: E731
            y, vjp = jax.vjp(call, *operands)
            return y, vjp(ct)

        got = jax.jit(tools.stacked(fn, layout, check_vma=False))(
            *tools.place((*operands, cts), layout)
        )
        wanted = [
            op_contract.over_teams(
                layout,
                lambda ct, *a, i=i: op.inside_vjp(i, a, ct, False),
                cts,
                *operands,
            )
            for i in range(len(operands))
        ]
        as_f32 = [a.astype(np.float32) for a in (right, *wanted)]
        self.assert_stacked(got, as_f32)

    def test_both_are_counted(self):
        x = jnp.ones((RANKS, 2, 3))
        w = jnp.ones((RANKS, 3, 4))
        fn = tools.stacked(
            lambda x, w: MATMUL_ALL_REDUCE_BY_PSUM.call(x, w, "x"), line(RANKS)
        )
        (plan,) = jax_overlap.explain(fn, x, w)
        self.assertEqual((plan.op, plan.algorithm), ("matmul_all_reduce", BY_PSUM))
        self.assertRegex(plan.reason, "by_psum.*psum by one_shot")
        before = [lowered(op, "native") for op in (plan.op, "psum")]
        jax.jit(fn).lower(x, w)
        after = [lowered(op, "native") for op in (plan.op, "psum")]
        self.assertEqual(after, [n + 1 for n in before])

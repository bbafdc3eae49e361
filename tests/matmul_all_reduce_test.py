"""jax_overlap.matmul_all_reduce: the contract of all ops, and what is its own."""

import functools

import contract_tools as tools
import jax
import numpy as np
import op_contract
import op_contract_batching
import op_contract_matmul
import op_contract_programs
import op_contract_transforms
from absl.testing import absltest
from contract_tools import BF16, F16, line
from jax import lax
from jax.sharding import PartitionSpec as P
from matmul_descriptions import MATMUL_ALL_REDUCE
from op_contract import named
from op_contract_matmul_forms import (
    BATCHED,
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
)
from op_contract_transforms import both_modes

import jax_overlap


class MatmulAllReduceValues(op_contract.Values):
    op = MATMUL_ALL_REDUCE


class MatmulAllReducePrograms(op_contract_programs.Programs):
    op = MATMUL_ALL_REDUCE


class MatmulAllReduceTransforms(op_contract_transforms.Transforms):
    op = MATMUL_ALL_REDUCE


class MatmulAllReduceBatching(op_contract_batching.Batching):
    op = MATMUL_ALL_REDUCE


class MatmulAllReduceForms(op_contract_matmul.Matmuls):
    op = MATMUL_ALL_REDUCE
    takes_groups = False
    refused = (
        form((8, 3), (4, 4)),
        form((8, 3), (3, 4), W_TURNED),
        form((3, 8, 3), (4, 3, 4), BATCHED),
        form((8, 3), (3, 4), (((2,), (0,)), ((), ()))),
        form((8, 3), (3, 3), (((1, 1), (0, 1)), ((), ()))),
    )
    empty = (
        form((0, 3), (3, 4)),
        form((7, 3), (3, 0)),
        form((7, 0), (0, 4)),
        form((0, 7, 3), (0, 3, 4), BATCHED),
    )

    @staticmethod
    def forms(n):
        return (
            form((7, 5), (5, 6)),
            form((1, 5), (5, 6)),
            form((n + 1, 5), (5, 6)),
            form((2, 3, 5), (5, 6)),
            form((5,), (5, 6)),
            form((7, 5), (6, 5), W_TURNED),
            form((5, 7), (5, 6), X_TURNED),
            form((3, 5, 2), (6, 5), NEGATIVE),
            form((7, 5), (5,), VECTOR),
            form((5,), (5,), (((0,), (0,)), ((), ()))),
            form((7,), (3,), OUTER),
            form((3, 7, 5), (3, 5, 6), BATCHED),
            form((4, 2, 3, 3, 6), (3, 3, 4, 2, 5), WILD),
            form((7, 5), (5, 3), precision=lax.Precision.HIGHEST),
        )

    @staticmethod
    def numpy(x, w, dimension_numbers=None, precision=None):
        y = sum(dot_general(*o, dimension_numbers) for o in zip(x, w, strict=True))
        return [np.stack([y] * len(x))]

    @staticmethod
    def lax(x, w, axis_name, dimension_numbers=None, precision=None):
        return [lax.psum(lax_dot(x, w, dimension_numbers, precision), axis_name)]

    def ragged(self, n):
        return [
            form((rows, k), (k, columns))
            for rows, k, columns in (
                (1, 129, 130),
                (127, 3, 1),
                (129, 17, 15),
                (300, 5, 33),
            )
        ]

    def large(self, n):
        return form((100, 1000), (1000, 700))

    @both_modes
    def test_the_bias_is_added_once(self, check_vma):
        """By every rank to its own copy; the gradient is that of each copy."""
        x, w = self.data([form((7, 5), (5, 6))])[0]
        b = tools.exact(self.seed, (RANKS, 6), np.float32)

        def fn(x, w, b):
            y, vjp = jax.vjp(lambda b: self.call(x, w, bias=b)[0], b)
            return y, vjp(y)[0]

        y = self.numpy(x, w)[0] + b[:, None]
        kw = {"check_vma": check_vma, "calls": 1, "repeats": 1}
        self.check(fn, line(RANKS), (x, w, b), (y, y.sum(1)), **kw)

    def test_a_bias_that_all_share_leaves_the_result_shared(self):
        """With check_vma the sum and its bias pass an out_specs that asks for that."""
        x, w = self.data([form((7, 5), (5, 6))])[0]
        b = tools.exact(self.seed, (6,), np.float32)
        fn = jax.jit(
            jax.shard_map(
                lambda x, w, b: self.call(x[0], w[0], bias=b)[0],
                mesh=line(RANKS).mesh,
                in_specs=(P("x"), P("x"), P()),
                out_specs=P(),
            )
        )
        np.testing.assert_array_equal(fn(x, w, b), self.numpy(x, w)[0][0] + b)

    @both_modes
    def test_what_the_gradient_sends(self, check_vma):
        """Nothing, where the cotangent is one that all ranks share; else one psum."""
        operands = self.data(self.forms(RANKS)[:1])[0]
        fn = tools.stacked(
            jax.grad(lambda *a: self.call(*a)[0].sum(), (0, 1)),
            line(RANKS),
            check_vma=check_vma,
        )
        plans = [p.op for p in jax_overlap.explain(fn, *operands)]
        sent = [] if check_vma else ["psum"]
        self.assertEqual(plans, ["matmul_all_reduce", *sent])


class MatmulAllReduceBits(op_contract.Contract):
    op = MATMUL_ALL_REDUCE

    def summed(self, parts, layout=None):
        """Sums of numbers: each is the product of itself and 1."""
        x = np.asarray(parts)[..., None]
        w = np.ones((len(x), 1, 3), x.dtype)
        fn = functools.partial(jax_overlap.matmul_all_reduce, axis_name="x")
        layout = line(len(x)) if layout is None else layout
        return np.asarray(jax.jit(tools.stacked(fn, layout))(x, w))

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_summed_in_rank_order(self, dtype):
        """In fp32, or the type if wider, and rounded once: the bits, not just near."""
        with jax.enable_x64(dtype == np.float64):
            for layout in (line(2), line(3), line(4, order=(2, 0, 3, 1)), line(8)):
                n = layout.size
                x = tools.normal(self.seed + n, (n, 151), dtype)
                want = np.repeat(tools.in_rank_order(x)[..., None], 3, -1)
                with self.subTest(layout=layout):
                    got = self.summed(x, layout)
                    self.assertTrue(tools.bits(got) == tools.bits(want))

    def test_half_types_are_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32; 40000 + 40000 - 80000 overflows float16."""
        for parts, dtype, right in (
            ([256, 1, 1, 1], BF16, 260),
            ([40000, 40000, -40000, -40000], F16, 0),
        ):
            x = np.repeat(np.array(parts).astype(dtype)[:, None], 33, 1)
            got = self.summed(x).astype(np.float32)
            np.testing.assert_array_equal(got, right)


if __name__ == "__main__":
    absltest.main()

"""The tests of jax_overlap.matmul_all_reduce on every backend."""

import contract_tools as tools
import jax
import numpy as np
import op_contract
import op_contract_batching
import op_contract_matmul
import op_contract_programs
import op_contract_transforms
from contract_tools import BF16, F16, line
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_descriptions import MATMUL_ALL_REDUCE
from op_contract import named
from op_contract_matmul_forms import (
    BATCHED,
    LINES,
    NEGATIVE,
    OUTER,
    RANKS,
    VECTOR,
    W_TURNED,
    WILD,
    X_TURNED,
    dot_general,
    form,
    half_sums,
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
        mesh = line(RANKS).mesh
        whole = NamedSharding(mesh, P())
        shared = jax.make_array_from_callback(b.shape, whole, lambda i: b[i])
        fn = jax.jit(
            jax.shard_map(
                lambda x, w, b: self.call(x[0], w[0], bias=b)[0],
                mesh=mesh,
                in_specs=(P("x"), P("x"), P()),
                out_specs=P(),
            )
        )
        got = fn(*tools.place((x, w), line(RANKS)), shared)
        self.assert_global(got, self.numpy(x, w)[0][0] + b)

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

    def summed(self, parts, layout=None, algorithm=None):
        """Sums of numbers, of each rank: each is the product of itself and 1."""
        x = np.asarray(parts)[..., None]
        w = np.ones((len(x), 1, 3), x.dtype)
        fn = lambda *a: self.op.run(*a, axis_name="x", algorithm=algorithm)  # noqa: E731
        layout = line(len(x)) if layout is None else layout
        got = jax.jit(tools.stacked(fn, layout))(*tools.place((x, w), layout))
        return tools.fetch(got)

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_summed_in_rank_order(self, dtype):
        """In fp32, or the type if wider, and rounded once: the bits, not just near."""
        self.multiply_exactly()
        with jax.enable_x64(dtype == np.float64):
            for layout in LINES:
                n = layout.size
                x = tools.normal(self.seed + n, (n, 151), dtype)
                want = np.repeat(tools.in_rank_order(x)[0][:, None], 3, -1)
                with self.subTest(layout=layout):
                    for part in self.summed(x, layout).values():
                        self.assertTrue(tools.bits(part) == tools.bits(want))

    def test_half_types_are_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32; 40000 + 40000 - 80000 overflows float16."""
        for parts, dtype, right in half_sums(RANKS):
            x = np.repeat(np.array(parts).astype(dtype)[:, None], 33, 1)
            for got in self.summed(x).values():
                np.testing.assert_array_equal(got.astype(np.float32), right)

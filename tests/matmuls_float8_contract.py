"""The fused matmuls of float8: native on GPUs, and by lax elsewhere.

Data are multiples of 1/2, of which every sum of products is exact in every type that a
result may have, also in the accumulators of tensor cores, which for float8 are short.
"""

import functools

import contract_devices as devices
import contract_tools as tools
import jax
import ml_dtypes
import numpy as np
from contract_devices import line
from contract_tools import BF16, F16
from jax import lax
from matmul_descriptions import (
    ALL_GATHER_MATMUL,
    BY_PSUM,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    ON_GPU,
    bound,
)
from op_contract import Contract, Near, named, over_teams

E4M3, E5M2 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
PAIRS = {"e4m3": (E4M3, E4M3), "e4m3_e5m2": (E4M3, E5M2), "e5m2_e4m3": (E5M2, E4M3)}
RESULTS = (np.dtype(np.float32), BF16, F16)
N = devices.ranks(8)
# Rows of a rank, or of its part; what is contracted; columns.
SHAPES = ((1, 16, 16), (5, 48, 32), (130, 64, 144))
TURNED = (((1,), (1,)), ((), ()))  # dimension_numbers for w [n, k]


class _OfOp(Contract):
    def operands(self, shape, dtypes, salt=0):
        """Stacked x and w."""
        rows, k, columns = shape
        if self.op.name == MATMUL_REDUCE_SCATTER.name:
            rows *= N
        x = np.sign(tools.exact(self.seed + salt, (N, rows, k), np.float32))
        w = tools.exact(self.seed + salt + 1, (N, k, columns), np.float32) / 2
        return x.astype(dtypes[0]), w.astype(dtypes[1])

    def call(self, dtype, **options):
        return functools.partial(
            self.op.call, axis_name="x", preferred_element_type=dtype, **options
        )

    def right(self, *operands):
        return over_teams(line(N), self.op.reference, *operands)

    def run_float8(self, fn, operands, want, calls, **kw):
        """As `check`, with no custom calls where float8 is left to lax."""
        if not ON_GPU:
            kw |= {"foreign": True}
            calls = 0
        self.check(fn, line(N), operands, want, calls=calls, **kw)

    def type_of_dot(self, x, w):
        dims = (((1,), (0,)), ((), ()))
        return jax.eval_shape(
            lambda x, w: lax.dot_general(x, w, dims), x[0], w[0]
        ).dtype

    @named(**{name: (pair,) for name, pair in PAIRS.items()})
    def test_values(self, dtypes):
        cases = [self.operands(s, dtypes, 10 * i) for i, s in enumerate(SHAPES)]
        turned = [(x, np.swapaxes(w, 1, 2).copy()) for x, w in cases]
        precisions = (None, lax.Precision.HIGHEST)
        asked = [(t, p) for t in RESULTS for p in precisions]

        def fn(cases, turned):
            return [
                self.call(dtype, dimension_numbers=numbers, precision=precision)(*case)
                for dtype, precision in asked
                for numbers, some in ((None, cases), (TURNED, turned))
                for case in some
            ]

        exact = [self.right(*case) for case in cases]
        want = [y.astype(dtype) for dtype, _ in asked for _ in range(2) for y in exact]
        self.run_float8(fn, (cases, turned), want, len(want), replicas=True)

    @named(
        f32=("e4m3_e5m2", np.dtype(np.float32)),
        bf16=("e4m3", BF16),
        as_the_operands=("e4m3", None),
        of_unlike_operands=("e5m2_e4m3", None),
    )
    def test_gradients(self, pair, dtype):
        """Of float8 as the operands, rounded once."""
        operands = self.operands(SHAPES[1], PAIRS[pair])
        y = self.right(*operands)
        call = self.call(dtype)
        of_result = dtype or self.type_of_dot(*operands)
        ct = np.sign(tools.exact(self.seed + 5, y.shape, np.float32)).astype(of_result)

        def fn(x, w, ct):
            return jax.vjp(call, x, w)[1](ct)

        want = tuple(
            over_teams(
                line(N),
                lambda *a, i=i: self.op.inside_vjp(i, a[:2], a[2], False),
                *operands,
                ct,
            ).astype(operands[i].dtype)
            for i in range(2)
        )
        placed = tools.place((*operands, ct), line(N))
        program = jax.jit(tools.stacked(fn, line(N), check_vma=False))
        self.assert_stacked(program(*placed), want)

    def test_vmap(self):
        cases = [self.operands(SHAPES[1], PAIRS["e4m3"], 10 * i) for i in range(3)]
        xs, ws = (np.stack(a, 1) for a in zip(*cases, strict=True))
        call = self.call(np.float32)

        def fn(xs, ws):
            return jax.vmap(call)(xs, ws), jax.vmap(call, (0, None))(xs, ws[0])

        each = [self.right(*case) for case in cases]
        first = [self.right(x, cases[0][1]) for x, _ in cases]
        want = tuple(np.stack(ys, 1).astype(np.float32) for ys in (each, first))
        self.run_float8(fn, (xs, ws), want, 2, check_vma=False)

    def test_random_data_stay_within_a_bound(self):
        """Tensor cores align products of float8 to the largest, by 13 bits or more."""
        shapes = [a.shape for a in self.operands(SHAPES[2], PAIRS["e4m3"])]
        operands = tuple(
            tools.normal(self.seed + i, shape, E4M3) for i, shape in enumerate(shapes)
        )
        wide = tuple(map(tools.wide, operands))
        adds_ranks = self.op.name != ALL_GATHER_MATMUL.name
        off = bound(self.op.reference, wide, SHAPES[2][1], adds_ranks, np.float32)
        off += 2.0**-11 * self.op.reference(*map(np.abs, wide))
        want = Near(self.op.reference(*wide), off, np.dtype(np.float32))
        self.run_float8(self.call(np.float32), operands, want, 1)

    def test_by_psum(self):
        operands = self.operands(SHAPES[1], PAIRS["e5m2_e4m3"])
        placed = tools.place(operands, line(N))
        call = self.call(BF16, algorithm=BY_PSUM)
        program = jax.jit(tools.stacked(call, line(N)))
        hlo = program.lower(*placed).compile().as_text()
        self.assertEqual(tools.custom_calls(hlo, "jax_overlap.psum"), int(ON_GPU))
        self.assert_stacked(program(*placed), self.right(*operands).astype(BF16))


class ReduceScatter(_OfOp):
    op = MATMUL_REDUCE_SCATTER


class AllGather(_OfOp):
    op = ALL_GATHER_MATMUL

    def with_gathered(self, x, *ws, dtype):
        """The results, and then the gathered x."""
        ys, gathered = self.call(dtype, return_gathered=True)(x, ws)
        return (*ys, gathered)

    def right_gathered(self, x):
        rows, k = x.shape[1:]
        return np.broadcast_to(x.reshape(-1, k), (N, N * rows, k))

    def test_several_weights_and_the_gathered(self):
        x, w = self.operands(SHAPES[1], PAIRS["e4m3"])
        _, v = self.operands((5, 48, 16), PAIRS["e4m3"], 20)
        fn = functools.partial(self.with_gathered, dtype=BF16)
        ys = [self.right(x, a).astype(BF16) for a in (w, v)]
        self.run_float8(fn, (x, w, v), (*ys, self.right_gathered(x)), 1)

    def test_weights_of_unlike_types(self):
        x, w = self.operands(SHAPES[1], PAIRS["e4m3"])
        _, v = self.operands((5, 48, 16), PAIRS["e4m3_e5m2"], 20)
        wide = functools.partial(self.with_gathered, dtype=np.float32)
        ys = [self.right(x, a).astype(np.float32) for a in (v, w)]
        self.run_float8(wide, (x, v, w), (*ys, self.right_gathered(x)), 2)
        kept = functools.partial(self.with_gathered, dtype=None)
        kept = jax.eval_shape(tools.stacked(kept, line(N)), x, v, w)
        types = [a.dtype for a in kept]
        self.assertEqual(types, [self.type_of_dot(x, v), E4M3, E4M3])

    def test_gathered_along_what_is_contracted(self):
        k, columns = 32, 48
        x = self.operands((6, k, columns), PAIRS["e4m3"])[0]
        w = self.operands((6, N * k, columns), PAIRS["e4m3"])[1]
        full = np.concatenate(list(tools.wide(x)), axis=-1)
        want = np.stack([full @ part for part in tools.wide(w)]).astype(np.float32)
        fn = self.call(np.float32, gather_dimension=1)
        self.run_float8(fn, (x, w), want, 1)


class AllReduce(_OfOp):
    op = MATMUL_ALL_REDUCE

"""The tests of jax_overlap.matmul_reduce_scatter on every backend."""

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
from matmul_descriptions import (
    MATMUL_REDUCE_SCATTER,
    MATMUL_REDUCE_SCATTER_LAST,
    MATMUL_REDUCE_SCATTER_SLICED,
)
from op_contract import named
from op_contract_matmul_forms import (
    BATCHED,
    LINES,
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
    half_sums,
    lax_dot,
)


class MatmulReduceScatterValues(op_contract.Values):
    op = MATMUL_REDUCE_SCATTER


class MatmulReduceScatterPrograms(op_contract_programs.Programs):
    op = MATMUL_REDUCE_SCATTER


class MatmulReduceScatterSlicedPrograms(op_contract_programs.Programs):
    op = MATMUL_REDUCE_SCATTER_SLICED


class MatmulReduceScatterTransforms(op_contract_transforms.Transforms):
    op = MATMUL_REDUCE_SCATTER


class MatmulReduceScatterBatching(op_contract_batching.Batching):
    op = MATMUL_REDUCE_SCATTER


class MatmulReduceScatterLastTransforms(op_contract_transforms.Transforms):
    op = MATMUL_REDUCE_SCATTER_LAST


class MatmulReduceScatterLastBatching(op_contract_batching.Batching):
    op = MATMUL_REDUCE_SCATTER_LAST


class MatmulReduceScatterForms(op_contract_matmul.Matmuls):
    op = MATMUL_REDUCE_SCATTER
    refused = (
        form((RANKS + 1, 3), (3, 2 * RANKS)),
        form((2 * RANKS, 3), (3, RANKS + 1), scatter_dimension=1),
        form((2 * RANKS, 3), (3, RANKS + 1), scatter_dimension=-1),
        form((2 * RANKS, 3), (3, RANKS), scatter_dimension=2),
        form((2 * RANKS, 3), (3, RANKS), scatter_dimension=-3),
        form((3,), (3,), (((0,), (0,)), ((), ()))),
        form((8, 3), (4, 4)),
        form((8, 3), (3, 4), W_TURNED),
        form((3, 8, 3), (4, 3, 4), BATCHED),
        form((8, 3), (3, 4), (((2,), (0,)), ((), ()))),
        form((8, 3), (3, 3), (((1, 1), (0, 1)), ((), ()))),
    )
    empty = (
        form((0, 3), (3, 4)),
        form((2 * RANKS, 3), (3, 0)),
        form((2 * RANKS, 0), (0, 4)),
        form((2, 2 * RANKS, 3), (3, 0), scatter_dimension=1),
        form((2, 3), (3, 0), scatter_dimension=1),
        form((0, 2 * RANKS, 3), (0, 3, 4), BATCHED, scatter_dimension=1),
    )

    @staticmethod
    def forms(n):
        x, w = (n, 2, 2 * n, 3, n), (3, 2 * n, n, 2, 5)
        cut_w = (3, 2 * n, n, 2, n, 2 * n)
        return (
            form((2 * n, 5), (5, 6)),
            form((3, 2 * n, 5), (5, 6), scatter_dimension=1),
            form((n, 3, 5), (5, 6)),
            form((2, 3, n, 5), (5, 6), scatter_dimension=-2),
            form((2, 3, 5), (5, 2 * n), scatter_dimension=-1),
            form((5,), (5, 2 * n), scatter_dimension=0),
            form((2 * n, 5), (6, 5), W_TURNED),
            form((3, 5), (2 * n, 5), W_TURNED, scatter_dimension=1),
            form((5, 2 * n), (5, 6), X_TURNED),
            form((3, 5, 2 * n), (6, 5), MIDDLE, scatter_dimension=1),
            form((n, 5, 2), (6, 5), NEGATIVE),
            form((2 * n, 5), (5,), VECTOR),
            form((2 * n,), (3,), OUTER),
            form((3,), (n, 2), OUTER, scatter_dimension=1),
            form((3, 2 * n, 5), (3, 5, 6), BATCHED, scatter_dimension=1),
            form((2 * n, 3, 5), (2 * n, 5, 6), BATCHED),
            form((3, 2, 5), (3, 5, 2 * n), BATCHED, scatter_dimension=2),
            form(x, w, WILD),
            form(x, w, WILD, scatter_dimension=1),
            *(form(x, cut_w, WILD, scatter_dimension=d) for d in (2, 3, -1)),
            form((2 * n, 5), (5, 3), precision=lax.Precision.HIGHEST),
        )

    @staticmethod
    def numpy(x, w, dimension_numbers=None, scatter_dimension=0, precision=None):
        y = sum(dot_general(*o, dimension_numbers) for o in zip(x, w, strict=True))
        return [np.stack(np.split(y, len(x), scatter_dimension))]

    @staticmethod
    def lax(
        x,
        w,
        axis_name,
        dimension_numbers=None,
        scatter_dimension=0,
        precision=None,
        **groups,
    ):
        y = lax_dot(x, w, dimension_numbers, precision)
        return [
            lax.psum_scatter(
                y, axis_name, scatter_dimension=scatter_dimension, tiled=True, **groups
            )
        ]

    def ragged(self, n):
        return [
            form((rows * n, k), (k, columns))
            for rows, k, columns in (
                (1, 129, 130),
                (127, 3, 1),
                (129, 17, 15),
                (300, 5, 33),
            )
        ] + [
            form((130, 33), (33, 129 * n), scatter_dimension=1),
            form((65, 7), (17 * n, 7), W_TURNED, scatter_dimension=1),
        ]

    def large(self, n):
        return form((100 * n, 1000), (1000, 700))

    def test_the_bias_is_added_once(self):
        columns = 2 * RANKS
        x, w = self.data([form((2 * RANKS, 5), (5, columns))])[0]
        biases = [tools.exact(self.seed + i, (RANKS, *s), np.float32)
                  for i, s in enumerate(((columns,), (2, columns), ()))]  # fmt: skip

        def fn(x, w, *biases):
            bias = lambda b, **kw: self.call(x, w, bias=b, **kw)[0]  # noqa: E731
            y, vjp = jax.vjp(bias, biases[0])
            last = self.call(x, w, bias=biases[0][:2], scatter_dimension=1)[0]
            return y, *map(bias, biases[1:]), last, vjp(y)[0]

        ((rows,), (columns,)) = (self.numpy(x, w, scatter_dimension=d) for d in (0, 1))
        y = rows + biases[0][:, None]
        want = [y, rows + biases[1], rows + biases[2][:, None, None]]
        want += [columns + biases[0][:, None, :2], y.sum(1)]
        # The program has one call for rows, however many biases, and one for columns.
        self.check(fn, line(RANKS), (x, w, *biases), want, repeats=1)

    def test_the_gradient_gathers_once(self):
        """For both operands together; for one alone no more than that needs."""
        operands = self.data(self.forms(RANKS)[:1])[0]
        for argnums, ops in (
            ((0, 1), ["all_gather_matmul"]),
            (0, ["all_gather_matmul"]),
            (1, ["all_gather"]),
        ):
            fn = tools.stacked(
                jax.grad(lambda *a: self.call(*a)[0].sum(), argnums), line(RANKS)
            )
            forward = "matmul_reduce_scatter"
            gathers = self.gathers(fn, operands, unused=[forward])
            self.assertEqual(gathers, [forward, *ops])


class ScatteredBits(op_contract.Contract):
    op = MATMUL_REDUCE_SCATTER

    def scattered(self, parts, algorithm, layout=None):
        """Sums of numbers, of each rank: each is the product of itself and 1."""
        x = np.asarray(parts)[..., None]
        w = np.ones((len(x), 1, 3), x.dtype)
        fn = lambda *a: self.op.run(*a, axis_name="x", algorithm=algorithm)  # noqa: E731
        layout = line(len(x)) if layout is None else layout
        return jax.jit(tools.stacked(fn, layout))(*tools.place((x, w), layout))

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_summed_in_rank_order(self, dtype):
        """In fp32, or the type if wider, and rounded once: the bits, not just near."""
        self.multiply_exactly()
        with jax.enable_x64(dtype == np.float64):
            for layout in LINES:
                n = layout.size
                x = tools.normal(self.seed + n, (n, 150 * n), dtype)
                want = tools.in_rank_order(x)[0].reshape(n, 150, 1).repeat(3, -1)
                for algorithm in self.algorithms:
                    with self.subTest(algorithm=algorithm, layout=layout):
                        got = self.scattered(x, algorithm, layout)
                        for position, part in tools.fetch(got).items():
                            right = tools.bits(want[position])
                            self.assertTrue(tools.bits(part) == right)

    def test_half_types_are_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32; 40000 + 40000 - 80000 overflows float16."""
        for parts, dtype, right in half_sums(RANKS):
            x = np.repeat(np.array(parts).astype(dtype)[:, None], RANKS * 33, 1)
            for algorithm in self.algorithms:
                for got in tools.fetch(self.scattered(x, algorithm)).values():
                    got = got.astype(np.float32)
                    np.testing.assert_array_equal(got, right, str(algorithm))

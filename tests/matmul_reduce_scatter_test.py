"""jax_overlap.matmul_reduce_scatter: the contract of all ops, and what is its own."""

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
from matmul_descriptions import (
    MATMUL_REDUCE_SCATTER,
    MATMUL_REDUCE_SCATTER_LAST,
    MATMUL_REDUCE_SCATTER_SLICED,
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
)

import jax_overlap


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
        form((6, 3), (3, 8)),
        form((8, 3), (3, 6), scatter_dimension=1),
        form((8, 3), (3, 6), scatter_dimension=-1),
        form((8, 3), (3, 4), scatter_dimension=2),
        form((8, 3), (3, 4), scatter_dimension=-3),
        form((3,), (3,), (((0,), (0,)), ((), ()))),
        form((8, 3), (4, 4)),
        form((8, 3), (3, 4), W_TURNED),
        form((3, 8, 3), (4, 3, 4), BATCHED),
        form((8, 3), (3, 4), (((2,), (0,)), ((), ()))),
        form((8, 3), (3, 3), (((1, 1), (0, 1)), ((), ()))),
    )
    empty = (
        form((0, 3), (3, 4)),
        form((8, 3), (3, 0)),
        form((8, 0), (0, 4)),
        form((2, 8, 3), (3, 0), scatter_dimension=1),
        form((2, 3), (3, 0), scatter_dimension=1),
        form((0, 8, 3), (0, 3, 4), BATCHED, scatter_dimension=1),
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
        x, w = self.data([form((8, 5), (5, 8))])[0]
        biases = [tools.exact(self.seed + i, (RANKS, *s), np.float32)
                  for i, s in enumerate(((8,), (2, 8), ()))]  # fmt: skip

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
            plans = [p.op for p in jax_overlap.explain(fn, *operands)]
            self.assertEqual(plans, ["matmul_reduce_scatter", *ops])
            hlo = jax.jit(fn).lower(*operands).compile().as_text()
            for op in ("all_gather_matmul", "all_gather"):
                found = tools.custom_calls(hlo, f"jax_overlap.{op}")
                self.assertEqual(found, ops.count(op), op)


class ScatteredBits(op_contract.Contract):
    op = MATMUL_REDUCE_SCATTER

    def scattered(self, parts, algorithm, layout=None):
        """Sums of numbers: each is the product of itself and 1."""
        x = np.asarray(parts)[..., None]
        w = np.ones((len(x), 1, 3), x.dtype)
        fn = lambda *a: self.op.run(*a, axis_name="x", algorithm=algorithm)  # noqa: E731
        layout = line(len(x)) if layout is None else layout
        return np.asarray(jax.jit(tools.stacked(fn, layout))(x, w))

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_summed_in_rank_order(self, dtype):
        """In fp32, or the type if wider, and rounded once: the bits, not just near."""
        with jax.enable_x64(dtype == np.float64):
            for layout in (line(2), line(3), line(4, order=(2, 0, 3, 1)), line(8)):
                n = layout.size
                x = tools.normal(self.seed + n, (n, 150 * n), dtype)
                want = tools.in_rank_order(x)[0].reshape(n, 150, 1).repeat(3, -1)
                for algorithm in self.algorithms:
                    with self.subTest(algorithm=algorithm, layout=layout):
                        got = self.scattered(x, algorithm, layout)
                        self.assertTrue(tools.bits(got) == tools.bits(want))

    def test_half_types_are_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32; 40000 + 40000 - 80000 overflows float16."""
        for parts, dtype, right in (
            ([256, 1, 1, 1], BF16, 260),
            ([40000, 40000, -40000, -40000], F16, 0),
        ):
            x = np.repeat(np.array(parts).astype(dtype)[:, None], 4 * 33, 1)
            for algorithm in self.algorithms:
                got = self.scattered(x, algorithm).astype(np.float32)
                np.testing.assert_array_equal(got, right, str(algorithm))


if __name__ == "__main__":
    absltest.main()

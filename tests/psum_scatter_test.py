"""jax_overlap.psum_scatter: the contract of all ops, and what is its own."""

import contract_tools as tools
import jax
import numpy as np
import op_contract
import op_contract_batching
import op_contract_parts
import op_contract_programs
import op_contract_transforms
from absl.testing import absltest
from contract_tools import BF16, F16, Layout, line
from op_contract import named
from op_contract_parts import RANKS, sized
from op_descriptions import PSUM_SCATTER, PSUM_SCATTER_FIRST

import jax_overlap


class PsumScatterValues(op_contract.Values):
    op = PSUM_SCATTER


class PsumScatterPrograms(op_contract_programs.Programs):
    op = PSUM_SCATTER


class PsumScatterTransforms(op_contract_transforms.Transforms):
    op = PSUM_SCATTER


class PsumScatterBatching(op_contract_batching.Batching):
    op = PSUM_SCATTER


class PsumScatterFirstTransforms(op_contract_transforms.Transforms):
    op = PSUM_SCATTER_FIRST


class PsumScatterFirstBatching(op_contract_batching.Batching):
    op = PSUM_SCATTER_FIRST


class PsumScatterParts(op_contract_parts.Parts):
    op = PSUM_SCATTER
    transposed = "all_gather"
    adds = True
    forms = tuple(
        (sized(d, RANKS * (1 + tiled)), {"scatter_dimension": d, "tiled": tiled})
        for d in range(-3, 3)
        for tiled in (True, False)
    )
    refused = (
        ((6, 3), {"tiled": True}),
        ((3, 6), {"tiled": True, "scatter_dimension": -1}),
        ((8, 3), {}),
        ((2, 3), {}),
        ((4, 3), {"scatter_dimension": 2}),
        ((4, 3), {"scatter_dimension": -3, "tiled": True}),
        ((), {}),
    )
    empty = (
        ((4, 0), {}),
        ((8, 0, 3), {"tiled": True}),
        ((0, 3), {"tiled": True}),
        ((3, 0), {"tiled": True, "scatter_dimension": 1}),
    )
    alone = (
        ((3, 2), {"tiled": True}),
        ((1, 2), {}),
        ((2, 1), {"scatter_dimension": -1}),
    )

    @staticmethod
    def numpy(x, scatter_dimension=0, tiled=False):
        parts = np.split(x.sum(0, dtype=x.dtype), len(x), scatter_dimension)
        return np.stack(
            [p if tiled else np.squeeze(p, scatter_dimension) for p in parts]
        )


class PsumScatterBits(op_contract.Contract):
    op = PSUM_SCATTER

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_the_bits_of_psum_two_shot(self, dtype):
        """Part r of psum's result, whatever the dimension: the same order of sums."""
        with jax.enable_x64(dtype == np.float64):
            for layout in (
                line(2),
                line(3),
                line(5, order=(7, 2, 0, 4, 6)),
                line(8),
                Layout((2, 4), ("a", "b"), ("b", "a")),
            ):
                team, axes = layout.team, layout.axis_name
                shape = (layout.size, team, team, 901)
                x = tools.normal(self.seed + team, shape, dtype)

                def fn(x, axes=axes):
                    whole = jax_overlap.psum(x, axes, algorithm="two_shot")
                    rank = jax.lax.axis_index(axes)
                    return [
                        (
                            jax_overlap.psum_scatter(x, axes, scatter_dimension=d),
                            jax.lax.dynamic_index_in_dim(whole, rank, d, False),
                        )
                        for d in (0, 1)
                    ]

                got = jax.jit(tools.stacked(fn, layout))(tools.place(x, layout))
                for ours, two_shot in got:
                    self.assertTrue(tools.bits(ours) == tools.bits(two_shot), layout)

    def test_half_types_are_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32; 40000 + 40000 - 80000 overflows float16."""
        for parts, dtype, right in (
            ([256, 1, 1, 1], BF16, 260),
            ([40000, 40000, -40000, -40000], F16, 0),
        ):
            x = np.repeat(np.array(parts).astype(dtype)[:, None], 4 * 33, 1)
            fn = lambda x: jax_overlap.psum_scatter(x, "x", tiled=True)  # noqa: E731
            got = jax.jit(tools.stacked(fn, line(4)))(x)
            np.testing.assert_array_equal(np.asarray(got, np.float32), right)


if __name__ == "__main__":
    absltest.main()

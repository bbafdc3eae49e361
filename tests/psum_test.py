"""jax_overlap.psum: the contract of all ops, and the bits that psum promises."""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import op_contract
import op_contract_batching
import op_contract_programs
import op_contract_transforms
from absl.testing import absltest
from contract_tools import BF16, F16, line
from op_contract import named, node_size
from op_descriptions import PSUM

import jax_overlap

ALGORITHMS = (None, *PSUM.algorithms)


class PsumValues(op_contract.Values):
    op = PSUM


class PsumPrograms(op_contract_programs.Programs):
    op = PSUM


class PsumTransforms(op_contract_transforms.Transforms):
    op = PSUM


class PsumBatching(op_contract_batching.Batching):
    op = PSUM


class PsumBits(op_contract.Contract):
    op = PSUM

    def psums(self, x, layout=None, algorithms=ALGORITHMS, **kw):
        """The psum of x by each algorithm: {algorithm: stacked numpy array}."""
        layout = line(len(x)) if layout is None else layout
        fn = tools.stacked(
            lambda x: [
                jax_overlap.psum(x, layout.axis_name, algorithm=a, **kw)
                for a in algorithms
            ],
            layout,
        )
        results = jax.jit(fn)(tools.place(x, layout))
        return {
            a: np.stack([part for _, part in sorted(tools.fetch(r).items())])
            for a, r in zip(algorithms, results, strict=True)
        }

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_summed_in_rank_order(self, dtype):
        """one_shot and two_shot: the bits of the sum rank after rank, not just near."""
        with jax.enable_x64(dtype == np.float64):
            for n in (2, 3, 5, 8):
                for size in (1, 100, 40_001):
                    x = tools.normal(self.seed + n, (n, size), dtype)
                    sums = self.psums(x, algorithms=("one_shot", "two_shot"))
                    for algorithm, got in sums.items():
                        self.assertTrue(
                            tools.bits(got) == tools.bits(tools.in_rank_order(x)),
                            f"{algorithm}, {n} ranks, {size} elements",
                        )

    def test_rank_order_is_the_order_of_the_mesh_not_of_the_devices(self):
        x = tools.normal(self.seed, (4, 999), np.float32)
        layout = line(4, order=(2, 0, 3, 1))
        got = self.psums(x, layout, ("one_shot", "two_shot"))
        self.assertNotEqual(
            tools.bits(tools.in_rank_order(x)[0]),
            tools.bits(
                tools.in_rank_order(x[[2, 0, 3, 1]])[0]
            ),  # else this shows nothing
        )
        for algorithm, sums in got.items():
            self.assertTrue(
                tools.bits(sums) == tools.bits(tools.in_rank_order(x)), algorithm
            )

    @named(f32=(np.float32,), bf16=(BF16,))
    def test_an_element_has_the_same_bits_in_a_larger_array(self, dtype):
        """Neither slices nor chunks may change the order in which it is summed."""
        x = tools.normal(self.seed, (6, 300_000), dtype)
        for split in ("6", "3", "2", "1"):
            with node_size(split):
                whole = self.psums(x)
                for size in (1, 1000):
                    for algorithm, got in self.psums(x[:, :size]).items():
                        if algorithm is None:
                            continue  # chooses by size, so may choose another
                        self.assertTrue(
                            tools.bits(got) == tools.bits(whole[algorithm][:, :size]),
                            f"{algorithm}, nodes of {split}, {size} elements",
                        )

    def test_nvrar_has_the_same_bits_on_all_ranks_whatever_the_split(self):
        for n, splits in ((8, "1248"), (6, "123"), (5, "1"), (7, "1")):
            x = tools.normal(self.seed, (n, 5000), np.float32)
            for split in splits:
                with node_size(split):
                    got = self.psums(x, algorithms=("nvrar",))["nvrar"]
                self.assertLen({tools.bits(part) for part in got}, 1, (n, split))

    def test_bfloat16_is_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32, 256 where each step rounds to bfloat16."""
        x = np.array([256, 1, 1, 1]).astype(BF16).reshape(4, 1) * np.ones(33, BF16)
        for split in ("4", "2", "1"):
            with node_size(split):
                for algorithm, got in self.psums(x).items():
                    np.testing.assert_array_equal(
                        got.astype(np.float32), 260, f"{algorithm} {split}"
                    )

    def test_bfloat16_is_rounded_to_nearest_even(self):
        """257 and 259 lie midway between two numbers: 256 and 260 are even."""
        for last, right in ((1, 256), (3, 260)):
            x = np.array([256, last]).astype(BF16).reshape(2, 1)
            for algorithm, got in self.psums(x).items():
                np.testing.assert_array_equal(got.astype(np.float32), right, algorithm)

    def test_float16_does_not_overflow_on_the_way(self):
        x = np.array([40000, 40000, -40000, -40000]).astype(F16).reshape(4, 1)
        for split in ("4", "2", "1"):
            with node_size(split):
                for algorithm, got in self.psums(x).items():
                    np.testing.assert_array_equal(got, 0, f"{algorithm} {split}")
        x = np.array([40000, 40000, 40000, -40000]).astype(F16).reshape(4, 1)
        for algorithm, got in self.psums(x).items():
            np.testing.assert_array_equal(got, np.inf, algorithm)  # 80000 > 65504

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_special_values(self, dtype):
        with jax.enable_x64(dtype == np.float64):
            big = float(jnp.finfo(dtype).max)
            inf, nan = np.inf, np.nan
            columns = [  # what the four ranks hold, and the sum
                ((inf, 1, 2, 3), inf),
                ((1, 2, 3, -inf), -inf),
                ((inf, 0, -inf, 0), nan),
                ((inf, inf, 1, inf), inf),
                ((0, nan, 0, 0), nan),
                ((nan, inf, nan, -inf), nan),
                ((big, 0, 0, 0), big),
                ((big, -big, big, -big), 0),
                ((big, big, big, big), inf),
                ((-0.0, -0.0, -0.0, -0.0), 0),
                ((-0.0, 0.0, 1, -1), 0),
            ]
            x = np.array([c for c, _ in columns], np.float64).T.astype(dtype)
            with np.errstate(over="ignore"):
                right = np.array([r for _, r in columns]).astype(dtype)
            right = np.tile(right.astype(np.float64), (4, 40))
            for split in ("4", "2", "1"):
                with node_size(split):
                    few, many = self.psums(x), self.psums(np.tile(x, (1, 40)))
                for algorithm in ALGORITHMS:  # many: also where vector code runs
                    for got in (few[algorithm], many[algorithm]):
                        np.testing.assert_array_equal(
                            got.astype(np.float64),
                            right[:, : got.shape[1]],
                            f"{algorithm} {split}",
                        )

    def test_every_nan_pattern_and_tiny_number_passes(self):
        """No value may be taken for a flag, and none may stop the ranks."""
        every = np.arange(2**16, dtype=np.uint16)
        for dtype in (BF16, F16):
            x = np.zeros((3, 2**16), dtype)
            x[1] = every.view(dtype)
            smallest = float(jnp.finfo(dtype).tiny)
            for algorithm, got in self.psums(x).items():
                # XLA may run its threads with subnormals flushed to zero.
                keep = ~(np.abs(x[1].astype(np.float32)) < smallest)
                np.testing.assert_array_equal(
                    got[:, keep].astype(np.float32),
                    np.broadcast_to(x[1][keep].astype(np.float32), got[:, keep].shape),
                    str(algorithm),
                )
                self.assertTrue((np.abs(got[:, ~keep].astype(float)) < smallest).all())

    @named(i32=(np.int32,), i8=(np.int8,))
    def test_integers_wrap_around_as_those_of_lax(self, dtype):
        top = np.iinfo(dtype).max
        x = np.array([[top, 100, -top], [top, 100, -top], [5, 100, -9]]).astype(dtype)
        right = x.astype(np.int64).sum(0).astype(dtype)
        for algorithm, got in self.psums(np.tile(x, 20)).items():
            np.testing.assert_array_equal(got, np.tile(right, (3, 20)), str(algorithm))

    def test_layouts_of_memory(self):
        """Slices, transposes and ranks of arrays before the op."""
        x = tools.exact(self.seed, (4, 6, 10, 3), np.float32)
        changes = [
            lambda x: x.T,
            lambda x: x[::2],
            lambda x: x[:, ::-1],
            lambda x: x[1:, 3:],
            lambda x: x.swapaxes(0, 1),
            lambda x: x.reshape(-1),
            lambda x: x[0, 0, 0],
        ]
        want = [np.stack([c(x.sum(0))] * 4) for c in changes]

        def fn(x):
            return [jax_overlap.psum(change(x), "x") for change in changes]

        self.check(fn, line(4), (x,), want, calls=len(changes))


if __name__ == "__main__":
    absltest.main()

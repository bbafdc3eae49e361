"""The tests of jax_overlap.psum on every backend: the contract of all ops; its bits."""

import contract_devices as devices
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import op_contract
import op_contract_batching
import op_contract_programs
import op_contract_transforms
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
        """The psum of x by each algorithm, stacked: {algorithm: numpy array}.

        On the ranks of this process: one after the other, as they all have the same.
        """
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
            for n in devices.team_sizes((2, 3, 5, 8)):
                for size in (1, 100, 40_001):
                    x = tools.normal(self.seed + n, (n, size), dtype)
                    sums = self.psums(x, algorithms=("one_shot", "two_shot"))
                    for algorithm, got in sums.items():
                        self.assert_in_rank_order(
                            got, x, f"{algorithm}, {n} ranks, {size} elements"
                        )

    def assert_in_rank_order(self, got, x, what):
        right = tools.bits(tools.in_rank_order(x)[0])
        for part in got:
            self.assertTrue(tools.bits(part) == right, what)

    def test_rank_order_is_the_order_of_the_mesh_not_of_the_devices(self):
        n = devices.ranks(4)
        order = (2, 0, 3, 1) if n == 4 else devices.permuted(n)
        x = tools.normal(self.seed, (n, 999), np.float32)
        got = self.psums(x, line(n, order=order), ("one_shot", "two_shot"))
        if n > 2:  # else this shows nothing
            self.assertNotEqual(
                tools.bits(tools.in_rank_order(x)[0]),
                tools.bits(tools.in_rank_order(x[[*order]])[0]),
            )
        for algorithm, sums in got.items():
            self.assert_in_rank_order(sums, x, algorithm)

    @named(f32=(np.float32,), bf16=(BF16,))
    def test_an_element_has_the_same_bits_in_a_larger_array(self, dtype):
        """Neither slices nor chunks may change the order in which it is summed."""
        n = devices.ranks(6)
        x = tools.normal(self.seed, (n, 300_000), dtype)
        for split in devices.divisors(n):
            with node_size(str(split)):
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
        for n in devices.team_sizes((8, 6, 5, 7)):
            x = tools.normal(self.seed, (n, 5000), np.float32)
            layout = line(n)
            for split in devices.divisors(n):
                with self.subTest(ranks=n, node=split), node_size(str(split)):
                    fn = tools.stacked(
                        lambda x: jax_overlap.psum(x, "x", algorithm="nvrar"), layout
                    )
                    got = jax.jit(fn)(tools.place(x, layout))
                    self.assert_replicas(tools.fetch(got), layout)

    def test_bfloat16_is_summed_in_fp32(self):
        """256 + 1 + 1 + 1: 260 in fp32, 256 where each step rounds to bfloat16."""
        n = devices.ranks(4)
        x = self.held(256, *(1,) * (n - 1), dtype=BF16) * np.ones(33, BF16)
        right = np.float32(255 + n).astype(BF16).astype(np.float32)
        for split in devices.divisors(n):
            with node_size(str(split)):
                for algorithm, got in self.psums(x).items():
                    np.testing.assert_array_equal(
                        got.astype(np.float32), right, f"{algorithm} {split}"
                    )

    def held(self, *values, dtype):
        """What the ranks hold, an element each: these values, then zeros."""
        n = max(len(values), devices.ranks(len(values)))
        return np.array([*values, *(0,) * (n - len(values))]).astype(dtype)[:, None]

    def test_bfloat16_is_rounded_to_nearest_even(self):
        """257 and 259 lie midway between two numbers: 256 and 260 are even."""
        for last, right in ((1, 256), (3, 260)):
            x = self.held(256, last, dtype=BF16)
            for algorithm, got in self.psums(x).items():
                np.testing.assert_array_equal(got.astype(np.float32), right, algorithm)

    def test_float16_does_not_overflow_on_the_way(self):
        n = devices.ranks(4)
        up, down = (40000,) * (n // 2), (-40000,) * (n // 2)
        x = self.held(*up, *down, *(0,) * (n % 2), dtype=F16)
        for split in devices.divisors(n):
            with node_size(str(split)):
                for algorithm, got in self.psums(x).items():
                    np.testing.assert_array_equal(got, 0, f"{algorithm} {split}")
        x = self.held(*(40000, 40000, 40000, -40000)[:n], dtype=F16)
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
            n = devices.ranks(4)
            if n < 4:  # the same with what there is on fewer ranks
                columns = [
                    ((inf, 1, 2), inf),
                    ((-inf, 1, 2), -inf),
                    ((inf, -inf, 0), nan),
                    ((1, nan, 0), nan),
                    ((big, 0, 0), big),
                    ((big, -big, 0), 0),
                    ((big, big, 0), inf),
                    ((-0.0, -0.0, -0.0), 0),
                ]
            rows = np.zeros((n, len(columns)))
            for i, (column, _) in enumerate(columns):
                rows[: len(column), i] = column[:n]
            x = rows.astype(dtype)
            with np.errstate(over="ignore"):
                right = np.array([r for _, r in columns]).astype(dtype)
            right = np.tile(right.astype(np.float64), (1, 40))
            for split in devices.divisors(n):
                with node_size(str(split)):
                    few, many = self.psums(x), self.psums(np.tile(x, (1, 40)))
                for algorithm in ALGORITHMS:  # many: also where vector code runs
                    for got in (few[algorithm], many[algorithm]):
                        np.testing.assert_array_equal(
                            got.astype(np.float64),
                            np.broadcast_to(right[:, : got.shape[1]], got.shape),
                            f"{algorithm} {split}",
                        )

    def test_every_nan_pattern_and_tiny_number_passes(self):
        """No value may be taken for a flag, and none may stop the ranks."""
        every = np.arange(2**16, dtype=np.uint16)
        for dtype in (BF16, F16):
            x = np.zeros((devices.ranks(3), 2**16), dtype)
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
        n = devices.ranks(3)
        held = [[top, 100, -top], [top, 100, -top], *[[5, 100, -9]] * (n - 2)]
        x = np.array(held[:n]).astype(dtype)
        right = np.tile(x.astype(np.int64).sum(0).astype(dtype), (1, 20))
        for algorithm, got in self.psums(np.tile(x, 20)).items():
            want = np.broadcast_to(right, got.shape)
            np.testing.assert_array_equal(got, want, str(algorithm))

    def test_layouts_of_memory(self):
        """Slices, transposes and ranks of arrays before the op."""
        n = devices.ranks(4)
        x = tools.exact(self.seed, (n, 6, 10, 3), np.float32)
        changes = [
            lambda x: x.T,
            lambda x: x[::2],
            lambda x: x[:, ::-1],
            lambda x: x[1:, 3:],
            lambda x: x.swapaxes(0, 1),
            lambda x: x.reshape(-1),
            lambda x: x[0, 0, 0],
        ]
        want = [np.stack([c(x.sum(0))] * n) for c in changes]

        def fn(x):
            return [jax_overlap.psum(change(x), "x") for change in changes]

        self.check(fn, line(n), (x,), want, calls=len(changes))

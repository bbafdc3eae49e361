"""The contract that every op passes, on every backend.

An op describes itself once (`Op`); `Values`, `Programs` and `Transforms` are the
tests. A test file makes classes of them:

    class PsumValues(op_contract.Values):
        op = PSUM

The oracle is numpy in a wider type, over the stacked arrays of contract_tools.py.
Most data are small integers, so results are compared exactly whatever the order of
summation; `lax` is asked only what structure and types should be.
"""

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Callable
from unittest import mock

import contract_devices as devices
import contract_processes as processes
import contract_tools as tools
import cpu_devices
import jax
import numpy as np
from absl.testing import parameterized
from contract_tools import BF16, F16, LAYOUTS, Layout, line

import jax_overlap

TEAM_SIZES = devices.team_sizes((1, 2, 3, 4, 5, 6, 8))
# On GPUs XLA (jax 0.11.2) crashes on operands without elements under shard_map, with or
# without an op.
TAKES_NO_ELEMENTS = cpu_devices.ON_CPU
SIZES = (
    *((0,) if TAKES_NO_ELEMENTS else ()),
    1,
    3,
    7,
    8,
    255,
    256,
    257,
    4095,
    4096,
    4097,
)
# A row of bytes that ends off a 16-byte line, in every way that two-byte types can.
RAGGED = (1, 7, 255, 8192 - 1, *(8192 + k for k in range(1, 8)))
NODE_SPLITS = devices.node_splits()


@dataclasses.dataclass(frozen=True)
class Op:
    """One op, as the contract needs to know it. Every op is linear in each operand.

    In the numpy functions operands and results are stacked over ONE team, in rank
    order, and of a wide type.
    """

    name: str
    call: Callable  # (*operands, axis_name, **options), ours
    lax: Callable  # (*operands, axis_name), what it stands in for
    reference: Callable  # (*operands) -> results
    vjp: Callable  # (i, operands, cts) -> cotangents of operand i, all ranks' cts in
    inside_vjp: Callable  # (i, operands, cts, check_vma), as one rank's own jax.vjp
    shapes: Callable  # (team, size) -> each operand's shape for about `size` elements
    bound: Callable  # (operands, dtype) -> how far a result may be off
    algorithms: tuple[str, ...]
    dtypes: tuple = (np.float32, BF16, F16, np.float64, np.int32, np.int8)
    invariant: bool = True  # the result is the same on all ranks, and typed so
    mixes_with_vmap: bool = True  # lax takes an axis of vmap and one of devices at once
    switches: bool = False  # sizes, of operands and nodes, decide on the algorithm
    many: int = 2**20 + 3  # elements that travel in many chunks
    called: str = ""  # the op whose handler it calls, if that is another one

    @property
    def target(self) -> str:
        return f"jax_overlap.{self.called or self.name}"

    def run(self, *operands, axis_name, algorithm):
        """`call`, by an algorithm if the op has several."""
        options = {"algorithm": algorithm} if self.algorithms else {}
        return self.call(*operands, axis_name, **options)

    def operands(self, layout: Layout, size: int, dtype, seed: int, make=tools.exact):
        shapes = self.shapes(layout.team, size)
        return tuple(
            make(seed + 1000 * i, (layout.size, *s), dtype)
            for i, s in enumerate(shapes)
        )


@dataclasses.dataclass(frozen=True)
class Near:
    """A wanted result that may be off by `off` in each element."""

    value: np.ndarray
    off: np.ndarray
    dtype: np.dtype


def over_teams(layout: Layout, function, *stacked):
    """`function` of each team's part of wide stacked arrays, put together again."""
    out = None
    for team in layout.teams:
        result = np.asarray(function(*(tools.wide(a)[team] for a in stacked)))
        if out is None:
            out = np.zeros((layout.size, *result.shape[1:]), result.dtype)
        out[team] = result
    return out


def lowered(op, implementation, word=""):
    """How many calls were lowered so, for a reason that has the word in it."""
    return sum(
        row["count"]
        for row in jax_overlap.info()["lowered"]
        if (row["op"], row["implementation"]) == (op, implementation)
        and word in row["reason"]
    )


def named(**cases):
    """Cases of parameterized tests whose names can be told to `pytest -k`."""
    return parameterized.named_parameters(
        *((f"_{name}", *case) for name, case in cases.items())
    )


class Contract(parameterized.TestCase):
    """What the groups of tests share."""

    op: Op
    skipping = False

    def setUp(self):
        super().setUp()
        self.seed = zlib.crc32(self.id().encode()) % 10**6
        self._comparisons = 0
        # What one test has broken does not stop those after it.
        self.addCleanup(jax_overlap.clear_errors)
        self.assertEqual(jax_overlap.last_errors(), [])

    def tearDown(self):
        self.assertEqual(jax_overlap.last_errors(), [])
        super().tearDown()

    @property
    def algorithms(self):
        return (None, *self.op.algorithms)

    def want(self, layout: Layout, operands, dtype):
        return over_teams(layout, self.op.reference, *operands).astype(dtype)

    def assert_stacked(self, got, want, replicas_of: Layout | None = None):
        """Each rank's part of `got` is as in `want`, a tree of arrays and `Near`s."""
        got, want = jax.tree.leaves(got), jax.tree.leaves(want)
        self.assertEqual(len(got), len(want))
        for leaf, right in zip(got, want, strict=True):
            near = isinstance(right, Near)
            value, parts = right.value if near else right, tools.fetch(leaf)
            for position, part in parts.items():
                expected = value[position]
                self.assertEqual(part.shape, expected.shape)
                self.assertEqual(part.dtype, right.dtype)
                if near:
                    off = np.abs(tools.wide(part) - expected)
                    bad = ~(off <= right.off[position])
                    self.assertFalse(bad.any(), f"{off[bad]} off at {position}")
                else:
                    np.testing.assert_array_equal(part, expected, f"at {position}")
            if replicas_of is not None:
                self.assert_replicas(parts, replicas_of)

    def assert_replicas(self, parts, layout: Layout):
        """The ranks of each team hold the same bits, also those of other processes.

        parts: of this process, by position. In every process it has to be called for
        the same, as they wait for one another.
        """
        digests = {}
        for i, team in enumerate(layout.teams):
            seen = {tools.bits(parts[p]) for p in team if p in parts}
            self.assertLessEqual(len(seen), 1, "ranks hold different bits")
            for text in seen:
                digests[str(i)] = hashlib.sha256(text).hexdigest()
        self._comparisons += 1
        key = f"{self.id()}/{self._comparisons}"
        self.assertEqual(
            processes.differing(key, digests), [], "teams hold different bits"
        )

    def assert_global(self, got, want):
        """The parts of a global array that this process holds are as in `want`."""
        self.assertEqual(got.shape, want.shape)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])

    def need_lax(self):
        """Skips where XLA's own collectives do not run."""
        if not processes.lax_runs():
            self.skipping = True
            self.skipTest("needs a GPU for each rank, or those of launch.py: for NCCL")

    def falls_back(self, fn, *operands) -> bool:
        """Whether an op in `fn` is left to lax, as those without GPU code are there.

        Without a plan it was left to lax when `fn` was traced.
        """
        plans = jax_overlap.explain(fn, *operands)
        return not plans or any(plan.implementation == "lax" for plan in plans)

    def need_lax_for(self, fn, *operands):
        """Skips where XLA's own collectives do not run and `fn` falls back on them."""
        if not processes.lax_runs() and self.falls_back(fn, *operands):
            self.need_lax()

    def multiply_exactly(self):
        """For the rest of the test: on GPUs float32 is cut to TF32 otherwise.

        Integers below 2^11 do not need it.
        """
        self.enterContext(jax.default_matmul_precision("highest"))

    def check(
        self,
        fn,
        layout,
        operands,
        want,
        *,
        calls=None,
        check_vma=True,
        foreign=False,
        replicas=False,
        repeats=3,
    ):
        """Compiles `fn` of one rank's arrays, and checks program, results, inputs.

        calls: how many custom calls the program has (None: some).
        foreign: whether XLA's own collectives may be in it.
        """
        placed = tools.place(operands, layout)
        program = jax.jit(tools.stacked(fn, layout, check_vma=check_vma))
        compiled = program.lower(*placed).compile()
        hlo = compiled.as_text()
        found = tools.custom_calls(hlo, self.op.target)
        if calls is None:
            self.assertGreater(found, 0, "no custom call in the program")
        else:
            self.assertEqual(found, calls, "custom calls in the program")
        if not foreign:
            self.assertEqual(tools.collectives(hlo), [])
        first = None
        for _ in range(repeats):
            got = jax.block_until_ready(compiled(*placed))
            same = layout if replicas and self.op.invariant else None
            self.assert_stacked(got, want, same)
            seen = jax.tree.map(
                lambda a: sorted((p, tools.bits(v)) for p, v in tools.fetch(a).items()),
                got,
            )
            first = seen if first is None else first
            self.assertTrue(seen == first, "other bits in a second run")
        for before, after in zip(
            jax.tree.leaves(operands), jax.tree.leaves(placed), strict=True
        ):
            for position, part in tools.fetch(after).items():
                self.assertEqual(tools.bits(part), tools.bits(before[position]))


class Values(Contract):
    """The right numbers: for every size, type, algorithm, team and mesh."""

    def check_sizes(self, layout, sizes, dtype, algorithms, **kw):
        """All sizes and algorithms in one program, each an op with data of its own."""
        op = self.op
        asked = [(a, size) for a in algorithms for size in sizes]
        cases = [
            op.operands(layout, size, dtype, self.seed + i)
            for i, (_, size) in enumerate(asked)
        ]

        def fn(*cases):
            return [
                op.run(*case, axis_name=layout.axis_name, algorithm=algorithm)
                for case, (algorithm, _) in zip(cases, asked, strict=True)
            ]

        want = [self.want(layout, case, dtype) for case in cases]
        live = sum(w[0].size > 0 for w in want) if layout.team > 1 else 0
        kw = {"calls": live, "replicas": True, **kw}
        self.check(fn, layout, tuple(cases), want, **kw)

    @named(**{f"{n}_ranks": (n,) for n in TEAM_SIZES})
    def test_sizes(self, n):
        for algorithm in self.algorithms:
            with self.subTest(algorithm=algorithm):
                self.check_sizes(line(n), SIZES, np.float32, [algorithm])

    @named(
        f32=(np.float32,),
        bf16=(BF16,),
        f16=(F16,),
        f64=(np.float64,),
        i32=(np.int32,),
        i8=(np.int8,),
    )
    def test_types(self, dtype):
        with jax.enable_x64(dtype == np.float64):
            for n in devices.team_sizes((2, 6)):
                if dtype in self.op.dtypes:
                    self.check_sizes(line(n), RAGGED, dtype, self.algorithms)
                else:
                    self.check_left_to_lax(line(n), (7, 8191), dtype)

    def check_left_to_lax(self, layout, sizes, dtype):
        """What is no type of the op goes to lax, is counted, and is right there."""
        self.need_lax()
        before = lowered(self.op.name, "lax", np.dtype(dtype).name)
        self.check_sizes(layout, sizes, dtype, [None], calls=0, foreign=True)
        after = lowered(self.op.name, "lax", np.dtype(dtype).name)
        self.assertEqual(after, before + len(sizes))

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_random_data_stay_within_the_derived_bound(self, dtype):
        op, layout = self.op, line(devices.ranks(8))
        self.multiply_exactly()
        with jax.enable_x64(dtype == np.float64):
            cases = [
                op.operands(layout, s, dtype, self.seed + s, tools.normal)
                for s in (257, 4097, 20_000)
            ]
            want = [
                Near(
                    over_teams(layout, op.reference, *c),
                    over_teams(layout, lambda *a: op.bound(a, dtype), *c),
                    np.dtype(dtype),
                )
                for c in cases
            ]
            for algorithm in self.algorithms:

                def fn(*cases, algorithm=algorithm):
                    return [
                        op.run(*c, axis_name="x", algorithm=algorithm) for c in cases
                    ]

                for split in (str(layout.team), "1" if layout.team % 2 else "2"):
                    with (
                        self.subTest(algorithm=algorithm, node=split),
                        node_size(split),
                    ):
                        self.check(
                            fn, layout, tuple(cases), want, calls=3, replicas=True
                        )

    @named(**{str(n): (n,) for n in devices.team_sizes((4, 6))})
    def test_around_each_switch_of_algorithm(self, n):
        """Sizes at which the choice changes, as `explain` tells it, and one off."""
        self.enterContext(node_size(str(n)))  # between nodes there is one algorithm
        for dtype in (np.float32, BF16):
            chosen = [self.chosen(line(n), 2**k, dtype) for k in range(20)]
            if not self.op.switches:
                self.assertLen(set(chosen), 1)
                continue
            sizes = []
            for k in range(19):
                low, high = 2**k, 2 ** (k + 1)
                if chosen[k] == chosen[k + 1]:
                    continue
                while high - low > 1:
                    middle = (low + high) // 2
                    same = self.chosen(line(n), middle, dtype) == chosen[k]
                    low, high = (middle, high) if same else (low, middle)
                sizes += [low - 1, low, high, high + 1]
            if n == 2 and {*chosen} == {"one_shot"}:
                # On GPUs; here flags follow upon cells.
                last = (512 << 10) // np.dtype(dtype).itemsize
                sizes = [last - 1, last, last + 1]
            self.assertTrue(sizes, "no switch was found")
            self.check_sizes(line(n), sizes, dtype, [None])

    def chosen(self, layout, size, dtype):
        operands = [
            jax.ShapeDtypeStruct((layout.size, *shape), dtype)
            for shape in self.op.shapes(layout.team, size)
        ]
        fn = tools.stacked(lambda *a: self.op.call(*a, layout.axis_name), layout)
        (plan,) = jax_overlap.explain(fn, *operands)
        self.assertEqual(plan.implementation, "native", plan)
        return plan.algorithm

    @named(**{f"{n}_ranks_by_{k}": (n, k) for n, k in NODE_SPLITS})
    def test_node_splits(self, n, size):
        with node_size(str(size)):
            for dtype in (np.float32, BF16):
                self.check_sizes(line(n), (1, 7, 257, 8193), dtype, self.algorithms)

    @named(**{str(layout): (layout,) for layout in LAYOUTS})
    def test_layouts(self, layout):
        for check_vma in (True, False):
            self.check_sizes(
                layout, (5, 600), np.float32, self.algorithms, check_vma=check_vma
            )

    @named(f32=(np.float32,), bf16=(BF16,))
    def test_many_chunks(self, dtype):
        layout = line(devices.ranks(4))
        self.check_sizes(layout, (self.op.many,), dtype, self.algorithms)
        splits = ("1",) if layout.team % 2 else ("2", "1")
        for split in splits if self.op.switches else ():
            with node_size(split):
                self.check_sizes(layout, (self.op.many,), dtype, [None])

    def test_same_bits_in_100_runs(self):
        op, layout = self.op, line(devices.ranks(8))
        operands = tools.place(
            op.operands(layout, 3001, BF16, self.seed, tools.normal), layout
        )
        for algorithm in self.algorithms:
            fn = jax.jit(
                tools.stacked(
                    lambda *a, al=algorithm: op.run(*a, axis_name="x", algorithm=al),
                    layout,
                )
            )
            seen = set()
            for _ in range(100):
                got = jax.block_until_ready(fn(*operands))
                seen.add(
                    tuple(
                        sorted((p, tools.bits(v)) for p, v in tools.fetch(got).items())
                    )
                )
            self.assertLen(seen, 1, algorithm)
            if op.invariant:
                self.assert_replicas(tools.fetch(got), layout)


def node_size(text: str):
    return mock.patch.dict(os.environ, JAX_OVERLAP_NODE_SIZE=text)

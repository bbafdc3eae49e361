"""What a fused matmul on GPUs is: fused, by psum, or left to lax. None is needed."""

import contextlib
import functools
import json
import os
import pathlib
import re
from unittest import mock

import contract_tools as tools
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import BF16, F16, line

import jax_overlap
from jax_overlap import _compat, _heaps
from jax_overlap.ops import _gpu_cost

RANKS = 8
LIMIT = 2 << 20
MATMULS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ASKED = {"JAX_OVERLAP_GPU_MATMULS": "1"}
AUTO = {"JAX_OVERLAP_GPU_MATMULS": "auto", "JAX_OVERLAP_BY_PSUM_MAX_BYTES": "0"}
DEFAULTS = dict.fromkeys(  # whatever is set for other tests
    (
        "JAX_OVERLAP_GPU_MATMULS",
        "JAX_OVERLAP_PSUM_MAX_BYTES",
        "JAX_OVERLAP_BY_PSUM_MAX_BYTES",
    ),
    "",
)


def plan(
    op,
    x,
    w,
    *,
    dtype=np.float32,
    w_dtype=None,
    reach=None,
    platform="cuda",
    env=None,
    **options,
):
    """That of a call on ranks whose operands have these shapes."""
    operands = [
        jax.ShapeDtypeStruct((RANKS, *shape), of)
        for shape, of in ((x, dtype), (w, w_dtype or dtype))
    ]
    call = getattr(jax_overlap, op)
    fn = tools.stacked(
        lambda *a: jax.tree.leaves(call(*a, "x", **options))[0], line(RANKS)
    )
    with on_gpus(reach, env):
        (one,) = jax_overlap.explain(fn, *operands, platform=platform)
    return one


@contextlib.contextmanager
def on_gpus(reach=None, env=None):
    """In it calls are planned as where there are GPUs."""
    with (
        mock.patch.dict(os.environ, DEFAULTS | (env or {})),
        mock.patch.object(_heaps, "why_not", return_value=""),
        mock.patch.object(_heaps, "reach", return_value=reach),
    ):
        yield


def chosen(*args, **kw):
    one = plan(*args, **kw)
    return one.algorithm or one.implementation


class Sizes(parameterized.TestCase):
    """By the bytes of what is added: of all rows, also where they are cut."""

    @parameterized.product(op=MATMULS[:2], dtype=(np.float32, BF16, F16))
    def test_of_what_is_summed(self, op, dtype):
        rows = LIMIT // 1024 // np.dtype(dtype).itemsize
        for more, want in ((0, "by_psum"), (RANKS, "sliced")):
            shapes = ((rows + more, 16), (16, 1024))
            got = chosen(op, *shapes, dtype=dtype, env=ASKED)
            self.assertEqual(got, want, (more, rows))

    def test_a_wide_result_counts_as_it_is(self):
        shapes = ((1024, 16), (16, 1024))
        wide = {"preferred_element_type": np.float32}
        for options, want in (({}, "by_psum"), (wide, "sliced")):
            got = chosen(MATMULS[0], *shapes, dtype=BF16, env=ASKED, **options)
            self.assertEqual(got, want)

    @parameterized.parameters(
        (np.float32, 128, 512, 0),
        (BF16, 256, 512, 0),
        (BF16, 256, 511, 0),  # a row is a whole number of integers
        (np.float32, 128, 512, 1),
        (np.float64, 64, 512, 0),
    )
    def test_of_what_is_gathered(self, dtype, rows, row, dimension):
        with jax.enable_x64(dtype == np.float64):
            w = (row * (RANKS if dimension else 1), 7)
            for more, want in ((0, "by_psum"), (1, "sliced")):
                options = {"gather_dimension": dimension, "dtype": dtype, "env": ASKED}
                got = chosen("all_gather_matmul", (rows + more, row), w, **options)
                self.assertEqual(got, want, more)

    def test_the_limit_is_a_setting(self):
        shapes = ((16, 16), (16, 16))
        name = "JAX_OVERLAP_BY_PSUM_MAX_BYTES"
        for limit, want in (("1024", "by_psum"), ("1023", "sliced"), ("0", "sliced")):
            for op in MATMULS[:2]:
                got = plan(op, *shapes, env=ASKED | {name: limit})
                self.assertEqual(got.algorithm, want)
        self.assertEqual(
            plan(MATMULS[0], *shapes, env={name: "1024"}).reason,
            f"1024 bytes are at most 1024 ({name}); psum by one_shot, as 1024 bytes "
            "are at most 74898",
        )
        with self.assertRaisesRegex(ValueError, f"{name} is '-1', .* 0 or a positive"):
            plan(MATMULS[0], *shapes, env={name: "-1"})

    def test_what_psum_leaves_to_nccl_is_fused(self):
        """Unless it has to be native, or by_psum is asked for."""
        env = ASKED | {"JAX_OVERLAP_PSUM_MAX_BYTES": "1000"}
        shapes = ((16, 16), (16, 16))
        self.assertEqual(chosen(MATMULS[0], *shapes, env=env), "sliced")
        for options in ({"implementation": "native"}, {"algorithm": "by_psum"}):
            got = chosen(MATMULS[0], *shapes, env=env, **options)
            self.assertEqual(got, "by_psum")


class Askers(parameterized.TestCase):
    SMALL, LARGE = ((16, 16), (16, 16)), ((4096, 16), (16, 4096))

    def test_a_small_sum_is_ours_without_being_asked_for(self):
        """As the psum would be. What is large, or new, has to be asked for."""
        self.assertEqual(chosen("matmul_all_reduce", *self.SMALL), "by_psum")
        for op, shapes in (
            ("matmul_all_reduce", self.LARGE),
            ("matmul_reduce_scatter", self.SMALL),
            ("all_gather_matmul", self.SMALL),
        ):
            got = plan(op, *shapes)
            self.assertEqual(got.implementation, "lax")
            self.assertIn("have to be asked for", got.reason)

    @parameterized.parameters(*MATMULS)
    def test_native_is_asked_for(self, op):
        self.assertEqual(chosen(op, *self.SMALL, implementation="native"), "by_psum")

    @parameterized.parameters(*MATMULS)
    def test_what_is_forced_is_asked_for(self, op):
        self.assertEqual(chosen(op, *self.SMALL, algorithm="sliced"), "sliced")

    @parameterized.parameters(
        ("all_gather_matmul", (0, 1), {"save_gathered": False}),
        ("matmul_reduce_scatter", (1,), {}),
    )
    def test_what_a_gradient_needs_besides_is_not_asked_for(self, op, of, options):
        """A gather alone is not native on GPUs: "native" is what the call is."""
        call = getattr(jax_overlap, op)

        def total(x, w):
            return call(x, w, "x", implementation="native", **options).sum()

        operands = [jax.ShapeDtypeStruct((RANKS, 16, 16), np.float32)] * 2
        fn = tools.stacked(jax.grad(total, argnums=of), line(RANKS))
        with on_gpus():
            jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))
            plans = jax_overlap.explain(fn, *operands, platform="cuda")
        plans = {p.op: p.implementation for p in plans}
        self.assertEqual(plans.pop("all_gather"), "lax")
        self.assertNotIn("lax", plans.values())

    @parameterized.product(op=MATMULS, shapes=(SMALL, LARGE))
    def test_forced(self, op, shapes):
        got = plan(op, *shapes, algorithm="by_psum")
        self.assertEqual((got.implementation, got.algorithm), ("native", "by_psum"))
        self.assertStartsWith(got.reason, "algorithm='by_psum'; psum by")
        fused = chosen(op, *shapes, algorithm="sliced", env=ASKED)
        self.assertEqual(fused, "sliced")

    @parameterized.parameters(*MATMULS)
    def test_reference_and_other_types(self, op):
        reference = plan(op, *self.SMALL, implementation="reference")
        self.assertEqual(reference.implementation, "lax")
        ints = plan(op, *self.SMALL, dtype=np.int32, algorithm="by_psum")
        self.assertEqual(ints.implementation, "lax")
        self.assertIn("int32", ints.reason)

    @parameterized.parameters(*MATMULS)
    def test_on_cpu_only_if_forced(self, op):
        cpu = {"platform": "cpu", "env": ASKED}
        self.assertEqual(chosen(op, *self.SMALL, **cpu), "in_place")
        got = chosen(op, *self.LARGE, algorithm="by_psum", **cpu)
        self.assertEqual(got, "by_psum")


class Teams(parameterized.TestCase):
    SMALL = Askers.SMALL

    @parameterized.parameters(*MATMULS)
    def test_stores_need_not_reach_all(self, op):
        """As psum crosses nodes, which the fused forms do not."""
        nodes = [set(range(4))] * 4 + [set(range(4, 8))] * 4
        got = plan(op, *self.SMALL, reach=nodes, env=ASKED)
        self.assertEqual((got.algorithm, got.nodes), ("by_psum", 2))
        self.assertIn("psum by nvrar", got.reason)
        got = plan(op, *self.SMALL, reach=nodes, algorithm="sliced", env=ASKED)
        self.assertEqual(got.implementation, "lax")

    @parameterized.parameters(*MATMULS[1:])
    def test_groups_are_fused(self, op):
        options = {"axis_index_groups": [[0, 1, 2, 3], [4, 5, 6, 7]], "env": ASKED}
        self.assertEqual(chosen(op, *self.SMALL, **options), "sliced")
        got = plan(op, *self.SMALL, algorithm="by_psum", **options)
        self.assertEqual(got.algorithm, "sliced")
        self.assertStartsWith(got.reason, "by_psum takes no axis_index_groups; ")

    def test_what_is_fused_only_if_small(self):
        """Half types gathered along what is contracted, and many results."""
        inner = {"dtype": BF16, "gather_dimension": 1, "env": ASKED}
        got = chosen("all_gather_matmul", (16, 16), (16 * RANKS, 5), **inner)
        self.assertEqual(got, "by_psum")

        def fn(x, w):
            call = jax_overlap.all_gather_matmul
            return sum(call(x, (w,) * 9, "x", algorithm="by_psum"))

        shapes = [jnp.ones((RANKS, 4, 4))] * 2
        (many,) = jax_overlap.explain(tools.stacked(fn, line(RANKS)), *shapes)
        self.assertEqual(many.algorithm, "by_psum")


class Duals(parameterized.TestCase):
    @parameterized.parameters("by_psum", None)
    def test_what_the_gradient_does(self, algorithm):
        """The dual op by the same algorithm; the sum of a cotangent by any psum."""
        kw = {"algorithm": algorithm}
        for op, dual in zip(MATMULS, ("psum", *MATMULS[:0:-1]), strict=True):
            call = getattr(jax_overlap, op)

            def fn(x, w, call=call):
                loss = lambda *a: call(*a, "x", **kw).sum()  # noqa: E731
                return jax.grad(loss, (0, 1))(x, w)

            operands = [jnp.ones((RANKS, 16, 16))] * 2
            stacked = tools.stacked(fn, line(RANKS), check_vma=False)
            one, two = jax_overlap.explain(stacked, *operands)
            self.assertEqual((one.op, two.op), (op, dual))
            self.assertEqual(one.algorithm, algorithm or "in_place")
            if dual != "psum":
                self.assertEqual(two.algorithm, algorithm or "in_place")


class Predictions(parameterized.TestCase):
    def shapes(self, op, m, k, n, ranks=RANKS):
        """Of a rank, of the whole problem."""
        if op == "all_gather_matmul":
            return (m // ranks, k), (k, n // ranks)
        return (m, k // ranks), (k // ranks, n)

    def predicted(self, *args, **kw):
        """Microseconds, fused and apart, as `explain` shows them."""
        words = plan(*args, **kw).reason
        found = re.search(r"predicted (\d+) us, with NCCL (\d+)", words)
        self.assertIsNotNone(found, words)
        return tuple(map(int, found.groups()))

    @parameterized.parameters(
        ("matmul_reduce_scatter", (8192, 8192, 8192), "sliced"),
        ("matmul_reduce_scatter", (64, 8192, 8192), "sliced"),
        ("all_gather_matmul", (8192, 8192, 8192), "sliced"),
        ("all_gather_matmul", (64, 8192, 8192), "lax"),
        ("matmul_all_reduce", (8192, 28672, 8192), "sliced"),
        ("matmul_all_reduce", (512, 8192, 8192), "lax"),
    )
    def test_auto(self, op, problem, want):
        shapes = self.shapes(op, *problem)
        fused, apart = self.predicted(op, *shapes, dtype=BF16, env=AUTO)
        self.assertEqual(fused <= apart, want == "sliced")
        self.assertEqual(chosen(op, *shapes, dtype=BF16, env=AUTO), want)
        # What is asked for is not left to lax.
        for env, options in (
            (AUTO | ASKED, {}),
            (AUTO, {"algorithm": "sliced"}),
            (AUTO, {"implementation": "native"}),
        ):
            got = chosen(op, *shapes, dtype=BF16, env=env, **options)
            self.assertEqual(got, "sliced")

    @parameterized.parameters(*MATMULS)
    def test_launches_are_as_measured(self, op):
        """What is beside the product, of 8 ranks without a link: half to twice it."""
        path = pathlib.Path(__file__).parents[1] / "benchmarks"
        path /= "matmul_launches_gpu_h200.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        rows = [r for r in rows if r["op"] == op and r["ranks"] == RANKS]
        self.assertLen(rows, 7)
        with mock.patch.object(_gpu_cost, "_LINK_BYTES", 1e18):
            for r in rows:
                m, k, n = r["m"], r["k"], r["n"]
                if op != "matmul_reduce_scatter" and m > 512:
                    continue  # the copies within the GPU take longer than the rest
                shapes = self.shapes(op, m, k, n)
                fused, apart = self.predicted(op, *shapes, dtype=BF16, env=AUTO)
                product = apart - _gpu_cost._NCCL_START_US
                beside = r["all_launches_us"] - r["product_us"]
                self.assertBetween(fused - product, beside / 2, 2.1 * beside, r)

    def test_what_counts(self):
        """Types, and whether float32 is multiplied as TF32."""
        op, (x, w) = "matmul_reduce_scatter", ((8192, 1024), (1024, 8192))
        half, _ = self.predicted(op, x, w, dtype=BF16, env=AUTO)
        tf32, _ = self.predicted(op, x, w, env=AUTO)
        full, _ = self.predicted(op, x, w, env=AUTO, precision="highest")
        self.assertLess(1.5 * half, tf32)
        self.assertLess(1.5 * tf32, full)

    def test_legal_values(self):
        name = "JAX_OVERLAP_GPU_MATMULS"
        with self.assertRaisesRegex(ValueError, f"{name} is 'yes', .* 0, 1 or auto"):
            plan(MATMULS[1], *Askers.LARGE, env={name: "yes"})
        # Settings for GPUs are not read elsewhere, nor where they do not count.
        env = {name: "yes", "JAX_OVERLAP_BY_PSUM_MAX_BYTES": "-1"}
        for algorithm in (None, "by_psum"):
            options = {"platform": "cpu", "env": env, "algorithm": algorithm}
            got = plan(MATMULS[1], *Askers.SMALL, **options)
            self.assertEqual(got.algorithm, algorithm or "in_place")

    def test_float8_is_faster_than_half_types(self):
        op, (x, w) = "matmul_reduce_scatter", ((8192, 8192), (8192, 8192))
        half, _ = self.predicted(op, x, w, dtype=BF16, env=AUTO)
        options = {"dtype": E4M3, "preferred_element_type": BF16}
        float8, _ = self.predicted(op, x, w, env=AUTO, **options)
        self.assertLess(1.3 * float8, half)


class Float8(parameterized.TestCase):
    """Native on GPUs, where cuBLASLt has the product."""

    SHAPES = ((1024, 64), (64, 1024))

    def plan(self, op, *shapes, dtype=E4M3, result=BF16, capability="9.0", **options):
        with mock.patch.object(_compat, "capability", return_value=capability):
            return plan(
                op,
                *(shapes or self.SHAPES),
                dtype=dtype,
                preferred_element_type=result,
                env=ASKED,
                **options,
            )

    @parameterized.product(op=MATMULS, result=(np.float32, BF16, F16))
    def test_what_is_native(self, op, result):
        options = {"result": result, "algorithm": "sliced"}
        for pair in ({}, {"w_dtype": E5M2}, {"dtype": E5M2, "w_dtype": E4M3}):
            got = self.plan(op, **pair, **options)
            self.assertEqual(got.algorithm, "sliced", got.reason)
        self.assertEqual(self.plan(op, capability="8.9", **options).algorithm, "sliced")
        self.assertEqual(self.plan(op, capability="", **options).algorithm, "sliced")

    @parameterized.product(op=MATMULS)
    def test_what_is_left_to_lax_and_why(self, op):
        for options, why in (
            ({"dtype": E5M2}, "no matmul of float8_e5m2 by float8_e5m2"),
            ({"result": None}, "result of float8_e4m3fn .* preferred_element_type"),
            ({"result": np.float64}, "with a result of float64"),
            ({"dtype": ml_dtypes.float8_e3m4}, "a matmul of float8_e3m4 with"),
            ({"w_dtype": ml_dtypes.float8_e4m3}, "of float8_e4m3, float8_e4m3fn with"),
            ({"capability": "8.0"}, "capability 8.0 multiply no float8 .8.9 and later"),
            ({"platform": "cpu"}, "matmuls of float8 are native on GPUs only"),
        ):
            with jax.enable_x64(True):
                got = self.plan(op, **options)
            self.assertEqual(got.implementation, "lax")
            self.assertRegex(got.reason, why)
        for shapes in (((1024, 24), (24, 1024)), ((1024, 64), (64, 24))):
            got = self.plan(op, *shapes)
            self.assertEqual(got.implementation, "lax")
            self.assertRegex(got.reason, r"contracted \(\d+\) and the columns \(\d+\)")

    def test_the_columns_that_count_are_those_of_a_part(self):
        options = {"scatter_dimension": 1, "algorithm": "sliced"}
        for columns, want in ((16 * RANKS, "sliced"), (24 * RANKS, None)):
            got = self.plan(MATMULS[1], (64, 64), (64, columns), **options)
            self.assertEqual(got.algorithm, want)

    @parameterized.product(op=MATMULS)
    def test_native_is_refused_where_it_is_not(self, op):
        for options, error, why in (
            ({"result": None}, TypeError, "does not take this: a matmul of float8"),
            (
                {"w_dtype": ml_dtypes.float8_e3m4},
                TypeError,
                "float8_e3m4, float8_e4m3fn",
            ),
            ({"dtype": E5M2}, TypeError, "float8_e5m2 by float8_e5m2"),
            ({}, NotImplementedError, "of float8 are native on GPUs only"),
        ):
            dtype = options.get("dtype", E4M3)
            dtypes = dtype, options.get("w_dtype", dtype)
            operands = [
                jax.ShapeDtypeStruct((RANKS, *s), of)
                for s, of in zip(self.SHAPES, dtypes, strict=True)
            ]
            call = functools.partial(
                getattr(jax_overlap, op),
                axis_name="x",
                preferred_element_type=options.get("result", BF16),
                implementation="native",
            )
            with self.assertRaisesRegex(error, why):
                jax.jit(tools.stacked(call, line(RANKS))).lower(*operands)

    @parameterized.product(op=MATMULS, dtype=(BF16, E4M3))
    def test_a_weak_type_is_not_wider(self, op, dtype):
        call, shape = getattr(jax_overlap, op), (16, RANKS)

        def fn(x):
            weak = jnp.broadcast_to(jnp.asarray(2.0), shape)
            right, left = call(x, weak, "x"), call(weak, x, "x")
            return right, left, x @ weak

        program = tools.stacked(fn, line(RANKS), check_vma=False)
        got = jax.eval_shape(program, jax.ShapeDtypeStruct((RANKS, RANKS, 16), dtype))
        self.assertEqual([a.dtype for a in got], [np.dtype(dtype)] * 3)

    @parameterized.product(op=MATMULS)
    def test_with_a_wider_type_it_is_of_that(self, op):
        got = plan(op, *self.SHAPES, dtype=BF16, w_dtype=E4M3, platform="cpu")
        self.assertEqual(got.implementation, "native")
        self.assertStartsWith(got.operands[0], "bfloat16")
        self.assertStartsWith(got.operands[1], "bfloat16")


if __name__ == "__main__":
    absltest.main()

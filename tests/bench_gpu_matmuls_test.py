"""The benchmarks of fused matmuls for GPUs, in small on CPU devices."""

import argparse
import contextlib
import io
import os
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap.bench import gpu_calls, gpu_matmuls, gpu_values, harness, repeated
from jax_overlap.bench import shapes as shapes_of
from jax_overlap.bench.__main__ import OPS

MATMULS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
TINY = ("--gpu", "--calls", "1", "3", "--rounds", "2")


def bench(op, *argv):
    """(rows, what was printed)."""
    parser = argparse.ArgumentParser()
    OPS[op].add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows = OPS[op].run(parser.parse_args([*TINY, *argv]))
    return rows, out.getvalue()


def ranks_share_a_gpu():
    mesh, _ = gpu_calls.start()
    return mock.patch.object(gpu_calls, "start", return_value=(mesh, True))


class Rows(parameterized.TestCase):
    @parameterized.parameters(*MATMULS)
    def test_against_the_parts(self, op):
        [row], out = bench(op, "--shapes", "16x32x24")
        names = {"ours", "lax", "matmul", "communication"}
        self.assertEqual(set(row["us_a_call"]), names)
        self.assertEqual(set(row["tflops_a_rank"]), names - {"communication"})
        for times in row["us_a_call"].values():
            self.assertLessEqual(times["least"], times["median"])
            self.assertLessEqual(times["median"], times["most"])
        median = {name: t["median"] for name, t in row["us_a_call"].items()}
        self.assertEqual(row["speedup"], median["lax"] / median["ours"])
        self.assertEqual(row["over_matmul"], median["ours"] / median["matmul"])
        self.assertIn("\n16x32x24: ours ", out)
        self.assertIn("speedup", out)

    @parameterized.parameters(*MATMULS)
    def test_ranks_that_share_a_gpu(self, op):
        with ranks_share_a_gpu():
            [row], out = bench(op, "--shapes", "16x32x24", "--peers", "xla_windowed")
        self.assertEqual(set(row["us_a_call"]), {"ours", "matmul"})
        self.assertNotIn("efficiency", row)
        self.assertEqual(row["peers"]["xla_windowed"]["error"], "ranks share a GPU")
        self.assertIn("where NCCL is slow", out)

    @parameterized.product(op=MATMULS, shared=(False, True))
    def test_a_wrong_value_is_no_time(self, op, shared):
        right = getattr(jax_overlap, op)

        def wrong(*args, **options):
            y = right(*args, **options)
            return y.at[:, -1].multiply(lax.axis_index("x").astype(y.dtype))

        with contextlib.ExitStack() as stack:
            if shared:
                stack.enter_context(ranks_share_a_gpu())
            stack.enter_context(mock.patch.object(jax_overlap, op, wrong))
            with self.assertRaisesRegex(AssertionError, "16x32x24 is off by"):
                bench(op, "--shapes", "16x32x24")

    def test_rows_that_no_rank_can_have_a_part_of(self):
        [row], out = bench("matmul_reduce_scatter", "--shapes", "1x32x24")
        self.assertIn("1 is not divisible by", row["left_out"])
        self.assertIn("left out", out)
        [row], _ = bench("matmul_all_reduce", "--shapes", "1x32x24")
        self.assertIn("ours", row["us_a_call"])

    def test_peers(self):
        """What cannot run says why, and the rest is measured."""
        shape = ("--shapes", "16x32x24", "--peers", "xla_windowed", "pallas")
        [row], out = bench("all_gather_matmul", *shape)
        self.assertEqual(set(row["peers"]), {"xla_windowed", "pallas"})
        for name, peer in row["peers"].items():
            self.assertTrue(peer["error"])
            self.assertNotIn(name, row["us_a_call"])
            self.assertIn(f"; {name}: ", out)
        self.assertIn("ours", row["us_a_call"])

    def test_xla_partitions(self):
        flags = os.environ.get("XLA_FLAGS", "")
        flags += " --xla_gpu_threshold_for_windowed_einsum_mib=0"
        with mock.patch.dict(os.environ, XLA_FLAGS=flags):
            for op in MATMULS:
                [row], _ = bench(op, "--shapes", "16x32x24", "--peers", "xla_windowed")
                self.assertIn("xla_windowed", row["us_a_call"], row["peers"])

    def test_judgement(self):
        us = {"ours": 10.0, "lax": 15.0, "matmul": 8.0, "communication": 5.0}
        expected = {"over_matmul": 1.25, "efficiency": 0.8, "speedup": 1.5}
        self.assertEqual(gpu_matmuls._judged(us), expected)


class Repeated(parameterized.TestCase):
    def variant(self):
        mesh = Mesh(np.array(jax.devices()), ("x",))
        x = jax.device_put(
            np.ones((len(jax.devices()), 2), np.float32), NamedSharding(mesh, P("x"))
        )
        step = harness.sharded(lax.psum, mesh, (P("x"),), P("x"))
        return repeated.Variant(step, (x,), (P("x"), P("x"))), mesh

    def test_no_step_is_spared(self):
        variant, mesh = self.variant()
        for calls in (1, 4):
            text = repeated.compiled(variant, mesh, calls).as_text()
            self.assertEqual(text.count(" all-reduce("), calls)

    def test_the_slowest_process_counts(self):
        def others(own):
            return [own, {n: [u + 1.0 for u in t] for n, t in own.items()}, own]

        variant, mesh = self.variant()
        pairs = {"sum": repeated.programs(variant, mesh, (1, 2))}
        clock = mock.patch.object(repeated, "_seconds", return_value=0.0)
        with clock, mock.patch.object(repeated, "everyone", others):
            self.assertEqual(repeated.times(pairs, mesh, 3, (1, 2)), {"sum": [1.0] * 3})

    def test_an_error_in_one_process_is_one_in_all(self):
        self.assertEqual(repeated.attempted(lambda: 3), (3, ""))
        self.assertEqual(repeated.attempted(lambda: 1 // 0)[0], None)
        with mock.patch.object(repeated, "everyone", lambda own: [own, "no memory"]):
            self.assertEqual(repeated.attempted(lambda: 3), (None, "no memory"))


class Values(parameterized.TestCase):
    @parameterized.parameters((P("x"),), (P(None, "x"),))
    def test_made_by_ranks_or_on_the_host(self, spec):
        mesh = Mesh(np.array(jax.devices()), ("x",))
        n = 2 * len(jax.devices())
        for dtype in (np.float32, jax.numpy.bfloat16):
            made = gpu_values.operand(mesh, 1, (n, 3 * n), spec, dtype)
            host = gpu_values.on_host(mesh, 1, (n, 3 * n), spec, dtype)
            seen = np.asarray(made).astype(np.float32)
            np.testing.assert_allclose(
                seen, host.astype(np.float32), rtol=0.01, atol=1e-6
            )


class Shapes(absltest.TestCase):
    def test_a_text(self):
        shape = shapes_of.parse("8x16x32")
        self.assertEqual(shape, shapes_of.Matmul(8, 16, 32))
        self.assertEqual(str(shape), "8x16x32")
        self.assertEqual(shape.arrays, ((8, 16), (16, 32), (8, 32)))
        self.assertEqual(shape.flops, 8192)

    def test_models(self):
        out, down = shapes_of.row_parallel("llama-8b", [16])
        self.assertEqual((str(out), str(down)), ("16x4096x4096", "16x14336x4096"))
        [up] = shapes_of.column_parallel("llama-70b", [512])
        self.assertEqual(str(up), "512x8192x57344")
        [up] = shapes_of.column_parallel("dit")
        self.assertEqual(str(up), "4608x3072x12288")
        everything = shapes_of.row_parallel("llama-405b")
        self.assertLen(everything, 16)


if __name__ == "__main__":
    absltest.main()

"""The benchmarks of fused matmuls for GPUs, in small on CPU devices."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
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
from jax_overlap.bench import (
    gpu_calls,
    gpu_matmuls,
    gpu_peers,
    gpu_values,
    harness,
    repeated,
)
from jax_overlap.bench import shapes as shapes_of
from jax_overlap.bench.__main__ import OPS
from jax_overlap.ops import _gpu_cost

MATMULS = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
TINY = ("--gpu", "--calls", "1", "3", "--rounds", "2")


def bench(op, *argv):
    """(rows, what was printed)."""
    parser = argparse.ArgumentParser()
    OPS[op].add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows = list(OPS[op].run(parser.parse_args([*TINY, *argv])))
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
        ours = row["ours"]["ours"]
        self.assertEqual(ours["speedup"], median["lax"] / median["ours"])
        self.assertEqual(ours["over_matmul"], median["ours"] / median["matmul"])
        self.assertEqual(ours["implementation"], "native")
        by_round = ours["by_round"]["efficiency"]
        self.assertLessEqual(by_round["least"], by_round["median"])
        for times in row["us_by_round"].values():
            self.assertLen(times, row["rounds"])
        head, rule, line = out.splitlines()[1:]
        self.assertIn(f"| {op} | 16x32x24 | in_place | ", line)
        self.assertLen({text.count(" | ") for text in (head, rule, line)}, 1)
        for column in ("speedup", "efficiency", "predicted us"):
            self.assertIn(f"| {column} |", head)

    @parameterized.parameters(*MATMULS)
    def test_ranks_that_share_a_gpu(self, op):
        with ranks_share_a_gpu():
            [row], out = bench(op, "--shapes", "16x32x24", "--peers", "xla_windowed")
        self.assertEqual(set(row["us_a_call"]), {"ours", "matmul"})
        self.assertNotIn("efficiency", row["ours"]["ours"])
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
            stderr = contextlib.redirect_stderr(io.StringIO())
            traceback = stack.enter_context(stderr)
            [row], out = bench(op, "--shapes", "16x32x24")
        self.assertRegex(row["error"], "AssertionError: .* 16x32x24 is off by")
        self.assertNotIn("us_a_call", row)
        self.assertRegex(out, "FAILED: op .* 16x32x24 is off by")
        self.assertIn("16x32x24 is off by", traceback.getvalue())

    def test_a_wrong_value_in_another_process(self):
        others = mock.patch.object(gpu_matmuls, "everyone", lambda own: [own, 0.5])
        with others, contextlib.redirect_stderr(io.StringIO()):
            [row], _ = bench("matmul_all_reduce", "--shapes", "16x32x24")
        self.assertIn("is off by 0.5 of", row["error"])

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
            self.assertIn(f" | {' '.join(peer['error'][:80].split())}", out)
        self.assertIn("ours", row["us_a_call"])

    def test_xla_partitions(self):
        flags = os.environ.get("XLA_FLAGS", "")
        flags += " --xla_gpu_threshold_for_windowed_einsum_mib=0"
        with mock.patch.dict(os.environ, XLA_FLAGS=flags):
            for op in MATMULS:
                [row], _ = bench(op, "--shapes", "16x32x24", "--peers", "xla_windowed")
                self.assertIn("xla_windowed", row["us_a_call"], row["peers"])

    def test_a_configuration_that_is_refused(self):
        """It says so, and another one is measured."""

        def two(mesh, operands, specs):
            def call(x, w, axis):
                return lax.all_gather(x, axis, tiled=True) @ w

            step = harness.sharded(call, mesh, specs[:2], specs[2])
            works = repeated.Variant(step, operands, (specs[0], specs[2]))

            def too_large(*_):
                raise ValueError("exceeds available shared memory")

            return {"large": dataclasses.replace(works, step=too_large), "small": works}

        with mock.patch.dict(gpu_peers.PEERS, pallas=two):
            shape = ("--shapes", "16x32x24", "--peers", "pallas")
            [row], out = bench("all_gather_matmul", *shape)
        self.assertEqual(row["peers"]["pallas"]["configuration"], "small")
        why = row["peers"]["pallas"]["refused"]
        self.assertEqual(why, {"large": "ValueError: exceeds available shared memory"})
        self.assertIn("pallas", row["us_a_call"])
        self.assertIn(") small |", out)

    def test_pallas_fits_and_is_lowered_once(self):
        """As the lowering for GPUs says, which refuses what takes too much memory."""
        kernels = "jax.experimental.pallas.ops.gpu.collective_matmul_mgpu"
        kernels = importlib.import_module(kernels)
        devices = jax.devices()
        mesh = Mesh(np.array(devices), ("x",))
        specs = (P("x"), P(None, "x"), P(None, "x"))
        n = 512 * len(devices)
        operands = tuple(
            jax.ShapeDtypeStruct(
                shape, jax.numpy.bfloat16, sharding=NamedSharding(mesh, spec)
            )
            for shape, spec in (((n, 512), specs[0]), ((512, n), specs[1]))
        )
        h200 = mock.Mock(core_count=132)
        with mock.patch.object(kernels.jax, "devices", return_value=[h200]):
            found = gpu_peers.pallas(mesh, operands, specs)
            for variant in found.values():
                step = variant.step
                twice = jax.jit(lambda x, w, step=step: (step(x, w), step(x + 1, w)))
                traced = twice.trace(*operands)
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
                self.assertEqual(text.count("custom_call @mosaic_gpu"), 1)
        self.assertLen(found, 3)

    def test_pallas_wants_one_process(self):
        two = mock.patch.object(jax, "process_count", return_value=2)
        with two, self.assertRaisesRegex(RuntimeError, "without launch"):
            gpu_peers.pallas(None, (), ())

    @parameterized.parameters("matmul_reduce_scatter", "all_gather_matmul")
    def test_algorithms(self, op):
        """Measured beside each other; of one of them there is a prediction."""
        forced = ("--algorithms", "auto", "sliced", "by_psum")
        [row], out = bench(op, "--shapes", "16x32x24", *forced)
        algorithms = {name: ours["algorithm"] for name, ours in row["ours"].items()}
        expected = {"ours": "in_place", "sliced": "sliced", "by_psum": "by_psum"}
        self.assertEqual(algorithms, expected)
        self.assertContainsSubset(expected, row["us_a_call"])
        foreseen = {n for n, o in row["ours"].items() if "predicted_over_measured" in o}
        self.assertEqual(foreseen, {"sliced"})
        self.assertEqual(
            row["ours"]["sliced"]["predicted_over_measured"],
            row["predicted_us"]["sliced"] / row["us_a_call"]["sliced"]["median"],
        )
        self.assertEqual(out.count(f"| {op} | 16x32x24 | "), 3)

    @parameterized.parameters(*MATMULS)
    def test_prediction_is_that_of_the_plan(self, op):
        """Of the local operands, in the form of the primitive."""
        m, k, n, ranks = 4096, 8192, 2048, len(jax.devices())
        gathers = op == "all_gather_matmul"
        local = (m // ranks, k, n // ranks) if gathers else (m, k // ranks, n)
        x = jax.ShapeDtypeStruct((1, 1, *local[:2]), jax.numpy.bfloat16)
        w = jax.ShapeDtypeStruct((1, *local[1:]), jax.numpy.bfloat16)
        expected = _gpu_cost.predict(op, [x], [w], x, [False], ranks, True)
        mesh = Mesh(np.array(jax.devices()), ("x",))
        whole = [jax.ShapeDtypeStruct(s, jax.numpy.bfloat16) for s in ((m, k), (k, n))]
        found = gpu_matmuls._predicted(OPS[op]._OP, mesh, whole)
        self.assertEqual(found, expected)

    def test_a_small_heap(self):
        with mock.patch.dict(os.environ, JAX_OVERLAP_HEAP_BYTES="4096"):
            rows, out = bench("matmul_reduce_scatter", "--shapes", "16x32x24", "4x4x4")
        large, small = rows
        self.assertEqual(large["heap_bytes"], 4096)
        self.assertEqual(large["heap_bytes_wanted"], 8192)  # above 8 x 16 x 24 x 2
        self.assertLess(small["heap_bytes_wanted"], 4096)
        self.assertIn("1 of 2 shapes go in more rounds", out)
        self.assertIn("Set it to 8192.", out)

    def test_programs_are_let_go(self):
        """Each row's, as each has a part of the heap."""
        client = jax.devices()[0].client
        parser = argparse.ArgumentParser()
        OPS["matmul_all_reduce"].add_arguments(parser)
        args = parser.parse_args([*TINY, "--shapes", "16x32x24", "16x32x8", "16x32x40"])
        with contextlib.redirect_stdout(io.StringIO()):
            alive = [
                len(client.live_executables())
                for _ in OPS["matmul_all_reduce"].run(args)
            ]
        self.assertLessEqual(alive[2], alive[1])

    def test_judgement(self):
        us = {
            "ours": [10.0, 20.0, 10.0],
            "lax": [15.0, 20.0, 15.0],
            "matmul": [8.0, 4.0, 8.0],
            "communication": [5.0, 5.0, 10.0],
        }
        expected = {
            "over_matmul": 1.25,
            "efficiency": 0.8,
            "speedup": 1.5,
            "by_round": {
                "efficiency": {"median": 0.8, "least": 0.25, "most": 1.0},
                "speedup": {"median": 1.5, "least": 1.0, "most": 1.5},
            },
        }
        self.assertEqual(gpu_matmuls._judged("ours", us), expected)


class Repeated(parameterized.TestCase):
    def variant(self, jit=False):
        mesh = Mesh(np.array(jax.devices()), ("x",))
        x = jax.device_put(
            np.ones((len(jax.devices()), 2), np.float32), NamedSharding(mesh, P("x"))
        )
        step = harness.sharded(lax.psum, mesh, (P("x"),), P("x"))
        step = jax.jit(step) if jit else step
        return repeated.Variant(step, (x,), (P("x"), P("x"))), mesh

    @parameterized.parameters(False, True)
    def test_no_step_is_spared(self, jit):
        variant, mesh = self.variant(jit)
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

    def test_turns(self):
        """All come in other orders, and in all processes in the same."""
        _, mesh = self.variant()
        pairs = {name: [f"{name}1", f"{name}3"] for name in "abc"}
        runs = []
        for _ in range(2):
            called = []

            def seconds(program, ready, called=called):
                called.append(program)
                return float(program[1])

            with mock.patch.object(repeated, "_seconds", seconds):
                found = repeated.times(pairs, mesh, 4, (1, 3))
            self.assertEqual(found, {name: [1e6] * 4 for name in "abc"})
            runs.append(called)
        self.assertEqual(*runs)
        rounds = np.array(runs[0][6:]).reshape(4, 6)  # after each has run once
        self.assertLen({tuple(sorted(r)) for r in rounds.tolist()}, 1)
        self.assertGreater(len({tuple(r[::2]) for r in rounds.tolist()}), 2)
        self.assertEqual([r[0][1] for r in rounds], ["3", "1"] * 2)

    def test_an_error_in_one_process_is_one_in_all(self):
        self.assertEqual(repeated.attempted(lambda: 3), (3, ""))
        self.assertEqual(repeated.attempted(lambda: 1 // 0)[0], None)
        others = mock.Mock(side_effect=lambda own: [own, {"error": "no memory"}])
        with mock.patch.object(repeated, "_exchanged", others):
            self.assertEqual(repeated.attempted(lambda: 3), (None, "no memory"))
            self.assertEqual(others.call_count, 1)
            # It failed where this one still measures: which has heard of it then.
            asks = functools.partial(repeated.everyone, 3)
            self.assertEqual(repeated.attempted(asks), (None, "no memory"))
            self.assertEqual(others.call_count, 2)

    def test_processes_that_take_longer_are_waited_for(self):
        late = RuntimeError("process 0 waited in vain for processes [1]")
        both = {1: {"value": 4}, 0: {"value": 3}}
        with (
            mock.patch.object(jax, "process_count", return_value=2),
            mock.patch.object(repeated, "exchange", side_effect=[late, both]) as asked,
        ):
            self.assertEqual(repeated.everyone(3), [3, 4])
        first, again = (call.args for call in asked.call_args_list)
        self.assertEqual(first, again)


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

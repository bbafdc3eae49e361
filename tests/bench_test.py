"""The benchmarks' command, and those of collectives for GPUs, in small on the CPU."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

import cpu_devices  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap import _native
from jax_overlap.bench import gpu_calls, gpu_values, rows
from jax_overlap.bench.__main__ import OPS, main

TINY = ("--gpu", "--rounds", "2", "--sizes", "64")


def bench(*argv):
    """(exit code, what was written, what was printed); the GPUs are CPU devices."""
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("require_gpus", lambda: None),
            ("_CALLS", (1, 3)),
            ("_LARGE_CALLS", (1, 2)),
            ("_LARGE_BYTES", 4096),
        ):
            stack.enter_context(mock.patch.object(gpu_calls, name, value))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder, "rows.json")
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        code = main([*argv, "--json", str(path)])
        kept = [file.name for file in pathlib.Path(folder).iterdir()]
        assert kept == ["rows.json"], kept
        return code, json.loads(path.read_text()), out.getvalue()


class Command(absltest.TestCase):
    def test_a_row_that_fails(self):
        """It says why, the others are measured, and the exit code tells."""
        right, calls = jax_overlap.psum, []

        def wrong(x, axis_name, **options):
            calls.append(x.size)
            if x.size == 32:
                raise ValueError("not 32 |\n of them")
            return right(x, axis_name, **options)

        with mock.patch.object(jax_overlap, "psum", wrong):
            code, told, out = bench("psum", *TINY, "128", "256")
        self.assertEqual(code, 1)
        failed = [row for row in told["rows"] if "error" in row]
        self.assertEqual([row["bytes"] for row in failed], [128, 128])
        self.assertEqual(failed[0]["error"], "ValueError: not 32 |\n of them")
        self.assertEqual([row["bytes"] for row in told["rows"]][-1], 256)
        self.assertIn("auto", told["rows"][-1]["us_a_call"])
        self.assertRegex(out, r"FAILED: op psum, .*bytes 128.* not 32 / of them \|")

    def test_written_after_each_row(self):
        """So that what ends the program leaves what there is."""

        class Killed(BaseException):
            pass

        def run(_):
            def killed():
                raise Killed

            yield from rows.measured([({"size": 1}, dict), ({"size": 2}, killed)], str)

        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = pathlib.Path(folder, "rows.json")
            stack.enter_context(mock.patch.object(OPS["psum"], "run", run))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            with self.assertRaises(Killed):
                main(["psum", "--json", str(path)])
            told = json.loads(path.read_text())
        self.assertEqual(told["rows"], [{"size": 1}])

    def test_no_gpu(self):
        with self.assertRaisesRegex(SystemExit, "--gpu: JAX has no GPU here"):
            main(["psum", "--gpu"])
        nothing = mock.patch.object(jax, "default_backend", side_effect=AssertionError)
        with nothing, self.assertRaisesRegex(SystemExit, "has no device of"):
            main(["psum", "--gpu"])
        err = io.StringIO()
        with contextlib.redirect_stderr(err), self.assertRaises(SystemExit):
            main(["psum", "--gpu", "--dtype", "bfloat61"])
        self.assertIn("expected one of float32, bfloat16", err.getvalue())

    def test_without_the_native_module(self):
        """Else it would time jax.lax against jax.lax."""
        missing = mock.patch.multiple(_native, ffi=None, why_missing="Install it")
        err = io.StringIO()
        with missing, contextlib.redirect_stderr(err), self.assertRaises(SystemExit):
            main(["psum"])
        self.assertIn("Install it", err.getvalue())


class Collectives(parameterized.TestCase):
    def test_psum(self):
        """As asked for, as users have it, and that of jax.lax."""
        forced = ("--algorithms", "auto", "one_shot")
        code, told, out = bench("psum", *TINY, "4096", *forced, "--dtype", "bfloat16")
        self.assertEqual(code, 0)
        self.assertLen(told["rows"], 4)
        self.assertIn("JAX_OVERLAP_HEAP_BYTES", told["settings"])
        self.assertNotIn("JAX_OVERLAP_TUNING_DIR", told["settings"])
        ours = ["auto", "one_shot", "default"]
        for row in told["rows"]:
            self.assertEqual(list(row["us_a_call"]), [*ours, "lax"])
            self.assertEqual(list(row["over_lax"]), ours)
            self.assertEqual(list(row["algorithms"]), ours)
            self.assertEqual(row["algorithms"]["one_shot"], "one_shot")
            self.assertEqual(row["calls"], [1, 2] if row["bytes"] == 4096 else [1, 3])
        head, rule, *lines = out.splitlines()[1:]
        self.assertLen({text.count(" | ") for text in (head, rule, *lines)}, 1)
        self.assertIn("| default / lax |", head)

    def test_default_is_that_of_users(self):
        """Whatever they get: on GPUs that of NCCL, if it is large."""
        right, asked = jax_overlap.psum, []

        def spied(x, axis_name, **options):
            asked.append(options)
            return right(x, axis_name, **options)

        with mock.patch.object(jax_overlap, "psum", spied):
            bench("psum", *TINY)
        self.assertIn({}, asked)
        self.assertIn({"implementation": "native", "algorithm": None}, asked)

    def test_ranks_that_share_a_gpu(self):
        mesh, _ = gpu_calls.start()
        with mock.patch.object(gpu_calls, "start", return_value=(mesh, True)):
            _, told, out = bench("psum", *TINY)
        self.assertEqual(list(told["rows"][0]["us_a_call"]), ["auto"])
        self.assertNotIn("over_lax", told["rows"][0])
        head, _, line, _ = out.splitlines()[2:]
        self.assertEqual(head.count(" | "), line.count(" | "))

    @parameterized.parameters("bfloat16", "float32", "int32", "int8")
    def test_operands_are_made_by_the_ranks(self, dtype):
        mesh = Mesh(np.array(jax.devices()), ("x",))
        ranks = len(jax.devices())
        x = gpu_values.operand(mesh, 0, (ranks, 64), P("x"), jnp.dtype(dtype))
        self.assertEqual((x.shape, x.dtype), ((ranks, 64), dtype))
        parts = [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
        self.assertLen(set(parts), ranks)
        self.assertTrue(jnp.any(lax.convert_element_type(x, jnp.float32) < 0))


if __name__ == "__main__":
    absltest.main()

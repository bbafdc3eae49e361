"""What goes wrong between GPU ranks ends in an error in time, and is not lost.

Each case is a program of gpu/faults/, run by launch.py as ranks of its own, without
MPS, where the death of one client can end the others. gpu/psum_faults_test.py and
gpu/matmuls_faults_test.py have the tests.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import cpu_devices
from absl.testing import absltest, parameterized

from jax_overlap.testing import LAUNCH

FAULTS = pathlib.Path(__file__).parent / "gpu" / "faults"
WAIT_S = 4
LIMIT_S = 150
# Else processes share what XLA finds out by timing, and those that compile unlike
# programs wait for one another in XLA, for ever, before any op of theirs is called.
XLA_FLAGS = "--xla_gpu_shard_autotuning=false"


class Faults(parameterized.TestCase):
    """Runs the programs, with an op, and reads what the ranks saw."""

    TIME_LIMIT_S = LIMIT_S + 60

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if os.environ.get(LAUNCH):
            raise absltest.SkipTest("needs one process, as it starts ranks of its own")
        if cpu_devices.ON_CPU:
            raise absltest.SkipTest("needs a GPU: several processes on CPU take lax")

    def run_ranks(self, ranks, program, op, *args, code=0, by_psum=False):
        """Runs a program; returns what launch wrote, and the output of each rank."""
        limit = 1 << 20 if by_psum else 0
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        env = {k: v for k, v in os.environ.items() if k != LAUNCH}
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "jax_overlap.testing.launch"),
                *("-n", str(ranks), "--no-mps", "--output", str(folder)),
                *("--timeout", str(LIMIT_S), "--grace", "60"),
                *("--env", f"JAX_OVERLAP_WAIT_TIMEOUT_S={WAIT_S}"),
                *("--env", f"JAX_OVERLAP_BY_PSUM_MAX_BYTES={limit}"),
                *("--env", f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}"),
                # The process of the tests has memory of the same GPUs.
                *("--env", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
                *("--", "python", str(FAULTS / program), op, *args),
            ],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S + 40,
        )
        logs = [(folder / f"rank{r}.log").read_text() for r in range(1, ranks)]
        text = f"{done.stdout}\n{done.stderr}"
        self.assertEqual(done.returncode, code, "\n".join([text, *logs]))
        return done.stderr, [done.stdout, *logs]

    def seen(self, outputs, rank):
        """The errors that a rank saw, one after the other."""
        lines = re.findall(rf"^rank {rank} saw: (.*)$", outputs[rank], re.M)
        for line in lines:
            self.assertIn("jax_overlap", line)
        return lines

    def assert_names(self, text, op, rank):
        """An error that says what was waited for: the op, the rank, and how long."""
        self.assertIn(f"jax_overlap.{op} over ('x',)", text)
        self.assertRegex(text, rf"in vain for rank {rank}\b")
        self.assertIn("JAX_OVERLAP_WAIT_TIMEOUT_S", text)

    def check_a_rank_that_dies(self, op, ranks, by_psum=False):
        """Its exit code is that of the whole; the others are not ended."""
        err, outputs = self.run_ranks(ranks, "dies.py", op, code=9, by_psum=by_psum)
        named = "psum" if by_psum else op
        for rank in range(ranks - 1):
            first, again = self.seen(outputs, rank)
            self.assert_names(first, named, ranks - 1)
            self.assertRegex(again, f"jax_overlap.{named} .*an earlier one has failed")
        failed = re.findall(r"^launch: rank (\d+): (.*?);", err, re.M)
        self.assertEqual(failed, [(str(ranks - 1), "exit code 9")], err)

    def check_a_rank_that_never_calls(self, op, when):
        _, outputs = self.run_ranks(2, "never_calls.py", op, when)
        (text,) = self.seen(outputs, 0)
        if when == "again":
            self.assert_names(text, op, 1)
        else:  # there was no call: GPUs are set up by all ranks
            self.assertRegex(text, r"in vain for processes \[1\]")
            self.assertIn("JAX_OVERLAP_WAIT_TIMEOUT_S", text)


class EveryFault(Faults):
    """All cases, for one op."""

    op: str
    # What a rank sees of {other}, which calls with another shape.
    other_shape = "mismatch|JAX_OVERLAP_WAIT_TIMEOUT_S"

    @parameterized.parameters(2, 3)
    def test_a_rank_that_dies(self, ranks):
        self.check_a_rank_that_dies(self.op, ranks)

    @parameterized.parameters("ever", "again")
    def test_a_rank_that_never_calls(self, when):
        self.check_a_rank_that_never_calls(self.op, when)

    @parameterized.parameters("first", "again")
    def test_ranks_that_call_with_other_shapes(self, when):
        """Found out at once, or waited for in vain: never a sum."""
        _, outputs = self.run_ranks(2, "other_shape.py", self.op, when)
        for rank in range(2):
            (text,) = self.seen(outputs, rank)
            self.assertRegex(text, self.other_shape.format(other=1 - rank))

    @parameterized.parameters("soon", "late")
    def test_an_error_that_nobody_reads(self, when):
        err, _ = self.run_ranks(2, "unread.py", self.op, when, code=70)
        self.assertIn("that nobody acknowledged", err)
        self.assertRegex(err, f"jax_overlap.{self.op} .*in vain for rank 1")
        self.assertIn("rank 0: exit code 70", err)
        self.assertNotIn("rank 1:", err)

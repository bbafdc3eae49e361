"""What goes wrong between GPU ranks ends in an error in time, and is not lost.

Each case is a program of faults/, run by launch.py as ranks of its own, without MPS,
where the death of one client can end the others. To be run in ONE process:

    JAX_PLATFORMS=cuda pytest tests/gpu/psum_faults_test.py
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

FAULTS = pathlib.Path(__file__).parent / "faults"
WAIT_S = 4
LIMIT_S = 150


class Faults(parameterized.TestCase):
    TIME_LIMIT_S = LIMIT_S + 60

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if os.environ.get(LAUNCH):
            raise absltest.SkipTest("needs one process, as it starts ranks of its own")
        if cpu_devices.ON_CPU:
            raise absltest.SkipTest("needs a GPU: several processes on CPU take lax")

    def run_ranks(self, ranks, program, *args, code=0):
        """Runs a program; returns what launch wrote, and the output of each rank."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        env = {k: v for k, v in os.environ.items() if k != LAUNCH}
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "jax_overlap.testing.launch"),
                *("-n", str(ranks), "--no-mps", "--output", str(folder)),
                *("--timeout", str(LIMIT_S), "--grace", "60"),
                *("--env", f"JAX_OVERLAP_WAIT_TIMEOUT_S={WAIT_S}"),
                *("--", "python", str(FAULTS / program), *args),
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
        """The error that a rank saw."""
        (line,) = re.findall(rf"^rank {rank} saw: (.*)$", outputs[rank], re.M)
        self.assertIn("jax_overlap", line)
        return line

    def assert_names(self, text, rank):
        self.assertRegex(text, rf"ranks? \[?{rank}\b")
        self.assertIn("JAX_OVERLAP_WAIT_TIMEOUT_S", text)

    @parameterized.parameters(2, 3)
    def test_a_rank_that_dies(self, ranks):
        """Its exit code is that of the whole; the others are not ended."""
        err, outputs = self.run_ranks(ranks, "dies.py", code=9)
        for rank in range(ranks - 1):
            self.assert_names(self.seen(outputs, rank), ranks - 1)
        failed = re.findall(r"^launch: rank (\d+): (.*?);", err, re.M)
        self.assertEqual(failed, [(str(ranks - 1), "exit code 9")], err)

    @parameterized.parameters("ever", "again")
    def test_a_rank_that_never_calls(self, when):
        _, outputs = self.run_ranks(2, "never_calls.py", when)
        text = self.seen(outputs, 0)
        if when == "again":
            self.assert_names(text, 1)

    @parameterized.parameters("first", "again")
    def test_ranks_that_call_with_other_shapes(self, when):
        """Found out at once, or waited for in vain: never a sum."""
        _, outputs = self.run_ranks(2, "other_shape.py", when)
        for rank in range(2):
            self.assertRegex(
                self.seen(outputs, rank), "mismatch|JAX_OVERLAP_WAIT_TIMEOUT_S"
            )

    @parameterized.parameters("soon", "late")
    def test_an_error_that_nobody_reads(self, when):
        err, _ = self.run_ranks(2, "unread.py", when, code=70)
        self.assertIn("that nobody acknowledged", err)
        self.assertIn("rank 0: exit code 70", err)
        self.assertNotIn("rank 1:", err)


if __name__ == "__main__":
    absltest.main()

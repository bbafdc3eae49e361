"""python -m jax_overlap.testing.launch: ranks, their environment, and their end."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import contract_tools as tools
from absl.testing import absltest, parameterized
from op_contract import named

import jax_overlap.testing

LIMIT_S = 60

# Ends with the sum over the ranks of all that `initialize` has brought together.
TWO_RANKS = """
import jax, numpy as np
import jax_overlap.testing
assert jax_overlap.testing.initialize(initialization_timeout_s=40)
assert jax_overlap.testing.initialize()  # the second time nothing happens
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
sum_ = lambda x: lax.psum(x, "x")
fn = jax.jit(jax.shard_map(sum_, mesh=mesh, in_specs=P("x"), out_specs=P()))
data = np.array([3.0, 4.0], np.float32)
x = jax.make_array_from_callback((2,), NamedSharding(mesh, P("x")), lambda i: data[i])
rank, all_, here = jax.process_index(), jax.device_count(), jax.local_device_count()
print("rank", rank, "of", all_, "has", here, "sum", float(fn(x)[0]))

import contract_processes as processes  # what the contract on several processes uses
digests = {"same": "a", "own": str(rank), f"only_of_{rank}": str(rank)}
print("differing", processes.differing("some test/1", digests), processes.lax_runs())
"""

# As the programs that a command line names: each does one thing, and none loads JAX.
SHOW = """
import json, os, sys
folder, *names = sys.argv[1:]
rank = os.environ["JAX_OVERLAP_LAUNCH"].split(",")[2]
seen = {name: os.environ.get(name) for name in names}
with open(os.path.join(folder, rank + ".json"), "w") as out:
    json.dump(seen, out)
"""
RANK = "import os, sys, time; rank = int(os.environ['JAX_OVERLAP_LAUNCH'][-1]); "

FAKE_SMI = """#!/bin/sh
[ "$1" = -L ] || exit 9
i=0
while [ $i -lt {count} ]; do echo "GPU $i: A GPU (UUID: GPU-$i)"; i=$((i+1)); done
"""
# Notes how it was called, and with which pipes; its daemon is a process that stays.
FAKE_MPS = """#!/bin/sh
if [ "$1" = -d ]; then
  [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 9
  echo "start $CUDA_MPS_PIPE_DIRECTORY ${{CUDA_VISIBLE_DEVICES-all}}" >> {log}
  {start}
else
  read -r word
  echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> {log}
fi
"""


class Launch(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def start(self, *argv, **env):
        here = dict(os.environ, PYTHONPATH=tools.child_path())
        for name in ("JAX_OVERLAP_LAUNCH", "CUDA_VISIBLE_DEVICES"):
            here.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jax_overlap.testing.launch", *argv],
            env={**here, **env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def launch(self, *argv, code=0, **env):
        """Runs it; returns (stdout, stderr)."""
        process = self.start(*argv, **env)
        out, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, code, f"{out}\n{err}")
        return out, err

    def fake(self, name, text):
        """An executable `name` that is found first; returns the PATH for it."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    def shown(self, rank):
        return json.loads((self.folder / f"{rank}.json").read_text())

    def assert_gone(self, pid):
        """The process ends, soon."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            state = pathlib.Path(f"/proc/{pid}/stat")
            try:
                if state.read_text().rpartition(")")[2].split()[0] == "Z":
                    return  # of a parent that does not wait
            except OSError:
                return
            time.sleep(0.02)
        self.fail(f"process {pid} is left over")

    def pid_in(self, name):
        path = self.folder / name
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return int(path.read_text())
            time.sleep(0.02)
        self.fail(f"nothing came into {name}")


class Programs(Launch):
    def test_two_ranks_are_one_program(self):
        """One device each, whatever XLA_FLAGS says of this process."""
        out, _ = self.launch(
            "-n", "2", "--cpu", "--output", ".", "--", "python", "-c", TWO_RANKS
        )
        self.assertIn("rank 0 of 2 has 1 sum 7.0", out)
        self.assertNotIn("rank 1", out)
        log = (self.folder / "rank1.log").read_text()
        self.assertIn("rank 1 of 2 has 1 sum 7.0", log)
        for text in (out, log):
            self.assertIn("differing ['own'] True", text)

    def test_pytest_is_run_by_this_python(self):
        (self.folder / "some_test.py").write_text(
            "import sys\ndef test_it(): assert sys.flags.safe_path\n"
        )
        out, _ = self.launch(
            *("-n", "2", "--cpu", "--", "pytest", "-q", "-p", "no:cacheprovider"),
            "some_test.py",
        )
        self.assertIn("1 passed", out)

    def test_without_launch_nothing_is_initialized(self):
        child = tools.run_child(
            "-c",
            "import jax, jax_overlap.testing as t; assert t.initialize() is False; "
            "assert not jax.distributed.is_initialized()",
        )
        self.assertEqual(child.code, 0, child.err)
        self.assertFalse(jax_overlap.testing.initialize())


class Environment(Launch):
    NAMES = (
        "JAX_OVERLAP_LAUNCH",
        "CUDA_VISIBLE_DEVICES",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "PYTHONFAULTHANDLER",
        "NCCL_HOSTID",
        "NCCL_NET",
        "NCCL_SOCKET_IFNAME",
        "MINE",
    )

    def show(self, *argv, **env):
        command = ("--", "python", "-c", SHOW, str(self.folder), *self.NAMES)
        return self.launch(*argv, *command, **env)

    def gpus(self, count, start=":"):
        self.fake("nvidia-smi", FAKE_SMI.format(count=count))
        log = self.folder / "mps.log"
        log.touch()
        text = FAKE_MPS.format(log=log, start=start)
        return self.fake("nvidia-cuda-mps-control", text)

    def mps_log(self):
        return (self.folder / "mps.log").read_text().splitlines()

    def test_cpu(self):
        flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=0"
        self.show("-n", "3", "--cpu", "--env", "MINE=a=b", XLA_FLAGS=flags)
        places = set()
        for rank in range(3):
            seen = self.shown(rank)
            place, count, number = seen["JAX_OVERLAP_LAUNCH"].split(",")
            self.assertEqual((count, number), ("3", str(rank)))
            self.assertRegex(place, r"^127\.0\.0\.1:\d+$")
            places.add(place)
            self.assertEqual(seen["JAX_PLATFORMS"], "cpu")
            self.assertEqual(seen["XLA_FLAGS"], "--xla_cpu_enable_fast_math=0")
            self.assertEqual(seen["PYTHONFAULTHANDLER"], "1")
            self.assertEqual(seen["MINE"], "a=b")
            self.assertIsNone(seen["CUDA_VISIBLE_DEVICES"])
        self.assertLen(places, 1)

    def test_a_gpu_for_each_rank(self):
        path = self.gpus(4)
        self.show("-n", "3", PATH=path)
        for rank in range(3):
            seen = self.shown(rank)
            self.assertEqual(seen["CUDA_VISIBLE_DEVICES"], str(rank))
            self.assertIsNone(seen["XLA_PYTHON_CLIENT_PREALLOCATE"])
            self.assertIsNone(seen["CUDA_MPS_PIPE_DIRECTORY"])
            self.assertIsNone(seen["NCCL_HOSTID"])
        self.assertEqual(self.mps_log(), [])

    def test_only_gpus_that_are_allowed(self):
        path = self.gpus(4)
        self.show("-n", "2", PATH=path, CUDA_VISIBLE_DEVICES="3, GPU-1,7,0")
        seen = [self.shown(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
        self.assertEqual(seen, ["3", "GPU-1"])
        self.assertEqual(self.mps_log(), [])

    def test_ranks_that_share_gpus(self):
        path = self.gpus(2)
        env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33", "TMPDIR": str(self.folder)}
        env["NCCL_SOCKET_IFNAME"] = "eth7"  # as the user wants it
        self.show("-n", "5", PATH=path, **env)
        seen = [self.shown(rank) for rank in range(5)]
        given = [s["CUDA_VISIBLE_DEVICES"] for s in seen]
        self.assertEqual(given, ["0", "1", "0", "1", "0"])
        (pipe,) = {s["CUDA_MPS_PIPE_DIRECTORY"] for s in seen}
        self.assertLess(len(pipe), 40)
        self.assertFalse(os.path.exists(pipe))
        self.assertEqual(self.mps_log(), [f"start {pipe} all", f"quit {pipe}"])
        for s in seen:
            self.assertEqual(s["XLA_PYTHON_CLIENT_PREALLOCATE"], "false")
            self.assertIsNotNone(s["CUDA_MPS_LOG_DIRECTORY"])
            self.assertIsNone(s["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
            self.assertEqual(s["NCCL_NET"], "Socket")
            self.assertEqual(s["NCCL_SOCKET_IFNAME"], "eth7")
        # For NCCL no two of a host have the same GPU.
        hosts = [s["NCCL_HOSTID"] for s in seen]
        self.assertLen(set(zip(hosts, given, strict=True)), 5)
        self.assertLen(set(hosts), 3)

    def test_ranks_that_take_turns(self):
        path = self.gpus(1)
        self.show("-n", "2", "--no-mps", PATH=path)
        self.assertEqual(self.shown(1)["CUDA_VISIBLE_DEVICES"], "0")
        self.assertEqual(self.shown(1)["XLA_PYTHON_CLIENT_PREALLOCATE"], "false")
        self.assertEqual(self.shown(1)["NCCL_SOCKET_IFNAME"], "lo")
        self.assertIsNone(self.shown(1)["CUDA_MPS_PIPE_DIRECTORY"])
        self.assertEqual(self.mps_log(), [])

    def test_a_daemon_that_does_not_start(self):
        path = self.gpus(1, start="echo no permission >&2; exit 3")
        _, err = self.launch("-n", "2", "--", "true", PATH=path, code=1)
        for words in ("exit code 3", "no permission", "--no-mps"):
            self.assertIn(words, err)
        self.assertNotIn("Traceback", err)

    @named(
        failure=("sys.exit(5)", None, 5),
        ctrl_c=("time.sleep(50)", signal.SIGINT, 130),
        termination=("time.sleep(50)", signal.SIGTERM, 143),
    )
    def test_the_daemon_is_stopped_after_a(self, does, sent, code):
        path = self.gpus(1)
        program = "import os, sys, time; open('pid','w').write(str(os.getpid())); "
        process = self.start(
            *("-n", "2", "--grace", "0", "--", "python", "-c", program + does),
            PATH=path,
        )
        pid = self.pid_in("pid")
        if sent:
            process.send_signal(sent)
        _, err = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, code, err)
        self.assertEqual(
            [line.split()[0] for line in self.mps_log()], ["start", "quit"]
        )
        self.assert_gone(pid)

    @named(none=(0, None), hidden=(2, ""), not_there=(2, "5"))
    def test_no_gpu(self, count, visible):
        env = {"PATH": self.gpus(count)}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        _, err = self.launch("-n", "2", "--", "true", code=2, **env)
        self.assertIn("no GPU", err)
        self.assertIn("--cpu", err)


class Failures(Launch):
    def run_ranks(self, program, *options, ranks=3, code=0):
        command = ("--", "python", "-c", RANK + program)
        return self.launch("-n", str(ranks), "--cpu", *options, *command, code=code)

    def test_code_and_output_of_the_first_that_failed(self):
        """The others have their time; what ends well is not shown."""
        out, err = self.run_ranks(
            "print('I am', rank, flush=True); time.sleep([0, 0.5, 0][rank]); "
            "[print('line', i) for i in range(100)]; sys.exit([0, 4, 3][rank])",
            code=3,
        )
        self.assertIn("I am 0", out)
        self.assertNotIn("I am 2", out + err)  # beyond its last 40 lines
        first, second = err.index("rank 2: exit code 3"), err.index("rank 1: exit code")
        self.assertLess(first, second)
        self.assertIn("[2] line 99", err)
        self.assertIn("[2] line 60", err)
        self.assertNotIn("[2] line 59", err)
        self.assertNotIn("rank 0:", err)

    def test_rank_zero_fails(self):
        _, err = self.run_ranks("sys.exit(9 if rank == 0 else 0)", code=9)
        self.assertIn("rank 0: exit code 9; its output is above", err)

    def test_those_that_do_not_end_are_ended(self):
        """With all that they have started, and also if SIGTERM is not enough."""
        start = time.monotonic()
        _, err = self.run_ranks(
            "import signal, subprocess; "
            "rank == 1 and signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "child = subprocess.Popen(['sleep', '50']); "
            "open(f'pid{rank}', 'w').write(str(child.pid)); "
            "open(f'me{rank}', 'w').write(str(os.getpid())); "
            "rank == 2 and sys.exit(7); "
            "time.sleep(50)",
            *("--grace", "1"),
            code=7,
        )
        self.assertBetween(time.monotonic() - start, 6, 20)
        self.assertIn("rank 2 failed, and ranks 0, 1 had not ended", err)
        self.assertIn("rank 2: exit code 7", err)
        self.assertIn("rank 0: had not ended, and was ended by SIGTERM", err)
        self.assertIn("rank 1: had not ended, and was ended by SIGKILL", err)
        for rank in range(3):
            self.assert_gone(self.pid_in(f"pid{rank}"))
            self.assert_gone(self.pid_in(f"me{rank}"))

    def test_a_signal(self):
        _, err = self.run_ranks(
            "rank == 1 and os.kill(os.getpid(), 9)", ranks=2, code=137
        )
        self.assertIn("rank 1: exit code 137 (SIGKILL)", err)

    def test_time_is_up(self):
        """Exit code 124, who had not ended, and where they were."""
        _, err = self.run_ranks(
            "\ndef stuck(): time.sleep(50)\nrank and stuck()",
            *("--timeout", "2"),
            code=124,
        )
        self.assertIn("the 2 s are over, and ranks 1, 2 had not ended", err)
        self.assertIn("rank 1: had not ended, and was ended by SIGABRT", err)
        self.assertRegex(err, r"\[1\].* in stuck")
        self.assertNotIn("rank 0:", err)

    def test_a_command_that_is_not_there(self):
        _, err = self.launch("-n", "2", "--cpu", "--", "no-such-command", "x", code=127)
        self.assertIn("'no-such-command'", err)

    @named(
        no_ranks=("-n", "0"),
        no_command=("-n", "2"),
        bad_env=("-n", "2", "--env", "NAME"),
    )
    def test_command_lines_that_are_refused(self, *argv):
        command = ("--", "true") if len(argv) > 2 or argv[1] == "0" else ()
        _, err = self.launch(*argv, *command, code=2)
        self.assertIn("usage", err)

    def test_help(self):
        out, _ = self.launch("--help")
        self.assertIn("python -m jax_overlap.testing.launch -n 8 -- pytest", out)


if __name__ == "__main__":
    absltest.main()

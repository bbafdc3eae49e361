"""Runs a command as N processes of one JAX program, each a rank with one device.

    python -m jax_overlap.testing.launch -n 8 -- pytest tests/gpu

The program calls `jax_overlap.testing.initialize()`. Ranks are dealt out to the GPUs
of this host, several to one GPU where there are fewer (through the MPS daemon, so
that their kernels run at the same time), or are CPU devices with --cpu.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax_overlap.testing import LAUNCH
from jax_overlap.testing._mps import MpsError, mps_daemon
from jax_overlap.testing._processes import Limits, run_ranks

_EXAMPLE = """\
examples:
  python -m jax_overlap.testing.launch -n 8 -- pytest tests/gpu
  python -m jax_overlap.testing.launch -n 2 --cpu -- python my_program.py --steps 3

Rank 0 writes to this terminal; of the others the last lines are shown if something
fails. The exit code is that of the first rank that failed (128 + n for signal n),
124 if the time was up.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` tells; returns the exit code."""
    args = _parser().parse_args(argv)
    command = _runnable(args.command)
    if args.cpu:
        gpus = None
    else:
        gpus = visible_gpus(os.environ)
        if not gpus:
            print(_no_gpu(os.environ), file=sys.stderr)
            return 2
    limits = Limits(timeout_s=args.timeout, grace_s=args.grace)
    try:
        with _signals_raise(), contextlib.ExitStack() as stack:
            base = base_environment(os.environ, args.ranks, gpus)
            if gpus and len(gpus) < args.ranks and not args.no_mps:
                base |= stack.enter_context(mps_daemon(base))
            folder = args.output or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="jax_overlap_launch-")
            )
            Path(folder).mkdir(parents=True, exist_ok=True)
            coordinator = f"127.0.0.1:{_free_port()}"
            environments = [
                rank_environment(base, coordinator, args.ranks, rank, gpus)
                | dict(args.env)
                for rank in range(args.ranks)
            ]
            stack.enter_context(_undisturbed())
            return run_ranks(command, environments, Path(folder), limits)
    except MpsError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except _Signalled as error:
        print(f"launch: ended by {error.signal.name}", file=sys.stderr)
        return 128 + error.signal


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_overlap.testing.launch",
        usage="%(prog)s -n RANKS [options] -- COMMAND [ARGUMENT ...]",
        description="Runs a command as RANKS processes of one jax.distributed program, "
        "each a rank with one device: a GPU, or a CPU device with --cpu.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_positive, required=True, help="how many processes")
    add("--cpu", action="store_true", help="CPU devices; no GPU is looked for")
    add(
        "--no-mps",
        action="store_true",
        help="do not start the MPS daemon where ranks share a GPU: they take turns "
        "then, which is slow, but one that is killed does not harm the others",
    )
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="end all ranks after S seconds, with exit code 124 (default: %(default)s)",
    )
    add(
        "--grace",
        type=float,
        default=30,
        metavar="S",
        help="when a rank has failed, the seconds that the others have to end "
        "(default: %(default)s)",
    )
    add(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for all ranks; may be repeated",
    )
    add(
        "--output",
        metavar="FOLDER",
        help="keep the output of ranks 1, 2, ... there, as rank1.log and so on",
    )
    add("command", nargs="+", metavar="COMMAND", help="what to run, with arguments")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _runnable(command: Sequence[str]) -> list[str]:
    """`command`, where pytest and python are those of this Python."""
    first, *rest = command
    if first == "pytest":  # -P: not the package that lies in the current folder
        return [sys.executable, "-P", "-m", "pytest", *rest]
    if re.fullmatch(r"python[\d.]*", first):
        return [sys.executable, *rest]
    return list(command)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    there = [str(i) for i in range(len(re.findall(r"^GPU \d+:", listed, re.M)))]
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not there:
        return there
    gpus = []
    for name in allowed.split(","):
        name = name.strip()
        # CUDA, too, stops at the first one that is not there; others are UUIDs.
        if not name or (re.fullmatch(r"-?\d+", name) and name not in there):
            break
        gpus.append(name)
    return gpus


def _no_gpu(environ: Mapping[str, str]) -> str:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f", of those in CUDA_VISIBLE_DEVICES={visible!r}"
    return (
        f"launch: there is no GPU: `nvidia-smi -L` lists none{why}. "
        "--cpu runs the ranks as CPU devices."
    )


def base_environment(
    environ: Mapping[str, str], ranks: int, gpus: Sequence[str] | None
) -> dict[str, str]:
    """What is the same for all ranks; gpus: None for CPU devices."""
    env = dict(environ, PYTHONFAULTHANDLER="1")
    # With a percentage of 33 or 16, matrix products of cuBLASLt left whole tiles
    # unwritten, with no error anywhere (CUDA 13.0, H200).
    env.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    if gpus is None:
        env["JAX_PLATFORMS"] = "cpu"
        env.pop("JAX_NUM_CPU_DEVICES", None)
        flags = env.pop("XLA_FLAGS", "").split()
        kept = [
            f for f in flags if "--xla_force_host_platform_device_count" not in f
        ]  # one device a process
        if kept:
            env["XLA_FLAGS"] = " ".join(kept)
    elif len(gpus) < ranks:
        # Else the first rank takes three quarters of the memory of its GPU.
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return env


def rank_environment(
    base: Mapping[str, str],
    coordinator: str,
    ranks: int,
    rank: int,
    gpus: Sequence[str] | None,
) -> dict[str, str]:
    """The environment of one rank: who it is, and its GPU."""
    env = {**base, LAUNCH: f"{coordinator},{ranks},{rank}"}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
        if len(gpus) < ranks:
            # NCCL refuses two ranks on one GPU of a host. So those that share one say
            # that they are of several, and it goes through sockets: slow, but right.
            env["NCCL_HOSTID"] = f"{coordinator}/{rank // len(gpus)}"
            env.setdefault("NCCL_NET", "Socket")
            env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return env


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Signalled(BaseException):
    """A signal that asks this process to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Makes the signals that end a process exceptions, so that all is cleaned up."""

    def handle(number, frame):
        _ignore_signals()  # a second Ctrl-C must not interrupt what cleans up
        raise _Signalled(number)

    before = {s: signal.signal(s, handle) for s in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Once the body is left, no signal interrupts what cleans up after it."""
    try:
        yield
    finally:
        _ignore_signals()


if __name__ == "__main__":
    sys.exit(main())

"""Starts the ranks, watches them, ends them all, and tells what went wrong.

       rank fails          grace over         5 s later
run ------------> grace ------------> SIGTERM --------> SIGKILL
    time is up                     5 s later
    ------------> SIGABRT (stacks) --------> SIGKILL
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_KILL_AFTER_S = 5
_LINES = 40
TIMED_OUT = 124  # as of timeout(1)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds: in all, and for the others once a rank has failed."""

    timeout_s: float
    grace_s: float


class _Rank:
    """A process that leads a process group, and where its output is."""

    def __init__(self, number: int, command, env: Mapping[str, str], log: Path | None):
        self.number, self.log = number, log
        self.code: int | None = None  # as of a shell: 128 + n for signal n
        self.sent: signal.Signals | None = None  # by us, and it had not ended then
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            out = None if log is None else stack.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Waits for the process to end, and ends what it leaves behind."""
        pid = self._process.pid
        # Until the zombie is reaped its group's number cannot be used anew, so none
        # but the group gets the signal.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _signal_group(pid, signal.SIGKILL)
            code = self._process.wait()
            self.code = code if code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group, if its leader has not ended."""
        with self._lock:
            if self.code is None:
                self.sent = number
                _signal_group(self._process.pid, number)

    @property
    def fate(self) -> str:
        if self.code is None:
            return "had not ended"
        if self.sent is not None:
            return f"had not ended, and was ended by {self.sent.name}"
        if self.code > 128:
            with contextlib.suppress(ValueError):
                return f"exit code {self.code} ({signal.Signals(self.code - 128).name})"
        return f"exit code {self.code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def run_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    limits: Limits,
) -> int:
    """Runs `command` in each environment at once; returns the exit code of all.

    Rank 0 has the output of this process, the others files in `folder`.
    """
    ranks: list[_Rank] = []
    ended: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
    try:
        for number, env in enumerate(environments):
            log = folder / f"rank{number}.log" if number else None
            ranks.append(_Rank(number, command, env, log))
            threading.Thread(
                target=lambda rank=ranks[-1]: (rank.wait(), ended.put(rank)),
                daemon=True,
            ).start()
        return _watch(ranks, ended, limits)
    except OSError as error:
        print(f"launch: cannot run {command[0]!r}: {error}", file=sys.stderr)
        return 127
    finally:
        _end(ranks, signal.SIGTERM)


def _watch(ranks: list[_Rank], ended: queue.SimpleQueue, limits: Limits) -> int:
    deadline = time.monotonic() + limits.timeout_s
    failed: list[_Rank] = []
    for _ in ranks:
        try:
            rank = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if rank.code != 0:
            failed.append(rank)
            deadline = min(deadline, time.monotonic() + limits.grace_s)
    # One may have ended just after the time was up.
    failed += [rank for rank in ranks if rank.code and rank not in failed]
    late = [rank for rank in ranks if rank.code is None]
    if late and not failed:
        _say(f"the {limits.timeout_s:g} s are over, and {_names(late)} had not ended")
        _end(ranks, signal.SIGABRT)  # upon which faulthandler prints the stacks
    elif late:
        _say(f"{_names(failed)} failed, and {_names(late)} had not ended")
        _end(ranks, signal.SIGTERM)
    for rank in [*failed, *late]:
        _tell(rank)
    return failed[0].code or 0 if failed else TIMED_OUT if late else 0


def _end(ranks: list[_Rank], first: signal.Signals) -> None:
    """Ends the ranks that have not: by a signal that they may act on, then surely."""
    for number in (first, signal.SIGKILL):
        for rank in ranks:
            rank.send(number)
        deadline = time.monotonic() + _KILL_AFTER_S
        while any(r.code is None for r in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


def _names(ranks: list[_Rank]) -> str:
    numbers = sorted(rank.number for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, numbers))}"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _tell(rank: _Rank) -> None:
    """Prints how a rank ended, and the end of its output."""
    if rank.log is None:
        _say(f"rank {rank.number}: {rank.fate}; its output is above")
        return
    with rank.log.open(errors="replace") as lines:
        tail = collections.deque(lines, _LINES)
    _say(f"rank {rank.number}: {rank.fate}; its last lines:")
    for line in tail:
        print(f"  [{rank.number}] {line.rstrip()}", file=sys.stderr)
    sys.stderr.flush()

"""The MPS daemon of NVIDIA: processes that share a GPU run kernels at the same time.

Without it the driver gives each process the GPU in turn, so a kernel that waits for
that of another process waits until its turn is over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_LIMIT_S = 30


class MpsError(RuntimeError):
    """The daemon did not start."""


@contextlib.contextmanager
def mps_daemon(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Starts a daemon of its own, and stops it.

    Yields:
      The environment variables that lead the clients to it.

    Raises:
      MpsError: it does not start.
    """
    # The pipes are unix sockets, whose paths have at most 107 bytes, and TMPDIR may
    # be long.
    short = os.path.join(os.sep, "tmp")
    folder = tempfile.mkdtemp(
        prefix="mps-", dir=short if os.access(short, os.W_OK) else None
    )
    clients = {
        "CUDA_MPS_PIPE_DIRECTORY": os.path.join(folder, "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": os.path.join(folder, "log"),
    }
    for path in clients.values():
        os.mkdir(path)
    env = {**environ, **clients}
    # The daemon numbers the GPUs that IT sees for its clients, so it sees all.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        with contextlib.ExitStack() as stack:
            # Before it is started: a signal may come while it starts.
            stack.callback(_stop, env)
            _start(env, Path(folder, "daemon.err"))
            yield clients
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(env: dict[str, str], errors: Path) -> None:
    # The daemon keeps its stderr open, so that is a file: a pipe would never end.
    with errors.open("w") as stderr:
        try:
            code = subprocess.run(
                [_CONTROL, "-d"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                timeout=_LIMIT_S,
                check=False,
            ).returncode
            text = f"exit code {code}"
        except (OSError, subprocess.TimeoutExpired) as error:
            code, text = 1, str(error)
    if code != 0:
        raise MpsError(
            f"`{_CONTROL} -d` failed: {text} {errors.read_text().strip()}. With "
            "--no-mps, ranks take turns on the GPU instead."
        )


def _stop(env: dict[str, str]) -> None:
    try:
        subprocess.run(
            [_CONTROL],
            env=env,
            input="quit\n",
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"launch: the MPS daemon may still run: {error}", file=sys.stderr)

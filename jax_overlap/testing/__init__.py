"""Programs of many processes: `launch` starts them, `initialize` makes them one.

    python -m jax_overlap.testing.launch -n 8 -- pytest tests/gpu

runs a command as N processes, each a rank with one device. A program that calls
`initialize()` before anything starts JAX's backend is then part of one
`jax.distributed` program; started by itself, it runs as if the call were not there.
"""

from __future__ import annotations

import os

import jax

# What launch.py tells a process: "<host:port of the coordinator>,<processes>,<rank>".
# Between these two files only, so not in the table of config.py.
LAUNCH = "JAX_OVERLAP_LAUNCH"


def initialize(
    *, initialization_timeout_s: int = 300, heartbeat_timeout_s: int = 100
) -> bool:
    """Makes this process a rank of the program that `launch` has started.

    Calls `jax.distributed.initialize`, unless that has been done. To be called
    before JAX's backend starts.

    Args:
      initialization_timeout_s: how long to wait for the other processes.
      heartbeat_timeout_s: after how many seconds without a sign of life a process
        counts as dead, and JAX ends all others. Above the limit of waits
        (`JAX_OVERLAP_WAIT_TIMEOUT_S`), the others see the error of their op first.

    Returns:
      Whether `launch` has started this process; if not, nothing is done.

    Example:
      >>> import jax_overlap.testing
      >>> jax_overlap.testing.initialize()  # not under launch here
      False
    """
    text = os.environ.get(LAUNCH, "")
    if not text:
        return False
    if not jax.distributed.is_initialized():
        coordinator, count, rank = text.rsplit(",", 2)
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=int(count),
            process_id=int(rank),
            local_device_ids=[0],
            initialization_timeout=initialization_timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
        )
    return True

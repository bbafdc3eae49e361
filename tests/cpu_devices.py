"""Eight CPU devices for the tests. To be imported before jax.

Under pytest conftest.py does it; a test file that runs by itself does it through
contract_tools.py; child processes inherit it. JAX_PLATFORMS=cuda leaves everything
as it is, and so does jax_overlap.testing.launch, which gives each process its device.
"""

import os
import sys

_DEVICES = 8
_XLA_FLAGS = (
    f"--xla_force_host_platform_device_count={_DEVICES}",
    # A collective that waits for a rank that never comes ends the process; after 20 s
    # here, 40 by default, and it says so after 5.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=5",
    "--xla_cpu_collective_call_terminate_timeout_seconds=20",
    # Programs are small and run once or twice: compiling them takes most of the time.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

_launched = bool(os.environ.get("JAX_OVERLAP_LAUNCH"))
_default = "" if _launched else "cpu"
ON_CPU = (os.environ.get("JAX_PLATFORMS") or _default).split(",")[0] == "cpu"
# How many devices there are; None: whatever JAX says.
DEVICES = _DEVICES if ON_CPU and not _launched else None

_given = os.environ.get("XLA_FLAGS", "").split()
if DEVICES is not None and not set(_XLA_FLAGS) <= set(_given):
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/cpu_devices.py set it up")
    os.environ["XLA_FLAGS"] = " ".join([*_given, *_XLA_FLAGS])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA sizes its thread pool by this. With fewer threads than ranks it starves.
    os.environ["NPROC"] = str(2 * _DEVICES)

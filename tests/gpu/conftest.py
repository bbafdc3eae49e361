"""The tests of this folder run on GPUs: as the ranks of launch.py, or in one process.

python -m jax_overlap.testing.launch -n 8 -- pytest tests/gpu
JAX_PLATFORMS=cuda pytest tests/gpu

JAX_OVERLAP_GPU_TESTS_ON=cpu pytest tests/gpu     to try the files on eight CPU devices
"""

import os
import pathlib

import cpu_devices
import pytest

import jax_overlap.testing

_HERE = pathlib.Path(__file__).parent
_ON_CPU = os.environ.get("JAX_OVERLAP_GPU_TESTS_ON") == "cpu"
_SKIPPED = cpu_devices.ON_CPU and not _ON_CPU  # nothing is imported for that

if not _SKIPPED:
    # Before any backend starts. A GPU may be shared with other ranks.
    if os.environ.get(jax_overlap.testing.LAUNCH):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Or this process has several, and takes their memory now: to take more of one may
    # have to wait for a kernel of another, which waits for this one. The rest is for
    # the heaps, and for the processes that the tests of faults start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    # Large sums are left to NCCL: here none is.
    os.environ.setdefault("JAX_OVERLAP_PSUM_MAX_BYTES", str(1 << 30))
    os.environ.setdefault("JAX_OVERLAP_GPU_MATMULS", "1")
    # All is small here, and is to be fused but where a test says otherwise.
    os.environ.setdefault("JAX_OVERLAP_BY_PSUM_MAX_BYTES", "0")
    # A rank that is stuck ends by its own limits, with a text.
    jax_overlap.testing.initialize(heartbeat_timeout_s=300)


def pytest_collection_modifyitems(items):
    """Skips what needs a GPU where nobody asks for one."""
    if _SKIPPED:
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="module")
def _on_the_right_devices(request):
    """Fails on other devices than were asked for; starts no backend for faults."""
    if request.module.__name__.endswith("faults_test"):
        return
    import contract_devices
    import jax

    if jax.default_backend() != ("cpu" if _ON_CPU else "gpu"):
        pytest.fail(f"tests/gpu runs on {jax.default_backend()}: {jax.devices()}")
    if contract_devices.COUNT < 2:
        pytest.skip("needs 2 GPUs, or ranks that share one: see tests/gpu/conftest.py")

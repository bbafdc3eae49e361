"""Loads the native module and registers its FFI targets.

Nothing here raises when the native side cannot be used: `ffi` is then None and
`why_missing` says why. Ops lower to `jax.lax` in that case and name the reason.
"""

from __future__ import annotations

import os

import jax

from jax_overlap import _compat, config

ABI = 2  # in every custom call: a change of its attributes or semantics changes it

ffi = None
why_missing = ""
forked = False


def _load():
    try:
        from jax_overlap import _ffi
    except ImportError as error:
        return None, (
            f"the native module jax_overlap._ffi could not be loaded ({error}). "
            "Install the package (pip install .) instead of using its source tree"
        )
    built, running = _ffi.api_version, _compat.ffi_api_version()
    # XLA refuses such a handler only when a backend starts, and then every JAX
    # call fails: so it must not be registered.
    if built[0] != running[0] or built > running:
        return None, (
            f"jax_overlap was built for XLA FFI {built[0]}.{built[1]} and jaxlib "
            f"{_compat.jaxlib_version} has {running[0]}.{running[1]}. Use jaxlib "
            f"{_compat.OLDEST_JAXLIB} or newer, or build jax_overlap against this one"
        )
    return _ffi, ""


def _register(module) -> None:
    _compat.prepare_cpu_state_types()
    for name, stages in module.state_types().items():
        jax.ffi.register_ffi_type(name, stages, platform="cpu")
    for name, stages in module.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


def _after_fork() -> None:
    global forked
    forked = True


def mutant(name: str) -> bool:
    """Whether a test build runs with the deliberate fault `name`."""
    return (
        ffi is not None
        and ffi.testing
        and os.environ.get("JAX_OVERLAP_MUTANT", "") == name
    )


def test_switch(name: str) -> bool:
    """Whether a test build runs with `JAX_OVERLAP_<name>=1`."""
    return (
        ffi is not None
        and ffi.testing
        and os.environ.get(f"JAX_OVERLAP_{name}", "") == "1"
    )


def check_process() -> None:
    """Raises in a process forked from one that had imported this package."""
    if forked:
        raise RuntimeError(
            "jax_overlap does not work in a forked process: the threads of JAX that "
            "it relies on exist in the parent only. Start processes with the 'spawn' "
            "method (multiprocessing.set_start_method('spawn'))."
        )


ffi, why_missing = _load()
if ffi is not None:
    ffi.configure(
        wait_timeout_s=config.WAIT_TIMEOUT_S.read(), heap_bytes=config.HEAP_BYTES.read()
    )
    _register(ffi)
    ffi.report_errors_at_exit()
os.register_at_fork(after_in_child=_after_fork)

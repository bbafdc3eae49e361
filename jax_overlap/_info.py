"""What is installed, loaded and counted."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

from jax_overlap import _compat, _heaps, _native, config, errors
from jax_overlap._plan import lowered

_PACKAGES = ("jax-overlap", "jax", "jaxlib", "flax")


def info() -> dict:
    """Returns versions, devices, handlers, settings and counts, as a dictionary.

    Starts JAX's backend, to list the devices.

    Returns:
      "versions": {package: version, or None if it is not installed}.
      "devices": {platform: number of devices}.
      "native": {"loaded", "why_missing", "targets", "built_for_ffi", "runtime_ffi",
        "test_build"}.
      "gpu": {"loaded", "why_not", "team", "ranks_on_a_gpu", "cutlass"}: of the module
        for GPUs; the team is "p2p" (one process) or "nvshmem", None before the first
        native op; with CUTLASS there are products for Hopper beside cuBLASLt's.
      "settings": {environment variable: its value, or the default}.
      "lowered": a list of {"op", "implementation", "algorithm", "reason", "count"},
        one for each kind of call lowered in this process; fallbacks to `jax.lax`
        have a reason.
      "errors": the unacknowledged errors.
    """
    on_gpus = jax.default_backend() == "gpu"
    return {
        "versions": _versions(),
        "devices": _devices(),
        "native": _native_info(),
        "gpu": _heaps.describe(),
        "settings": {v.name: v.read(on_gpus=on_gpus) for v in config.VARIABLES},
        "lowered": lowered.rows(),
        "errors": errors.last_errors(),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _devices() -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in jax.devices():
        counts[device.platform] = counts.get(device.platform, 0) + 1
    return counts


def _native_info() -> dict:
    ffi = _native.ffi
    return {
        "loaded": ffi is not None,
        "why_missing": _native.why_missing,
        "targets": [] if ffi is None else sorted(ffi.targets()),
        "built_for_ffi": None if ffi is None else ffi.api_version,
        "runtime_ffi": _compat.ffi_api_version(),
        "test_build": ffi is not None and ffi.testing,
    }

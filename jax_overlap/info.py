"""What is installed, loaded and counted: `python -m jax_overlap.info`."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import jax

from jax_overlap import _compat, _native, config, errors
from jax_overlap.plan import lowered

_PACKAGES = ("jax", "jaxlib", "flax", "nanobind", "nvidia-nvshmem-cu12")
_PACKAGES += ("nvidia-nvshmem-cu13",)


def info() -> dict:
    """Returns versions, devices, handlers, settings and counts, as a dictionary.

    Keys: "versions" {package: version or None}; "devices" {platform: count};
    "native" {"loaded", "why_missing", "targets", "built_for_ffi", "runtime_ffi",
    "test_build"}; "settings" {variable: value in force}; "lowered" [{"op",
    "implementation", "algorithm", "reason", "count"}], one for each kind of call
    that was lowered in this process (fallbacks have a reason); "errors", the
    unacknowledged errors.

    Starts JAX's backend, to list the devices.
    """
    return {
        "versions": _versions(),
        "devices": _devices(),
        "native": _native_info(),
        "settings": {v.name: v.read() for v in config.VARIABLES},
        "lowered": [
            dict(op=op, implementation=impl, algorithm=algo, reason=why, count=count)
            for (op, impl, algo, why), count in sorted(
                lowered.snapshot().items(), key=str
            )
        ],
        "errors": errors.last_errors(),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("jax-overlap", *_PACKAGES):
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


def _print(value, indent: str = "") -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            print(f"{indent}{key}:")
            _print(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            print(f"{indent}{key}:")
            for row in item:
                print(f"{indent}  " + ", ".join(f"{k}={v}" for k, v in row.items()))
        else:
            print(f"{indent}{key}: {item}")


def main() -> None:
    """Prints `info()`."""
    print(f"cpus: {os.cpu_count()}")
    _print(info())


if __name__ == "__main__":
    main()

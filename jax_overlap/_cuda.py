"""Loads the native module for GPUs and registers its FFI targets.

Nothing here raises when it cannot be used: `ffi` is then None and `why_missing` says
why.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax

from jax_overlap import _native


def _load():
    """(module, "") or (None, why)."""
    if _native.ffi is None:
        return None, _native.why_missing
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return None, "JAX's CUDA plugin is not installed (pip install 'jax[cuda13]')"
    try:
        from jax_overlap import _ffi_cuda
    except ImportError as error:
        return None, (
            f"the module jax_overlap._ffi_cuda could not be loaded ({error}): this "
            "build of jax_overlap is without CUDA. Build it where nvcc is, with "
            "-Ccmake.define.JAX_OVERLAP_CUDA=ON"
        )
    if _ffi_cuda.api_version != _native.ffi.api_version:
        return None, "the native modules of jax_overlap are of different builds"
    return _ffi_cuda, ""


def _register(module) -> None:
    assert _native.ffi is not None  # or there would be no module
    module.share_ledger(_native.ffi.ledger())
    for name, stages in module.state_types().items():
        jax.ffi.register_ffi_type(name, stages, platform="CUDA")
    for name, stages in module.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def cublaslt_path() -> str:
    """The cuBLASLt that JAX's extras install; empty if it is not there.

    The native module finds what JAX has loaded, or what the system has, by its name.
    """
    release = ffi.cuda_versions()[0] // 1000
    folder = "cublas" if release == 12 else f"cu{release}"
    try:
        spec = importlib.util.find_spec("nvidia")
    except ModuleNotFoundError:
        spec = None
    for root in (spec and spec.submodule_search_locations) or ():
        path = Path(root) / folder / "lib" / f"libcublasLt.so.{release}"
        if path.is_file():
            return str(path)
    return ""


ffi: Any
ffi, why_missing = _load()
if ffi is not None:
    _register(ffi)

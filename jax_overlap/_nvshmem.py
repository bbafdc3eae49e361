"""Finds NVSHMEM and loads the native module that works with it.

Only programs of several processes need it. `load` never raises: it returns the module,
or None and why there is none.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from types import ModuleType

OLDEST = (3, 4, 5)
# Others have seen hangs from 3.5.19 on; pyproject.toml has the same range.
FIRST_UNTESTED = (3, 5)

_MODULE = "jax_overlap._ffi_nvshmem"
_LIBRARY = "libnvshmem_host.so.3"
# What NVSHMEM allocates for itself out of its symmetric heap, generously.
_OWN_BYTES = 32 << 20


def prepare_environment(heap_bytes: int) -> None:
    """Sets what NVSHMEM reads when it starts, where the user has not."""
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes + _OWN_BYTES))
    # NVLink multicast is not used here, and setting it up fails on some machines.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


def load() -> tuple[ModuleType | None, str]:
    """The native module, or None and the reason in words."""
    try:
        if importlib.util.find_spec(_MODULE) is None:
            return None, (
                "this jax_overlap was built without NVSHMEM. Build it where nvcc is, "
                "with -Ccmake.define.JAX_OVERLAP_CUDA=ON and "
                "-Ccmake.define.JAX_OVERLAP_NVSHMEM_DIR=<the folder nvidia/nvshmem of "
                "the package nvidia-nvshmem-cu12 or -cu13>"
            )
        folder = _package_folder()
        if folder is None:
            return None, f"the package nvidia.nvshmem is not installed. {_cure()}"
        path = folder / "lib" / _LIBRARY
        why = _why_not_loadable(path)
        if why:
            return None, why
        # Found by its name when the module asks for it, wherever that is installed.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        module = importlib.import_module(_MODULE)
        why = _why_not_usable(module, folder, path)
    except Exception as error:  # whatever is wrong with it, psum has another way
        return None, f"NVSHMEM could not be loaded ({error}). {_cure()}"
    return (None, why) if why else (module, "")


def _package_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no `nvidia` at all
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _why_not_loadable(path: Path) -> str:
    if not path.is_file():
        others = sorted(p.name for p in path.parent.glob("libnvshmem_host*"))
        return (
            f"{path.parent} has no {_LIBRARY}"
            + (f", only {', '.join(others)}" if others else "")
            + f". {_cure()}"
        )
    # Of two NVSHMEMs in a process, one would be started and the other one used.
    loaded = [p for p in _loaded_libraries() if p != os.path.realpath(path)]
    if loaded:
        return (
            f"another NVSHMEM, {loaded[0]}, is loaded in this process already, and "
            f"jax_overlap would use {path}. Take the folder of the first from "
            "LD_LIBRARY_PATH, or import jax_overlap before the library that loads it"
        )
    return ""


def _loaded_libraries() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    return sorted(p for p in paths if Path(p).name.startswith("libnvshmem_host."))


def _why_not_usable(module: ModuleType, folder: Path, path: Path) -> str:
    wheels = _cuda_majors(folder)
    if len(wheels) > 1:
        return (
            "both nvidia-nvshmem-cu12 and nvidia-nvshmem-cu13 are installed in "
            f"{folder}, where one has overwritten the other. Uninstall both. "
            f"{_cure(module.built_cuda)}"
        )
    if wheels and wheels != [module.built_cuda]:
        return (
            f"jax_overlap was built for CUDA {module.built_cuda}, and the NVSHMEM of "
            f"{path} is for CUDA {wheels[0]} (nvidia-nvshmem-cu{wheels[0]}). Uninstall "
            f"that. {_cure(module.built_cuda)}"
        )
    built, running = tuple(module.built_version), tuple(module.runtime_version())
    if running[0] != built[0] or running < built:
        return (
            f"jax_overlap was built for NVSHMEM {_text(built)}, and {path} is "
            f"{_text(running)}: it has to be of the same major version and not older. "
            f"{_cure(module.built_cuda)}"
        )
    if not OLDEST <= running < FIRST_UNTESTED:
        return (
            f"{path} is NVSHMEM {_text(running)}; jax_overlap, built for "
            f"{_text(built)}, was tested with {_text(OLDEST)} and newer, below "
            f"{_text(FIRST_UNTESTED)}. {_cure(module.built_cuda)}"
        )
    return ""


def _cuda_majors(folder: Path) -> list[int]:
    """The CUDA versions of the wheels that own the folder; none if no wheel does."""
    majors = []
    for major in (12, 13):
        try:
            wheel = metadata.distribution(f"nvidia-nvshmem-cu{major}")
        except metadata.PackageNotFoundError:
            continue
        owned = str(wheel.locate_file("nvidia/nvshmem"))
        if os.path.realpath(owned) == os.path.realpath(folder):
            majors.append(major)
    return majors


def _cure(cuda: int | None = None) -> str:
    extras = [
        f"pip install 'jax-overlap[cuda{c}]'" for c in ((cuda,) if cuda else (12, 13))
    ]
    return "What to install: " + " or ".join(extras)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

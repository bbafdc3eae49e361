"""Tensor-parallel Flax layers: `jax_overlap.flax.nnx` and `jax_overlap.flax.linen`.

Neither is imported before it is used, so that `import jax_overlap` works where Flax
is not installed.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_overlap.flax import linen as linen
    from jax_overlap.flax import nnx as nnx

__all__ = ["linen", "nnx"]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])

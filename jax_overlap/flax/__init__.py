"""Tensor parallelism for Flax: `nnx` and `linen` layers, and `dot_general`.

`jax_overlap.flax.nnx` and `jax_overlap.flax.linen` have layers of their own;
`jax_overlap.flax.dot_general` makes those of Flax overlap. None is imported before it
is used, so that `import jax_overlap.flax` works where Flax is not installed.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_overlap.flax import linen as linen
    from jax_overlap.flax import nnx as nnx
    from jax_overlap.flax._dot_general import dot_general as dot_general

__all__ = ["dot_general", "linen", "nnx"]


def __getattr__(name: str):
    if name == "dot_general":
        return importlib.import_module(f"{__name__}._dot_general").dot_general
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])

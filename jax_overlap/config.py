"""Environment variables: all of them, in one table.

Values are checked when they are read; a bad one is a `ValueError` that names the
variable, what it holds and what it may hold.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def _int_from_zero(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _switch(text: str) -> str:
    if text not in ("0", "1", "auto"):
        raise ValueError
    return text


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable: its parser, its default and what it is for.

    Attributes:
      on_gpus: the default there, if it is another.
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    legal: str
    doc: str
    on_gpus: Any = None

    def read(self, on_gpus: bool = False) -> Any:
        """The value now; the default if the variable is unset or empty."""
        default = self.on_gpus if on_gpus and self.on_gpus is not None else self.default
        text = os.environ.get(self.name, "")
        if not text:
            return default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(
                f"{self.name} is {text!r}, but has to be {self.legal}. "
                f"It sets {self.doc} (default: {default})."
            ) from None


WAIT_TIMEOUT_S = Variable(
    "JAX_OVERLAP_WAIT_TIMEOUT_S",
    60.0,
    _positive_float,
    "a positive number of seconds",
    "how long a rank waits for its peers before the call fails; read at import",
)
HEAP_BYTES = Variable(
    "JAX_OVERLAP_HEAP_BYTES",
    256 << 20,
    _positive_int,
    "a positive number of bytes",
    "the size of the symmetric heap of each rank (on CPU a team's); read at import, "
    "on GPUs at the first native op",
    on_gpus=1 << 30,
)
NODE_SIZE = Variable(
    "JAX_OVERLAP_NODE_SIZE",
    None,
    _positive_int,
    "a positive number of ranks",
    "how many consecutive ranks of a team count as one node, instead of those "
    "that share a host; read when a function is lowered",
)

PSUM_MAX_BYTES = Variable(
    "JAX_OVERLAP_PSUM_MAX_BYTES",
    2 << 20,
    _positive_int,
    "a positive number of bytes",
    "the size of a rank's operands above which psum on GPUs is left to NCCL; read when "
    "a function is lowered",
)

BY_PSUM_MAX_BYTES = Variable(
    "JAX_OVERLAP_BY_PSUM_MAX_BYTES",
    2 << 20,
    _int_from_zero,
    "0 or a positive number of bytes",
    "up to which size of what a rank adds, or gathers, fused matmuls on GPUs are a "
    "matmul and a psum, 0 for none; read when a function is lowered",
)
GPU_MATMULS = Variable(
    "JAX_OVERLAP_GPU_MATMULS",
    "0",
    _switch,
    "0, 1 or auto",
    "whether fused matmuls on GPUs are native without implementation='native': 1, or "
    "auto where they are predicted to be faster than with NCCL; 0 until they are "
    "faster in whole models over NVLink; read when a function is lowered",
)
TUNING_DIR = Variable(
    "JAX_OVERLAP_TUNING_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jax_overlap"),
    str,
    "a folder",
    "where the fastest algorithms of matmuls on GPUs are kept, once measured; read at "
    "the first native op",
)

VARIABLES = (
    WAIT_TIMEOUT_S,
    HEAP_BYTES,
    NODE_SIZE,
    PSUM_MAX_BYTES,
    BY_PSUM_MAX_BYTES,
    GPU_MATMULS,
    TUNING_DIR,
)

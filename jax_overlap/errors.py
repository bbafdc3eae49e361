"""Errors of earlier calls, kept until they are acknowledged.

An op that fails while it runs gives its error to its result. JAX drops the error
of a result that nobody reads, so it is kept here as well.
"""

from __future__ import annotations

from jax_overlap import _native


class OverlapError(RuntimeError):
    """An earlier call of an op has failed, and nobody has acknowledged it."""


def last_errors() -> list[str]:
    """The texts of the errors since the last `clear_errors`, oldest first."""
    return [] if _native.ffi is None else _native.ffi.last_errors()


def clear_errors() -> None:
    """Acknowledges all errors so far: they are reported no more."""
    if _native.ffi is not None:
        _native.ffi.clear_errors()


def raise_unacknowledged() -> None:
    """Raises `OverlapError` if there are errors that nobody has acknowledged."""
    if texts := last_errors():
        raise OverlapError(
            f"An earlier call has failed: {texts[0]} ({len(texts)} error(s), see "
            "jax_overlap.last_errors(); jax_overlap.clear_errors() acknowledges them.)"
        )

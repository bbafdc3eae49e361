"""Setting up what native ops need, before the first of them does."""

from __future__ import annotations

from jax_overlap import _compat, _cuda, _heaps, _native


def init() -> None:
    """Sets up now what the first native op on GPUs would set up: optional.

    In a program of several processes it is collective: all have to call it, or to come
    to their first native op, within `JAX_OVERLAP_WAIT_TIMEOUT_S`. It costs the memory
    of `JAX_OVERLAP_HEAP_BYTES` on each GPU, and tries that each GPU can write to the
    others' memory. Programs that are loaded rather than lowered (serialised
    executables) need it before they run. On other platforms it does nothing.

    Whether ops are native is then decided, alike in all processes: `jax_overlap.info()`
    says so under "gpu", and why not, if they are not.

    Raises:
      RuntimeError: other processes did not come in time; it names them.

    Example:
      >>> import jax_overlap
      >>> jax_overlap.init()
    """
    _native.check_process()
    if _cuda.ffi is not None and _compat.lowering_platform() == "cuda":
        _heaps.start()

"""`overlap(fn)`: an existing function, with our ops in place of its collectives.

    fn --trace--> jaxpr --_rewrite_walk.py--> jaxpr with our ops --evaluate--> results
                               |
          each jaxpr inside: _rewrite_edit.py, by the decisions of
          _rewrite_rules.py (alone) and _rewrite_fusion.py (with matmuls)

`report` lists the decisions; it is the same code that makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, cast

from jax_overlap import _compat
from jax_overlap._rewrite_edit import Context
from jax_overlap._rewrite_rules import Rewrite as Rewrite
from jax_overlap._rewrite_walk import Rewriter, Traced

_rewriter = Rewriter()


class Overlapped(Protocol):
    """What `overlap` makes of a function."""

    def __call__(self, *args, **kwargs) -> Any:
        """What the function does, by our ops."""
        ...

    def report(self, *args, **kwargs) -> list[Rewrite]:
        """What becomes of each collective, in program order; runs nothing."""
        ...


def overlap(fn: Callable) -> Overlapped:
    """Makes a function of `fn` that does the same with the ops of this library.

    In place of `psum`, `psum_scatter`, `all_gather` and `all_to_all` over axes of
    `jax.shard_map` come the ops of these names; where a matmul feeds a sum or takes a
    gathered left operand, and both are in one function for JAX (no `jax.jit` between),
    `matmul_reduce_scatter`, `matmul_all_reduce` and `all_gather_matmul`, of several
    weights at once. The psums of a pytree become one. All this holds inside of `jit`,
    `scan`, `while_loop`, `cond`, `checkpoint`, `custom_jvp`, `custom_vjp` and
    `shard_map`, too. Whatever else there is stays as it is, as does what an op cannot
    take the place of with exactly the same types; a dtype that an op has no native
    code for goes to the op, which leaves it to `jax.lax`.

    `overlap(jax.grad(fn))` sees the whole program. `jax.grad(overlap(fn))` sees the
    forward pass: the transposes of ops, and of casts to varying, are ops, but sums that
    `jax.shard_map` itself adds under `check_vma=False` stay, and matmuls of the
    backward pass are fused only as the transposes of fused ones. Under a policy of
    `jax.checkpoint` that treats matmuls on their own, such as `dots_saveable`, they are
    not fused with collectives, as other values would be saved then.

    Args:
      fn: a function of pytrees that contains or is called inside `jax.shard_map`, pure
        as for `jax.jit`. Arrays in its arguments are traced; Python numbers and other
        objects reach `fn` as they are. As with `jax.jit`, state that it changes in
        place, such as that of an nnx module, does not come out: split and merge the
        module, or return the state.

    Returns:
      A function with the signature of `fn`. It traces `fn` in every call, so put
      `jax.jit` around it. Its `report(*args, **kwargs)` lists a `Rewrite` for each
      collective by tracing alone: arrays may be `jax.ShapeDtypeStruct`s. Rules of
      custom derivatives are in it where `fn` itself differentiates.

    Raises:
      TypeError: `fn` is no function.
      OverlapError: an earlier call of an op has failed and nobody acknowledged it.
      Otherwise what `fn` raises.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "tp"), mesh=mesh,
      ...                       in_specs=P("tp"), out_specs=P())
      >>> x = jax.numpy.ones(jax.device_count())
      >>> jax.jit(jax_overlap.overlap(total))(x).item() == jax.device_count()
      True
      >>> [row.became for row in jax_overlap.overlap(total).report(x)]
      ['psum']
    """
    if not callable(fn):
        raise TypeError(f"overlap: expected a function, but got {type(fn).__name__}.")

    @wraps(fn)
    def overlapped(*args, **kwargs):
        return _rewriter.call(fn, args, kwargs)

    def report(*args, **kwargs):
        context = Context(_compat.check_vma())
        return list(_rewriter.jaxpr(Traced(fn, args, kwargs).jaxpr, context)[1])

    setattr(overlapped, "report", report)  # noqa: B010  a function has no such field
    return cast(Overlapped, overlapped)

"""What each op of a function will do, before it runs."""

from __future__ import annotations

import jax
from jax.extend import core

from jax_overlap import _compat
from jax_overlap._plan import Plan
from jax_overlap.ops._collective import plan_call, planners


def explain(fn, *args, platform: str | None = None, **kwargs) -> list[Plan]:
    """Lists what each op that `fn(*args)` calls will do, and why.

    The function is traced, not run: arguments may be `jax.ShapeDtypeStruct`s. On GPUs
    what native ops need is set up for it (`jax_overlap.init`), by all processes.

    Args:
      fn: a function that contains or is called inside `jax.shard_map`.
      *args: its arguments, arrays or shapes.
      platform: such as "cpu" or "cuda"; default: that of `jax.devices()`.
      **kwargs: its keyword arguments.

    Returns:
      A `Plan` for each call, in program order; `str(plan)` is a line of text.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x: jax_overlap.psum(x, "tp"), mesh=mesh,
      ...                   in_specs=P("tp"), out_specs=P())
      >>> [plan.op for plan in jax_overlap.explain(f, jax.numpy.ones(64))]
      ['psum']
    """
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
    platform = platform or _compat.lowering_platform()
    return list(_plans(jaxpr.jaxpr, None, frozenset(), platform))


def _plans(jaxpr, mesh, manual, platform):
    for eqn in jaxpr.eqns:
        inner_mesh, inner_manual = mesh, manual
        if eqn.primitive.name == "shard_map":
            inner_mesh = _compat.concrete_mesh(eqn.params["mesh"])
            inner_manual = manual | eqn.params["newly_manual_axes"]
        if eqn.primitive in planners:
            assert mesh is not None  # no op is traced outside of shard_map
            avals = [v.aval for v in eqn.invars]
            yield plan_call(
                eqn.primitive, avals, eqn.params, mesh, manual, (platform,)
            )[1]
        for sub in core.jaxprs_in_params(eqn.params):
            yield from _plans(sub, inner_mesh, inner_manual, platform)

"""All-reduce: the sum of the operands over mesh axes, on every rank.

Within a node, with the vector in as many slices as ranks (two_shot):

    rank 0  | sum slice 0 of all | send it to 1, 2, 3 |
    rank 1  | sum slice 1 of all | send it to 0, 2, 3 |   reduce-scatter, then
    rank 2  | sum slice 2 of all | send it to 0, 1, 3 |   all-gather
    rank 3  | sum slice 3 of all | send it to 0, 1, 2 |

Small vectors go whole to every rank (one_shot), and on GPUs all of two ranks. Across
nodes each rank exchanges its slice of the node's sum with the same rank of node XOR 1,
2, 4, ... (nvrar, https://arxiv.org/abs/2511.09557). ffi/ops/psum.h has the algorithms.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_overlap import _compat, _native
from jax_overlap._plan import PSUM_ALGORITHMS, choose_psum_algorithm, make_plan
from jax_overlap.ops import _collective


def reference(*xs, axes, axis_index_groups):
    """The same by `jax.lax`."""
    return [lax.psum(x, axes, axis_index_groups=axis_index_groups) for x in xs]


def psum(
    x,
    axis_name,
    *,
    axis_index_groups=None,
    implementation: str | None = None,
    algorithm: str | None = None,
):
    """Sums `x` over the mesh axes `axis_name`: a drop-in for `jax.lax.psum`.

    Same values, gradients and sharding types as `jax.lax.psum`. Half types are
    summed in float32 and rounded once. The order of the sum depends on ranks only:
    all ranks get the same bits, in every run.

    Args:
      x: array, Python scalar, or pytree of them, of any shape. Native dtypes are
        float32, bfloat16, float16, float64, int32 and int8; others lower to
        `jax.lax`. Leaves of one dtype share one call. Booleans count as int32.
      axis_name: name of a mesh axis, or a tuple of names.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`:
        sums are over each group. Needs `check_vma=False`.
      implementation: None chooses and falls back to `jax.lax` (`jax_overlap.explain`
        says why, `jax_overlap.info` counts it); "native" raises instead;
        "reference" is `jax.lax`.
      algorithm: None chooses; "one_shot", "two_shot" or "nvrar" forces one.

    Returns:
      Like `x`. Under `check_vma=True` the result no longer varies over `axis_name`.

    Raises:
      NameError: `axis_name` is not bound; call it inside `jax.shard_map`.
      TypeError: `implementation="native"` and a dtype that is not native.
      ValueError: an unknown `implementation` or `algorithm`, an axis named twice, or
        groups that do not hold each index along the axis once.
      NotImplementedError: `implementation="native"` where it is not possible.
      OverlapError: an earlier call has failed and nobody acknowledged it.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x: jax_overlap.psum(x, "tp"), mesh=mesh,
      ...                   in_specs=P("tp"), out_specs=P())
      >>> f(jax.numpy.ones(jax.device_count())).item() == jax.device_count()
      True
    """
    _collective.check_options("psum", implementation, algorithm, PSUM_ALGORITHMS)
    axes = _collective.canonical_axes("psum", axis_name, x)
    axis_index_groups = _collective.checked_groups("psum", axis_index_groups, axes)
    leaves, treedef = jax.tree.flatten(x)
    sums = list(leaves)
    native: dict[np.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _left_to_lax(leaf, axes, axis_index_groups):
            sums[i] = lax.psum(leaf, axes, axis_index_groups=axis_index_groups)
        else:
            if leaf.dtype == np.bool_:
                sums[i] = lax.convert_element_type(leaf, np.int32)
            _collective.check_native_dtype("psum", implementation, sums[i].dtype)
            native.setdefault(sums[i].dtype, []).append(i)
    params = {
        "axis_index_groups": axis_index_groups,
        "implementation": implementation,
        "algorithm": algorithm,
    }
    for indices in native.values():
        outs = bind([sums[i] for i in indices], axes, _compat.check_vma(), **params)
        for i, out in zip(indices, outs, strict=True):
            sums[i] = out
    return jax.tree.unflatten(treedef, sums)


def _left_to_lax(leaf, axes, axis_index_groups) -> bool:
    """Whether `lax.psum` does, or refuses, something that is not an all-reduce."""
    return (
        not isinstance(leaf, Tracer)  # a constant: times the axis size
        or not axes
        or any(isinstance(a, int) for a in axes)
        or bool(_compat.unreduced(leaf) & set(axes))
        or (axis_index_groups is not None and _compat.check_vma())
    )


def bind(xs, axes, invariant, **params):
    """Binds the primitive: the sums of arrays of one dtype."""
    if invariant:  # types speak of the mesh only, so an axis of vmap goes by itself
        axes, others = _collective.split_axes(axes)
        xs = bind(xs, others, False, **params)
        xs = [_collective.make_varying(x, axes) for x in xs]
    if not axes:
        return xs
    return psum_p.bind(*xs, axes=axes, invariant=invariant, **params)


# `invariant`: traced under check_vma=True, where the result is typed as equal on
# all ranks. It is a parameter, not read from the configuration, since rules such
# as the transpose run when that has changed.
psum_p = core.Primitive("jax_overlap_psum")
psum_p.multiple_results = True
psum_p.def_impl(partial(_compat.apply_primitive, psum_p))


# ---------------------------------------------------------------- shape rule
@psum_p.def_effectful_abstract_eval
def _abstract_eval(*avals, axes, invariant, **_):
    _compat.check_axis_names(axes, "jax_overlap.psum")
    effects = {_compat.NamedAxisEffect(axis) for axis in axes}
    return [_out_type(a, axes, invariant) for a in avals], effects


def _out_type(aval, axes, invariant):
    if not invariant:
        return aval.update(weak_type=False)
    if not aval.mat.varying & set(axes):
        raise ValueError(
            f"psum: the operand has to vary over {axes}, but varies over "
            f"{sorted(map(str, aval.mat.varying))}. Mark it by "
            "jax.lax.pcast(x, axes, to='varying')."
        )
    return aval.update(
        manual_axis_type=aval.mat.update(varying=aval.mat.varying - set(axes))
    )


# ------------------------------------------------------------------ lowering
def _plan(avals, team, situation, *, axes, implementation, algorithm, **_):
    choose = partial(
        choose_psum_algorithm,
        team=team,
        situation=situation,
        implementation=implementation,
        forced=algorithm,
    )
    return make_plan("psum", axes, avals, team, situation, implementation, choose)


def _lower(ctx, *xs, **params):
    team, plan = _collective.plan_lowering(ctx, psum_p, params)
    axes = params["axes"]
    if plan.implementation == "identity":
        return xs
    if plan.implementation == "lax":
        groups, invariant = params["axis_index_groups"], params["invariant"]
        return _collective.lower_to_lax(
            ctx, reference, xs, invariant, axes=axes, axis_index_groups=groups
        )
    assert plan.algorithm is not None  # as every native plan of psum has one
    algorithm = PSUM_ALGORITHMS[plan.algorithm]
    return _collective.lower_to_handler(
        ctx, "jax_overlap.psum", team, axes, xs, algorithm=algorithm
    )


_collective.planners[psum_p] = _plan
mlir.register_lowering(psum_p, _lower)
mlir.register_lowering(psum_p, _lower, platform="cpu")
_collective.lower_on_gpu(psum_p, _lower)


# ----------------------------------------------------------- differentiation
def _jvp(primals, tangents, *, axes, invariant, **params):
    outs = psum_p.bind(*primals, axes=axes, invariant=invariant, **params)
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    out_tangents = [ad.Zero(_compat.tangent_type(out)) for out in outs]
    if live:
        sums = bind([tangents[i] for i in live], axes, invariant, **params)
        for i, t in zip(live, sums, strict=True):
            out_tangents[i] = t
    return outs, out_tangents


def _transpose(cts, *xs, axes, invariant, **params):
    """An invariant result has one cotangent, which every rank takes as its own.

    Without varying types the cotangents of the ranks are separate, as in
    `lax.psum`: the operand's is their sum.
    """
    live = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    out = [ad.Zero(x.aval.to_ct_aval()) for x in xs]
    if invariant:
        sums = [lax.pcast(cts[i], axes, to="varying") for i in live]
    elif not live or _native.mutant("transpose_without_reduction"):
        sums = [cts[i] for i in live]
    else:
        sums = bind([cts[i] for i in live], axes, invariant, **params)
    for i, ct in zip(live, sums, strict=True):
        out[i] = ct
    return out


ad.primitive_jvps[psum_p] = _jvp
ad.primitive_transposes[psum_p] = _transpose


# ------------------------------------------------------------------ batching
def _batch(axis_data, xs, dims, *, axes, axis_index_groups, **params):
    if axis_data.name not in axes:  # element-wise: a further dimension is as good
        outs = psum_p.bind(
            *xs, axes=axes, axis_index_groups=axis_index_groups, **params
        )
        return outs, dims
    if axis_index_groups is not None:
        raise NotImplementedError(
            "psum: axis_index_groups over an axis of jax.vmap are not supported."
        )
    # The axis of the vmap is summed here, the other axes by the collective.
    xs = [
        lax.reduce_sum(x, (d,)) if d is not None else lax.mul(x, _like(x, axis_data))
        for x, d in zip(xs, dims, strict=True)
    ]
    rest = tuple(a for a in axes if a != axis_data.name)
    outs = bind(xs, rest, axis_index_groups=None, **params)
    return outs, [None] * len(outs)


def _like(x, axis_data):
    return lax.full_like(x, axis_data.size)


batching.fancy_primitive_batchers[psum_p] = _batch

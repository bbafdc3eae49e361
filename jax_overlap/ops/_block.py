"""What psum_scatter, all_gather and all_to_all share: one operand, cut in parts.

An array cut in P parts along a dimension is [outer, P, inner] in memory; that is
how their handlers see it (ffi/ops/block_op.h).
"""

from __future__ import annotations

import math
from functools import partial

from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_overlap import _compat
from jax_overlap._plan import make_plan
from jax_overlap.ops import _collective

# On the CPU every rank reads and writes its peers' operands in place.
_ALGORITHM = ("direct", "peers' operands are addressed in place")


def left_to_lax(axes, *operands) -> bool:
    """Whether `jax.lax` has to do, or to refuse, what is not between devices."""
    return (
        not axes
        or bool(_collective.split_axes(axes)[1])
        or any(_compat.unreduced(x) & set(axes) for x in operands)
    )


def checked_groups(op: str, groups, axes):
    """`axis_index_groups` as tuples, of one size."""
    groups = _collective.checked_groups(op, groups, axes)
    sizes = sorted({len(group) for group in groups or ()})
    if len(sizes) > 1:  # jax.lax finds out, if at all, when it is lowered
        raise ValueError(
            f"{op}: axis_index_groups have to be of one size, but have {sizes}."
        )
    return groups


def group_size(axes, axis_index_groups) -> int:
    """The ranks of a group; 1 if there are no axes."""
    if axis_index_groups is not None:
        return len(axis_index_groups[0])
    return lax.axis_size(axes) if axes else 1


def from_front(axis: int, ndim: int) -> int:
    """`axis` counted from the front; outside of 0 .. ndim-1 if there is none such."""
    return axis + ndim if axis < 0 else axis


def fits(size: int, ranks: int, tiled: bool) -> bool:
    """Whether a dimension of this size can be cut in a part for each rank."""
    return size % ranks == 0 if tiled else size == ranks


def bind(
    primitive, x, axes, *, dimension, axis_index_groups, axis_size, implementation
):
    """Binds a primitive made by `make_primitive`."""
    return primitive.bind(
        _collective.make_varying(x, axes),
        axes=axes,
        dimension=dimension,
        axis_index_groups=axis_index_groups,
        axis_size=axis_size,
        implementation=implementation,
    )


def make_primitive(op: str, reference, out_size):
    """The primitive of an op, with its rules but for the transpose.

    Args:
      op: the public name.
      reference: (x, axes, dimension, axis_index_groups) -> result, by `jax.lax`.
      out_size: (size of the dimension, axis size) -> that of the result.
    """
    primitive = core.Primitive(f"jax_overlap_{op}")
    primitive.def_impl(partial(_compat.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(partial(_abstract_eval, op, out_size))
    _collective.planners[primitive] = partial(_plan, op)
    lower = partial(_lower, op, primitive, reference)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cpu")
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    batching.fancy_primitive_batchers[primitive] = partial(_batch, op, primitive)
    return primitive


def define_transpose(primitive, transposed) -> None:
    """Sets the transpose: another primitive of this kind, on the same dimension."""

    def rule(ct, x, **params):
        if type(ct) is ad.Zero:
            return (ad.Zero(x.aval.to_ct_aval()),)
        return (transposed.bind(ct, **params),)

    ad.primitive_transposes[primitive] = rule


def _abstract_eval(op, out_size, aval, *, axes, dimension, axis_size, **_):
    _compat.check_axis_names(axes, f"jax_overlap.{op}")
    if _compat.check_vma() and not set(axes) <= aval.mat.varying:
        raise ValueError(
            f"{op}: the operand has to vary over {axes}, but varies over "
            f"{sorted(map(str, aval.mat.varying))}. Mark it by "
            "jax.lax.pcast(x, axes, to='varying')."
        )
    shape = list(aval.shape)
    shape[dimension] = out_size(shape[dimension], axis_size)
    effects = {_compat.NamedAxisEffect(axis) for axis in axes}
    return aval.update(shape=tuple(shape), weak_type=False), effects


def _plan(op, avals, team, situation, *, axes, implementation, **_):
    return make_plan(
        op, axes, avals, team, situation, implementation, lambda nbytes: _ALGORITHM
    )


def _lower(op, primitive, reference, ctx, x, **params):
    team, plan = _collective.plan_lowering(ctx, primitive, params)
    axes, dimension = params["axes"], params["dimension"]
    if plan.implementation == "identity" and team.ranks == 1:
        return [x]
    if plan.implementation == "identity":  # no elements, and another shape
        (out,) = ctx.avals_out
        zeros = mlir.lower_fun(
            lambda _: lax.full(out.shape, 0, out.dtype), multiple_results=False
        )
        return zeros(ctx, x)
    if plan.implementation == "lax":
        return _collective.lower_to_lax(
            ctx,
            lambda x: [reference(x, axes, dimension, params["axis_index_groups"])],
            [x],
        )
    shape, out_shape = ctx.avals_in[0].shape, ctx.avals_out[0].shape
    part = min(shape[dimension], out_shape[dimension])  # of scatter and gather
    if shape == out_shape:
        part //= team.ranks
    outer = math.prod(shape[:dimension])
    inner = part * math.prod(shape[dimension + 1 :])
    return _collective.lower_to_handler(
        ctx, f"jax_overlap.{op}", team, axes, [x], outer=outer, inner=inner
    )


def _jvp(primitive, primals, tangents, **params):
    out = primitive.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return out, ad.Zero(_compat.tangent_type(out))
    tangent = _collective.make_varying(tangents[0], params["axes"])
    return out, primitive.bind(tangent, **params)


def _batch(op, primitive, axis_data, xs, dims, *, axes, dimension, **params):
    (x,), (d,) = xs, dims
    _collective.check_batch_axis(op, axis_data, axes)
    shifted = dimension + (d is not None and d <= dimension)
    return primitive.bind(x, axes=axes, dimension=shifted, **params), d

"""What all collective ops share: options, axes, and the way into JAX's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import get_abstract_mesh

from jax_overlap import _compat, _cuda, _heaps, _native, errors
from jax_overlap._plan import (
    NATIVE_DTYPES,
    Plan,
    Situation,
    lowered,
    why_never_native,
)
from jax_overlap._region import names
from jax_overlap.team import Team, make_team

IMPLEMENTATIONS = ("reference", "native")


def check_options(op: str, implementation, algorithm, algorithms) -> None:
    """Refuses unknown options, forked processes and unacknowledged errors."""
    _native.check_process()
    errors.raise_unacknowledged()
    for option, value, legal in (
        ("implementation", implementation, IMPLEMENTATIONS),
        ("algorithm", algorithm, tuple(algorithms)),
    ):
        if value is not None and value not in legal:
            raise ValueError(
                f"{op}: {option}={value!r}, but has to be None or one of {legal}."
            )


def check_native_dtype(op: str, implementation, dtype) -> None:
    """Refuses a dtype that `implementation="native"` cannot serve."""
    if implementation == "native" and str(dtype) not in NATIVE_DTYPES:
        raise TypeError(
            f"{op}: implementation='native' does not take dtype {dtype}, only "
            f"{', '.join(NATIVE_DTYPES)}. implementation=None lowers to jax.lax."
        )


def canonical_axes(op: str, axis_name, x=()) -> tuple:
    """`axis_name` as a tuple, as `jax.lax` reads it; x: the operands, for errors."""
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if len(set(axes)) < len(axes):  # XLA aborts the process
        raise ValueError(f"{op}: axis_name={axis_name!r} names an axis twice.")
    for axis in axes:
        if not isinstance(axis, int):  # which is a dimension, for lax.psum
            _check_bound(op, axis, x)
    return _compat.without_unit_axes(axes)


def _check_bound(op: str, axis, x) -> None:
    """Refuses an axis that no `shard_map` or `vmap` has bound."""
    try:
        lax.axis_size(axis)
    except NameError as error:
        from jax_overlap import sharded  # which calls the ops

        whole = "the layers of jax_overlap.flax, or jax_overlap.overlap"
        if hasattr(sharded, op):
            whole = f"jax_overlap.sharded.{op}, {whole}"
        raise NameError(
            f"{error}\njax_overlap.{op} works on the arrays of one rank of {axis!r}. "
            f"Call it inside jax.shard_map over {axis!r} (or jax.vmap with axis_name="
            f"{axis!r}).{_where_it_is(axis, x)} For whole arrays, outside of "
            f"jax.shard_map, take {whole}."
        ) from None


def _where_it_is(axis, x) -> str:
    """What to say of an axis of a mesh that is set, or on which operands lie."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(x)]
    cut = [t for t in types if any(axis in names(e) for e in t.sharding.spec)]
    if cut:
        return (
            f" An operand is of type {cut[0]}, sharded over {axis!r}, but only "
            "jax.shard_map (not jax.jit) binds the axis."
        )
    meshes = [get_abstract_mesh(), *(t.sharding.mesh for t in types)]
    if any(axis in mesh.axis_names for mesh in meshes):
        return f" The mesh has {axis!r}, but only jax.shard_map binds it."
    if bound := get_abstract_mesh().manual_axes:
        return f" Bound here are {sorted(map(str, bound))}."
    return ""


def checked_groups(op: str, groups, axes: tuple):
    """`axis_index_groups` as tuples, each index along `axes` once."""
    if groups is None:
        return None
    groups = tuple(tuple(map(int, group)) for group in groups)
    size = lax.axis_size(axes) if axes else 1
    if not all(groups) or sorted(i for g in groups for i in g) != list(range(size)):
        raise ValueError(
            f"{op}: axis_index_groups has to hold each index along {axes}, 0 to "
            f"{size - 1}, once, in groups that are not empty, but is {groups}."
        )
    return groups


def split_axes(axes: tuple) -> tuple[tuple, tuple]:
    """(axes of the mesh, others), which are those of `jax.vmap`."""
    manual = get_abstract_mesh().manual_axes
    return (
        tuple(a for a in axes if a in manual),
        tuple(a for a in axes if a not in manual),
    )


def check_batch_axis(op: str, axis_data, axes) -> None:
    """Refuses to be batched over an axis of the collective."""
    if axis_data.name in axes:
        raise NotImplementedError(
            f"{op}: traced over the mesh axes {axes}, but batched over one of them."
        )


def make_varying(x, axes: tuple):
    """Marks `x` as varying over all of `axes`, as `jax.lax` collectives do."""
    missing = tuple(a for a in axes if a not in _compat.varying(x))
    if missing and _compat.check_vma() and _compat.auto_pcast():
        return lax.pcast(x, missing, to="varying")
    return x


# The plan of each primitive: (avals, team, situation, **parameters) -> Plan. The
# lowering acts on it and `jax_overlap.explain` shows it.
planners: dict[Primitive, Callable[..., Plan]] = {}


# Those that can be native on GPUs, and the dtypes that only GPUs take.
_on_gpu: dict[Primitive, tuple[str, ...]] = {}
_FOR_EXPORT = (
    "an exported program may run on other devices than it was lowered for, and on GPUs "
    "these are attributes of the custom call"
)


def plan_call(
    primitive, avals, params: dict, mesh, manual_axes, platforms, for_export=False
) -> tuple[Team, Plan]:
    """The team and the plan of a call with these operands, at this place."""
    situation = Situation(
        platforms,
        frozenset(mesh.axis_names),
        manual_axes,
        jax.process_count(),
        primitive in _on_gpu,
        _on_gpu.get(primitive, ()),
        _compat.capability(mesh),
    )
    never = why_never_native(avals[0].dtype, situation, params["implementation"])
    reach = None
    if situation.on_gpu and not never:  # what follows is work for all processes
        why = _FOR_EXPORT if for_export else _heaps.why_not(mesh)
        situation = dataclasses.replace(situation, why_no_gpu=why)
        reach = None if why else _heaps.reach(mesh)
    team = make_team(mesh, params["axes"], params["axis_index_groups"], reach)
    return team, planners[primitive](avals, team, situation, **params)


def plan_lowering(ctx, primitive, params: dict) -> tuple[Team, Plan]:
    """The same for a call that is lowered; counts the plan."""
    mesh, manual = _compat.manual_mesh(ctx)
    team, plan = plan_call(
        primitive,
        ctx.avals_in,
        params,
        mesh,
        manual,
        _compat.platforms(ctx),
        _compat.for_export(ctx),
    )
    count_or_refuse(plan, params["implementation"])
    return team, plan


def lower_on_gpu(primitive, rule, dtypes: tuple[str, ...] = ()) -> None:
    """Registers a lowering for GPUs, if this installation has what it takes.

    `dtypes` are those that it takes there and not on CPU.
    """
    _on_gpu[primitive] = dtypes
    if _cuda.ffi is not None:
        mlir.register_lowering(primitive, rule, platform="cuda")
        _compat.lower_for_devices(primitive)


def lower_to_lax(ctx, reference, xs, invariant: bool | None = None, **params):
    """Lowers to `reference`, traced with `check_vma` as the op was."""
    rule = mlir.lower_fun(reference, multiple_results=True)
    if invariant is None:
        return rule(ctx, *xs, **params)
    with _compat.set_check_vma(invariant):
        return rule(ctx, *xs, **params)


def lower_to_handler(ctx, target: str, team: Team, axes, xs, **attributes):
    """Lowers to an FFI call with the attributes that all handlers have, and its own.

    A handler has to know which rank it is: on CPU the first operand says that, on GPUs
    it knows its device, and an attribute has the devices of the mesh.
    """
    assert team.groups is not None  # or the plan would not be native
    attributes |= {
        "abi": _native.ABI,
        "axes": str(axes),
        "groups": team.groups.reshape(-1),
        "group_size": team.ranks,
        "node_size": team.node_size,
    }
    if _compat.platforms(ctx) == ("cuda",):
        mesh, _ = _compat.manual_mesh(ctx)
        devices = _compat.mesh_devices(mesh)
        assert devices is not None  # or the plan would not be native
        attributes |= {
            "devices": np.array([d.id for d in devices], np.int64),
            "puts": int(_puts(team)),
            "dtype": str(ctx.avals_in[0].dtype),
            "counts": np.array([aval.size for aval in ctx.avals_in], np.int64),
        }
    else:
        device, device_aval = device_operand(ctx)
        ctx = ctx.replace(avals_in=[device_aval, *ctx.avals_in])
        xs = [device, *xs]
    attributes = {
        name: np.int64(value) if isinstance(value, int) else value
        for name, value in attributes.items()
    }
    return jax.ffi.ffi_lowering(target)(ctx, *xs, **attributes)


def _puts(team: Team) -> bool:
    """Whether ranks of other nodes are put to; in tests also where stores do reach."""
    return not team.reaches_all or (
        team.nodes > 1 and _native.test_switch("PUT_ACROSS_NODES")
    )


def count_or_refuse(plan: Plan, implementation) -> None:
    """Counts a plan that is lowered; refuses a fallback that was not to be."""
    lowered.add(plan)
    if implementation == "native" and plan.implementation == "lax":
        raise NotImplementedError(
            f"{plan.op}: implementation='native' is not possible here: {plan.reason}. "
            "implementation=None lowers to jax.lax."
        )


def device_operand(ctx):
    """(value, aval) of the logical id of the device, the first operand on CPU.

    A handler cannot tell by itself which rank it is: the device ordinal that XLA
    gives it is not the position in the mesh.
    """
    aval = core.ShapedArray((), jnp.uint32)
    return _compat.partition_id(), aval

"""Global arrays: where their shards lie, and the `shard_map` that opens them.

Where the shards lie is a list of *entries*, for each dimension the mesh axes that cut
it, major first: what `PartitionSpec` says, in one form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from jax_overlap import _compat

Names = tuple[Hashable, ...]
Entries = list[Names]

# The end of errors: moving data is left to those who want it.
RESHARD = "Use jax.sharding.reshard where you want to pay for another sharding."


def names(entry: Any) -> Names:
    """The mesh axes of one entry of a `PartitionSpec`."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def entries_of(spec: Any, ndim: int) -> Entries:
    """The entries of a spec, one for each of `ndim` dimensions."""
    entries = [names(entry) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def entry_of(names: Sequence[Hashable]) -> Any:
    """The entry of a `PartitionSpec` that has these mesh axes."""
    return tuple(names) if len(names) > 1 else (names[0] if names else None)


def spec_of(entries: Sequence[Names]) -> P:
    """The `PartitionSpec` of entries."""
    return P(*map(entry_of, entries))


def bound_size(axis: Hashable) -> int | None:
    """The size of the axis of a `shard_map` or a `vmap` around this, else None."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def mesh_of(*arrays: Any) -> Any:
    """The mesh that is set, else that on which the arrays lie; it may be empty."""
    meshes = [get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def ranks(mesh: Any, entry: Names) -> int:
    """The parts in which an entry cuts a dimension."""
    return math.prod(mesh.shape[a] for a in entry)


def axes_of_type(mesh: Any, kind: AxisType) -> frozenset:
    """The axes of a mesh that are Auto, or Explicit, here and not taken by vmap."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(a for a, k in pairs if k == kind) - _compat.mapped_mesh_axes()


@dataclasses.dataclass(frozen=True)
class Region:
    """The `shard_map` that a function on global arrays opens.

    Attributes:
      op: the public name, for errors.
      mesh: the mesh, which may be abstract.
      axes: the axes over which the op communicates.
      explicit: the axes of which the types of the arrays tell the sharding.
      told: the Auto axes of which the sharding is known, as a spec tells it.
    """

    op: str
    mesh: Any
    axes: Names
    explicit: frozenset
    told: frozenset

    @classmethod
    def of(cls, op: str, axis_name, mesh, arrays, specs_given: bool) -> Region:
        """The region over `mesh`, or that which the context or the arrays have."""
        axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else axis_name
        axes = axes if isinstance(axes, tuple) else (axes,)
        bound = [a for a in axes if bound_size(a) is not None]
        if bound:
            raise ValueError(
                f"{op}: axis {bound[0]!r} is bound here, by jax.shard_map or jax.vmap, "
                "so the arrays are those of one rank. Call "
                f"jax_overlap.{op.removeprefix('sharded.')}."
            )
        mesh = mesh_of(*arrays) if mesh is None else mesh
        if mesh.empty:
            raise ValueError(
                f"{op}: needs a mesh with the axis {axis_name!r}, but no mesh is set "
                "and the arrays do not lie on one. Wrap the call in `with "
                "jax.set_mesh(mesh):`, or pass mesh=."
            )
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{op}: axis_name {axis!r} is not an axis of the mesh, which has "
                    f"{mesh.axis_names}."
                )
        if (
            not axes
            or len(set(axes)) < len(axes)
            or _compat.mapped_mesh_axes() & {*axes}
        ):
            raise ValueError(
                f"{op}: axis_name has to name axes of the mesh, each once, and none of "
                f"a dimension that is mapped by jax.vmap, but is {axis_name!r}."
            )
        auto = axes_of_type(mesh, AxisType.Auto)
        if not specs_given:  # an axis of size one hides nothing
            auto = frozenset(a for a in auto if mesh.shape[a] == 1)
        explicit = axes_of_type(mesh, AxisType.Explicit)
        return cls(op, mesh, axes, explicit, auto - frozenset(axes))

    def entries(self, name: str, x: Any, spec: P | None) -> Entries:
        """Where x lies, or is cut to lie: its type and `spec` together."""
        typed = [
            tuple(a for a in entry if a in self.explicit)
            for entry in entries_of(jax.typeof(x).sharding.spec, x.ndim)
        ]
        if spec is None:
            return typed
        if len(spec) > x.ndim:
            raise ValueError(
                f"{self.op}: {name}_spec = {spec} has more entries than {name} of "
                f"shape {x.shape} has dimensions."
            )
        told = entries_of(spec, x.ndim)
        for axis in (axis for entry in told for axis in entry):
            if axis not in self.explicit | self.told | frozenset(self.axes):
                raise ValueError(
                    f"{self.op}: {name}_spec = {spec} uses {axis!r}, which is not an "
                    f"axis of the mesh {self.mesh.axis_names} or is manual here."
                )
        return [
            t if set(e) <= set(t) else (*e, *(a for a in t if a not in e))
            for t, e in zip(told, typed, strict=True)
        ]

    def check(self, name: str, shape: Sequence[int], entries: Entries) -> None:
        """Refuses entries with an axis twice, and sizes that cannot be cut so."""
        used = [axis for entry in entries for axis in entry]
        if len(set(used)) < len(used):
            axis = next(a for a in used if used.count(a) > 1)
            raise ValueError(
                f"{self.op}: {name} would be sharded over {axis!r} twice, as "
                f"{spec_of(entries)}. {RESHARD}"
            )
        for d, (n, entry) in enumerate(zip(shape, entries, strict=True)):
            parts = ranks(self.mesh, entry)
            if n % parts:
                raise ValueError(
                    f"{self.op}: dimension {d} of {name} has size {n}, not divisible "
                    f"by the {parts} ranks of {spec_of([entry])}. Pad it to "
                    f"{-(-n // parts) * parts}."
                )

    def sharding(self, entries: Entries) -> NamedSharding:
        """The sharding that types can tell: the part of Explicit axes."""
        return _typed(self.mesh, self.explicit, spec_of(entries))

    def is_mapped(self, implementation: str | None) -> bool:
        """Whether vmap takes an Explicit axis, which cannot be made manual then.

        The ops would lower to `jax.lax` in a region without that axis, but JAX does
        not lower its reduce-scatter there; by `jax.lax` on whole arrays all is right.
        """
        mapped = sorted(map(str, _compat.mapped_mesh_axes()))
        if mapped and implementation == "native":
            raise NotImplementedError(
                f"{self.op}: implementation='native' is not possible under jax.vmap of "
                f"a dimension that is sharded over {mapped}. Give the whole array, "
                "without jax.vmap; implementation=None leaves it to jax.lax."
            )
        return bool(mapped)

    def run(
        self,
        fn: Callable,
        options: dict[str, Any],
        arrays: Sequence[jax.Array],
        entries: Sequence[Entries],
        outs: Sequence[Entries],
    ) -> tuple[jax.Array, ...]:
        """fn(*shards, **options) -> tuple of shards, as a function of global arrays."""
        call = _Call(
            fn,
            tuple(options.items()),
            self.mesh,
            self.explicit,
            self.explicit | self.told | frozenset(self.axes),
            tuple(map(spec_of, entries)),
            tuple(map(spec_of, outs)),
        )
        return _run(call, *arrays)


@dataclasses.dataclass(frozen=True)
class _Call:
    fn: Callable
    options: tuple
    mesh: Any
    explicit: frozenset
    manual: frozenset
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]


# A jit of its own, so that a call outside of jit is one program, compiled once.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(call: _Call, *arrays):
    placed = [_place(call, x, s) for x, s in zip(arrays, call.in_specs, strict=True)]
    return jax.shard_map(
        functools.partial(call.fn, **dict(call.options)),
        mesh=call.mesh,
        in_specs=call.in_specs,
        out_specs=call.out_specs,
        axis_names=call.manual,
    )(*placed)


def _place(call: _Call, x, spec: P):
    """Cuts what is replicated over an Explicit axis, where types have to agree."""
    want = _typed(call.mesh, call.explicit, spec)
    have = entries_of(jax.typeof(x).sharding.spec, x.ndim)
    if not call.explicit or have == entries_of(want.spec, x.ndim):
        return x
    return jax.sharding.reshard(x, want)


def _typed(mesh, explicit: frozenset, spec: P) -> NamedSharding:
    entries = [tuple(a for a in names(e) if a in explicit) for e in spec]
    return NamedSharding(mesh, spec_of(entries))

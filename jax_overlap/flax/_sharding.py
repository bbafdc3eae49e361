"""The mesh axis of a layer, and its parameters: whether they fit, and where they go."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from jax_overlap._region import bound_size as bound_size


def axis_types(mesh: Any) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def known(axis_name: str) -> bool:
    """Whether there is a mesh here, or the axis is bound."""
    return bound_size(axis_name) is not None or not get_abstract_mesh().empty


def axis_size(owner: str, axis_name: str) -> int:
    """The size of the axis: bound here, or in the mesh that is set."""
    if (size := bound_size(axis_name)) is not None:
        return size
    mesh = get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{owner}: needs a mesh with the axis {axis_name!r}, but no mesh is set. "
            f"Wrap the call in `with jax.set_mesh(mesh):`, or call it inside "
            f"jax.shard_map over {axis_name!r}."
        )
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{owner}: axis_name {axis_name!r} is not an axis of the mesh, which has "
            f"{mesh.axis_names}. Pass axis_name= one of these, or set another mesh."
        )
    return mesh.shape[axis_name]


def check_divisible(owner: str, what: str, count: int, axis_name: str) -> None:
    size = axis_size(owner, axis_name)
    if count % size:
        up = -(-count // size) * size
        raise ValueError(
            f"{owner}: {what} = {count} is not divisible by the {size} ranks of axis "
            f"{axis_name!r}. Use {up}, or a mesh whose {axis_name!r} divides {count}."
        )


def check_last(owner: str, x: jax.Array, features: int) -> None:
    """The features of an input, which a wrong (local or global) array gets wrong."""
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{owner}: expected inputs with {features} features in the last "
            f"dimension, got shape {x.shape}."
        )


def check_has_sequence(owner: str, x: jax.Array) -> None:
    """The sequence-parallel form cuts the dimension before the features."""
    if jnp.ndim(x) < 2:
        raise ValueError(
            f"{owner}: sequence_parallel=True needs inputs (..., sequence, features), "
            f"got shape {jnp.shape(x)}. Add a dimension, or pass "
            f"sequence_parallel=False."
        )


def check_sequence(
    owner: str, shape: Sequence[int], ranks: int, axis_names: tuple[str, ...]
) -> None:
    """The sequence of an input has to give each of the ranks an equal part."""
    if (count := shape[-2]) % ranks:
        over = " and ".join(f"{name!r}" for name in axis_names)
        axes = "axis" if len(axis_names) == 1 else "axes"
        up = -(-count // ranks) * ranks
        raise ValueError(
            f"{owner}: sequence_parallel=True cuts dimension {len(shape) - 2} of the "
            f"input of shape {tuple(shape)}, but {count} is not divisible by the "
            f"{ranks} ranks of {axes} {over}. Pad it to {up}, or pass "
            f"sequence_parallel=False."
        )


def check_local(
    owner: str, name: str, value: Any, shape: Sequence[int], spec: P, axis_name: str
) -> None:
    """Inside shard_map a parameter must be this rank's shard of the global shape."""
    if value is None or (size := bound_size(axis_name)) is None:
        return
    want = tuple(
        n // size if a == axis_name else n for n, a in zip(shape, spec, strict=True)
    )
    if value.shape != want:
        raise ValueError(
            f"{owner}: inside shard_map over {axis_name!r} ({size} ranks) {name} must "
            f"be the local shard of shape {want}, got {value.shape}. Pass the "
            f"parameters with their partition specs as in_specs "
            f"(nnx.get_partition_spec or nn.get_partition_spec)."
        )


def local_slice(value: jax.Array, spec: P, axis_name: str) -> jax.Array:
    """This rank's shard of a global value, for parameters made inside shard_map."""
    if axis_name not in tuple(spec):
        return value
    dim = tuple(spec).index(axis_name)
    size = value.shape[dim] // lax.axis_size(axis_name)
    start = lax.axis_index(axis_name) * size
    return lax.dynamic_slice_in_dim(value, start, size, dim)


def cut(value: jax.Array, spec: P, axis_name: str) -> jax.Array:
    """A new parameter, where it belongs: a shard inside shard_map, else on the mesh."""
    if bound_size(axis_name) is not None:
        return local_slice(value, spec, axis_name)
    mesh = get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        return value
    if axis_types(mesh)[axis_name] == AxisType.Explicit:
        return jax.sharding.reshard(value, spec)
    return lax.with_sharding_constraint(value, spec)

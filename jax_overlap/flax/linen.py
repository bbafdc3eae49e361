"""Tensor-parallel layers for Flax linen: the twins of `jax_overlap.flax.nnx`.

Each layer is its plain counterpart with the parameters cut over one mesh axis: same
names, same global shapes, same initial values, so checkpoints go both ways. `init`
and `apply` are called (a) inside `jax.shard_map` over the layer's axis, on local
shards, or (b) under plain `jit` with `jax.set_mesh(mesh)`, on global arrays. `init`
also works without a mesh; it returns `nn.Partitioned` parameters, as layers with
`nn.with_partitioning` do, and `apply` takes them with or without these boxes.

Fields that all layers share, beside those of the plain layers:

- `axis_name`: the mesh axis over which the layer is cut.
- `collectives`: "overlap" for `jax_overlap.psum`, "xla" for `jax.lax.psum`.
- `batch_spec`: in use (b) on a mesh with Auto axes, the PartitionSpec of the
  dimensions before the features, such as `P("data")`: nothing else can tell it there.
  Without it the layer computes the same, by `jax.lax.psum`, and warns. On a mesh with
  Explicit axes the type of the input tells it.

Gradients taken inside `shard_map` need its default `check_vma=True`; with False they
are what `jax.lax.psum` gives there: n times too large on n ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

try:
    import flax.linen as nn
except ImportError as error:
    raise ImportError(
        f"jax_overlap.flax.linen needs Flax, which cannot be imported here ({error}). "
        "Install it: pip install 'jax-overlap[flax]'"
    ) from error

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_overlap.flax import _local, _sharding

__all__ = [
    "ColumnParallelDense",
    "RowParallelDense",
    "TensorParallelAttention",
    "TensorParallelMLP",
]

_lecun_normal = nn.initializers.lecun_normal()
_zeros = nn.initializers.zeros_init()


def _param(
    module: nn.Module,
    name: str,
    init: Callable,
    shape: Sequence[int],
    spec: P,
    split: int,
) -> jax.Array:
    """A parameter of global `shape`, or inside shard_map this rank's shard of it.

    Made whole and then cut, so that the values are those of the plain layer. The
    first `split` dimensions count as inputs.
    """
    axis = module.axis_name
    # `nn.Module.param` has checks of the shape, which would not say what is wrong.
    if module.has_variable("params", name):
        given = nn.meta.unbox(_bare(module.get_variable("params", name)))
        _sharding.check_local(_owner(module), name, given, shape, spec, axis)

    def make(key: jax.Array) -> Any:
        value = _local.flat_init(init, key, shape, split, module.param_dtype)
        if isinstance(value, nn.meta.AxisMetadata):
            boxed = value.replace_boxed(jnp.reshape(_bare(value), shape))
            return boxed  # an initializer with a placement of its own knows better
        value = _sharding.cut(jnp.reshape(value, shape), spec, axis)
        return nn.Partitioned(value, names=tuple(spec))

    # Unboxing there would constrain the value to the mesh, also inside shard_map.
    return _bare(module.param(name, make, unbox=False))

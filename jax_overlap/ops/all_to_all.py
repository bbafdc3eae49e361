"""All-to-all: part j of rank r becomes part r of rank j.

    rank 0  | send part 1 to 1, part 2 to 2, part 3 to 3 |
    rank 1  | send part 2 to 2, part 3 to 3, part 0 to 0 |     4 ranks
    rank 2  | send part 3 to 3, part 0 to 0, part 1 to 1 |
    rank 3  | send part 0 to 0, part 1 to 1, part 2 to 2 |

ffi/ops/all_to_all.h has the algorithm. Where parts are cut along one dimension and
put together along another, XLA transposes before and after.
"""

from __future__ import annotations

import jax
from jax import lax

from jax_overlap.ops import _block, _collective


def reference(x, axes, dimension, axis_index_groups):
    """The same by `jax.lax`."""
    return lax.all_to_all(
        x,
        axes,
        split_axis=dimension,
        concat_axis=dimension,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )


def all_to_all(
    x,
    axis_name,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups=None,
    tiled: bool = False,
    implementation: str | None = None,
):
    """Exchanges parts between all ranks: a drop-in for `jax.lax.all_to_all`.

    Args:
      x: array or pytree of arrays; `split_axis` has to be divisible by the axis size
        (`tiled=True`), or equal to it.
      axis_name: name of a mesh axis, or a tuple of names.
      split_axis: the dimension that is cut, part j for rank j.
      concat_axis: the dimension along which the received parts are put together.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`.
      tiled: whether dimensions stay, divided and multiplied by the axis size; if not,
        `split_axis` goes and `concat_axis` is new.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.

    Returns:
      The parts that were sent to this rank; varies over `axis_name`.

    Raises:
      ValueError: the dimension does not fit the axis size, in the words of `jax.lax`;
        an unknown `implementation`.
      NameError, TypeError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("sp",))
      >>> f = jax.shard_map(
      ...     lambda x: jax_overlap.all_to_all(x, "sp", 1, 0, tiled=True),
      ...     mesh=mesh, in_specs=P("sp"), out_specs=P(None, "sp"))
      >>> n = jax.device_count()
      >>> x = jax.numpy.arange(n * n).reshape(n, n)
      >>> bool((f(x) == x).all())
      True
    """
    _collective.check_options("all_to_all", implementation, None, ())
    axes = _collective.canonical_axes("all_to_all", axis_name, x)
    axis_index_groups = _block.checked_groups("all_to_all", axis_index_groups, axes)
    lax_axes = axes if isinstance(axis_name, list) else axis_name

    def one(leaf):
        leaf = jax.numpy.asarray(leaf)
        size = _block.group_size(axes, axis_index_groups)
        split, concat = (
            _block.from_front(a, leaf.ndim) for a in (split_axis, concat_axis)
        )
        if (
            _block.left_to_lax(axes, leaf)
            or not (0 <= split < leaf.ndim and 0 <= concat < leaf.ndim)
            or not _block.fits(leaf.shape[split], size, tiled)
        ):
            return lax.all_to_all(
                leaf,
                lax_axes,
                split_axis,
                concat_axis,
                axis_index_groups=axis_index_groups,
                tiled=tiled,
            )
        _collective.check_native_dtype("all_to_all", implementation, leaf.dtype)

        def exchange(parts, dimension):
            return _block.bind(
                all_to_all_p,
                parts,
                axes,
                dimension=dimension,
                axis_index_groups=axis_index_groups,
                axis_size=size,
                implementation=implementation,
            )

        if split == concat:
            return exchange(leaf, split)
        # [.., size, part, ..] with the parts first, exchanged, then put in place.
        shape = leaf.shape
        part = shape[split] // size
        parts = leaf.reshape(*shape[:split], size, part, *shape[split + 1 :])
        received = exchange(jax.numpy.moveaxis(parts, split, 0), 0)
        if not tiled:
            return jax.numpy.moveaxis(lax.squeeze(received, (split + 1,)), 0, concat)
        placed = jax.numpy.moveaxis(received, 0, concat)
        shape = placed.shape
        joined = shape[concat] * shape[concat + 1]
        return placed.reshape(*shape[:concat], joined, *shape[concat + 2 :])

    return jax.tree.map(one, x)


all_to_all_p = _block.make_primitive("all_to_all", reference, lambda size, ranks: size)
_block.define_transpose(all_to_all_p, all_to_all_p)

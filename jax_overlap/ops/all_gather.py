"""All-gather: every rank gets the operands of all, side by side.

    rank 0  | send x0 to 1, 2, 3 |
    rank 1  | send x1 to 2, 3, 0 |     4 ranks; each ends with [x0 x1 x2 x3]
    rank 2  | send x2 to 3, 0, 1 |
    rank 3  | send x3 to 0, 1, 2 |

ffi/ops/all_gather.h has the algorithm.
"""

from __future__ import annotations

import jax
from jax import lax

from jax_overlap.ops import _block, _collective
from jax_overlap.ops.psum_scatter import psum_scatter_p


def reference(x, axes, dimension, axis_index_groups):
    """The same by `jax.lax`."""
    return lax.all_gather(
        x, axes, axis=dimension, axis_index_groups=axis_index_groups, tiled=True
    )


def all_gather(
    x,
    axis_name,
    *,
    axis_index_groups=None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    implementation: str | None = None,
):
    """Gathers `x` over the mesh axes: a drop-in for `jax.lax.all_gather`.

    Args:
      x: array or pytree of arrays, of any shape.
      axis_name: name of a mesh axis, or a tuple of names.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`.
      axis: the dimension along which operands are put side by side.
      tiled: whether that is a dimension of `x`, or a new one.
      to: "varying"; the other kinds of result go to `jax.lax`.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.

    Returns:
      Like `x` with the dimension multiplied by, or new of, the axis size; typed as
      varying over `axis_name`.

    Raises:
      ValueError: an unknown `implementation`.
      NameError, TypeError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x: jax_overlap.all_gather(x, "tp", tiled=True),
      ...                   mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
      >>> n = jax.device_count()
      >>> f(jax.numpy.ones(n)).shape == (n * n,)
      True
    """
    _collective.check_options("all_gather", implementation, None, ())
    axes = _collective.canonical_axes("all_gather", axis_name, x)
    axis_index_groups = _block.checked_groups("all_gather", axis_index_groups, axes)
    if implementation == "native" and to != "varying":
        raise NotImplementedError(
            f"all_gather: implementation='native' does not make to={to!r}. "
            "implementation=None leaves it to jax.lax."
        )
    lax_axes = axes if isinstance(axis_name, list) else axis_name

    def one(leaf):
        leaf = jax.numpy.asarray(leaf)
        ndim = leaf.ndim + (not tiled)
        dimension = _block.from_front(axis, ndim)
        if (
            to != "varying"
            or _block.left_to_lax(axes, leaf)
            or not 0 <= dimension < ndim
        ):
            return lax.all_gather(
                leaf,
                lax_axes,
                axis_index_groups=axis_index_groups,
                axis=axis,
                tiled=tiled,
                to=to,
            )
        _collective.check_native_dtype("all_gather", implementation, leaf.dtype)
        return _block.bind(
            all_gather_p,
            leaf if tiled else lax.expand_dims(leaf, (dimension,)),
            axes,
            dimension=dimension,
            axis_index_groups=axis_index_groups,
            axis_size=_block.group_size(axes, axis_index_groups),
            implementation=implementation,
        )

    return jax.tree.map(one, x) if axes else x


all_gather_p = _block.make_primitive(
    "all_gather", reference, lambda size, ranks: size * ranks
)
_block.define_transpose(all_gather_p, psum_scatter_p)
_block.define_transpose(psum_scatter_p, all_gather_p)

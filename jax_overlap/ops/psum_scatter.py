"""Reduce-scatter: rank r gets the r-th part of the operands' sum.

    rank 0  | send parts 1, 2, 3 | add part 0 of all |
    rank 1  | send parts 2, 3, 0 | add part 1 of all |     4 ranks, parts along
    rank 2  | send parts 3, 0, 1 | add part 2 of all |     scatter_dimension
    rank 3  | send parts 0, 1, 2 | add part 3 of all |

ffi/ops/psum_scatter.h has the algorithm.
"""

from __future__ import annotations

import jax
from jax import lax

from jax_overlap.ops import _block, _collective


def reference(x, axes, dimension, axis_index_groups):
    """The same by `jax.lax`."""
    return lax.psum_scatter(
        x,
        axes,
        scatter_dimension=dimension,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )


def psum_scatter(
    x,
    axis_name,
    *,
    scatter_dimension: int = 0,
    axis_index_groups=None,
    tiled: bool = False,
    implementation: str | None = None,
):
    """Sums over the mesh axes and leaves each rank its part: `jax.lax.psum_scatter`.

    Half types are summed in float32 and rounded once, in rank order: the parts are
    bit for bit those of `jax_overlap.psum` with `algorithm="two_shot"`.

    Args:
      x: array or pytree of arrays; `scatter_dimension` has to be divisible by the
        axis size (`tiled=True`), or equal to it.
      axis_name: name of a mesh axis, or a tuple of names.
      scatter_dimension: the dimension that is cut, part r for rank r.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`.
      tiled: whether the dimension stays, divided by the axis size, or goes.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.

    Returns:
      Like `x` with the dimension cut; varies over `axis_name`.

    Raises:
      ValueError: the dimension does not fit the axis size, in the words of `jax.lax`;
        an unknown `implementation`.
      NameError, TypeError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x: jax_overlap.psum_scatter(x, "tp", tiled=True),
      ...                   mesh=mesh, in_specs=P(None, "tp"), out_specs=P("tp"))
      >>> n = jax.device_count()
      >>> f(jax.numpy.ones((n, n))).shape == (n, 1)
      True
    """
    _collective.check_options("psum_scatter", implementation, None, ())
    axes = _collective.canonical_axes("psum_scatter", axis_name, x)
    axis_index_groups = _block.checked_groups("psum_scatter", axis_index_groups, axes)
    lax_axes = axes if isinstance(axis_name, list) else axis_name

    def one(leaf):
        leaf = jax.numpy.asarray(leaf)
        size = _block.group_size(axes, axis_index_groups)
        dimension = _block.from_front(scatter_dimension, leaf.ndim)
        if (
            _block.left_to_lax(axes, leaf)
            or not 0 <= dimension < leaf.ndim
            or not _block.fits(leaf.shape[dimension], size, tiled)
        ):
            return lax.psum_scatter(
                leaf,
                lax_axes,
                scatter_dimension=scatter_dimension,
                axis_index_groups=axis_index_groups,
                tiled=tiled,
            )
        _collective.check_native_dtype("psum_scatter", implementation, leaf.dtype)
        out = _block.bind(
            psum_scatter_p,
            leaf,
            axes,
            dimension=dimension,
            axis_index_groups=axis_index_groups,
            axis_size=size,
            implementation=implementation,
        )
        return out if tiled else lax.squeeze(out, (dimension,))

    return jax.tree.map(one, x) if axes else x


psum_scatter_p = _block.make_primitive(
    "psum_scatter", reference, lambda size, ranks: size // ranks
)

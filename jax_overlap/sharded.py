"""The ops for global arrays, under plain `jax.jit` or outside of it.

`jax_overlap.psum` and the like are called inside `jax.shard_map`, on the arrays of one
rank. The functions here open the `shard_map` themselves: they take whole arrays and
return what one device would compute of them; which device holds which part is what
the op changes.

    matmul_reduce_scatter   x @ w: contracting dimensions cut -> rows cut
    all_gather_matmul       x @ w: rows of x cut, columns of w cut -> columns cut
    matmul_all_reduce       x @ w: contracting dimensions cut -> replicated
    all_to_all              x: one dimension cut -> another one cut

There is no such function for `psum`, `psum_scatter` and `all_gather`: of a whole array
there is nothing to sum over the ranks, and a gathered array is `jax.sharding.reshard`.

The mesh is `mesh=`, else that of `jax.set_mesh`, else that on which the arrays lie.
What is known of its other axes decides how the op runs:

- Explicit axes: the types of the arrays tell where shards lie, and that is kept.
- Auto axes: XLA decides, and tells nobody. `x_spec` (and `w_spec`) say how the arrays
  lie on them. Without these, Auto axes larger than one stay automatic, and the ops
  lower to `jax.lax`, for XLA would gather the operands of a custom call over such axes
  (`jax_overlap.explain` shows it, `jax_overlap.info` counts it).

An operand that is replicated over the op's axis is cut first, which moves nothing. One
that is cut otherwise is refused where types tell it, and moved by XLA where not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_overlap._dot_region import Operands, position, uncut
from jax_overlap._region import Region
from jax_overlap.ops import all_gather_matmul as _all_gather_matmul
from jax_overlap.ops import all_to_all as _all_to_all
from jax_overlap.ops import matmul_all_reduce as _matmul_all_reduce
from jax_overlap.ops import matmul_reduce_scatter as _matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_to_all",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


def matmul_reduce_scatter(
    x,
    w,
    axis_name,
    *,
    scatter_dimension: int = 0,
    dimension_numbers=None,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
    algorithm: str | None = None,
    mesh=None,
    x_spec: P | None = None,
    w_spec: P | None = None,
):
    """`x @ w`, contracted over `axis_name`, with `scatter_dimension` cut over it.

    The row-parallel matmul of sequence parallelism; `jax_overlap.matmul_reduce_scatter`
    has the details of arithmetic and gradients.

    Args:
      x: global array [..., k], with k cut over `axis_name`.
      w: global array [k, n], with k cut alike.
      axis_name: name of a mesh axis, or a tuple of names.
      scatter_dimension: the dimension of `x @ w` to be cut: rows, batch or the last
        one. It may be cut over other axes already; `axis_name` becomes the minor one.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; default: that of the operands.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: as in `jax_overlap.matmul_reduce_scatter`.
      mesh: the mesh, where none is set and the arrays do not lie on one.
      x_spec: how `x` lies on Auto axes of the mesh, such as `P("data", None, "tp")`.
        With it (`P()` if on none) nothing is left automatic. Of Explicit axes the type
        says enough.
      w_spec: the same of `w`, beside `x_spec`; default: cut over `axis_name` only.

    Returns:
      `x @ w`, of the global shape. Its dimensions are sharded as those of `x` and `w`,
      and `scatter_dimension` over `axis_name`, too.

    Raises:
      ValueError: no mesh, or one without the axis; operands that are sharded otherwise,
        or a size that is not divisible by the ranks; `axis_name` is bound, inside of
        `jax.shard_map`.
      TypeError, NotImplementedError, OverlapError: as
        `jax_overlap.matmul_reduce_scatter`.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_overlap import sharded
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> n = 4 * jax.device_count()
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((n, n)), P(None, "tp"))
      ...     w = jax.device_put(jax.numpy.ones((n, 3)), P("tp", None))
      ...     y = jax.jit(sharded.matmul_reduce_scatter, static_argnums=2)(x, w, "tp")
      >>> y.shape == (n, 3), y.sharding.spec == P("tp", None)
      (True, True)
    """
    op = "sharded.matmul_reduce_scatter"
    operands = Operands(op, x, (w,), axis_name, mesh, x_spec, w_spec, dimension_numbers)
    axes = operands.region.axes
    out = operands.contract()
    d = position(op, "scatter_dimension", scatter_dimension, "the result", len(out))
    out[d] = (*out[d], *axes)
    options = {
        "op": _matmul_reduce_scatter.matmul_reduce_scatter,
        "axis_name": axes,
        "scatter_dimension": d,
        "dimension_numbers": operands.dims[0],
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "algorithm": algorithm,
    }
    return operands.run(_single, options, [out])[0]


def all_gather_matmul(
    x,
    w,
    axis_name,
    *,
    gather_dimension: int = 0,
    dimension_numbers=None,
    precision=None,
    preferred_element_type=None,
    save_gathered: bool = True,
    implementation: str | None = None,
    algorithm: str | None = None,
    mesh=None,
    x_spec: P | None = None,
    w_spec=None,
):
    """`x @ w`, with `gather_dimension` of `x` and the columns of `w` cut over the axis.

    The column-parallel matmul of sequence parallelism; `jax_overlap.all_gather_matmul`
    has the details of arithmetic, memory and gradients.

    Args:
      x: global array [..., k], with `gather_dimension` cut over `axis_name`, which is
        the minor one if it is cut over other axes, too.
      w: global array [k, n] with n cut over `axis_name`, or a tuple of such arrays,
        which share one gather.
      axis_name: name of a mesh axis, or a tuple of names.
      gather_dimension: the dimension of `x`: rows, batch or the last one.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts; with several
        weights, one for all or a tuple of one for each.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the results; default: that of the operands.
      save_gathered: whether the gathered `x` is kept for the gradient of `w`, or
        gathered again, as in `jax_overlap.all_gather_matmul`.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: as in `jax_overlap.all_gather_matmul`.
      mesh: as in `jax_overlap.sharded.matmul_reduce_scatter`.
      x_spec: as there.
      w_spec: as there; with several weights, one for all or a tuple of one for each.

    Returns:
      `x @ w` of the global shape, sharded as the dimensions of `x` and `w` are, but
      that of `gather_dimension`; with several weights a tuple of such results.

    Raises:
      ValueError, TypeError, NotImplementedError, OverlapError: as
        `jax_overlap.sharded.matmul_reduce_scatter` and `jax_overlap.all_gather_matmul`.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_overlap import sharded
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> n = 4 * jax.device_count()
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((n, 3)), P("tp", None))
      ...     w = jax.device_put(jax.numpy.ones((3, n)), P(None, "tp"))
      ...     y = sharded.all_gather_matmul(x, w, "tp")
      >>> y.shape == (n, n), y.sharding.spec == P(None, "tp")
      (True, True)
    """
    op = "sharded.all_gather_matmul"
    several = isinstance(w, (tuple, list))
    weights = tuple(w) if several else (w,)
    operands = Operands(
        op, x, weights, axis_name, mesh, x_spec, w_spec, dimension_numbers
    )
    d = position(op, "gather_dimension", gather_dimension, "x", operands.x.ndim)
    outs = operands.gather(d)
    options = {
        "axis_name": operands.region.axes,
        "gather_dimension": d,
        "dimension_numbers": operands.dims,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "save_gathered": save_gathered,
        "implementation": implementation,
        "algorithm": algorithm,
    }
    ys = operands.run(_gather_matmuls, options, outs)
    return ys if several else ys[0]


def matmul_all_reduce(
    x,
    w,
    axis_name,
    *,
    dimension_numbers=None,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
    algorithm: str | None = None,
    mesh=None,
    x_spec: P | None = None,
    w_spec: P | None = None,
):
    """`x @ w`, contracted over `axis_name`, with the whole result on all its ranks.

    The row-parallel matmul; `jax_overlap.matmul_all_reduce` has the details of
    arithmetic and gradients.

    Args:
      x: global array [..., k], with k cut over `axis_name`.
      w: global array [k, n], with k cut alike.
      axis_name: name of a mesh axis, or a tuple of names.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; default: that of the operands.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: as in `jax_overlap.matmul_all_reduce`.
      mesh: as in `jax_overlap.sharded.matmul_reduce_scatter`.
      x_spec: as there.
      w_spec: as there.

    Returns:
      `x @ w`, sharded as the dimensions of `x` and `w` are, and replicated over
      `axis_name`.

    Raises:
      ValueError, TypeError, NotImplementedError, OverlapError: as
        `jax_overlap.sharded.matmul_reduce_scatter`.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_overlap import sharded
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> n = 4 * jax.device_count()
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((2, n)), P(None, "tp"))
      ...     w = jax.device_put(jax.numpy.ones((n, 3)), P("tp", None))
      ...     y = sharded.matmul_all_reduce(x, w, "tp")
      >>> y.shape, y.is_fully_replicated
      ((2, 3), True)
    """
    op = "sharded.matmul_all_reduce"
    operands = Operands(op, x, (w,), axis_name, mesh, x_spec, w_spec, dimension_numbers)
    out = operands.contract()
    options = {
        "op": _matmul_all_reduce.matmul_all_reduce,
        "axis_name": operands.region.axes,
        "dimension_numbers": operands.dims[0],
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "algorithm": algorithm,
    }
    return operands.run(_single, options, [out])[0]


def all_to_all(
    x,
    axis_name,
    split_axis: int,
    concat_axis: int,
    *,
    implementation: str | None = None,
    mesh=None,
    x_spec: P | None = None,
):
    """`x` itself, cut over `axis_name` along `split_axis` in place of `concat_axis`.

    What changes between the sequence and the heads in attention, or between tokens and
    experts. The names of the dimensions are those of `jax_overlap.all_to_all`, by which
    it is done, as is its gradient.

    Args:
      x: global array, with `concat_axis` cut over `axis_name`, which is the minor one
        if that dimension is cut over other axes, too.
      axis_name: name of a mesh axis, or a tuple of names.
      split_axis: the dimension to be cut; `axis_name` becomes its minor axis.
      concat_axis: the dimension that is no longer cut over `axis_name`.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      mesh: as in `jax_overlap.sharded.matmul_reduce_scatter`.
      x_spec: as there.

    Returns:
      The same values in the same shape.

    Raises:
      ValueError, TypeError, NotImplementedError, OverlapError: as
        `jax_overlap.sharded.matmul_reduce_scatter`.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_overlap import sharded
      >>> mesh = jax.make_mesh((jax.device_count(),), ("sp",))
      >>> n = 4 * jax.device_count()
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((2, n, n)), P(None, "sp"))
      ...     y = sharded.all_to_all(x, "sp", split_axis=2, concat_axis=1)
      >>> y.sharding.spec == P(None, None, "sp")
      True
    """
    op = "sharded.all_to_all"
    x = jnp.asarray(x)
    region = Region.of(op, axis_name, mesh, [x], x_spec is not None)
    split = position(op, "split_axis", split_axis, "x", x.ndim)
    concat = position(op, "concat_axis", concat_axis, "x", x.ndim)
    if split == concat:
        raise ValueError(
            f"{op}: split_axis and concat_axis are both {split}, but a dimension that "
            "is cut already is not to be cut again."
        )
    xs = region.entries("x", x, x_spec)
    out = uncut(region, x, xs, concat)
    out[split] = (*out[split], *region.axes)
    region.check("x", x.shape, xs)
    region.check("the result", x.shape, out)
    options = {
        "axis_name": region.axes,
        "split_axis": split,
        "concat_axis": concat,
        "implementation": implementation,
    }
    if region.is_mapped(implementation):
        return jax.sharding.reshard(x, region.sharding(out))
    return region.run(_exchange, options, [x], [xs], [out])[0]


# ------------------------------------------------------- what a rank computes
def _gather_matmuls(x, *ws, **options):
    return _all_gather_matmul.all_gather_matmul(x, ws, **options)


def _exchange(x, **options):
    return (_all_to_all.all_to_all(x, tiled=True, **options),)


def _single(x, w, *, op, **options):
    return (op(x, w, **options),)

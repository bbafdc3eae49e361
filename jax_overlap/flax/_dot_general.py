"""A `dot_general` for Flax's own layers, which overlaps where shardings ask for it.

On a mesh with Explicit axes the types of arrays tell where shards lie. Together with
`out_sharding` they tell which communication a matmul needs:

    contracting dims cut over "tp", result cut over "tp" by rows   reduce-scatter
    contracting dims cut over "tp", result not                     all-reduce
    rows of lhs cut over "tp", result cut over "tp" by columns     all-gather
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from jax_overlap import sharded
from jax_overlap._dot_region import of_result
from jax_overlap._region import (
    Entries,
    Names,
    axes_of_type,
    entries_of,
    names,
    ranks,
    spec_of,
)
from jax_overlap.ops._matmul import dims_of_matmul


def dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    *,
    axis_name=None,
    save_gathered: bool = True,
    implementation: str | None = None,
    **kwargs,
):
    """`jax.lax.dot_general`, by the overlapped matmuls where shardings call for them.

    For the argument `dot_general=` of `nnx.Linear`, `nnx.LinearGeneral`,
    `nnx.MultiHeadAttention` (`qkv_dot_general=`, `out_dot_general=`) and of
    `nn.Dense`, with models that follow Flax's conventions for Explicit meshes: kernels
    by `nnx.with_partitioning`, calls with `out_sharding=`. Which op is taken:

    - `jax_overlap.sharded.matmul_reduce_scatter`: contracting dimensions are cut over
      an axis, in lhs and rhs alike, and `out_sharding` has that axis in one dimension;
    - `jax_overlap.sharded.matmul_all_reduce`: so, and `out_sharding` does not have it;
    - `jax_overlap.sharded.all_gather_matmul`: a dimension of lhs (rows, batch or
      contracting) is cut over an axis over which `out_sharding` (or, without it, rhs)
      has columns cut instead.

    All other dimensions have to stay as they are. Everything else goes to
    `jax.lax.dot_general` unchanged: other changes of sharding, unreduced operands,
    operands of two dtypes, Auto and manual axes, no mesh, `jax.vmap` of a dimension
    that lies on an Explicit axis. Values, types and gradients are those of
    `jax.lax.dot_general`, which refuses matmuls of the last kind without
    `out_sharding`.

    Linen passes no `out_sharding`; give it by `functools.partial(dot_general,
    out_sharding=P(...))`. For `nnx.Einsum`, pass `einsum_op=functools.partial(
    jax.numpy.einsum, _dot_general=dot_general)`, as far as your JAX has that argument.

    Args:
      lhs: array of any rank, such as [batch, sequence, features].
      rhs: array of any rank, the kernel.
      dimension_numbers: as in `jax.lax.dot_general`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: as in `jax.lax.dot_general`.
      out_sharding: `PartitionSpec` or `NamedSharding` of the result.
      axis_name: a name, or tuple of names: act on these axes only. Default: any.
      save_gathered: whether a gathered lhs is kept for the gradient of rhs, or gathered
        again, as in `jax_overlap.all_gather_matmul`.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      **kwargs: passed to `jax.lax.dot_general`, which then does the work.

    Returns:
      The result of `jax.lax.dot_general`, sharded as `out_sharding`.

    Raises:
      TypeError, ValueError: as `jax.lax.dot_general`.

    Example:
      >>> import jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from jax_overlap.flax import dot_general
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ("tp",), axis_types=(AxisType.Explicit,))
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((2, n, 4 * n)), P(None, None, "tp"))
      ...     w = jax.device_put(jax.numpy.ones((4 * n, 3)), P("tp", None))
      ...     dims = (((2,), (0,)), ((), ()))
      ...     y = dot_general(x, w, dims, out_sharding=P(None, "tp", None))
      >>> y.shape == (2, n, 3), y.sharding.spec == P(None, "tp", None)
      (True, True)
    """
    found = None if kwargs else _op_for(lhs, rhs, dimension_numbers, out_sharding)
    if found is not None and axis_name is not None:
        asked = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        found = found if set(found.axes) <= {*names(asked)} else None
    if found is None:
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            **kwargs,
        )
    if found.rhs is not None:
        rhs = jax.sharding.reshard(rhs, NamedSharding(found.mesh, found.rhs))
    options = dict(found.options)
    if found.op is sharded.all_gather_matmul:
        options["save_gathered"] = save_gathered
    return found.op(
        lhs,
        rhs,
        found.axes,
        dimension_numbers=found.dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """The op that makes a result of the wanted sharding.

    Attributes:
      op: a function of `jax_overlap.sharded`.
      mesh: the mesh.
      dims: the dimension numbers.
      axes: the axes of the op.
      options: what else it is called with.
      rhs: the spec to which rhs is cut before, without communication.
    """

    op: Callable
    mesh: Any
    dims: Any
    axes: Names
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rhs: P | None = None


def _op_for(lhs, rhs, dimension_numbers, out_sharding) -> _Found | None:
    """The op that makes the result so, if there is one."""
    lhs, rhs = jax.typeof(lhs), jax.typeof(rhs)
    mesh = get_abstract_mesh()
    mesh = lhs.sharding.mesh if mesh.empty else mesh
    explicit = axes_of_type(mesh, AxisType.Explicit)
    if not explicit or lhs.dtype != rhs.dtype:
        return None
    if isinstance(out_sharding, NamedSharding):
        if out_sharding.mesh.abstract_mesh != mesh.abstract_mesh:
            return None
        out_sharding = out_sharding.spec
    specs = [lhs.sharding.spec, rhs.sharding.spec]
    specs += [] if out_sharding is None else [out_sharding]
    if not all(isinstance(s, P) and _is_plain(s) for s in specs):
        return None
    dims = dims_of_matmul("dot_general", dimension_numbers, lhs, rhs)
    ls, rs = (entries_of(a.sharding.spec, a.ndim) for a in (lhs, rhs))
    out = None
    if out_sharding is not None:
        shape: list = of_result(dims, *([(n,) for n in a.shape] for a in (lhs, rhs)))
        if len(out_sharding) > len(shape):
            return None
        out = entries_of(out_sharding, len(shape))
        for (size,), entry in zip(shape, out, strict=True):
            if not explicit.issuperset(entry) or size % ranks(mesh, entry):
                return None
    (lc, rc), _ = dims
    axes = tuple(a for i in lc for a in ls[i])
    if out is not None and axes and [ls[i] for i in lc] == [rs[j] for j in rc]:
        return _sum_for(mesh, dims, axes, ls, rs, out)
    return _gather_for(mesh, dims, ls, rs, out)


def _is_plain(spec: P) -> bool:
    return not (spec.unreduced or spec.reduced or P.UNCONSTRAINED in tuple(spec))


def _sum_for(mesh, dims, axes, ls: Entries, rs: Entries, out: Entries):
    """Of partial sums over `axes`: reduced, or reduced and scattered, or None."""
    kept = of_result(dims, ls, rs)
    changed = [d for d in range(len(out)) if out[d] != kept[d]]
    if any(ls[i] != rs[j] for i, j in zip(*dims[1], strict=True)) or len(changed) > 1:
        return None
    if not changed:
        return _Found(sharded.matmul_all_reduce, mesh, dims, axes)
    (d,) = changed
    new = _added(kept[d], out[d])
    if new is None or set(new) != set(axes):
        return None
    options = {"scatter_dimension": d}
    return _Found(sharded.matmul_reduce_scatter, mesh, dims, new, options)


def _gather_for(mesh, dims, ls: Entries, rs: Entries, out: Entries | None):
    """Of lhs cut over axes over which the result's columns are to be cut, or None."""
    (lc, rc), (lb, rb) = dims
    rows = [d for d in range(len(ls)) if d not in (*lc, *lb)]
    columns = [d for d in range(len(rs)) if d not in (*rc, *rb)]
    # How lhs and rhs have to lie for the matmul itself; only one dimension may differ.
    cut: Entries = list(rs)
    want: Entries = [()] * len(ls)
    if out is None:
        taken = {a for d in columns for a in rs[d]}
        for d in (*lb, *rows):
            want[d] = tuple(a for a in ls[d] if a not in taken)
    else:
        for d, entry in zip((*lb, *rows), out, strict=False):
            want[d] = entry
        for d, entry in zip(columns, out[len(lb) + len(rows) :], strict=True):
            cut[d] = entry
    changed = [d for d in range(len(ls)) if ls[d] != want[d]]
    axes = _added(want[changed[0]], ls[changed[0]]) if len(changed) == 1 else None
    if (
        axes is None
        or any(_added(rs[d], cut[d]) is None for d in columns)
        or not set(axes) <= {a for d in columns for a in cut[d]}
        or any(rs[d] for d in rc)
        or any(want[i] != rs[j] for i, j in zip(lb, rb, strict=True))
    ):
        return None
    spec = None if cut == rs else spec_of(cut)
    options = {"gather_dimension": changed[0]}
    return _Found(sharded.all_gather_matmul, mesh, dims, axes, options, spec)


def _added(before: Names, after: Names) -> Names | None:
    """The axes that cut further what is cut as `before`, or None if it is not that."""
    n = len(before)
    return after[n:] if after[:n] == before else None

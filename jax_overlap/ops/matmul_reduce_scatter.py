"""Matmul, then reduce-scatter: row-parallel, with the sum's parts left on the ranks.

    rank 0  | x0 w0 part 3 | part 2 | part 1 | part 0 | sum part 0 |
    rank 1  | x1 w1 part 0 | part 3 | part 2 | part 1 | sum part 1 |   own part last:
    rank 2  | x2 w2 part 1 | part 0 | part 3 | part 2 | sum part 2 |   nobody waits
    rank 3  | x3 w3 part 2 | part 1 | part 0 | part 3 | sum part 3 |   for it
                           ^ each goes to its owner while the next is computed

The schedule is that of https://arxiv.org/abs/2604.24013; ffi/ops/matmul.h has the
algorithms, ffi/ops/matmul_program.h that on GPUs. The transpose is `all_gather_matmul`,
and the other way round.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_overlap import _compat
from jax_overlap.ops import _block, _by_psum, _collective, _matmul, _matmul_types
from jax_overlap.ops._matmul_form import form_of
from jax_overlap.ops.all_gather import all_gather_p


def reference(*operands, axes, axis_index_groups, cut, **params):
    """The same by `jax.lax`, of operands in the form of ops/_matmul_form.py."""
    y = local_sum(*operands, **params)
    if not axes:
        return [y]
    return [
        lax.psum_scatter(
            y,
            axes,
            scatter_dimension=_matmul.CUT_IN_OUT[cut],
            axis_index_groups=axis_index_groups,
            tiled=True,
        )
    ]


def by_psum(*operands, axes, axis_size, cut, out_dtype, **params):
    """The same by our psum: ops/_by_psum.py."""

    def product(dtype):
        return local_sum(*operands, out_dtype=dtype, **params)

    y = _by_psum.total(_by_psum.rounded_once(product, out_dtype), axes)
    return [_by_psum.own_part(y, axes, _matmul.CUT_IN_OUT[cut], axis_size)]


def local_sum(*operands, xs, transposed, out_dtype, precision, **_):
    """The sum of the matmuls x_i @ w_i of one rank."""
    dots = [
        _matmul.dot(x, w, t, out_dtype, precision)
        for x, w, t in zip(operands[:xs], operands[xs:], transposed, strict=True)
    ]
    return sum(dots[1:], dots[0])


def matmul_reduce_scatter(
    x,
    w,
    axis_name,
    *,
    scatter_dimension: int = 0,
    dimension_numbers=None,
    bias=None,
    precision=None,
    preferred_element_type=None,
    axis_index_groups=None,
    implementation: str | None = None,
    algorithm: str | None = None,
):
    """`psum_scatter(x @ w, axis_name, tiled=True)` with the communication hidden.

    Products are summed over the ranks in float32 (float64 for float64), in rank order,
    and rounded once. On GPUs, and by_psum, what a rank sends is of the result's type:
    half types are rounded once more, unless `preferred_element_type` is float32. So is
    the own part where two ranks have one kernel for both products (bfloat16 on Hopper,
    rounds of some 200 rows and more): there bits depend on JAX_OVERLAP_HEAP_BYTES. The
    gradient of `x` is `all_gather_matmul` of the cotangent, which it gathers once for
    that of `w` too.

    Args:
      x: array [..., k]; float32, float64, bfloat16, float16, and on GPUs float8_e4m3fn
        and float8_e5m2 (others, and where cuBLASLt has no such product: by `jax.lax`).
      w: array [k, n]. `x` and `w` are promoted to a common type as by `x @ w`,
        float8 to a wider type.
      axis_name: name of a mesh axis, or a tuple of names.
      scatter_dimension: the dimension of `x @ w` that is cut, part r for rank r: rows,
        batch or the last one. Its size has to be divisible by the axis size.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts of `x` and `w`,
        such as `(((1,), (1,)), ((), ()))` for w [n, k].
      bias: array added to the result, once; its last dimension is that of the result.
      precision: of the matmul, as in `jax.lax.dot_general`; native ones are exact
        float32 products on CPU, and on GPUs by default TF32 (and float8 in short
        accumulators), as there.
      preferred_element_type: dtype of the result; default: that of the operands.
        Float8 is native with bfloat16, float16 or float32; multiply the result by
        its scales.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: None chooses; "in_place" (on CPU) or "sliced" forces one (see
        `jax_overlap.explain`); "by_psum" forces what takes the place of "sliced" on
        GPUs while the whole `x @ w` is small (JAX_OVERLAP_BY_PSUM_MAX_BYTES): the
        matmul, then `jax_overlap.psum`, of which a rank keeps its part.
        `jax_overlap.info` counts the psum, too, and errors name it. With
        `axis_index_groups` it is as None.

    Returns:
      `x @ w` summed over the axis, with `scatter_dimension` divided by the axis size;
      typed as varying over `axis_name`.

    Raises:
      ValueError: the dimension does not fit the axis size, in the words of `jax.lax`;
        operands without `dimension_numbers` that are no `x @ w`; an unknown
        `implementation` or `algorithm`.
      TypeError: operands that `jax.lax.dot_general` refuses, in its words;
        `implementation="native"` and a type that is not native.
      NameError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x, w: jax_overlap.matmul_reduce_scatter(x, w, "tp"),
      ...                   mesh=mesh, in_specs=(P(None, "tp"), P("tp")),
      ...                   out_specs=P("tp"))
      >>> n = 4 * jax.device_count()
      >>> f(jax.numpy.ones((n, n)), jax.numpy.ones((n, 3))).shape == (n, 3)
      True
    """
    op = "matmul_reduce_scatter"
    _collective.check_options(op, implementation, algorithm, _matmul.ALGORITHMS)
    precision = _matmul.hashable(precision)
    axes = _collective.canonical_axes(op, axis_name, (x, w))
    groups = _block.checked_groups(op, axis_index_groups, axes)
    x, w = _matmul_types.promoted(x, w)
    dims = _matmul.dims_of_matmul(op, dimension_numbers, x, w)
    dot = _matmul.dot_general(dims, precision, preferred_element_type)
    out = _matmul.result_type(dot, x.shape, x, w)
    size = _block.group_size(axes, groups)
    d = _block.from_front(scatter_dimension, out.ndim)
    if (
        _block.left_to_lax(axes, x, w)
        or out.dtype == np.bool_
        or not 0 <= d < out.ndim
        or not _block.fits(out.shape[d], size, True)
    ):
        y = lax.psum_scatter(
            dot(x, w),
            axes if isinstance(axis_name, list) else axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=True,
        )
        return _matmul.add_bias(op, y, bias)
    _matmul_types.check_native(op, implementation, x, [w], out.dtype)
    form = form_of(dims, x.ndim, w.ndim, *_cut(dims, x.ndim, d))
    y = bind(
        [form.x(x)],
        [form.w(w)],
        axes=axes,
        axis_index_groups=groups,
        axis_size=size,
        cut=form.cut,
        transposed=(form.transposed,),
        out_dtype=out.dtype,
        precision=precision,
        implementation=implementation,
        algorithm=algorithm,
    )
    return _matmul.add_bias(op, form.out(y, x, w, lambda n: n // size), bias)


def _cut(dims, x_ndim: int, d: int) -> tuple[str, int]:
    """The kind of dimension `d` of the result, and its place among these."""
    (xc, _), (xb, _) = dims
    free = x_ndim - len(xc) - len(xb)
    if d < len(xb):
        return "batch", d
    if d < len(xb) + free:
        return "rows", d - len(xb)
    return "cols", d - len(xb) - free


def bind(xs, ws, *, axes, **params):
    """Binds the primitive: the sum of all x_i @ w_i, reduced and scattered."""
    operands = _matmul.same_varying(axes, *_matmul_types.promoted(*xs, *ws))
    (y,) = matmul_reduce_scatter_p.bind(*operands, axes=axes, xs=len(xs), **params)
    return y


def _abstract_eval(*avals, axes, axis_size, cut, xs, transposed, out_dtype, **_):
    varying = _matmul.check_varying("matmul_reduce_scatter", avals, axes)
    x, w = avals[0], avals[xs]
    shape = [*x.shape[:3], w.shape[1 if transposed[0] else 2]]
    shape[_matmul.CUT_IN_OUT[cut]] //= axis_size
    return [_matmul.result_aval(x, out_dtype, shape, varying)]


matmul_reduce_scatter_p = _matmul.make_primitive(
    "matmul_reduce_scatter",
    reference,
    _abstract_eval,
    by_psum,
    summed_bytes=lambda x, y, ranks: ranks * y.size * y.dtype.itemsize,
)


# ----------------------------------------------------------- differentiation
def jvp_of_sum(bind_op, primals, tangents, *, xs, transposed, **params):
    """JVP of a linear collective of a sum of matmuls: both products in one call.

    So the transpose gathers the cotangent once, for the gradients of x and w.
    """
    y = bind_op(primals[:xs], primals[xs:], transposed=transposed, **params)
    left, right, flags = [], [], []
    for i, t in enumerate(transposed):
        x, w, dx, dw = primals[i], primals[xs + i], tangents[i], tangents[xs + i]
        for a, b in ((dx, w), (x, dw)):
            if type(a) is not ad.Zero and type(b) is not ad.Zero:
                left, right, flags = [*left, a], [*right, b], [*flags, t]
    if not left:
        return [y], [ad.Zero(_compat.tangent_type(y))]
    return [y], [bind_op(left, right, transposed=tuple(flags), **params)]


def transpose(gather_matmul, cts, *operands, xs, transposed, out_dtype, cut, **params):
    """By `gather_matmul`, the dual op; the ranks' cotangents are gathered once."""
    del out_dtype
    (ct,) = cts
    if type(ct) is ad.Zero:
        return zeros_for(operands)
    pairs = list(zip(operands[:xs], operands[xs:], transposed, strict=True))
    wanted = [i for i, (x, _, _) in enumerate(pairs) if ad.is_undefined_primal(x)]
    with_weights = len(wanted) < len(pairs)
    cut = "inner" if cut == "cols" else cut
    if wanted:
        ws = [pairs[i][1] for i in wanted]
        dxs, gathered = gather_matmul(
            ct,
            ws,
            transposed=tuple(not pairs[i][2] for i in wanted),
            out_dtype=_matmul_types.cotangent_type(
                pairs[wanted[0]][0].aval.dtype, ct, *ws
            ),
            cut=cut,
            gathered=with_weights,
            save_gathered=True,
            **params,
        )
    else:
        dxs, gathered = [], along_cut(all_gather_p, ct, cut, **params)
    out: list = [None] * len(operands)
    for i, dx in zip(wanted, dxs, strict=True):
        out[i] = dx.astype(pairs[i][0].aval.dtype)
    for i, (x, w, t) in enumerate(pairs):
        if i not in wanted:
            out[xs + i] = _matmul.weight_gradient(
                x, gathered, t, w.aval.dtype, params["precision"]
            )
    return out


def along_cut(
    primitive, x, cut, *, axes, axis_index_groups, axis_size, implementation, **_
):
    """X gathered, or reduced and scattered, along what is cut of it.

    Not what a call that has to be native is: on GPUs these are not, but for a gradient.
    """
    return _block.bind(
        primitive,
        x,
        axes,
        dimension=_matmul.CUT_IN_X[cut],
        axis_index_groups=axis_index_groups,
        axis_size=axis_size,
        implementation=None if implementation == "native" else implementation,
    )


def zeros_for(operands):
    """No cotangents, for all operands that want one."""
    return [
        ad.Zero(o.aval.to_ct_aval()) if ad.is_undefined_primal(o) else None
        for o in operands
    ]


ad.primitive_jvps[matmul_reduce_scatter_p] = partial(jvp_of_sum, bind)


# ------------------------------------------------------------------ batching
def batch_sum(
    op, bind_op, axis_data, operands, dims, *, axes, xs, transposed, **params
):
    """Batches a linear collective of a sum of matmuls."""
    _collective.check_batch_axis(op, axis_data, axes)
    if all(d is None for d in dims):
        params.update(axes=axes, transposed=transposed)
        return [bind_op(operands[:xs], operands[xs:], **params)], [None]
    left, right, unfold = _matmul.fold_batch(
        axis_data,
        operands[:xs],
        dims[:xs],
        operands[xs:],
        dims[xs:],
        transposed,
        into_cols=params.get("cut") != "cols",
    )
    y, d = unfold(bind_op(left, right, axes=axes, transposed=transposed, **params))
    return [y], [d]


batching.fancy_primitive_batchers[matmul_reduce_scatter_p] = partial(
    batch_sum, "matmul_reduce_scatter", bind
)

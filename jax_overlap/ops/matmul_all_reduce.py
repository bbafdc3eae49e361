"""Matmul, then all-reduce: row-parallel, with the sum on every rank.

    rank 0  | x0 w0 part 3 | part 2 | part 1 | part 0 | sum part 0, send it to all |
    rank 1  | x1 w1 part 0 | part 3 | part 2 | part 1 | sum part 1, send it to all |
    rank 2  | x2 w2 part 1 | part 0 | part 3 | part 2 | sum part 2, send it to all |
    rank 3  | x3 w3 part 2 | part 1 | part 0 | part 3 | sum part 3, send it to all |

It is `matmul_reduce_scatter` over parts of the rows, and the all-gather of these;
ffi/ops/matmul.h has the algorithm on CPU, ffi/ops/matmul_program.h that on GPUs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_overlap import _compat, _native
from jax_overlap.ops import _block, _by_psum, _collective, _matmul, _matmul_types
from jax_overlap.ops import matmul_reduce_scatter as _scatter
from jax_overlap.ops import psum as _psum
from jax_overlap.ops._matmul_form import form_of


def reference(*operands, axes, **params):
    """The same by `jax.lax`, of operands in the form of ops/_matmul_form.py."""
    y = _scatter.local_sum(*operands, **params)
    return [lax.psum(y, axes) if axes else y]


def by_psum(*operands, axes, out_dtype, **params):
    """The same by our psum: ops/_by_psum.py."""

    def product(dtype):
        return _scatter.local_sum(*operands, out_dtype=dtype, **params)

    return [_by_psum.total(_by_psum.rounded_once(product, out_dtype), axes)]


def matmul_all_reduce(
    x,
    w,
    axis_name,
    *,
    dimension_numbers=None,
    bias=None,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
    algorithm: str | None = None,
):
    """`psum(x @ w, axis_name)` with the communication hidden.

    Products are summed over the ranks in float32 (float64 for float64), in rank order,
    and rounded once: all ranks get the same bits. On GPUs, and by_psum, what a rank
    sends is of the result's type, as in `matmul_reduce_scatter`. In place of it,
    `matmul_reduce_scatter` moves half as much, where the next op can work on parts.

    Args:
      x: array [..., k]; float32, float64, bfloat16, float16, and on GPUs float8_e4m3fn
        and float8_e5m2 (others, and where cuBLASLt has no such product: by `jax.lax`).
      w: array [k, n]. `x` and `w` are promoted to a common type as by `x @ w`,
        float8 to a wider type.
      axis_name: name of a mesh axis, or a tuple of names.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts.
      bias: array added to the result, once.
      precision: of the matmul, as in `jax.lax.dot_general`; native ones are exact
        float32 products on CPU, and on GPUs by default TF32 (and float8 in short
        accumulators), as there.
      preferred_element_type: dtype of the result; default: that of the operands.
        Float8 is native with bfloat16, float16 or float32; multiply the result by
        its scales.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: None chooses; "in_place" and "sliced" force the fused form that there
        is on CPU and on GPUs; "by_psum" forces what small results (up to
        JAX_OVERLAP_BY_PSUM_MAX_BYTES) have on GPUs: the matmul, then a
        `jax_overlap.psum`, which `jax_overlap.info` counts, too, and errors name.

    Returns:
      `x @ w` summed over the axis. Under `check_vma=True` it no longer varies over
      `axis_name`.

    Raises:
      ValueError: operands without `dimension_numbers` that are no `x @ w`; an unknown
        `implementation` or `algorithm`.
      TypeError: operands that `jax.lax.dot_general` refuses, in its words;
        `implementation="native"` and a type that is not native.
      NameError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x, w: jax_overlap.matmul_all_reduce(x, w, "tp"),
      ...                   mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
      >>> n = 4 * jax.device_count()
      >>> f(jax.numpy.ones((2, n)), jax.numpy.ones((n, 3))).shape
      (2, 3)
    """
    op = "matmul_all_reduce"
    _collective.check_options(op, implementation, algorithm, _matmul.ALGORITHMS)
    precision = _matmul.hashable(precision)
    axes = _collective.canonical_axes(op, axis_name, (x, w))
    x, w = _matmul_types.promoted(x, w)
    dims = _matmul.dims_of_matmul(op, dimension_numbers, x, w)
    dot = _matmul.dot_general(dims, precision, preferred_element_type)
    out = _matmul.result_type(dot, x.shape, x, w)
    # Of booleans, lax.psum makes integers.
    if _block.left_to_lax(axes, x, w) or out.dtype == np.bool_:
        return _matmul.add_bias(op, lax.psum(dot(x, w), axis_name), bias)
    _matmul_types.check_native(op, implementation, x, [w], out.dtype)
    form = form_of(dims, x.ndim, w.ndim, "", 0)
    y = bind(
        [form.x(x)],
        [form.w(w)],
        axes=axes,
        axis_index_groups=None,
        transposed=(form.transposed,),
        out_dtype=out.dtype,
        precision=precision,
        implementation=implementation,
        algorithm=algorithm,
        invariant=_compat.check_vma(),
    )
    return _matmul.add_bias(op, form.out(y, x, w, lambda n: n), bias)


def bind(xs, ws, *, axes, **params):
    """Binds the primitive: the sum of all x_i @ w_i over the ranks."""
    operands = _matmul_types.promoted(*xs, *ws)
    if params["invariant"]:
        operands = _matmul.same_varying(axes, *operands)
    (y,) = matmul_all_reduce_p.bind(*operands, axes=axes, xs=len(xs), **params)
    return y


# `invariant`: as in ops/psum.py.
def _abstract_eval(*avals, axes, xs, transposed, out_dtype, invariant, **_):
    x, w = avals[0], avals[xs]
    varying = x.mat.varying
    if invariant:
        varying = _matmul.check_varying("matmul_all_reduce", avals, axes) - set(axes)
    shape = (*x.shape[:3], w.shape[1 if transposed[0] else 2])
    return [_matmul.result_aval(x, out_dtype, shape, varying)]


matmul_all_reduce_p = _matmul.make_primitive(
    "matmul_all_reduce",
    reference,
    _abstract_eval,
    by_psum,
    summed_bytes=lambda x, y, ranks: y.size * y.dtype.itemsize,
)


# ----------------------------------------------------------- differentiation
def _transpose(
    cts, *operands, axes, xs, transposed, invariant, implementation, precision, **_
):
    """The cotangent of the sum is that of each rank's product, as in ops/psum.py."""
    (ct,) = cts
    if type(ct) is ad.Zero:
        return _scatter.zeros_for(operands)
    if invariant:
        ct = lax.pcast(ct, axes, to="varying")
    elif not _native.mutant("transpose_without_reduction"):
        (ct,) = _psum.bind(
            [ct],
            axes,
            invariant,
            axis_index_groups=None,
            implementation=implementation,
            algorithm=None,
        )
    out: list = [None] * len(operands)
    pairs = zip(operands[:xs], operands[xs:], transposed, strict=True)
    for i, (x, w, t) in enumerate(pairs):
        if ad.is_undefined_primal(x):
            out[i] = _matmul.dot(ct, w, not t, x.aval.dtype, precision)
        else:
            out[xs + i] = _matmul.weight_gradient(x, ct, t, w.aval.dtype, precision)
    return out


ad.primitive_jvps[matmul_all_reduce_p] = partial(_scatter.jvp_of_sum, bind)
ad.primitive_transposes[matmul_all_reduce_p] = _transpose
batching.fancy_primitive_batchers[matmul_all_reduce_p] = partial(
    _scatter.batch_sum, "matmul_all_reduce", bind
)

"""All-gather, then matmul: column-parallel, of an operand that lies cut on the ranks.

    rank 0  | x0 w | x3 w | x2 w | x1 w |
    rank 1  | x1 w | x0 w | x3 w | x2 w |   own part first: it is there; the others
    rank 2  | x2 w | x1 w | x0 w | x3 w |   arrive meanwhile
    rank 3  | x3 w | x2 w | x1 w | x0 w |

The schedule is that of https://arxiv.org/abs/2604.24013; ffi/ops/matmul.h has the
algorithms, ffi/ops/matmul_program.h that on GPUs. The transpose is
`matmul_reduce_scatter`, and the other way round.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jax import lax
from jax.interpreters import ad, batching

from jax_overlap import _compat
from jax_overlap.ops import (
    _block,
    _by_psum,
    _collective,
    _matmul,
    _matmul_types,
    matmul_reduce_scatter,
)
from jax_overlap.ops._matmul_form import form_of
from jax_overlap.ops.all_gather import all_gather_p
from jax_overlap.ops.matmul_reduce_scatter import along_cut, zeros_for
from jax_overlap.ops.psum_scatter import psum_scatter_p


def reference(
    x,
    *ws,
    axes,
    axis_index_groups,
    cut,
    transposed,
    out_dtype,
    gathered,
    precision,
    **_,
):
    """The same by `jax.lax`, of operands in the form of ops/_matmul_form.py."""
    if axes:
        x = lax.all_gather(
            x,
            axes,
            axis=_matmul.CUT_IN_X[cut],
            axis_index_groups=axis_index_groups,
            tiled=True,
        )
    ys = products(x, ws, transposed, precision, out_dtype)
    return [*ys, x] if gathered else ys


def by_psum(
    x,
    *ws,
    axes,
    axis_size,
    cut,
    transposed,
    out_dtype,
    gathered,
    precision,
    **_,
):
    """The same by our psum: ops/_by_psum.py."""
    x = _by_psum.gathered(x, axes, _matmul.CUT_IN_X[cut], axis_size)
    product = partial(products, x, ws, transposed, precision)
    ys = _by_psum.rounded_once(product, out_dtype)
    return [*ys, x] if gathered else ys


def products(x, ws, transposed, precision, dtype):
    """Those of one rank: x by each w."""
    return [
        _matmul.dot(x, w, t, dtype, precision)
        for w, t in zip(ws, transposed, strict=True)
    ]


def all_gather_matmul(
    x,
    w,
    axis_name,
    *,
    gather_dimension: int = 0,
    return_gathered: bool = False,
    dimension_numbers=None,
    bias=None,
    precision=None,
    preferred_element_type=None,
    axis_index_groups=None,
    save_gathered: bool = True,
    implementation: str | None = None,
    algorithm: str | None = None,
):
    """`all_gather(x, axis_name, tiled=True) @ w` with the communication hidden.

    Several weights (those of query, key and value, or of gate and up) share one
    gather. The gradient of `x` is one `matmul_reduce_scatter` of all the cotangents.

    Args:
      x: array [..., k]; float32, float64, bfloat16, float16, and on GPUs float8_e4m3fn
        and float8_e5m2 (others, and where cuBLASLt has no such product: by `jax.lax`).
      w: array [k, n], or a tuple of such arrays. All are promoted to a common type,
        float8 to a wider type.
      axis_name: name of a mesh axis, or a tuple of names.
      gather_dimension: the dimension of `x` along which the ranks' operands are put
        together: rows, batch or the last one, which `w` then has in full.
      return_gathered: whether to return the gathered `x`, too.
      dimension_numbers: as in `jax.lax.dot_general`, for other layouts of `x` and `w`;
        with several weights, one for all or a tuple of one (or None) for each.
      bias: array added to the result, or with several weights a tuple of arrays (or
        None); its last dimension is that of the result.
      precision: of the matmul, as in `jax.lax.dot_general`; native ones are exact
        float32 products on CPU, and on GPUs by default TF32 (and float8 in short
        accumulators), as there.
      preferred_element_type: dtype of the results; default: that of the operands.
        Float8 is native with bfloat16, float16 or float32; multiply the results by
        its scales.
      axis_index_groups: list of lists of indices along the axis, as in `jax.lax`.
      save_gathered: what the gradient of `w` takes the gathered `x` from. True keeps
        it from the forward pass: (axis size) x (bytes of `x`) until then, as for
        `jax.lax.all_gather`. False keeps `x` only, and gathers again: (axis size - 1)
        x (bytes of `x`) received by each rank.
      implementation: None, "native" or "reference", as in `jax_overlap.psum`.
      algorithm: None chooses; "in_place" (on CPU) or "sliced" forces one (see
        `jax_overlap.explain`); "by_psum" forces what takes the place of "sliced" on
        GPUs while the gathered `x` is small (JAX_OVERLAP_BY_PSUM_MAX_BYTES): a
        `jax_overlap.psum` gathers the bits of `x`, and then it is multiplied.
        `jax_overlap.info` counts the psum, too, and errors name it. With
        `axis_index_groups` it is as None.

    Returns:
      The result, or with several weights a tuple of results; with `return_gathered`
      the pair of that and the gathered `x`. All are typed as varying over `axis_name`.

    Raises:
      ValueError: operands without `dimension_numbers` that are no `x @ w`; several
        weights that contract unlike dimensions of `x`, or come with too few or too many
        biases; an unknown `implementation` or `algorithm`; a dimension that `x` does
        not have.
      TypeError: operands that `jax.lax.dot_general` refuses, in its words;
        `implementation="native"` and a type that is not native.
      NameError, NotImplementedError, OverlapError: as `jax_overlap.psum`.

    Example:
      >>> import jax, jax_overlap
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
      >>> f = jax.shard_map(lambda x, w: jax_overlap.all_gather_matmul(x, w, "tp"),
      ...                   mesh=mesh, in_specs=(P("tp"), P(None, "tp")),
      ...                   out_specs=P(None, "tp"))
      >>> n = 4 * jax.device_count()
      >>> f(jax.numpy.ones((n, 3)), jax.numpy.ones((3, n))).shape == (n, n)
      True
    """
    op = "all_gather_matmul"
    _collective.check_options(op, implementation, algorithm, _matmul.ALGORITHMS)
    precision = _matmul.hashable(precision)
    axes = _collective.canonical_axes(op, axis_name, (x, w))
    groups = _block.checked_groups(op, axis_index_groups, axes)
    several = isinstance(w, (tuple, list))
    x, *ws = _matmul_types.promoted(x, *(w if several else (w,)))
    dims = dims_of_each(dimension_numbers, len(ws))
    if several and not isinstance(bias, (tuple, list, type(None))):
        raise ValueError(f"{op}: bias has to be a tuple, of an array for each weight.")
    biases: Any = bias if several and bias is not None else (bias,) * len(ws)
    _check_counts(len(ws), dimension_numbers=dims, bias=biases)
    dims = [_matmul.dims_of_matmul(op, n, x, w) for n, w in zip(dims, ws, strict=True)]
    size = _block.group_size(axes, groups)
    d = _block.from_front(gather_dimension, x.ndim)
    dots = [_matmul.dot_general(n, precision, preferred_element_type) for n in dims]
    if not 0 <= d < x.ndim or _block.left_to_lax(axes, x, *ws):
        gathered = lax.all_gather(
            x,
            axes if isinstance(axis_name, list) else axis_name,
            axis=gather_dimension,
            axis_index_groups=axis_index_groups,
            tiled=True,
        )
        ys = [dot(gathered, w) for dot, w in zip(dots, ws, strict=True)]
    else:
        shape = [n * (size if i == d else 1) for i, n in enumerate(x.shape)]
        outs = [
            _matmul.result_type(dot, shape, x, w)
            for dot, w in zip(dots, ws, strict=True)
        ]
        for w, out in zip(ws, outs, strict=True):
            _matmul_types.check_native(op, implementation, x, [w], out.dtype)
        forms = _forms(dims, x, ws, d)
        form, params = (
            forms[0],
            {
                "axes": axes,
                "axis_index_groups": groups,
                "axis_size": size,
                "cut": forms[0].cut,
                "save_gathered": save_gathered,
                "precision": precision,
                "implementation": implementation,
                "algorithm": algorithm,
            },
        )
        ys, gathered = _bind_alike(form.x(x), ws, forms, outs, return_gathered, params)
        ys = [
            form.out(y, x, w, lambda n: n * size)
            for form, y, w in zip(forms, ys, ws, strict=True)
        ]
        if return_gathered:
            gathered = form.gathered(gathered, x, lambda n: n * size)
    ys = tuple(_matmul.add_bias(op, y, b) for y, b in zip(ys, biases, strict=True))
    result = ys if several else ys[0]
    return (result, gathered) if return_gathered else result


def dims_of_each(dimension_numbers: Any, count: int) -> tuple:
    """The dimension numbers of each weight, from one for all or from a tuple."""
    if dimension_numbers is None or _is_one(dimension_numbers):
        return (dimension_numbers,) * count
    return tuple(dimension_numbers)


def _is_one(dimension_numbers) -> bool:
    """Whether these are ((of x, of w), (of x, of w)), or bad ones, but not several."""
    first = dimension_numbers[0] if len(dimension_numbers) == 2 else None
    whole = (int, np.integer)
    return first is not None and all(
        isinstance(n, whole) or not n or isinstance(n[0], whole) for n in first
    )


def _check_counts(weights: int, **of_each) -> None:
    if not weights:
        raise ValueError("all_gather_matmul: w is an empty tuple. Pass a weight.")
    for name, values in of_each.items():
        if len(values) != weights:
            raise ValueError(
                f"all_gather_matmul: {name} has {len(values)} entries, but there are "
                f"{weights} weights. Pass one for each."
            )


def _forms(dims, x, ws, d: int):
    """The form of each matmul; all have to see the gathered dimension alike."""
    forms = []
    for numbers, w in zip(dims, ws, strict=True):
        (xc, _), (xb, _) = numbers
        free = [i for i in range(x.ndim) if i not in (*xc, *xb)]
        cut, among = next(
            (cut, among)
            for cut, among in (("batch", xb), ("inner", xc), ("rows", free))
            if d in among
        )
        forms.append(form_of(numbers, x.ndim, w.ndim, cut, among.index(d)))
    if len({(form.x_perm, form.counts[:3], form.cut) for form in forms}) > 1:
        raise ValueError(
            "all_gather_matmul: all weights have to contract the same dimensions of x, "
            f"but dimension_numbers are {dims}. Call it once for each kind, with "
            "return_gathered=True the first time."
        )
    return forms


def _bind_alike(x, ws, forms, outs, return_gathered: bool, params):
    """A call for the weights of each type, mostly one: a result varies as its operands.

    Operands of one call are marked as varying alike, and what varies over more axes
    than `jax.lax` says has another gradient. Types of float8 may differ, too.
    """
    alike: dict[tuple, list[int]] = {}
    for i, (w, out) in enumerate(zip(ws, outs, strict=True)):
        more = _compat.varying(w) - _compat.varying(x) - set(params["axes"])
        alike.setdefault((more, w.dtype, out.dtype), []).append(i)
    ys: list = [None] * len(ws)
    gathered = None
    for (more, _, out_dtype), members in alike.items():
        some, full = bind(
            x,
            [forms[i].w(ws[i]) for i in members],
            transposed=tuple(forms[i].transposed for i in members),
            gathered=return_gathered and not more and gathered is None,
            out_dtype=out_dtype,
            **params,
        )
        gathered = gathered if full is None else full
        for i, y in zip(members, some, strict=True):
            ys[i] = y
    if return_gathered and gathered is None:
        gathered = along_cut(all_gather_p, x, **params)
    return ys, gathered


def bind(x, ws, *, axes, transposed, gathered, **params):
    """Binds the primitive; returns (results, gathered operand or None)."""
    x, *ws = _matmul.same_varying(axes, *_matmul_types.promoted(x, *ws))
    outs = all_gather_matmul_p.bind(
        x,
        *ws,
        axes=axes,
        transposed=tuple(transposed),
        gathered=gathered,
        **params,
    )
    return (outs[:-1], outs[-1]) if gathered else (outs, None)


def _abstract_eval(x, *ws, axes, axis_size, cut, transposed, out_dtype, gathered, **_):
    varying = _matmul.check_varying("all_gather_matmul", (x, *ws), axes)
    full = list(x.shape)
    full[_matmul.CUT_IN_X[cut]] *= axis_size
    shapes = [
        (*full[:3], w.shape[1 if t else 2]) for w, t in zip(ws, transposed, strict=True)
    ]
    ys = [_matmul.result_aval(x, out_dtype, shape, varying) for shape in shapes]
    return [*ys, _matmul.result_aval(x, x.dtype, full, varying)] if gathered else ys


all_gather_matmul_p = _matmul.make_primitive(
    "all_gather_matmul",
    reference,
    _abstract_eval,
    by_psum,
    summed_bytes=lambda x, y, ranks: _by_psum.gathered_bytes(x, ranks),
)


# ----------------------------------------------------------- differentiation
def _jvp(primals, tangents, *, gathered, save_gathered, transposed, **params):
    x, *ws = primals
    dx, *dws = tangents
    live = [i for i, dw in enumerate(dws) if type(dw) is not ad.Zero]
    flags = tuple(transposed[i] for i in live)
    options = {"save_gathered": save_gathered, **params}
    save = bool(live) and save_gathered
    ys, full = bind(x, ws, transposed=transposed, gathered=gathered or save, **options)
    terms: list = [None] * len(ws)
    full_tangent = None
    if type(dx) is not ad.Zero:
        terms, full_tangent = bind(
            dx, ws, transposed=transposed, gathered=gathered, **options
        )
    of_weights = [dws[i] for i in live]
    if save:
        of_weights = [
            _matmul.dot(full, dw, t, params["out_dtype"], params["precision"])
            for dw, t in zip(of_weights, flags, strict=True)
        ]
    elif live:
        of_weights, _ = bind(x, of_weights, transposed=flags, gathered=False, **options)
    for i, term in zip(live, of_weights, strict=True):
        terms[i] = term if terms[i] is None else terms[i] + term
    primals_out = [*ys, full] if gathered else ys
    tangents_out = [*terms, full_tangent] if gathered else terms
    return primals_out, [
        ad.Zero(_compat.tangent_type(p)) if t is None else t
        for p, t in zip(primals_out, tangents_out, strict=True)
    ]


def _transpose(
    cts, *operands, cut, transposed, gathered, save_gathered, out_dtype, **params
):
    del save_gathered, out_dtype
    x, *ws = operands
    *cts, full_ct = cts if gathered else (*cts, None)
    live = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    out: list = zeros_for(operands)
    if ad.is_undefined_primal(x):
        if live:
            left, right = [cts[i] for i in live], [ws[i] for i in live]
            dx = matmul_reduce_scatter.bind(
                left,
                right,
                cut="cols" if cut == "inner" else cut,
                transposed=tuple(not transposed[i] for i in live),
                out_dtype=_matmul_types.cotangent_type(x.aval.dtype, *left, *right),
                **params,
            ).astype(x.aval.dtype)
            out[0] = dx
        if full_ct is not None and type(full_ct) is not ad.Zero:
            scattered = along_cut(psum_scatter_p, full_ct, cut, **params)
            out[0] = out[0] + scattered if live else scattered
    elif live:
        full = along_cut(all_gather_p, x, cut, **params)
        for i in live:
            out[1 + i] = _matmul.weight_gradient(
                full, cts[i], transposed[i], ws[i].aval.dtype, params["precision"]
            )
    return out


ad.primitive_jvps[all_gather_matmul_p] = _jvp
ad.primitive_transposes[all_gather_matmul_p] = _transpose
ad.primitive_transposes[matmul_reduce_scatter.matmul_reduce_scatter_p] = partial(
    matmul_reduce_scatter.transpose, bind
)


# ------------------------------------------------------------------ batching
def _batch(axis_data, operands, dims, *, axes, transposed, gathered, **params):
    _collective.check_batch_axis("all_gather_matmul", axis_data, axes)
    if all(d is None for d in dims):
        outs = all_gather_matmul_p.bind(
            *operands, axes=axes, transposed=transposed, gathered=gathered, **params
        )
        return outs, [None] * len(outs)
    (x,), ws, unfold = _matmul.fold_batch(
        axis_data,
        operands[:1],
        dims[:1],
        operands[1:],
        dims[1:],
        transposed,
        into_cols=True,
    )
    ys, full = bind(
        x, ws, axes=axes, transposed=transposed, gathered=gathered, **params
    )
    pairs: list = [unfold(y) for y in ys]
    if gathered:
        cols_only = dims[0] is None and x.shape == operands[0].shape
        pairs.append((full, None) if cols_only else unfold(full))
    return [y for y, _ in pairs], [d for _, d in pairs]


batching.fancy_primitive_batchers[all_gather_matmul_p] = _batch

"""What the fused matmuls share: their arguments, lowering and rules.

ops/_matmul_form.py has the form in which the primitives take their operands, and
ops/_matmul_types.py of which types.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from jax_overlap import _compat, config
from jax_overlap._plan import LEFT_TO_LAX, make_plan
from jax_overlap.ops import _block, _by_psum, _collective, _gpu_cost, _matmul_types

# Positions in x, w and the result of the dimension that is cut.
CUT_IN_X = {"batch": 0, "rows": 2, "inner": 3}
CUT_IN_OUT = {"batch": 0, "rows": 2, "cols": 3}
CUTS = {"rows": 0, "batch": 1, "cols": 2, "inner": 3}  # as in ffi/ops/matmul.h

# As in ffi/ops/matmul_handler.h. GPUs have "sliced" alone.
_HANDLED = {"in_place": 0, "sliced": 1}
ALGORITHMS = (*_HANDLED, _by_psum.NAME)
# Precisions, or the presets of algorithms, with which a GPU may round float32 to TF32.
_TF32 = ("none", "default", "fastest", "bfloat16", "tensorfloat32", "tf32_tf32_f32")
# Of the results of a call on GPUs (ffi/core/exchange.h).
_MOST_GPU_RESULTS = 8


# ------------------------------------------------------------- public arguments
def dims_of_matmul(op: str, dims, x, w):
    """`dimension_numbers` as tuples counted from the front; default: of `x @ w`."""
    if dims is None:
        if w.ndim != 2 or x.ndim < 1:
            raise ValueError(
                f"{op}: without dimension_numbers, x has to be [..., k] and w [k, n], "
                f"but their shapes are {x.shape} and {w.shape}. Pass dimension_numbers "
                "as to jax.lax.dot_general."
            )
        return (((x.ndim - 1,), (0,)), ((), ()))
    front = lambda axes, ndim: tuple(_block.from_front(int(a), ndim) for a in axes)  # noqa: E731
    try:
        (xc, wc), (xb, wb) = dims
        return (
            (front(xc, x.ndim), front(wc, w.ndim)),
            (front(xb, x.ndim), front(wb, w.ndim)),
        )
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op}: dimension_numbers have to be ((contracting of x, of w), (batch of "
            f"x, of w)), each a sequence of dimensions, but are {dims}."
        ) from error


def hashable(precision):
    """`precision` as a parameter of a primitive: a pair as a tuple."""
    return tuple(precision) if isinstance(precision, list) else precision


def dot_general(dims, precision, preferred_element_type):
    """`lax.dot_general` with these options, as a function of x and w."""
    return partial(
        lax.dot_general,
        dimension_numbers=dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def result_type(dot, x_shape, x, w):
    """Shape and dtype of what `dot` makes; refuses what it refuses, in its words."""
    operands = ((x_shape, x.dtype), (w.shape, w.dtype))
    return jax.eval_shape(dot, *(jax.ShapeDtypeStruct(*o) for o in operands))


def add_bias(op: str, y, bias):
    """`y + bias` in the type of `y`."""
    if bias is None:
        return y
    bias = jnp.asarray(bias)
    if bias.ndim > y.ndim or any(
        n not in (1, m) for n, m in zip(bias.shape[::-1], y.shape[::-1], strict=False)
    ):
        raise ValueError(
            f"{op}: bias of shape {bias.shape} cannot be added to a result of shape "
            f"{y.shape}. Its last dimension has to be that of the result, or 1."
        )
    return y + bias.astype(y.dtype)


# -------------------------------------------------- local parts, in the form
def dot(x, w, transposed: bool, dtype, precision=None):
    """The matmul of one rank: [g, a, q, k] and [g, k, n] -> [g, a, q, n]."""
    x, w = _matmul_types.promoted(x, w)
    dims = (((3,), (2 if transposed else 1,)), ((0,), (0,)))
    wide = (
        _matmul_types.at_least_float32([x]) if _matmul_types.is_narrow(dtype) else dtype
    )
    y = lax.dot_general(x, w, dims, precision=precision, preferred_element_type=wide)
    return y.astype(dtype)


def weight_gradient(x, ct, transposed: bool, dtype, precision):
    """The cotangent of w in `dot`, of x and the cotangent of the result."""
    x, ct = _matmul_types.promoted(x, ct)
    pair = (ct, x) if transposed else (x, ct)
    dims = (((1, 2), (1, 2)), ((0,), (0,)))
    narrow = _matmul_types.is_narrow(dtype) or _matmul_types.is_narrow(x.dtype)
    wide = (
        _matmul_types.at_least_float32([x])
        if narrow
        else jnp.promote_types(x.dtype, dtype)
    )
    dw = lax.dot_general(*pair, dims, precision=precision, preferred_element_type=wide)
    return dw.astype(dtype)


def same_varying(axes, *arrays):
    """Marks all as varying over `axes` and whatever one of them varies over."""
    names = set(axes).union(*(_compat.varying(a) for a in arrays))
    return [_collective.make_varying(a, tuple(sorted(names, key=str))) for a in arrays]


# ------------------------------------------------------------------- primitives
def make_primitive(op: str, reference, abstract_eval, by_psum, summed_bytes):
    """A primitive on operands in the form, with what all three have alike.

    Args:
      op: the public name.
      reference: (*operands, **parameters) -> list of results, by `jax.lax`.
      abstract_eval: (*avals, **parameters) -> list of results' types.
      by_psum: as `reference`, by our psum.
      summed_bytes: (first operand, first result, ranks) -> what that psum adds.
    """
    primitive = core.Primitive(f"jax_overlap_{op}")
    primitive.multiple_results = True
    primitive.def_impl(partial(_compat.apply_primitive, primitive))

    @primitive.def_effectful_abstract_eval
    def _(*avals, axes, **params):
        _compat.check_axis_names(axes, f"jax_overlap.{op}")
        effects = {_compat.NamedAxisEffect(axis) for axis in axes}
        return abstract_eval(*avals, axes=axes, **params), effects

    _collective.planners[primitive] = partial(_plan, op, abstract_eval, summed_bytes)
    lower = partial(_lower, op, primitive, reference, by_psum)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cpu")
    _collective.lower_on_gpu(primitive, lower, _matmul_types.FLOAT8)
    return primitive


def result_aval(x, dtype, shape, varying):
    """The type of a result."""
    return x.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        manual_axis_type=x.mat.update(varying=varying),
    )


def check_varying(op: str, avals, axes) -> frozenset:
    """What all operands vary over, which has to hold `axes`."""
    varying = avals[0].mat.varying
    if _compat.check_vma() and not all(
        a.mat.varying == varying and set(axes) <= varying for a in avals
    ):
        raise ValueError(
            f"{op}: all operands have to vary over {axes} and alike, but vary over "
            f"{[sorted(map(str, a.mat.varying)) for a in avals]}. Mark them by "
            "jax.lax.pcast(x, axes, to='varying')."
        )
    return varying


def _plan(op, abstract_eval, summed_bytes, avals, team, situation, **params):
    results = abstract_eval(*avals, **params)
    plan = make_plan(
        op,
        params["axes"],
        avals,
        team,
        situation,
        params["implementation"],
        lambda _: _choose(
            op,
            avals,
            results,
            summed_bytes(avals[0], results[0], team.ranks),
            team,
            situation,
            **params,
        ),
        no_elements=_all_empty(results) or _all_empty(avals[: params.get("xs", 1)]),
    )
    count = params.get("xs", 1)
    xs, ws = avals[:count], avals[count:]
    transposed, cut = params["transposed"], params.get("cut", "")
    why = _matmul_types.why_not_types(xs, ws, results[0].dtype)
    why = why or _matmul_types.why_not_here(xs, ws, transposed, cut, team, situation)
    if why and params["implementation"] != "reference":
        return dataclasses.replace(
            plan, implementation="lax", algorithm=None, reason=why
        )
    return plan


def _choose(
    op,
    avals,
    results,
    summed,
    team,
    situation,
    *,
    algorithm,
    implementation,
    axis_index_groups,
    transposed,
    precision,
    cut="",
    xs=1,
    **_,
) -> tuple[str, str]:
    """The algorithm, or LEFT_TO_LAX, and why; summed: bytes, if by psum."""
    fuses = "0"
    if situation.on_gpu:
        forced = implementation == "native" or algorithm == "sliced"
        fuses = "1" if forced else config.GPU_MATMULS.read()
    asked = fuses != "0"
    if chosen := _by_psum.choose(
        summed,
        team,
        situation,
        algorithm=algorithm,
        implementation=implementation,
        groups=axis_index_groups,
        # Nothing in it is new: psum on GPUs is native without being asked for.
        by_choice=asked or op == "matmul_all_reduce",
    ):
        return chosen
    note = ""
    if algorithm == _by_psum.NAME:
        algorithm, note = None, "by_psum takes no axis_index_groups; "
    if asked:
        prediction = _gpu_cost.predict(
            op,
            avals[:xs],
            avals[xs:],
            results[0],
            transposed,
            team.ranks,
            _is_fast(precision),
        )
        chosen = _choose_on_gpu(
            algorithm, results, team, cut, prediction, by_it=fuses == "auto"
        )
    elif situation.on_gpu:
        chosen = _NOT_ASKED
    elif (op, algorithm) == ("matmul_all_reduce", "sliced"):
        chosen = LEFT_TO_LAX, "algorithm='sliced' of matmul_all_reduce is for GPUs"
    else:
        chosen = (algorithm, f"algorithm={algorithm!r}") if algorithm else _IN_PLACE
    return chosen[0], note + chosen[1]


_NOT_ASKED = (
    LEFT_TO_LAX,
    (
        "fused matmuls on GPUs are new, and have to be asked for: "
        f"implementation='native', algorithm='sliced', or {config.GPU_MATMULS.name}=1 "
        "or auto"
    ),
)
_IN_PLACE = ("in_place", "peers' operands are addressed in place")


def _choose_on_gpu(
    algorithm, results, team, cut, prediction, by_it: bool
) -> tuple[str, str]:
    """The algorithm on GPUs, or LEFT_TO_LAX, and why; by_it: by the prediction."""
    if not team.reaches_all:
        return LEFT_TO_LAX, f"products are stored at all ranks, but {team.note}"
    if algorithm == "in_place":
        return LEFT_TO_LAX, "on GPUs the operands of other ranks cannot be addressed"
    if cut == "inner" and results[0].dtype.itemsize < 4:
        return LEFT_TO_LAX, (
            "x is gathered along what is contracted, and a result in a half type would "
            "be rounded once for each rank"
        )
    if len(results) > _MOST_GPU_RESULTS:
        return LEFT_TO_LAX, f"more than {_MOST_GPU_RESULTS} results"
    if algorithm:
        return algorithm, f"algorithm={algorithm!r}"
    if by_it and not prediction.fuses:
        return LEFT_TO_LAX, f"{prediction} ({config.GPU_MATMULS.name}=auto)"
    how = "products go to their owners, or start, while others are computed"
    return "sliced", f"{how}; {prediction}"


def _all_empty(avals) -> bool:
    return all(a.size == 0 for a in avals)


def _lower(op, primitive, reference, by_psum, ctx, *operands, **params):
    xs = params.get("xs", 1)
    # CuBLASLt multiplies float8 along rows of both operands.
    along_rows = all(params["transposed"]) or _compat.platforms(ctx) != ("cuda",)
    if _matmul_types.is_narrow(ctx.avals_in[0].dtype) and not along_rows:
        bind = partial(_bind_transposed, primitive, **params)
        return _collective.lower_to_lax(ctx, bind, operands, False)
    team, plan = _collective.plan_lowering(ctx, primitive, params)
    if plan.implementation == "identity" and team.ranks != 1:  # no elements
        zeros = lambda *_: [jnp.zeros(a.shape, a.dtype) for a in ctx.avals_out]  # noqa: E731
        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)
    if plan.implementation != "native":
        alone = plan.implementation == "identity"
        local = {"axes": (), "axis_index_groups": None} if alone else {}
        return _collective.lower_to_lax(
            ctx, partial(reference, **{**params, **local}), operands, False
        )
    assert plan.algorithm is not None
    if plan.algorithm == _by_psum.NAME:
        by_psum = partial(by_psum, **params)
        return _collective.lower_to_lax(ctx, by_psum, operands, False)
    flags = np.array(params["transposed"], np.int64)
    return _collective.lower_to_handler(
        ctx,
        f"jax_overlap.{op}",
        team,
        params["axes"],
        operands,
        algorithm=_HANDLED[plan.algorithm],
        cut=CUTS[params.get("cut", "rows")],
        # Shapes of x and of w [g, k, n], an operand after the other.
        x_shapes=np.array([a.shape for a in ctx.avals_in[:xs]], np.int64).reshape(-1),
        w_cols=np.array(
            [
                a.shape[1 if t else 2]
                for a, t in zip(ctx.avals_in[xs:], flags, strict=True)
            ],
            np.int64,
        ),
        transposed=flags,
        **_of_platform(ctx, **params),
    )


def _bind_transposed(primitive, *operands, transposed, **params):
    """Binds with each w as [g, n, k]."""
    xs = params.get("xs", 1)
    ws = [
        w if t else lax.transpose(w, (0, 2, 1))
        for w, t in zip(operands[xs:], transposed, strict=True)
    ]
    transposed = (True,) * len(ws)
    return primitive.bind(*operands[:xs], *ws, transposed=transposed, **params)


def _of_platform(ctx, *, precision, xs=1, gathered=False, **_) -> dict:
    """The attributes that only the handlers for GPUs have, or those for CPUs."""
    x, w, out = ctx.avals_in[0], ctx.avals_in[xs], ctx.avals_out[0]
    if _compat.platforms(ctx) != ("cuda",):
        return {"wide": x.dtype != out.dtype}
    return {
        "w_dtype": str(w.dtype),
        "out_dtype": str(out.dtype),
        "fast": int(_is_fast(precision)),
        "gathered": int(gathered),
    }


def _is_fast(precision) -> bool:
    """Whether `jax.lax` would multiply float32 as TF32, its default on GPUs.

    By the same rule it adds products of float8 in accumulators of fewer bits.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(str(getattr(p, "name", p)).lower() in _TF32 for p in pair)


# --------------------------------------------------------------------- batching
def fold_batch(axis_data, xs, x_dims, ws, w_dims, transposed, *, into_cols: bool):
    """Operands with the batch dimension folded into one of the form.

    Returns (xs, ws, unfold), and unfold(result) is (batched result, its batch
    dimension). The batch goes into `a` if no weight has it, into `n` if no x has it
    (and `into_cols`), else into `g`.
    """
    n = axis_data.size
    if n == 0:  # as of one, of which nothing is kept
        xs, ws = _padded(xs, x_dims), _padded(ws, w_dims)
        n = 1

    def unfold(place, out, first):
        def of(y):
            y = _split(y, place, n, first)
            return (y if axis_data.size else lax.slice_in_dim(y, 0, 0, axis=out)), out

        return of

    if all(d is None for d in w_dims):
        xs = [
            _merged(_with_batch(x, d, n, 1), 1) for x, d in zip(xs, x_dims, strict=True)
        ]
        return xs, ws, unfold(1, 1, first=True)
    if into_cols and all(d is None for d in x_dims):
        ws = [
            _merged(_with_batch(w, d, n, 1 if t else 2), 1 if t else 2)
            for w, d, t in zip(ws, w_dims, transposed, strict=True)
        ]
        return xs, ws, unfold(3, 3, first=True)
    xs = [_merged(_with_batch(x, d, n, 1), 0) for x, d in zip(xs, x_dims, strict=True)]
    ws = [_merged(_with_batch(w, d, n, 1), 0) for w, d in zip(ws, w_dims, strict=True)]
    return xs, ws, unfold(0, 1, first=False)


def _padded(arrays, dims):
    """The arrays with one entry, of zeros, in their batch dimension of none."""
    zero = lambda a: np.zeros((), a.dtype)  # noqa: E731
    one = lambda a, d: [(0, int(i == d), 0) for i in range(a.ndim)]  # noqa: E731
    return [
        a if d is None else lax.pad(a, zero(a), one(a, d))
        for a, d in zip(arrays, dims, strict=True)
    ]


def _with_batch(x, d, size, place):
    if d is None:
        shape = (*x.shape[:place], size, *x.shape[place:])
        kept = [i for i in range(len(shape)) if i != place]
        return lax.broadcast_in_dim(x, shape, kept)
    return jnp.moveaxis(x, d, place)


def _merged(x, i):
    """Dimensions i and i + 1 as one."""
    return lax.reshape(
        x, (*x.shape[:i], x.shape[i] * x.shape[i + 1], *x.shape[i + 2 :])
    )


def _split(x, i, size, first: bool):
    """Dimension i as two, of which the first, or the second, has `size`."""
    pair = (size, x.shape[i] // size) if first else (x.shape[i] // size, size)
    return lax.reshape(x, (*x.shape[:i], *pair, *x.shape[i + 1 :]))

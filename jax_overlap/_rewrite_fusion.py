"""Which matmuls go into one op with a collective.

    dot_general -> reduce_scatter      matmul_reduce_scatter
    dot_general -> psum                matmul_all_reduce
    all_gather -> dot_general, ...     all_gather_matmul, of several weights in one call

Between a dot_general and its sum there may be transposes, reshapes and squeezes that
leave the scattered dimension whole; they are done after the sum instead.

A gather comes where its result is first used, with all matmuls that can come there:

    g = all_gather x                             k = convert k0
    q = dot_general g q0                         q, v, g = all_gather_matmul x (q0, k)
    k = convert k0                     becomes
    v = dot_general g k
    o = sin g                                    o = sin g
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding

import jax_overlap
from jax_overlap import _compat
from jax_overlap._rewrite_rules import COLLECTIVES, Body, Candidate

# How far after the first use of a gathered value its matmuls are looked for. Bounds
# the work, and how early weights are computed.
_WINDOW = 256


# ------------------------------------------------------- a matmul, then its sum
def fused_sum(body: Body, i: int) -> Iterator[Candidate | str]:
    """dot_general -> (transposes, reshapes) -> psum or reduce_scatter."""
    eqn = body.eqns[i]
    p = eqn.params
    scattered = p.get("scatter_dimension")
    if len(eqn.invars) != 1:
        return
    found = _chain(body, eqn.invars[0], scattered)
    if found is None:
        return
    if isinstance(found, str):
        yield f"not fused: {found}"
        return
    dot_index, chain, scattered = found
    dot = body.eqns[dot_index]
    if why := _why_no_dot(body, dot_index, eqn):
        yield f"not fused: {why}"
        return
    if not body.only_use(dot.outvars[0]) or not all(
        body.only_use(body.eqns[j].outvars[0]) for j in chain
    ):
        yield "not fused: the result of the dot_general is used elsewhere too"
        return
    if eqn.primitive.name == "reduce_scatter":
        if not p["tiled"]:
            yield "not fused: tiled=False"
            return
        became = "matmul_reduce_scatter"
    elif p.get("axis_index_groups") is not None:
        yield "not fused: axis_index_groups"
        return
    else:
        became = "matmul_all_reduce"
    steps = [body.eqns[j] for j in chain]
    yield Candidate(
        became,
        (dot_index, *chain, i),
        i,
        tuple(dot.invars),
        tuple(eqn.outvars),
        _sum_call(became, dot, steps, eqn, scattered),
    )


def _sum_call(became: str, dot, steps, eqn, scattered):
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    options = {}
    if became == "matmul_reduce_scatter":
        options = {
            "scatter_dimension": scattered,
            "axis_index_groups": eqn.params["axis_index_groups"],
        }

    def call(x, w):
        y = getattr(jax_overlap, became)(x, w, axes, **_dot_options(dot), **options)
        for step in steps:
            y = step.primitive.bind(y, **_resized(step, y.shape, eqn))
        return [y]

    return call


def _resized(step, shape, eqn) -> dict:
    """The parameters of a step on a value of which one dimension is now a part."""
    if step.primitive.name != "reshape" or eqn.primitive.name != "reduce_scatter":
        return step.params
    whole = _compat.shape_of(step.invars[0])
    sizes = list(step.params["new_sizes"])
    for cut in (d for d, n in enumerate(shape) if n != whole[d]):  # one, or none
        place = _dimension_at(sizes, math.prod(whole[:cut]), whole[cut])
        assert place is not None  # see _before
        sizes[place] //= eqn.params["axis_size"]
    return {**step.params, "new_sizes": tuple(sizes)}


def _chain(body: Body, v, scattered):
    """(dot_general, steps after it, scattered dimension of its result).

    None if no dot_general made `v`; a string if one did and something is in between.
    """
    chain: list[int] = []
    between = ""
    while not isinstance(v, Literal) and v in body.made_by:
        i = body.made_by[v]
        eqn = body.eqns[i]
        name = eqn.primitive.name
        if name == "dot_general":
            return between or (i, tuple(reversed(chain)), scattered)
        if name == "convert_element_type":
            between = "the result of the dot_general is converted before the sum"
        elif name not in ("reshape", "transpose", "squeeze"):
            return None
        elif scattered is not None and not between:
            scattered = _before(eqn, scattered)
            if scattered is None:
                between = f"a {name} cuts the scattered dimension"
        chain.append(i)
        v = eqn.invars[0]
    return None


def _before(eqn: JaxprEqn, dimension: int) -> int | None:
    """Which dimension of the operand is `dimension` of the result, whole; or None."""
    p = eqn.params
    shape, out_shape = _compat.shape_of(eqn.invars[0]), _compat.shape_of(eqn.outvars[0])
    if eqn.primitive.name == "transpose":
        return p["permutation"][dimension]
    if eqn.primitive.name == "squeeze":
        return [d for d in range(len(shape)) if d not in p["dimensions"]][dimension]
    if p["dimensions"] is not None or p.get("sharding") is not None:
        return None
    before = math.prod(out_shape[:dimension])
    return _dimension_at(shape, before, out_shape[dimension])


def _dimension_at(shape, before: int, size: int) -> int | None:
    """The dimension of this size that has `before` elements in those before it."""
    if size == 1:  # there may be several
        return None
    for d, dim in enumerate(shape):
        if dim == size and math.prod(shape[:d]) == before:
            return d
    return None


# ------------------------------------------------- a gather, then its matmuls
def fused_gather(body: Body, i: int) -> Iterator[Candidate | str]:
    """all_gather -> dot_generals with it on the left; other uses get it as well."""
    eqn = body.eqns[i]
    (x,), (gathered,) = eqn.invars, eqn.outvars
    users = body.used_by.get(gathered, [])
    near = [j for j in users if j <= users[0] + _WINDOW]
    near = [j for j in near if body.eqns[j].primitive.name == "dot_general"]
    if not near:
        return
    if not eqn.params["tiled"]:
        yield "not fused: tiled=False"
        return
    if body.early.intersection(users):
        yield "not fused: the result feeds another fused matmul"
        return
    dots, hoisted, why = _group(body, gathered, near, eqn, users[0])
    if not dots:
        yield f"not fused: {why}"
        return
    members = [body.eqns[j] for j in dots]
    others = gathered in body.returned or any(j not in dots for j in users)
    results = (*(d.outvars[0] for d in members), *((gathered,) if others else ()))
    yield Candidate(
        "all_gather_matmul",
        (i, *dots),
        users[0],
        (x, *(d.invars[1] for d in members)),
        results,
        _gather_call(eqn, members, others),
        before=True,
        hoisted=tuple(sorted(hoisted)),
    )


def _gather_call(eqn, dots, others: bool):
    p = eqn.params
    options = _dot_options(dots[0])
    options["dimension_numbers"] = tuple(d.params["dimension_numbers"] for d in dots)

    def call(x, *ws):
        got = jax_overlap.all_gather_matmul(
            x,
            ws,
            p["axis_name"],
            gather_dimension=p["all_gather_dimension"],
            return_gathered=others,
            axis_index_groups=p["axis_index_groups"],
            **options,
        )
        return [*got[0], got[1]] if others else list(got)

    return call


def _group(body: Body, gathered, near, eqn, first: int):
    """The dot_generals that can be one call before the equation `first`.

    Returns (these, what has to come before them, why the last other one cannot).
    """
    dots: list[int] = []
    hoisted: set[int] = set()
    why = ""
    late = _depending(body, gathered, first, near[-1])
    for j in near:
        dot = body.eqns[j]
        right = dot.invars[1]
        if dot.invars[0] is not gathered:
            why = "the result is the right operand of the dot_general"
        elif right is gathered:
            why = "the result is both operands of the dot_general"
        elif reason := _why_no_dot(body, j, eqn):
            why = reason
        elif not isinstance(right, Literal) and right in late:
            why = "the right operand depends on the result"
        elif dots and _kind(dot) != _kind(body.eqns[dots[0]]):
            why = "it is of another kind than the first"
        elif not all(_movable(body, k) for k in _needed(body, right, first)):
            why = "the right operand is computed later, and cannot be before"
        else:
            dots.append(j)
            hoisted |= _needed(body, right, first)
    return dots, hoisted, why


def _depending(body: Body, v, first: int, last: int) -> set:
    """The variables that depend on `v` and are made by equations `first` to `last`."""
    found = {v}
    for eqn in body.eqns[first : last + 1]:
        if any(not isinstance(a, Literal) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def _needed(body: Body, v, first: int) -> set[int]:
    """The equations from `first` on that `v` needs."""
    needed: set[int] = set()
    stack = [v]
    while stack:
        v = stack.pop()
        i = -1 if isinstance(v, Literal) else body.made_by.get(v, -1)
        if i >= first and i not in needed:
            needed.add(i)
            stack.extend(body.eqns[i].invars)
    return needed


def _movable(body: Body, i: int) -> bool:
    """Whether an equation may come earlier: nothing but a computation."""
    eqn = body.eqns[i]
    return (
        i not in body.gone
        and i not in body.early
        and not eqn.effects
        and eqn.primitive.name not in COLLECTIVES
    )


# ------------------------------------------------------------------ dot_generals
def _why_no_dot(body: Body, i: int, collective: JaxprEqn) -> str:
    """Why a dot_general cannot be fused with a collective, or an empty string."""
    dot = body.eqns[i]
    types = [_compat.dtype_of(v) for v in dot.invars]
    result = _compat.dtype_of(dot.outvars[0])
    mesh = _compat.equation_mesh(collective)
    automatic = sorted(set(mesh.axis_names) - set(mesh.manual_axes), key=str)
    if automatic:  # nothing to gain, and reshapes could undo how XLA has cut these
        return f"mesh axes {automatic} are automatic here, so ops lower to jax.lax"
    if i in body.gone or i in body.early:
        return "the dot_general is fused with another collective"
    if body.unused(dot.outvars[0]):
        return "the result of the dot_general is not used"
    if not _is_trivial(dot.params.get("out_sharding")):
        return "the dot_general has an out_sharding"
    if not _has_free_dimensions(dot):
        return "the dot_general is no matrix product"
    if types[0] != types[1]:
        return f"the dot_general is of {types[0]} and {types[1]}"
    if not all(jnp.issubdtype(t, jnp.floating) for t in (*types, result)):
        return f"the dot_general is of {types[0]}"
    if not _compat.is_same_context(dot, collective):
        return "the dot_general is in another context (mesh, compute_on, metadata)"
    return ""


def _has_free_dimensions(dot: JaxprEqn) -> bool:
    """Whether a dimension of an operand is neither contracted nor of the batch."""
    contracting, batch = dot.params["dimension_numbers"]
    return any(
        len(_compat.shape_of(v)) > len(c) + len(b)
        for v, c, b in zip(dot.invars, contracting, batch, strict=True)
    )


def _is_trivial(sharding) -> bool:
    """Whether a sharding says nothing, as those of transposed dot_generals do."""
    return sharding is None or (
        isinstance(sharding, NamedSharding)
        and all(axes is None for axes in sharding.spec)
        and set(sharding.mesh.axis_names) <= set(sharding.mesh.manual_axes)
    )


def _kind(dot: JaxprEqn) -> tuple:
    """What dot_generals of one call have alike: arithmetic, and the dimensions of x."""
    (x_contracting, _), (x_batch, _) = dot.params["dimension_numbers"]
    arithmetic = dot.params["precision"], dot.params["preferred_element_type"]
    return *arithmetic, tuple(x_contracting), tuple(x_batch)


def _dot_options(dot: JaxprEqn) -> dict:
    names = ("dimension_numbers", "precision", "preferred_element_type")
    return {name: dot.params[name] for name in names}

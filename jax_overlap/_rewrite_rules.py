"""What becomes of each collective of a jaxpr: the decisions of `jax_overlap.overlap`.

    dot_general -> reduce_scatter         matmul_reduce_scatter
    dot_general -> psum                   matmul_all_reduce
    all_gather  -> dot_general, ...       all_gather_matmul (several weights, one call)
    any of the four collectives alone     the op of its name

Between a dot_general and its sum there may be transposes, reshapes and squeezes that
leave the scattered dimension whole; they are done after the sum instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

import jax_overlap
from jax_overlap import _compat

SUMS = ("psum", "psum_invariant")
REWRITTEN = (*SUMS, "reduce_scatter", "all_gather", "all_to_all")
# Reported, and left as they are: there is no op for them.
LEFT = (
    *("pmax", "pmin", "ppermute", "pbroadcast", "ragged_all_to_all"),
    *("all_gather_invariant", "all_gather_reduced", "unreduced_psum"),
    *("unreduced_reduce_scatter", "unreduced_pmax", "unreduced_pmin"),
)
COLLECTIVES = frozenset((*REWRITTEN, *LEFT))

# How far after the first use of a gathered value its matmuls are looked for. Bounds
# the work, and how early weights are computed.
_WINDOW = 256


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What `jax_overlap.overlap` makes of one collective.

    Attributes:
      primitives: what was found: the collective, or with it the dot_generals that it
        is fused with, in program order.
      axes: the names of the axes.
      operands: the type of each operand of what was found, such as "float32[8,128]".
      where: the line of the source, and the function.
      became: the op, such as "psum" or "matmul_reduce_scatter"; None if it stays.
      reason: why it stays, or why it is not fused; may be empty.
    """

    primitives: tuple[str, ...]
    axes: tuple
    operands: tuple[str, ...]
    where: str
    became: str | None
    reason: str

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{' + '.join(self.primitives)} over {self.axes} of "
            f"{', '.join(self.operands)} at {self.where}: "
            f"{self.became or 'stays'}{reason}"
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Equations that one call of an op can take the place of.

    Attributes:
      became: the op.
      eqns: the indices of the equations that go.
      at: the index of the equation before which, or in whose place, the call comes.
      operands: of the call.
      results: the variables that it defines.
      call: (*operands) -> list of results, by the op.
      hoisted: indices of equations that have to come before the call.
    """

    became: str
    eqns: tuple[int, ...]
    at: int
    operands: tuple[Any, ...]
    results: tuple[Var, ...]
    call: Callable[..., Sequence]
    hoisted: tuple[int, ...] = ()


class Body:
    """The equations of a jaxpr: who makes and who uses each variable.

    Attributes:
      gone: equations that a chosen candidate replaces.
      early: those of them, and others, that now come before their place.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outvars: Sequence):
        self.eqns = eqns
        self.made_by: dict[Var, int] = {}
        self.used_by: dict[Var, list[int]] = {}
        for i, eqn in enumerate(eqns):
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.used_by.setdefault(v, []).append(i)
            self.made_by.update((v, i) for v in eqn.outvars)
        self.returned = {v for v in outvars if not isinstance(v, Literal)}
        self.gone: set[int] = set()
        self.early: set[int] = set()

    def take(self, candidate: Candidate) -> None:
        """Notes that the candidate was chosen."""
        self.gone.update(candidate.eqns)
        if candidate.became == "all_gather_matmul":
            self.early.update(candidate.eqns, candidate.hoisted)

    def only_use(self, v: Var) -> bool:
        return len(self.used_by.get(v, ())) == 1 and v not in self.returned

    def unused(self, v: Var) -> bool:
        return v not in self.used_by and v not in self.returned


def axes_of(eqn: JaxprEqn) -> tuple:
    """The axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def why_left(body: Body, i: int) -> str:
    """Why the collective `i` stays as it is; empty if an op can take its place."""
    eqn = body.eqns[i]
    mesh = _compat.equation_mesh(eqn)
    foreign = [a for a in axes_of(eqn) if a not in mesh.manual_axes]
    if eqn.primitive.name not in REWRITTEN:
        return "there is no such op"
    if foreign:
        return f"{foreign} are not manual axes of a mesh (of jax.vmap, or positional)"
    if not _compat.is_plain_context(eqn):
        return "it is under compute_on"
    if all(body.unused(v) for v in eqn.outvars):
        return "its result is not used"
    return ""


def candidates(body: Body, i: int) -> Iterator[Candidate | str]:
    """What the collective `i` may become, the best first; or why not to something."""
    name = body.eqns[i].primitive.name
    if name in SUMS or name == "reduce_scatter":
        yield from _fused_sum(body, i)
    if name == "all_gather":
        yield from _fused_gather(body, i)
    yield _alone(body, i)


# ------------------------------------------------------------------------- alone
def _alone(body: Body, i: int) -> Candidate:
    eqn = body.eqns[i]
    p = eqn.params
    axes = p.get("axes", p.get("axis_name"))
    groups = p.get("axis_index_groups")

    def psum(*xs):
        return jax_overlap.psum(list(xs), axes, axis_index_groups=groups)

    def psum_scatter(x):
        return [
            jax_overlap.psum_scatter(
                x,
                axes,
                scatter_dimension=p["scatter_dimension"],
                axis_index_groups=groups,
                tiled=p["tiled"],
            )
        ]

    def all_gather(x):
        return [
            jax_overlap.all_gather(
                x,
                axes,
                axis_index_groups=groups,
                axis=p["all_gather_dimension"],
                tiled=p["tiled"],
            )
        ]

    def all_to_all(x):
        return [
            jax_overlap.all_to_all(
                x,
                axes,
                p["split_axis"],
                p["concat_axis"],
                axis_index_groups=groups,
                tiled=p["tiled"],
            )
        ]

    call = {
        "reduce_scatter": psum_scatter,
        "all_gather": all_gather,
        "all_to_all": all_to_all,
    }.get(eqn.primitive.name, psum)
    return Candidate(
        call.__name__, (i,), i, tuple(eqn.invars), tuple(eqn.outvars), call
    )


# ------------------------------------------------------- a matmul, then its sum
def _fused_sum(body: Body, i: int) -> Iterator[Candidate | str]:
    """dot_general -> (transposes, reshapes) -> psum or reduce_scatter."""
    eqn = body.eqns[i]
    p = eqn.params
    scattered = p.get("scatter_dimension")
    if len(eqn.invars) != 1:
        return
    found = _chain(body, eqn.invars[0], scattered)
    if found is None:
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
    size = eqn.params["axis_size"]
    whole = step.invars[0].aval.shape
    cut = next((d for d in range(len(shape)) if shape[d] != whole[d]), None)
    sizes = list(step.params["new_sizes"])
    if cut is not None:
        before = math.prod(whole[:cut])
        sizes[_dimension_at(sizes, before, whole[cut])] //= size
    return {**step.params, "new_sizes": tuple(sizes)}


def _chain(body: Body, v, scattered):
    """(dot_general, steps after it, scattered dimension of its result), or None."""
    chain: list[int] = []
    while not isinstance(v, Literal) and v in body.made_by:
        i = body.made_by[v]
        eqn = body.eqns[i]
        if eqn.primitive.name == "dot_general":
            return i, tuple(reversed(chain)), scattered
        if eqn.primitive.name not in ("reshape", "transpose", "squeeze"):
            return None
        if scattered is not None:
            scattered = _before(eqn, scattered)
            if scattered is None:
                return None
        chain.append(i)
        v = eqn.invars[0]
    return None


def _before(eqn: JaxprEqn, dimension: int) -> int | None:
    """Which dimension of the operand is `dimension` of the result, whole; or None."""
    p = eqn.params
    shape, out_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
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
def _fused_gather(body: Body, i: int) -> Iterator[Candidate | str]:
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
    """(dot_generals that can be one call before `first`, what has to come before it,
    why the last other one cannot)."""
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
    types = [v.aval.dtype for v in dot.invars]
    result = dot.outvars[0].aval.dtype
    if i in body.gone or i in body.early:
        return "the dot_general is fused with another collective"
    if body.unused(dot.outvars[0]):
        return "the result of the dot_general is not used"
    if dot.params.get("out_sharding") is not None:
        return "the dot_general has an out_sharding"
    if types[0] != types[1]:
        return f"the dot_general is of {types[0]} and {types[1]}"
    if not all(jnp.issubdtype(t, jnp.floating) for t in (*types, result)):
        return f"the dot_general is of {types[0]}"
    if not _compat.is_same_context(dot, collective):
        return "the dot_general is in another context (mesh, compute_on, metadata)"
    return ""


def _kind(dot: JaxprEqn) -> tuple:
    """What dot_generals of one call have alike: arithmetic, and the dimensions of x."""
    (x_contracting, _), (x_batch, _) = dot.params["dimension_numbers"]
    arithmetic = dot.params["precision"], dot.params["preferred_element_type"]
    return *arithmetic, tuple(x_contracting), tuple(x_batch)


def _dot_options(dot: JaxprEqn) -> dict:
    names = ("dimension_numbers", "precision", "preferred_element_type")
    return {name: dot.params[name] for name in names}

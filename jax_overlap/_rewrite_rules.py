"""What a collective of a jaxpr becomes by itself: an op with the signature of its own.

_rewrite_fusion.py has what it becomes together with matmuls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

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
    *("psum_invariant_start", "reduce_scatter_start", "all_gather_start"),
    *("all_to_all_start", "ppermute_start"),
)
COLLECTIVES = frozenset((*REWRITTEN, *LEFT))
# From invariant to varying: JAX's and ours.
CASTS = ("pvary", "jax_overlap_pvary")


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
      at: the index of the equation in whose place the call comes.
      operands: of the call.
      results: the variables that it defines.
      call: (*operands) -> list of results, by the op.
      before: whether it comes before that equation instead.
      hoisted: indices of equations that have to come before the call.
    """

    became: str
    eqns: tuple[int, ...]
    at: int
    operands: tuple[Any, ...]
    results: tuple[Var, ...]
    call: Callable[..., Sequence]
    before: bool = False
    hoisted: tuple[int, ...] = ()


class Body:
    """The equations of a jaxpr: who makes and who uses each variable.

    Attributes:
      gone: equations that a chosen candidate replaces.
      hoisted: equations that now come earlier, before such a call.
      early: all that now happens before its place.
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
        self.hoisted: set[int] = set()
        self.early: set[int] = set()

    def take(self, candidate: Candidate) -> None:
        """Notes that the candidate was chosen."""
        self.gone.update(candidate.eqns)
        self.hoisted.update(candidate.hoisted)
        if candidate.before:
            self.early.update(candidate.eqns, candidate.hoisted)
        self.made_by.update((v, candidate.at) for v in candidate.results)

    def first_use(self, eqn: JaxprEqn) -> int:
        """The index of the first equation that uses a result of this one."""
        uses = [self.used_by[v][0] for v in eqn.outvars if v in self.used_by]
        return min(uses, default=len(self.eqns))

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


# ------------------------------------------------------------------------- alone
def alone(body: Body, i: int) -> Candidate:
    """The collective `i` as the op of its name."""
    eqn = body.eqns[i]
    p = eqn.params

    def psum_scatter(x):
        return [
            jax_overlap.psum_scatter(
                x,
                p["axis_name"],
                scatter_dimension=p["scatter_dimension"],
                axis_index_groups=p["axis_index_groups"],
                tiled=p["tiled"],
            )
        ]

    def all_gather(x):
        return [
            jax_overlap.all_gather(
                x,
                p["axis_name"],
                axis_index_groups=p["axis_index_groups"],
                axis=p["all_gather_dimension"],
                tiled=p["tiled"],
            )
        ]

    def all_to_all(x):  # for tiled=False, jax.lax has added a dimension before this
        return [
            jax_overlap.all_to_all(
                x,
                p["axis_name"],
                p["split_axis"],
                p["concat_axis"],
                axis_index_groups=p["axis_index_groups"],
                tiled=True,
            )
        ]

    calls = {
        "reduce_scatter": psum_scatter,
        "all_gather": all_gather,
        "all_to_all": all_to_all,
    }
    call = calls[eqn.primitive.name]
    return Candidate(
        call.__name__, (i,), i, tuple(eqn.invars), tuple(eqn.outvars), call
    )


def psums(body: Body, indices: Sequence[int]) -> Candidate:
    """These psums, which are alike, as one: it packs its operands."""
    eqns = [body.eqns[i] for i in indices]
    p = eqns[0].params

    def psum(*xs):
        groups = p.get("axis_index_groups")
        return jax_overlap.psum(list(xs), p["axes"], axis_index_groups=groups)

    operands = [v for eqn in eqns for v in eqn.invars]
    results = [v for eqn in eqns for v in eqn.outvars]
    return Candidate(
        "psum", tuple(indices), indices[-1], tuple(operands), tuple(results), psum
    )


def run_of_psums(body: Body, i: int, by_itself: Callable[[int], bool]) -> list[int]:
    """The psum `i` and those right behind it that it can be one with.

    Such as those of the leaves of a pytree. `by_itself(j)`: whether the psum `j` is
    to become something else. No result may be used before the last of them.
    """
    run, first = [i], body.eqns[i]
    used = body.first_use(first)
    for j in range(i + 1, len(body.eqns)):
        eqn = body.eqns[j]
        if j >= used or eqn.primitive.name not in (*CASTS, first.primitive.name):
            break
        if eqn.primitive.name in CASTS:
            continue
        if (
            eqn.params != first.params
            or not _compat.is_same_context(eqn, first)
            or why_left(body, j)
            or by_itself(j)
        ):
            break
        run.append(j)
        used = min(used, body.first_use(eqn))
    return run

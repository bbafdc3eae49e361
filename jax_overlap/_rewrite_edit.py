"""Puts ops in place of the collectives of one jaxpr.

The equations of an op are traced where the collective was, with its mesh, its metadata
and its types, and carry its source line and names. What a collective becomes is the
first candidate that gives exactly the types it gave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import Recompute, Saveable
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from jax_overlap import _compat
from jax_overlap._rewrite_fusion import fused_gather, fused_sum
from jax_overlap._rewrite_rules import (
    COLLECTIVES,
    SUMS,
    Body,
    Candidate,
    Rewrite,
    alone,
    axes_of,
    psums,
    run_of_psums,
    why_left,
)
from jax_overlap.ops._pvary import to_varying_p


@dataclasses.dataclass(frozen=True)
class Context:
    """What the equations of a jaxpr inherit from the equations around them.

    Attributes:
      check_vma: whether types say over which axes values vary.
      policy: that of the `jax.checkpoint` around them, if it has one.
    """

    check_vma: bool
    policy: Callable | None = None

    def inside(self, eqn: JaxprEqn) -> Context:
        """The context of the jaxprs of an equation."""
        return dataclasses.replace(
            self,
            check_vma=eqn.params.get("check_vma", self.check_vma),
            policy=eqn.params.get("policy", self.policy),
        )


class Edits:
    """The equations of one jaxpr while collectives are replaced."""

    def __init__(self, eqns, outvars, context: Context):
        self._body = Body(eqns, outvars)
        self._context = context
        self._before: dict[int, list[JaxprEqn]] = {}
        self._instead: dict[int, list[JaxprEqn]] = {}
        self._calls: dict[tuple, tuple] = {}

    def decide(self, i: int) -> list[Rewrite]:
        """Replaces the collective `i`, if something can take its place.

        Returns what became of it; nothing if it went with another one before.
        """
        body = self._body
        if i in body.gone:
            return []
        if why := why_left(body, i):
            return [self._row((i,), None, why)]
        reasons: list[str] = []
        for candidate in self._candidates(i):
            if isinstance(candidate, str):
                reasons.append(candidate)
                continue
            new, why = self._traced(candidate, body.eqns[i])
            if not why:
                self._replace(candidate, new)
                indices = tuple(sorted(candidate.eqns))
                return [self._row(indices, candidate.became, "; ".join(reasons))]
            reasons.append(f"not {candidate.became}: {why}")
        return [self._row((i,), None, "; ".join(reasons))]

    def _candidates(self, i: int) -> Iterator[Candidate | str]:
        """What the collective `i` may become, the best first; or why it may not."""
        body, name = self._body, self._body.eqns[i].primitive.name
        if name in SUMS or name == "reduce_scatter":
            yield from fused_sum(body, i)
        if name == "all_gather":
            yield from fused_gather(body, i)
        if name not in SUMS:
            yield alone(body, i)
            return
        run = run_of_psums(body, i, self._is_fused)
        if len(run) > 1:
            yield psums(body, run)
        yield psums(body, [i])

    def _is_fused(self, i: int) -> bool:
        return any(isinstance(c, Candidate) for c in fused_sum(self._body, i))

    def result(self) -> list[JaxprEqn]:
        """All equations, in an order in which each comes after what it needs."""
        moved = self._body.gone | self._body.hoisted
        out = []
        for i, eqn in enumerate(self._body.eqns):
            out += self._before.get(i, ())
            out += self._instead.get(i, () if i in moved else (eqn,))
        return out

    def _replace(self, candidate: Candidate, new: list[JaxprEqn]) -> None:
        where = self._before if candidate.before else self._instead
        hoisted = [self._body.eqns[j] for j in candidate.hoisted]
        where.setdefault(candidate.at, []).extend([*hoisted, *new])
        self._body.take(candidate)

    def _traced(self, candidate: Candidate, eqn: JaxprEqn):
        """(the equations of a candidate, "") or ([], why it cannot be)."""
        old = [self._body.eqns[j] for j in candidate.eqns]
        try:
            jaxpr, consts = self._call(candidate, eqn)
        except (TypeError, ValueError, NotImplementedError) as error:
            return [], " ".join(str(error).split())
        types = [v.aval for v in jaxpr.outvars]
        wanted = [v.aval for v in candidate.results]
        made = {v for e in jaxpr.eqns for v in e.outvars}
        effects = set().union(*(e.effects for e in old))
        if types != wanted:
            return [], f"its result would be {types} instead of {wanted}"
        if consts or not jaxpr.effects <= effects:
            return [], "it needs constants or has other effects"
        if len(set(map(id, jaxpr.outvars))) < len(types) or not all(
            isinstance(v, Var) and v in made for v in jaxpr.outvars
        ):
            return [], "there is nothing to do"
        if not _same_policy(self._context.policy, old, jaxpr.eqns):
            return [], "the policy of jax.checkpoint would treat it differently"
        return _inlined(jaxpr, candidate, eqn), ""

    def _call(self, candidate: Candidate, eqn: JaxprEqn) -> tuple:
        """The call of a candidate as (jaxpr, constants); those alike are traced once.

        A model has many layers.
        """
        eqns = [self._body.eqns[j] for j in candidate.eqns]
        key = (
            candidate.became,
            tuple((e.primitive, tuple(sorted(e.params.items()))) for e in eqns),
            tuple(v.aval for v in (*candidate.operands, *candidate.results)),
            len(candidate.results),
            _compat.context_key(eqn),
        )
        try:
            hash(key)
        except TypeError:  # such as lists in axis_index_groups
            return _trace(candidate, eqn, self._context.check_vma)
        if key not in self._calls:
            self._calls[key] = _trace(candidate, eqn, self._context.check_vma)
        return self._calls[key]

    def _row(self, indices, became, reason) -> Rewrite:
        eqns = [self._body.eqns[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        operands = [v for eqn in eqns for v in eqn.invars]
        collective = next(e for e in eqns if e.primitive.name in COLLECTIVES)
        return Rewrite(
            primitives=tuple(eqn.primitive.name for eqn in eqns),
            axes=axes_of(collective),
            operands=tuple(
                v.aval.str_short()
                for v in operands
                if isinstance(v, Literal) or v not in made
            ),
            where=_compat.source_line(collective),
            became=became,
            reason=reason,
        )


def _trace(candidate: Candidate, eqn: JaxprEqn, check_vma: bool):
    """The call of a candidate as a jaxpr, traced where the equation was."""
    mesh = _compat.equation_mesh(eqn)
    sizes = {axis: mesh.shape[axis] for axis in mesh.manual_axes}
    with (
        _compat.equation_context(eqn),
        _compat.set_check_vma(check_vma),
        _compat.axis_env(sizes),
    ):
        avals = [v.aval for v in candidate.operands]
        return _compat.trace(candidate.call, avals)


def _inlined(jaxpr, candidate: Candidate, eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of `jaxpr` on the variables of a candidate, and on new ones."""
    made = [v for e in jaxpr.eqns for v in e.outvars if not isinstance(v, DropVar)]
    new: dict[Var, Any] = {v: Var(v.aval) for v in made}
    new.update(zip(jaxpr.invars, candidate.operands, strict=True))
    new.update(zip(jaxpr.outvars, candidate.results, strict=True))

    def renamed(v):
        return v if isinstance(v, Literal) else new.get(v, v)

    return [
        e.replace(
            invars=[renamed(v) for v in e.invars],
            outvars=[renamed(v) for v in e.outvars],
            source_info=eqn.source_info,
        )
        for e in jaxpr.eqns
    ]


def _same_policy(policy, old, new) -> bool:
    """Whether a policy of `jax.checkpoint` saves as much with the new equations.

    What it says of the op it has to say of all that it would save before.
    """
    if policy is None:
        return True

    def answer(eqn):
        saved = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        return (Saveable if saved else Recompute) if isinstance(saved, bool) else saved

    answers = {answer(e) for e in new if e.primitive.name.startswith("jax_overlap_")}
    answers |= {answer(eqn) for eqn in old} - {Recompute}
    return len(answers) <= 1


# --------------------------------------------------------------- casts to varying
def with_our_transpose(eqn: JaxprEqn, context: Context) -> JaxprEqn:
    """A cast to varying as one whose cotangents our psum adds, if it may have any."""
    (x,) = eqn.invars
    if (
        isinstance(x, Literal)
        or not jnp.issubdtype(_compat.dtype_of(x), jnp.inexact)
        or not set(eqn.params["axes"]) <= set(_compat.equation_mesh(eqn).manual_axes)
        or not _compat.is_plain_context(eqn)
    ):
        return eqn
    new = eqn.replace(primitive=to_varying_p)
    return new if _same_policy(context.policy, [eqn], [new]) else eqn

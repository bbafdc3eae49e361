"""Goes through a jaxpr and those inside of it; _rewrite_edit.py edits each.

Equations that nothing becomes of stay the very same objects, and so do jaxprs without
any other. An enclosing equation is bound as it was but for the jaxprs in its
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import linear_util
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from jax_overlap import _compat
from jax_overlap._rewrite_edit import Context, Edits, with_our_transpose
from jax_overlap._rewrite_rules import COLLECTIVES, Rewrite

# Kernels, whose collectives are not between the ranks of `jax.shard_map`.
_OPAQUE = ("pallas_call",)


class Rewriter:
    """Rewrites jaxprs, each object once: JAX compiles by the identity of jaxprs.

    Attributes:
      visited: how many equations were looked at.
    """

    def __init__(self):
        self.visited = 0
        self._known = weakref.WeakKeyDictionary()

    def jaxpr(self, jaxpr, context: Context) -> tuple[Any, list[Rewrite]]:
        """(`jaxpr` with our ops, or itself; what became of its collectives)."""
        known = self._known.setdefault(jaxpr, {})
        if context not in known:
            eqns, rows = self._equations(jaxpr, context)
            # None if unchanged: a reference to its key would keep an entry alive.
            new = None if eqns is None else _compat.replace_equations(jaxpr, eqns)
            known[context] = (new, rows)
        new, rows = known[context]
        return (jaxpr if new is None else new), rows

    def _equations(self, jaxpr, context: Context):
        """(equations, or None if they are those of `jaxpr`; rows)."""
        jaxpr = _compat.open_jaxpr(jaxpr)
        eqns: list[JaxprEqn] = []
        rows: dict[int, list[Rewrite]] = {}  # by the index of the equation
        found: list[int] = []
        for i, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            if name in COLLECTIVES:
                found.append(i)
            elif name == "pvary":
                eqn = with_our_transpose(eqn, context)
            elif name not in _OPAQUE:
                eqn, rows[i] = self._with_inner(eqn, context)
            eqns.append(eqn)
        self.visited += len(eqns)
        if found:
            edits = Edits(eqns, jaxpr.outvars, context)
            # Sums choose first: a matmul between a gather and a sum goes to the sum.
            found.sort(key=lambda i: eqns[i].primitive.name == "all_gather")
            rows.update((i, edits.decide(i)) for i in found)
            eqns = edits.result()
        changed = len(eqns) != len(jaxpr.eqns) or any(
            a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)
        )
        in_order = [row for i in sorted(rows) for row in rows[i]]
        return (eqns if changed else None), in_order

    def _with_inner(self, eqn: JaxprEqn, context: Context):
        """An equation with the jaxprs in its parameters rewritten, and their rows."""
        rows: list[Rewrite] = []
        new: dict[str, Any] = {}
        for name, value in eqn.params.items():
            old = value if isinstance(value, tuple) else (value,)
            parts = []
            for part in old:
                if _compat.is_jaxpr(part):
                    part, inner = self.jaxpr(part, context.inside(eqn))
                    rows += inner
                parts.append(part)
            if any(a is not b for a, b in zip(parts, old, strict=True)):
                new[name] = _like(value, parts)
        new |= self._with_rules(eqn, context)
        return (eqn.replace(params={**eqn.params, **new}) if new else eqn), rows

    def _with_rules(self, eqn: JaxprEqn, context: Context) -> dict[str, Any]:
        """The derivative rules of custom_jvp and custom_vjp, rewritten when used."""
        rules = {
            "custom_jvp_call": {"jvp_jaxpr_fun": self._traced_rule},
            "custom_vjp_call": {"fwd_jaxpr_thunk": self._traced_rule, "bwd": self._bwd},
        }.get(eqn.primitive.name, {})
        return {
            name: linear_util.wrap_init(
                partial(run, eqn.params[name], context),
                debug_info=eqn.params[name].debug_info,
            )
            for name, run in rules.items()
        }

    def _traced_rule(self, rule, context: Context, *args):
        """Of a rule that gives (jaxpr, constants, ...)."""
        jaxpr, *rest = rule.call_wrapped(*args)
        return self.jaxpr(jaxpr, context)[0], *rest

    def _bwd(self, rule, context: Context, *args):
        return self.call(rule.call_wrapped, args, {}, context.policy)

    # ------------------------------------------------------------- functions
    def call(self, fn, args, kwargs, policy=None):
        """`fn(*args, **kwargs)` with our ops."""
        traced = Traced(fn, args, kwargs)
        jaxpr, _ = self.jaxpr(traced.jaxpr, Context(_compat.check_vma(), policy))
        return traced.outputs(jaxpr_as_fun(jaxpr)(*traced.operands))


def _like(value, parts):
    """`parts` as `value` is: a tuple, a named tuple, or one thing."""
    if not isinstance(value, tuple):
        return parts[0]
    return getattr(value, "_make", tuple)(parts)


class Traced:
    """`fn(*args, **kwargs)` as a jaxpr.

    Arrays become the operands; whatever else is a leaf of the arguments, such as a
    Python number, is seen by `fn` as it is, and so are its results by the caller.
    """

    def __init__(self, fn, args, kwargs):
        arguments = _Split((args, kwargs), _is_operand)
        self.operands = arguments.arrays
        self._results: _Split

        def flat(*operands):
            args, kwargs = arguments.filled(operands)
            self._results = _Split(
                fn(*args, **kwargs), lambda leaf: isinstance(leaf, jax.Array)
            )
            arrays, self._results.arrays = self._results.arrays, []  # no tracer leaks
            return arrays

        # A new function each time: it may close over what has changed meanwhile.
        self.jaxpr = jax.make_jaxpr(flat)(*self.operands)

    def outputs(self, arrays):
        """The results of `fn` with these arrays in it."""
        return self._results.filled(arrays)


class _Split:
    """A pytree, as the arrays among its leaves and all the rest."""

    def __init__(self, tree, is_array: Callable[[Any], bool]):
        leaves, self._tree = jax.tree.flatten(tree)
        self._places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        self.arrays = [leaves[i] for i in self._places]
        self._rest = [None if is_array(leaf) else leaf for leaf in leaves]

    def filled(self, arrays):
        """The pytree with these arrays."""
        leaves = list(self._rest)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self._tree, leaves)


def _is_operand(leaf) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))

"""The contract of the fused matmuls: every `lax.dot_general`, cut along any dimension.

The forms (which dimension, how the operands lie, options) are run all in one program
and compared with numpy; types with those of `lax`. All data are small integers, so
everything is exact.
"""

import functools

import contract_devices as devices
import contract_processes as processes
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_devices import Layout, alone, line
from contract_tools import BF16, F16
from jax import lax
from matmul_descriptions import BY_PSUM, ON_GPU
from op_contract import TAKES_NO_ELEMENTS, Contract, named

import jax_overlap

RANKS = devices.ranks(4)  # four, or as many as there are
REFUSALS = (ValueError, TypeError, IndexError)
GRID = Layout((2, 4) if devices.COUNT == 8 else (1, devices.COUNT), ("a", "b"), ("b",))
WIDE = {"preferred_element_type": np.float32}

_ORDER = (2, 0, 3, 1) if RANKS == 4 else devices.permuted(RANKS)
LINES = (*map(line, devices.team_sizes((2, 3, 8))), line(RANKS, order=_ORDER))

# Dimension numbers: of a weight [n, k]; of x [k, m]; with a batch; with everything at
# an unlikely place: two batch and two contracting dimensions, in unlike orders.
W_TURNED = (((1,), (1,)), ((), ()))
X_TURNED = (((0,), (0,)), ((), ()))
BATCHED = (((2,), (1,)), ((0,), (0,)))
WILD = (((1, 3), (3, 0)), ((0, 2), (2, 1)))
MIDDLE = (((1,), (1,)), ((), ()))  # x [m, k, m'], w [n, k]
NEGATIVE = (((-2,), (-1,)), ((), ()))  # the same
VECTOR = (((1,), (0,)), ((), ()))  # w [k]
OUTER = (((), ()), ((), ()))  # nothing contracted


def form(x, w, dims=None, **options):
    """Shapes of x and of the weight, or of several, and options."""
    ws = w if isinstance(w[0], tuple) else (w,)
    if dims is not None:
        options["dimension_numbers"] = dims
    return (x, *ws), options


def half_sums(ranks):
    """(what the ranks hold, its type, the sum) that show in which type it is made."""
    up = [40_000] * (ranks // 2)
    even = float(np.float32(255 + ranks).astype(BF16))
    return (
        ([256, *[1] * (ranks - 1)], BF16, even),
        ([*up, *(-v for v in up), *[0] * (ranks % 2)], F16, 0),
    )


def with_elements(*forms):
    """The forms, less those without elements where these cannot be had."""
    return tuple(
        (shapes, options)
        for shapes, options in forms
        if TAKES_NO_ELEMENTS or all(0 not in shape for shape in shapes)
    )


def lax_dot(x, w, dims, precision=None):
    """lax.dot_general, which takes no negative dimensions and has no default."""
    if dims is None:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, MIDDLE if dims == NEGATIVE else dims, precision)


def dot_general(x, w, dims=None):
    """lax.dot_general in numpy, of one rank's operands."""
    (xc, wc), (xb, wb) = (((-1,), (0,)), ((), ())) if dims is None else dims
    xc, wc = [d % x.ndim for d in xc], [d % w.ndim for d in wc]
    of_x = list(range(x.ndim))
    of_w = [*range(x.ndim, x.ndim + w.ndim)]
    for i, j in (*zip(xc, wc, strict=True), *zip(xb, wb, strict=True)):
        of_w[j] = i
    free = [i for i in of_x if i not in (*xc, *xb)]
    out = [*xb, *free, *(i for i in of_w if i >= x.ndim)]
    return np.einsum(x, of_x, w, of_w, out, optimize=True)


class MatmulForms(Contract):
    """A subclass has an op and its forms."""

    forms: staticmethod  # (ranks) -> forms, of which the first is of plain rows
    numpy: staticmethod  # (x, *ws of a team, **options) -> list of results
    lax: staticmethod  # (x, *ws, axis_name, **options) -> list of results
    refused: tuple  # forms on RANKS that lax refuses, too
    empty: (
        tuple  # forms on RANKS that need no call: there is nothing to send, or to add
    )
    takes_groups = True
    adds_ranks = True  # so that sums have the products of all ranks
    rounds_ranks = ON_GPU  # before these are added

    def call(self, x, *ws, axis_name="x", **options):
        w = ws if len(ws) > 1 else ws[0]
        y = getattr(jax_overlap, self.op.name)(x, w, axis_name, **options)
        return jax.tree.leaves(y)

    def data(self, forms, layout=None, dtype=np.float32, make=tools.exact, seed=0):
        """Stacked operands of each form."""
        layout = line(RANKS) if layout is None else layout
        return [
            tuple(
                make(self.seed + seed + 100 * i + j, (layout.size, *shape), dtype)
                for j, shape in enumerate(shapes)
            )
            for i, (shapes, _) in enumerate(forms)
        ]

    def right(self, data, forms, teams=None):
        """The right results; teams: positions of the ranks of each, default: of one."""
        return [
            self.right_of(operands, options, teams)
            for operands, (_, options) in zip(data, forms, strict=True)
        ]

    def right_of(self, operands, options, teams=None):
        out: list = []
        for team in [np.arange(len(operands[0]))] if teams is None else teams:
            parts = (tools.wide(a)[team] for a in operands)
            ys = [np.asarray(y) for y in self.numpy(*parts, **options)]
            if not out:
                shapes = [(len(operands[0]), *y.shape[1:]) for y in ys]
                out = [np.zeros(shape, np.float32) for shape in shapes]
            for whole, y in zip(out, ys, strict=True):
                whole[team] = y
        return out

    def each(self, forms, **more):
        """A function of one rank's operands: the op on those of each form."""

        def fn(data):
            return [
                self.call(*operands, **options, **more)
                for operands, (_, options) in zip(data, forms, strict=True)
            ]

        return fn

    def check_forms(self, forms, layout=None, check_vma=True, calls=None, **more):
        layout = line(RANKS) if layout is None else layout
        data = self.data(forms, layout)
        self.check(
            self.each(forms, **more),
            layout,
            (data,),
            self.right(data, forms, layout.teams),
            calls=len(forms) if calls is None else calls,
            check_vma=check_vma,
            repeats=1,
        )

    # Values and derivatives of every form.

    def test_every_form(self):
        for algorithm in self.op.algorithms:
            with self.subTest(algorithm=algorithm):
                self.check_forms(self.forms(RANKS), algorithm=algorithm)

    def test_every_form_no_vma(self):
        self.check_forms(self.forms(RANKS), check_vma=False)

    @named(**{str(n): (n,) for n in devices.team_sizes((2, 3, 8))})
    def test_every_form_on_ranks(self, n):
        self.check_forms(self.forms(n), line(n))

    @named(by_choice=(None, False), by_force=("native", True))
    def test_one_rank_needs_no_call(self, kind, check_vma):
        self.check_forms(
            self.forms(1), alone(), check_vma, calls=0, implementation=kind
        )

    @named(vma=(True, 0), no_vma=(False, -1))
    def test_the_derivatives_of_every_form(self, check_vma, which):
        """Value, JVP and gradients: their numbers, and types as of lax.

        Results are linear in each operand that they need, so a gradient g is right if
        <g, v> = <ct, op(v)> for any other operand v; some random ones tell it.

        A result that all ranks share gets a cotangent that they share, the sum of
        theirs, by our psum: else JAX adds them, by its own (`need_lax_to_transpose`).
        """
        layout, algorithm = line(RANKS), self.op.algorithms[which]
        shares = check_vma and self.op.invariant
        calls = (
            functools.partial(self.call, algorithm=algorithm),
            functools.partial(self.lax, axis_name="x"),
        )

        def both(forms):
            return [
                tools.stacked(
                    functools.partial(self.derivatives, call, forms, shares),
                    layout,
                    check_vma=check_vma,
                )
                for call in calls
            ]

        def operands(forms):
            data = self.data(forms)
            return data, [
                [tools.exact(self.seed + 50 + i, y.shape, np.float32) for y in ys]
                for i, ys in enumerate(self.right(data, forms))
            ]

        self.seen_types = []
        forms, left = self.forms(RANKS), False
        if jax.default_backend() == "gpu":  # some send what has no GPU code
            falls = [self.falls_back(both([f])[0], *operands([f])) for f in forms]
            left = any(falls) and processes.lax_runs()
            if not left:
                forms = [f for f, falls in zip(forms, falls, strict=True) if not falls]
        data, cts = operands(forms)
        right = self.right(data, forms)
        ours, theirs = both(forms)
        self.seen_types.clear()
        for stacked in (ours, theirs):
            jax.eval_shape(stacked, data, cts)
        self.assertEqual(*self.seen_types)
        placed = tools.place((data, cts), layout)
        compiled = jax.jit(ours).lower(*placed).compile()
        if not left:
            self.assertEqual(tools.collectives(compiled.as_text()), [])
        products = {}  # <g, v>, as much as this process has, and <ct, op(v)>
        for i, (value, along, grads) in enumerate(compiled(*placed)):
            operands, (shapes, options) = data[i], forms[i]
            with self.subTest(shapes=shapes, **options):
                self.assert_stacked(value, right[i])
                moved = [
                    self.with_operand(operands, j, 2 * a + 1, options)
                    for j, a in enumerate(operands)
                ]
                self.assert_stacked(along, [sum(ys) for ys in zip(*moved, strict=True)])
                for j, grad in enumerate(grads):
                    self.assertEqual(grad.shape, operands[j].shape)
                    for seed in (1, 2, 3):
                        v = tools.exact(self.seed + seed, grad.shape, np.float32)
                        ys = self.with_operand(operands, j, v, options)
                        parts = tools.fetch(grad).items()
                        mine = sum(float(np.vdot(part, v[p])) for p, part in parts)
                        products[f"{i} {j} {seed}"] = (
                            mine,
                            sum(map(np.vdot, cts[i], ys)),
                        )
        mine = {name: part for name, (part, _) in products.items()}
        for name, got in processes.added(self.id(), mine).items():
            self.assertEqual(got, products[name][1], f"form, operand, seed: {name}")

    def derivatives(self, call, forms, shares, data, cts):
        """Value, JVP and gradients of each form."""
        out = []
        cts = jax_overlap.psum(cts, "x") if shares else cts
        for operands, ct, (_, options) in zip(data, cts, forms, strict=True):
            of = functools.partial(call, **options)

            def loss(*operands, of=of, ct=ct):
                return sum(map(jnp.vdot, of(*operands), ct))

            argnums = tuple(range(len(operands)))
            grads = jax.grad(loss, argnums)(*operands)
            tangents = tuple(2 * a + 1 for a in operands)
            out.append((*jax.jvp(of, operands, tangents), grads))
        self.seen_types.append(jax.tree.map(jax.typeof, out))
        return out

    def with_operand(self, operands, i, other, options):
        """The right results with another operand at i, less what does not need it."""
        both = [
            self.right([(*operands[:i], a, *operands[i + 1 :])], [((), options)])[0]
            for a in (other, np.zeros_like(other))
        ]
        return [y - rest for y, rest in zip(*both, strict=True)]

    @named(of_x=(0,), of_weights=(1,), of_both=(2,))
    def test_every_form_under_vmap(self, which):
        """The batch dimension of an operand at each place in turn."""
        forms = self.forms(RANKS)
        both = [self.data(forms, seed=seed) for seed in (0, 1000)]
        stacked_, axes, want = [], [], []
        for i, (shapes, options) in enumerate(forms):
            has = [which == 2 or which == min(j, 1) for j in range(len(shapes))]
            places = [
                (i + j) % (1 + len(shape)) if yes else None
                for j, (shape, yes) in enumerate(zip(shapes, has, strict=True))
            ]
            one, two = both[0][i], both[1][i]
            stacked_.append(
                tuple(
                    a if p is None else np.stack([a, b], 1 + p)
                    for a, b, p in zip(one, two, places, strict=True)
                )
            )
            axes.append(tuple(places))
            two = tuple(
                b if yes else a for a, b, yes in zip(one, two, has, strict=True)
            )
            ys = [self.right([o], [((), options)])[0] for o in (one, two)]
            want.append([np.stack(pair, 1) for pair in zip(*ys, strict=True)])

        def fn(data):
            return [
                jax.vmap(functools.partial(self.call, **options), in_axes=a)(*operands)
                for operands, a, (_, options) in zip(data, axes, forms, strict=True)
            ]

        kw = {"calls": len(forms), "repeats": 1}
        self.check(fn, line(RANKS), (stacked_,), want, **kw)

    def gathers(self, fn, operands, unused=()):
        """The ops in a program, as `explain` says; the native ones are calls in it.

        But for those of which nothing is used.
        """
        plans = jax_overlap.explain(fn, *operands)
        placed = tools.place(operands, line(RANKS))
        hlo = jax.jit(fn).lower(*placed).compile().as_text()
        native = [p for p in plans if p.implementation == "native"]
        self.assertIn(self.op.name, [p.op for p in native])
        called = [
            "psum" if p.algorithm == BY_PSUM else p.op
            for p in native
            if p.op not in unused
        ]
        for op in {"all_gather", "all_gather_matmul", *called}:
            found = tools.custom_calls(hlo, f"jax_overlap.{op}")
            self.assertEqual(found, called.count(op), op)
        return [p.op for p in plans]

    # Groups.

    def test_groups(self):
        """Equal groups of the ranks along "b" of the mesh."""
        if not self.takes_groups:
            return
        for groups in devices.groups(GRID.team):
            size = len(groups[0])
            forms = self.forms(size)
            data = self.data(forms, GRID)
            teams = [team[group] for team in GRID.teams for group in groups]
            want = self.right(data, forms, teams)
            fn = self.each(forms, axis_name="b", axis_index_groups=groups)
            kw = {"calls": len(forms) if size > 1 else 0, "repeats": 1}
            with self.subTest(groups=groups):
                self.check(fn, GRID, (data,), want, **kw)

    def test_the_gradient_over_groups(self):
        if not self.takes_groups:
            return
        self.need_lax()
        groups = devices.groups(RANKS)[-2]  # pairs, if the ranks are even
        forms = self.forms(len(groups[0]))[:1]
        operands = tools.place(self.data(forms)[0], line(RANKS))
        grads = []
        for call in (self.call, functools.partial(self.lax, axis_name="x")):
            fn = lambda *a, call=call: call(*a, axis_index_groups=groups)[0] ** 2  # noqa: E731
            fn = tools.stacked(fn, line(RANKS))
            of = jax.jit(jax.grad(lambda *a, fn=fn: fn(*a).sum(), (0, 1)))
            grads.append(of(*operands))
        self.assert_same(*grads)

    def assert_same(self, got, want):
        """Both trees of stacked arrays have the same numbers on each rank."""
        got, want = (jax.tree.map(tools.fetch, tree) for tree in (got, want))
        jax.tree.map(np.testing.assert_array_equal, got, want)

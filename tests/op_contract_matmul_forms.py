"""The contract of the fused matmuls: every `lax.dot_general`, cut along any dimension.

The forms (which dimension, how the operands lie, options) are run all in one program
and compared with numpy; types with those of `lax`. All data are small integers, so
everything is exact.
"""

import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_tools import Layout, line
from jax import lax
from op_contract import Contract, named

import jax_overlap

RANKS = 4
REFUSALS = (ValueError, TypeError, IndexError)
GRID = Layout((2, 4), ("a", "b"), ("b",))
WIDE = {"preferred_element_type": np.float32}

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
    refused: tuple  # forms on four ranks that lax refuses, too
    empty: tuple  # forms that need no call: there is nothing to send, or to add
    takes_groups = True
    adds_ranks = True  # so that sums have the products of all ranks

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

    def right(self, data, forms):
        return [
            [
                np.asarray(y).astype(np.float32)
                for y in self.numpy(*map(tools.wide, operands), **options)
            ]
            for operands, (_, options) in zip(data, forms, strict=True)
        ]

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
            self.right(data, forms),
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

    @named(**{str(n): (n,) for n in (2, 3, 8)})
    def test_every_form_on_ranks(self, n):
        self.check_forms(self.forms(n), line(n))

    @named(by_choice=(None, False), by_force=("native", True))
    def test_one_rank_needs_no_call(self, kind, check_vma):
        self.check_forms(
            self.forms(1), line(1), check_vma, calls=0, implementation=kind
        )

    @named(vma=(True, 0), no_vma=(False, -1))
    def test_the_derivatives_of_every_form(self, check_vma, which):
        """Value, JVP and gradients: their numbers, and types as of lax.

        Results are linear in each operand that they need, so a gradient g is right if
        <g, v> = <ct, op(v)> for any other operand v; some random ones tell it.
        """
        forms = self.forms(RANKS)
        data = self.data(forms)
        right = self.right(data, forms)
        cts = [
            [tools.exact(self.seed + 50 + i, y.shape, np.float32) for y in ys]
            for i, ys in enumerate(right)
        ]

        def fn(call, data, cts):
            out = []
            for operands, ct, (_, options) in zip(data, cts, forms, strict=True):
                of = functools.partial(call, **options)

                def loss(*operands, of=of, ct=ct):
                    return sum(map(jnp.vdot, of(*operands), ct))

                argnums = tuple(range(len(operands)))
                grads = jax.grad(loss, argnums)(*operands)
                tangents = tuple(2 * a + 1 for a in operands)
                out.append((*jax.jvp(of, operands, tangents), grads))
            types.append(jax.tree.map(jax.typeof, out))
            return out

        types, layout, algorithm = [], line(RANKS), self.op.algorithms[which]
        ours, theirs = (
            tools.stacked(functools.partial(fn, call), layout, check_vma=check_vma)
            for call in (
                functools.partial(self.call, algorithm=algorithm),
                functools.partial(self.lax, axis_name="x"),
            )
        )
        for stacked in (ours, theirs):
            jax.eval_shape(stacked, data, cts)
        self.assertEqual(*types)
        placed = tools.place((data, cts), layout)
        compiled = jax.jit(ours).lower(*placed).compile()
        self.assertEqual(tools.collectives(compiled.as_text()), [])
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
                        want = sum(map(np.vdot, cts[i], ys))
                        self.assertEqual(np.vdot(np.asarray(grad), v), want, j)

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

    # Groups.

    def test_groups(self):
        """Equal groups of the four along "b" of a mesh of 2 x 4."""
        if not self.takes_groups:
            return
        for groups in ([[0, 2], [3, 1]], [[3, 1, 0, 2]], [[2], [0], [3], [1]]):
            size = len(groups[0])
            forms = self.forms(size)
            data = self.data(forms, GRID)
            want = []
            for operands, (_, options) in zip(data, forms, strict=True):
                out = None
                for row in range(2):
                    for group in groups:
                        ranks = [4 * row + r for r in group]
                        part = [tools.wide(a[ranks]) for a in operands]
                        ys = [np.asarray(y) for y in self.numpy(*part, **options)]
                        if out is None:
                            out = [np.zeros((8, *y.shape[1:]), np.float32) for y in ys]
                        for o, y in zip(out, ys, strict=True):
                            o[ranks] = y
                want.append(out)
            fn = self.each(forms, axis_name="b", axis_index_groups=groups)
            kw = {"calls": len(forms) if size > 1 else 0, "repeats": 1}
            with self.subTest(groups=groups):
                self.check(fn, GRID, (data,), want, **kw)

    def test_the_gradient_over_groups(self):
        if not self.takes_groups:
            return
        forms = self.forms(2)[:1]
        groups = [[3, 0], [1, 2]]
        (operands,) = self.data(forms)
        grads = []
        for call in (self.call, functools.partial(self.lax, axis_name="x")):
            fn = lambda *a, call=call: call(*a, axis_index_groups=groups)[0] ** 2  # noqa: E731
            fn = tools.stacked(fn, line(RANKS))
            grads.append(
                jax.jit(jax.grad(lambda *a, fn=fn: fn(*a).sum(), (0, 1)))(*operands)
            )
        jax.tree.map(np.testing.assert_array_equal, *grads)

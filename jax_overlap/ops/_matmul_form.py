"""Any `lax.dot_general` as the one matmul that the primitives know.

The public functions bring their operands to the form of the primitives by
transposes and reshapes (which cost nothing where dimensions are in order already):

    y[g, a, q, n] = sum over k of x[g, a, q, k] * w[g, k, n]      w or its transpose

`g` stands for the batch dimensions of the dot_general, `a` and `q` for the free
dimensions of x, of which `q` begins with the one that is scattered or gathered, `k`
for the contracting dimensions, `n` for the free dimensions of w. What is cut in parts,
one for each rank, is `rows` (q), `batch` (g), `cols` (n, scattered) or `inner` (k,
gathered); a part is then a block of memory, or a block of each row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Form:
    """How the operands of a dot_general come into the form of the primitives.

    Attributes:
      cut: "rows", "batch", "cols", "inner", or "" where nothing is cut.
      x_perm: order of the dimensions of x: batch, free, contracting.
      w_perm: of those of w: batch, contracting, free, or (transposed) free last.
      transposed: whether w comes as [g, n, k].
      outer: how many of the free dimensions of x come before what is cut.
      counts: how many dimensions are batch, free in x, contracting, free in w.
      out_order: for each dimension of the dot_general's result, its place among
        those of the primitive's.
    """

    cut: str
    x_perm: tuple[int, ...]
    w_perm: tuple[int, ...]
    transposed: bool
    outer: int
    counts: tuple[int, int, int, int]
    out_order: tuple[int, ...]

    def x(self, x):
        """Brings x to [g, a, q, k]."""
        x = _transposed(x, self.x_perm)
        b, f, _, _ = self.counts
        ends = (0, b, b + self.outer, b + f, x.ndim)
        return lax.reshape(x, _products(x.shape, ends))

    def w(self, w):
        """Brings w to [g, k, n], or [g, n, k]."""
        w = _transposed(w, self.w_perm)
        b, _, k, n = self.counts
        ends = (0, b, b + (n if self.transposed else k), w.ndim)
        return lax.reshape(w, _products(w.shape, ends))

    def out(self, y, x, w, resize):
        """[g, a, q, n] as the result for operands x and w; resize: of the cut one."""
        b, f, k, _ = self.counts
        x_sizes = [x.shape[d] for d in self.x_perm]
        w_sizes = [w.shape[d] for d in self.w_perm]
        n_sizes = w_sizes[b : len(w_sizes) - k] if self.transposed else w_sizes[b + k :]
        sizes = x_sizes[: b + f] + n_sizes
        places = {"batch": 0, "rows": b + self.outer, "cols": b + f}
        if self.cut in places:
            sizes[places[self.cut]] = resize(sizes[places[self.cut]])
        return _transposed(lax.reshape(y, sizes), self.out_order)

    def gathered(self, g, x, resize):
        """[g, a, q, k], gathered, in the order of the dimensions of x."""
        b, f, _, _ = self.counts
        sizes = [x.shape[d] for d in self.x_perm]
        place = {"batch": 0, "rows": b + self.outer, "inner": b + f}[self.cut]
        sizes[place] = resize(sizes[place])
        return _transposed(lax.reshape(g, sizes), np.argsort(self.x_perm))


def form_of(dims, x_ndim: int, w_ndim: int, cut: str, index: int) -> Form:
    """The form of a dot_general of which dimension `index` of a kind is cut.

    cut: "batch", "rows", "cols", "inner" or "", and `index` counts among the batch
    dimensions, the free ones of x, the free ones of w, or the contracting ones.
    """
    (xc, wc), (xb, wb) = dims
    in_order = sorted(zip(xc, wc, strict=True))
    index = index if cut != "inner" else in_order.index((xc[index], wc[index]))
    xc, wc = [x for x, _ in in_order], [w for _, w in in_order]
    free_x = [d for d in range(x_ndim) if d not in (*xc, *xb)]
    free_w = [d for d in range(w_ndim) if d not in (*wc, *wb)]
    batch = _first(len(xb), index if cut == "batch" else 0)
    inner = _first(len(xc), index if cut == "inner" else 0)
    cols = _first(len(free_w), index if cut == "cols" else 0)
    w_batch, w_inner, w_cols = (
        [wb[i] for i in batch],
        [wc[i] for i in inner],
        [free_w[i] for i in cols],
    )
    transposed = [*w_batch, *w_cols, *w_inner] == list(range(w_ndim)) and bool(w_cols)
    w_perm = [*w_batch, *w_cols, *w_inner] if transposed else [*w_batch, *w_inner]
    w_perm += [] if transposed else w_cols
    out = [*batch, *(len(xb) + i for i in range(len(free_x)))]
    out += [len(xb) + len(free_x) + i for i in cols]
    return Form(
        cut=cut,
        x_perm=(*(xb[i] for i in batch), *free_x, *(xc[i] for i in inner)),
        w_perm=tuple(w_perm),
        transposed=transposed,
        outer=index if cut == "rows" else 0,
        counts=(len(xb), len(free_x), len(xc), len(free_w)),
        out_order=tuple(int(i) for i in np.argsort(out)),
    )


def _first(count: int, index: int) -> list[int]:
    """0 .. count-1, with `index` moved to the front."""
    return sorted(range(count), key=lambda i: i != index)


def _transposed(x, perm):
    perm = tuple(int(i) for i in perm)
    return x if perm == tuple(range(x.ndim)) else lax.transpose(x, perm)


def _products(shape, ends):
    return tuple(math.prod(shape[a:b]) for a, b in itertools.pairwise(ends))

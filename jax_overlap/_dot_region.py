"""The matmuls of global arrays: which dimensions are cut, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_overlap._region import RESHARD, Entries, Names, Region, spec_of
from jax_overlap.ops import _block, _matmul, _matmul_types
from jax_overlap.ops.all_gather_matmul import dims_of_each


def of_result(dims, xs: Entries, ws: Entries) -> Entries:
    """The entries of a dot_general's result, which has those of its operands."""
    (xc, wc), (xb, wb) = dims
    return [
        *(xs[d] for d in xb),
        *(e for d, e in enumerate(xs) if d not in (*xc, *xb)),
        *(e for d, e in enumerate(ws) if d not in (*wc, *wb)),
    ]


class Operands:
    """x and its weights, and the entries with which they enter the region.

    Attributes:
      region: the region.
      x: the array x.
      ws: the weights.
      dims: the dimension numbers of each weight.
      x_entries: the entries of x.
      w_entries: those of each weight.
    """

    def __init__(self, op, x, ws, axis_name, mesh, x_spec, w_spec, dimension_numbers):
        self.x, *self.ws = _matmul_types.promoted(x, *ws)
        several = isinstance(w_spec, (tuple, list))  # a PartitionSpec is neither
        specs: list = [x_spec, *(w_spec if several else [w_spec] * len(ws))]
        if x_spec is not None:
            specs = [P() if spec is None else spec for spec in specs]
        elif any(spec is not None for spec in specs):
            raise ValueError(
                f"{op}: w_spec = {w_spec} needs x_spec, too, which says how the batch "
                "lies: P() if it is on no axis."
            )
        arrays, told = [self.x, *self.ws], x_spec is not None
        self.region = Region.of(op, axis_name, mesh, arrays, told)
        self.dims = tuple(
            _matmul.dims_of_matmul(op, numbers, self.x, w)
            for numbers, w in zip(
                dims_of_each(dimension_numbers, len(self.ws)), self.ws, strict=True
            )
        )
        self.x_entries = self.region.entries("x", self.x, specs[0])
        self.w_entries = [
            self.region.entries("w", w, spec)
            for w, spec in zip(self.ws, specs[1:], strict=True)
        ]

    def contract(self) -> Entries:
        """Has the contracting dimensions cut over the axes; returns the result's."""
        (dims,), axes = self.dims, self.region.axes
        xs, (ws,) = self.x_entries, self.w_entries
        pairs = list(zip(*dims[0], strict=True))
        batch = list(zip(*dims[1], strict=True))
        for i, j in pairs + batch:  # what is replicated is cut like the other
            one = xs[i] or ws[j]
            if (not xs[i] or not ws[j]) and (set(one) <= set(axes) or (i, j) in batch):
                xs[i] = ws[j] = one
        cut = [a for i, _ in pairs for a in xs[i]]
        if pairs and not cut:
            i, j = pairs[0]
            xs[i] = ws[j] = cut = axes
        if any(xs[i] != ws[j] for i, j in pairs + batch) or set(cut) != set(axes):
            raise ValueError(
                f"{self.region.op}: contracting dimensions have to be cut over {axes} "
                "and nothing else, and batch dimensions alike in x and w, but x is "
                f"sharded as {spec_of(xs)} and w as {spec_of(ws)}, with "
                f"dimension_numbers {dims}. {RESHARD}"
            )
        return of_result(dims, xs, ws)

    def gather(self, d: int) -> list[Entries]:
        """Has dimension d of x cut over the axes; returns the results' without that."""
        xs = self.x_entries
        kept = uncut(self.region, self.x, xs, d)
        both = list(zip(self.dims, self.w_entries, strict=True))
        for dims, ws in both:
            for i, j in zip(*dims[1], strict=True):
                if not xs[i]:  # what is replicated is cut like the other
                    xs[i] = kept[i] = ws[j]
                ws[j] = ws[j] or kept[i]
        return [self._columns(dims, kept, ws) for dims, ws in both]

    def _columns(self, dims, kept: Entries, ws: Entries) -> Entries:
        """Has the columns of w cut over the axes; returns the result's entries."""
        ((xc, wc), (xb, wb)), axes = dims, self.region.axes
        columns = [d for d in range(len(ws)) if d not in (*wc, *wb)]
        if columns and not any(set(entry) & set(axes) for entry in ws):
            ws[columns[0]] = (*ws[columns[0]], *axes)
        summed = [*(kept[d] for d in xc), *(ws[d] for d in wc)]
        alike = all(kept[i] == ws[j] for i, j in zip(xb, wb, strict=True))
        if any(summed) or not alike or not _hold(axes, [ws[d] for d in columns]):
            raise ValueError(
                f"{self.region.op}: the columns of w have to be cut over {axes}, "
                "contracting dimensions over nothing, and batch dimensions alike in x "
                f"and w, but x, once gathered, is sharded as {spec_of(kept)} and w as "
                f"{spec_of(ws)}, with dimension_numbers {dims}. {RESHARD}"
            )
        return of_result(dims, kept, ws)

    def run(self, fn, options: dict[str, Any], outs: Sequence[Entries]):
        """fn(x, *ws, **options) of shards, after a look at all shapes."""
        arithmetic = options["precision"], options["preferred_element_type"]
        dots = [_matmul.dot_general(dims, *arithmetic) for dims in self.dims]
        self.region.check("x", self.x.shape, self.x_entries)
        for w, ws, dot, out in zip(self.ws, self.w_entries, dots, outs, strict=True):
            self.region.check("w", w.shape, ws)
            y = _matmul.result_type(dot, self.x.shape, self.x, w)
            self.region.check("the result", y.shape, out)
        if self.region.is_mapped(options["implementation"]):
            return tuple(
                dot(self.x, w, out_sharding=self.region.sharding(out))
                for w, dot, out in zip(self.ws, dots, outs, strict=True)
            )
        arrays, entries = [self.x, *self.ws], [self.x_entries, *self.w_entries]
        return self.region.run(fn, options, arrays, entries, outs)


def uncut(region: Region, x: jax.Array, xs: Entries, d: int) -> Entries:
    """Has dimension d of x cut over the axes (`xs` is changed); the entries without."""
    axes = region.axes
    if not any(set(entry) & set(axes) for entry in xs):
        xs[d] = (*xs[d], *axes)
    if xs[d][-len(axes) :] != axes:
        raise ValueError(
            f"{region.op}: dimension {d} of x has to be cut over {axes} (the minor "
            f"axes, if over others, too), but x is sharded as {spec_of(xs)} for shape "
            f"{x.shape}. {RESHARD}"
        )
    return [e[: -len(axes)] if i == d else e for i, e in enumerate(xs)]


def position(op: str, option: str, d: int, what: str, ndim: int) -> int:
    """A dimension counted from the front, which has to exist."""
    front = _block.from_front(d, ndim)
    if not 0 <= front < ndim:
        raise ValueError(f"{op}: {option}={d}, but {what} has {ndim} dimensions.")
    return front


def _hold(axes: Names, entries: Entries) -> bool:
    """Whether these entries have all of the axes."""
    return set(axes) <= {a for entry in entries for a in entry}

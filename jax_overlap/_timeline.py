"""A model of time: what each rank computes, sends, waits for and adds when.

It says what the orders of `jax_overlap.schedule` are good for, without running
anything; `python -m jax_overlap.plan` draws it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jax_overlap.schedule import own_first, own_last, rotated

# Transfer time over compute time of a slice, where a picture needs one.
DEFAULT_RATIO = 0.8
# The same for adding one slot: it is bound by memory, not by arithmetic.
DEFAULT_ADD = 0.05

# Later by less than this is rounding.
_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True)
class Span:
    """What a rank does for a while.

    Attributes:
      kind: "compute", "wait" or "reduce" (adds one slot), by the worker; "send", by
        the link, at the same time.
      start: in units of `Timeline.unit`.
      end: the same.
      slice: computed, sent, waited for or added up.
      peer: to which it is sent; for which the rank waits; whose slot is added (the own
        rank's, too). None of "compute".
      sub: the sub-slice.
    """

    kind: str
    start: float
    end: float
    slice: int
    peer: int | None
    sub: int = 0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The model of one call: what each rank does when.

    Attributes:
      op: the public name.
      ranks: of the team.
      sub_slices: in which a slice is cut.
      ratio: transfer time over compute time of a slice; 1 where nothing is computed.
      unit: of the times.
      spans: of each rank, in order of time.
    """

    op: str
    ranks: int
    sub_slices: int
    ratio: float
    unit: str
    spans: tuple[tuple[Span, ...], ...]

    @property
    def total(self) -> float:
        """When the last rank is done."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    def time(self, rank: int, kind: str) -> float:
        """How long `rank` spends on a kind of span."""
        return sum(s.end - s.start for s in self.spans[rank] if s.kind == kind)


def timeline(
    op: str,
    ranks: int,
    sub_slices: int = 1,
    ratio: float | None = None,
    add: float = DEFAULT_ADD,
) -> Timeline:
    """Simulates an op whose slices travel between ranks.

    Each rank has a worker, which computes, adds and waits, and a link, which sends one
    sub-slice at a time, in the order in which they became ready.

    Args:
      op: one of `OPS`.
      ranks: of the team, at least 1.
      sub_slices: in which a slice is cut; each travels by itself.
      ratio: transfer time over compute time of a slice; default 0.8. An op that
        computes nothing takes none: its unit is the transfer time.
      add: time to add one slot of a slice, in the same unit.

    Returns:
      A `Timeline`. Of a matmul with a gather or a scatter it ends, but for the adds,
      after P + max(0, (P - 1) (ratio - 1) - (1 - 1 / sub_slices)).

    Raises:
      ValueError: there is no such op, or a number is out of range.

    Example:
      >>> timeline("all_gather_matmul", ranks=4, ratio=0.8).total
      4.0
      >>> timeline("all_gather_matmul", ranks=4, ratio=2).total
      7.0
    """
    _check(op, ranks, sub_slices, ratio, add)
    computes = op in _COMPUTES
    if ratio is None:
        ratio = DEFAULT_RATIO if computes else 1.0
    simulation = _Simulation(ranks, sub_slices, ratio, add)
    if ranks > 1 or computes:
        OPS[op](simulation)
    unit = f"time to {'compute' if computes else 'send'} a slice"
    spans = tuple(tuple(sorted(s, key=_by_time)) for s in simulation.spans)
    return Timeline(op, ranks, sub_slices, ratio, unit, spans)


def _by_time(span: Span):
    return span.start, span.end


def _check(op, ranks, sub_slices, ratio, add) -> None:
    if op not in OPS:
        raise ValueError(f"op={op!r}, but has to be one of {', '.join(OPS)}.")
    if ranks < 1 or sub_slices < 1:
        raise ValueError(
            f"{op}: ranks={ranks}, sub_slices={sub_slices}, but both have to be 1 or "
            "more."
        )
    if ratio is not None and op not in _COMPUTES:
        raise ValueError(
            f"{op}: ratio={ratio}, but it computes nothing that a transfer could be "
            "compared with. Leave it out: the unit is the time to send a slice."
        )
    if not (ratio is None or 0 <= ratio < float("inf")) or not 0 <= add < float("inf"):
        raise ValueError(
            f"{op}: ratio={ratio}, add={add}, but both have to be finite, 0 or more."
        )


class _Simulation:
    """What the ranks have done so far."""

    def __init__(self, ranks: int, parts: int, transfer: float, add: float):
        self.ranks = ranks
        self.parts = parts  # sub-slices of a slice
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self._transfer = transfer / parts
        self._add = add / parts
        self._worker_free = [0.0] * ranks
        self._link_free = [0.0] * ranks
        # By (receiver, sender, slice, sub-slice).
        self._arrived: dict[tuple[int, int, int, int], float] = {}

    def send(self, rank: int, peer: int, slice: int, part: int, ready: float) -> None:
        """The link sends a sub-slice that is ready at this time."""
        start = max(ready, self._link_free[rank])
        end = self._link_free[rank] = start + self._transfer
        self._arrived[peer, rank, slice, part] = end
        self.spans[rank].append(Span("send", start, end, slice, peer, part))

    def wait(self, rank: int, senders: Iterable[int], slice: int, part: int) -> None:
        """The worker goes on when a sub-slice has come from all of `senders`."""
        arrivals = [
            (self._arrived[rank, sender, slice, part], sender)
            for sender in senders
            if sender != rank
        ]
        ready, last = max(arrivals, default=(0.0, rank))
        if ready > self._worker_free[rank] + _EPSILON:
            self._work("wait", rank, ready - self._worker_free[rank], slice, last, part)

    def compute(self, rank: int, slice: int, part: int) -> float:
        """The worker computes a sub-slice. Returns when it is done."""
        return self._work("compute", rank, 1 / self.parts, slice, None, part)

    def sum_slots(self, rank: int, part: int) -> float:
        """The worker adds the slots of its own slice, in rank order."""
        self.wait(rank, range(self.ranks), rank, part)
        for source in range(self.ranks):
            self._work("reduce", rank, self._add, rank, source, part)
        return self._worker_free[rank]

    def wait_for_owners(self, rank: int) -> None:
        """The worker waits for every slice from its owner, in the order of arrival."""
        arrivals = [
            (self._arrived[rank, owner, owner, part], owner, part)
            for owner in range(self.ranks)
            for part in range(self.parts)
            if owner != rank
        ]
        for _, owner, part in sorted(arrivals):
            self.wait(rank, [owner], owner, part)

    def _work(self, kind, rank, duration, slice, peer, part) -> float:
        start = self._worker_free[rank]
        end = self._worker_free[rank] = start + duration
        self.spans[rank].append(Span(kind, start, end, slice, peer, part))
        return end


def _all_gather_matmul(sim: _Simulation) -> None:
    _send_own(sim)
    for rank in range(sim.ranks):
        for step in range(sim.ranks):
            slice = own_first(rank, step, sim.ranks)
            for part in range(sim.parts):
                sim.wait(rank, [slice], slice, part)
                sim.compute(rank, slice, part)


def _matmul_reduce_scatter(sim: _Simulation) -> None:
    _matmul_and_send(sim)
    if sim.ranks > 1:
        _sum(sim)


def _matmul_all_reduce(sim: _Simulation) -> None:
    _matmul_and_send(sim)
    if sim.ranks > 1:
        _sum(sim, send=True)
        _wait_for_all(sim)


def _psum(sim: _Simulation) -> None:
    _send_others(sim)
    _sum(sim, send=True)
    _wait_for_all(sim)


def _psum_scatter(sim: _Simulation) -> None:
    _send_others(sim)
    _sum(sim)


def _all_gather(sim: _Simulation) -> None:
    _send_own(sim)
    _wait_for_all(sim)


def _peers(sim: _Simulation):
    """(rank, peer) for all sends of one to each, in the order of `rotated`."""
    for k in range(1, sim.ranks):
        for rank in range(sim.ranks):
            yield rank, rotated(rank, k, sim.ranks)


def _send_own(sim: _Simulation) -> None:
    """Each rank's own slice, an operand, to all others."""
    for rank, peer in _peers(sim):
        for part in range(sim.parts):
            sim.send(rank, peer, rank, part, ready=0.0)


def _send_others(sim: _Simulation) -> None:
    """Each rank's share of the others' slices, an operand, to their owners."""
    for part in range(sim.parts):
        for rank, peer in _peers(sim):
            sim.send(rank, peer, peer, part, ready=0.0)


def _matmul_and_send(sim: _Simulation) -> None:
    """Own slice last; each partial product goes to the slice's owner."""
    for rank in range(sim.ranks):
        for step in range(sim.ranks):
            slice = own_last(rank, step, sim.ranks)
            for part in range(sim.parts):
                done = sim.compute(rank, slice, part)
                if slice != rank:
                    sim.send(rank, slice, slice, part, ready=done)


def _sum(sim: _Simulation, send: bool = False) -> None:
    """Each rank's own slice; with `send`, what is summed goes to all others."""
    for part in range(sim.parts):
        ready = [sim.sum_slots(rank, part) for rank in range(sim.ranks)]
        for rank, peer in _peers(sim) if send else ():
            sim.send(rank, peer, rank, part, ready[rank])


def _wait_for_all(sim: _Simulation) -> None:
    for rank in range(sim.ranks):
        sim.wait_for_owners(rank)


OPS: dict[str, Callable[[_Simulation], None]] = {
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "all_gather_matmul": _all_gather_matmul,
    "matmul_all_reduce": _matmul_all_reduce,
    "psum": _psum,
    "psum_scatter": _psum_scatter,
    "all_gather": _all_gather,
}
_COMPUTES = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")

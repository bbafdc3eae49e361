"""The picture of a `jax_overlap._timeline.Timeline`. Needs matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from jax_overlap._timeline import Span, Timeline

# Okabe and Ito's colours, which the colour-blind can tell apart, and their text.
_STYLES: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": "#56B4E9"},
    "own": {"facecolor": "#0072B2"},
    "send": {"facecolor": "#E69F00"},
    "reduce": {"facecolor": "#009E73"},
    "wait": {"facecolor": "#F7F7F7", "edgecolor": "#BBBBBB", "hatch": "////"},
}
_WHITE_TEXT = ("own", "reduce")
_WORDS = {
    "compute": "compute slice n",
    "own": "compute the own slice",
    "send": "send to rank n (→n)",
    "reduce": "add the slots in rank order (Σ)",
    "wait": "wait",
}
_JOINED = ("reduce", "wait")

# Of a rank's row, one unit high: the worker's lane above the link's.
_LANES = {"send": (0.52, 0.34)}
_WORKER_LANE = (0.06, 0.46)
_WIDTH, _ROW, _MARGIN = 9.6, 0.46, 1.5  # inches
_INCHES_A_LETTER = 0.085


def draw(timeline: Timeline) -> Figure:
    """A row for each rank; within it what is computed above what is sent."""
    height = _ROW * timeline.ranks + _MARGIN
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    _set_up(axes, timeline)
    for rank, spans in enumerate(timeline.spans):
        for span in _joined(spans):
            _draw_span(axes, rank, span, timeline)
    _add_legend(figure, timeline)
    return figure


def _set_up(axes: Axes, timeline: Timeline) -> None:
    end = timeline.total or 1.0
    axes.set(
        xlim=(-0.004 * end, 1.004 * end),
        ylim=(timeline.ranks, -0.1),
        xlabel=f"time / {timeline.unit}",
        yticks=[rank + 0.46 for rank in range(timeline.ranks)],
    )
    axes.set_yticklabels([f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_title(_title(timeline), loc="left", fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.tick_params(left=False)
    axes.spines[["left", "top", "right"]].set_visible(False)


def _title(timeline: Timeline) -> str:
    plural = "" if timeline.ranks == 1 else "s"
    title = f"{timeline.op}, {timeline.ranks} rank{plural}"
    if timeline.sub_slices > 1:
        title += f", {timeline.sub_slices} sub-slices"
    if "compute" in timeline.unit:
        title += f" (sending a slice takes {timeline.ratio:g} x computing it)"
    return title


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans, those that follow each other and would look alike as one."""
    last: dict[str, Span] = {}
    for span in spans:
        before = last.get(span.kind)
        if span.kind not in _JOINED:
            yield span
        elif before and span.start <= before.end + 1e-9:
            last[span.kind] = dataclasses.replace(before, end=span.end)
        else:
            if before:
                yield before
            last[span.kind] = span
    yield from last.values()


def _style_of(span: Span, rank: int) -> str:
    return "own" if span.kind == "compute" and span.slice == rank else span.kind


def _draw_span(axes: Axes, rank: int, span: Span, timeline: Timeline) -> None:
    top, height = _LANES.get(span.kind, _WORKER_LANE)
    width = span.end - span.start
    style = _style_of(span, rank)
    axes.add_patch(
        Rectangle(
            (span.start, rank + top),
            width,
            height,
            linewidth=0.8,
            **{"edgecolor": "white", **_STYLES[style]},
        )
    )
    label = _label(span, timeline)
    inches = width / timeline.total * (_WIDTH - 1)
    if label and inches >= _INCHES_A_LETTER * len(label) + 0.04:
        axes.text(
            span.start + width / 2,
            rank + top + height / 2 + 0.02,
            label,
            ha="center",
            va="center",
            fontsize=7.5 if span.kind == "send" else 9,
            color="white" if style in _WHITE_TEXT else "black",
        )


def _label(span: Span, timeline: Timeline) -> str:
    if span.kind == "send":
        return f"→{span.peer}"
    if span.kind == "reduce":
        return "Σ"
    if span.kind == "wait":
        return ""
    sub = f".{span.sub}" if timeline.sub_slices > 1 else ""
    return f"{span.slice}{sub}"


def _add_legend(figure: Figure, timeline: Timeline) -> None:
    used = {
        _style_of(span, rank)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    }
    figure.legend(
        handles=[
            Patch(label=_WORDS[style], linewidth=0.8, **look)
            for style, look in _STYLES.items()
            if style in used
        ],
        loc="outside lower center",
        ncols=max(1, len(used)),
        frameon=False,
        fontsize=9,
    )

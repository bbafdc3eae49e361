"""The rows of a benchmark: one that fails says so, and the rest go on."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import jax

import jax_overlap
from jax_overlap.bench.repeated import attempted

Task = tuple[dict, Callable[[], dict]]


def measured(tasks: Iterable[Task], line: Callable[[dict], str]) -> Iterator[dict]:
    """Makes the rows one after the other, prints each, and yields it.

    Args:
      tasks: of each row, what it is about, and what measures the rest of it.
      line: a row for people.
    """
    for about, make in tasks:
        rest, error = attempted(partial(_traced, make))
        row = about | ({"error": error} if rest is None else rest)
        if error:
            jax_overlap.clear_errors()  # or the next row would fail of them
        say(_failed(about, error) if error else line(row))
        # A program that is left in a cycle would keep its part of the heap.
        gc.collect()
        yield row


def say(text: str) -> None:
    """Prints a line, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def table_line(cells: Iterable[object]) -> str:
    """A line of a table in Markdown."""
    texts = (" ".join(str(cell).split()).replace("|", "/") for cell in cells)
    return f"| {' | '.join(texts)} |"


def table_head(names: Iterable[str]) -> str:
    """The first two lines of such a table."""
    names = list(names)
    return f"{table_line(names)}\n{table_line('---' for _ in names)}"


def _traced(make: Callable[[], dict]) -> dict:
    try:
        return make()
    except Exception:
        traceback.print_exc()
        raise


def _failed(about: dict, error: str) -> str:
    what = ", ".join(f"{name} {value}" for name, value in about.items())
    return table_line([f"FAILED: {what}", error])

"""What processes of a program tell each other, through JAX's coordination service."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jax_overlap import _compat, config

_KEY = "jax_overlap/"


def exchange(topic: str, value: Any, processes: Iterable[int] | None = None) -> dict:
    """What each process says about a topic, by process; waits until all have.

    Args:
      topic: names the exchange; each is done once.
      value: what this process says, as JSON has it.
      processes: those that take part; default: all.

    Raises:
      RuntimeError: names the processes that did not say anything in time.
    """
    client = _compat.coordination_client()
    assert client is not None  # as there are several processes
    me = jax.process_index()
    processes = range(jax.process_count()) if processes is None else processes
    client.key_value_set(f"{_KEY}{topic}/{me}", json.dumps(value), allow_overwrite=True)
    limit = config.WAIT_TIMEOUT_S.read()
    said, absent, cause = {}, [], None
    for process in processes:
        try:
            text = client.blocking_key_value_get(
                f"{_KEY}{topic}/{process}", 1000 if absent else int(limit * 1000)
            )
        except Exception as error:  # of jaxlib, which has no narrower type for it
            absent.append(process)
            cause = error
        else:
            said[process] = json.loads(text)
    if absent:
        raise RuntimeError(
            f"jax_overlap: process {me} waited {limit:g} s in vain for processes "
            f"{absent} to set up their GPUs. All processes have to come to the first "
            "native op, or call jax_overlap.init(), within that time "
            f"({config.WAIT_TIMEOUT_S.name} sets it)."
        ) from cause
    return said


def why_not(everybody: dict) -> str:
    """The first reason ("why") among those that processes gave; empty if none did."""
    for process, theirs in everybody.items():
        if theirs["why"]:
            return f"process {process} cannot: {theirs['why']}"
    return ""


def within_limit(start: Callable[[], Any], what: str) -> Any:
    """`start()`, which waits for other processes, unless that takes too long.

    Raises:
      RuntimeError: the limit has passed; or whatever `start` raised.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()

    def run():
        try:
            done.put((start(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    limit = config.WAIT_TIMEOUT_S.read()
    try:
        value, error = done.get(timeout=limit)
    except queue.Empty:
        raise RuntimeError(
            f"{what} did not start within {limit:g} s ({config.WAIT_TIMEOUT_S.name}): "
            "another process has ended, or cannot be reached"
        ) from None
    if error is not None:
        raise error
    return value

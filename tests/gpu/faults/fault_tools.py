"""What the programs of this folder share: an op on all ranks, and how it may fail.

gpu_faults_contract.py starts each program as the ranks of launch.py, with a short
JAX_OVERLAP_WAIT_TIMEOUT_S. The first argument is the op, of which every call is native.
A rank prints "rank R saw: TEXT" for each error it got.
"""

import functools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
import jax_overlap.testing
from jax_overlap import _compat


def leave(code):
    """Ends without JAX's barrier at exit, to which a dead rank would never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(*error):
    """A rank whose verdict is bad must not wait at that barrier either."""
    sys.__excepthook__(*error)
    leave(1)


sys.excepthook = _fail
OP, *ARGS = sys.argv[1:]
WAIT_S = float(os.environ["JAX_OVERLAP_WAIT_TIMEOUT_S"])
SLACK_S = 5
_MEETING_S = 60

# JAX must not end the others before they have seen the error of their op.
assert jax_overlap.testing.initialize(heartbeat_timeout_s=300), "to be run by launch"
RANK, RANKS = jax.process_index(), jax.process_count()
LAST = RANKS - 1  # the one at fault, as rank 0 is also the coordinator
_MESH = jax.sharding.Mesh(jax.devices(), ("x",))
_INNER, _COLUMNS = 8, 16  # of the matmuls
_INVARIANT = ("psum", "matmul_all_reduce")


@jax.jit
@jax.shard_map(mesh=_MESH, in_specs=P("x"), out_specs=P("x"))
def _program(x):
    """The op on one rank's row; the result varies, so that each rank has its own."""
    call = functools.partial(getattr(jax_overlap, OP), implementation="native")
    if OP == "psum":
        y = call(x, "x")
    else:  # of rows alike, which can be dealt out
        rows = jnp.tile(x.reshape(-1, 1), (RANKS, _INNER))
        y = call(rows, jnp.ones((_INNER, _COLUMNS)), "x")[None]
    return lax.pcast(y, ("x",), to="varying") if OP in _INVARIANT else y


@functools.cache
def program(size):
    """It, compiled for an operand of a size, for which ranks need one another."""
    return _program.lower(operand(size)).compile()


def operand(size, factor=1):
    """One row a rank, of rank + 1 times the factor."""
    rows = np.arange(1, RANKS + 1, dtype=np.float32)[:, None] * np.ones(size) * factor
    return jax.make_array_from_callback(
        rows.shape,
        NamedSharding(_MESH, P("x")),
        lambda index: rows[index].astype(np.float32),
    )


def _right(factor, result):
    """What the elements of a rank's result have to be."""
    parts = factor * np.arange(1, RANKS + 1)
    if OP == "psum":
        return parts.sum()
    if OP == "all_gather_matmul":
        return _INNER * np.repeat(parts, len(result) // RANKS)[:, None]
    return _INNER * parts.sum()


@functools.cache
def meet():
    """Waits until all ranks are here: one may have compiled for longer than another."""
    client = _compat.coordination_client()
    client.wait_at_barrier("jax_overlap_faults", 1000 * _MEETING_S)


def local(array) -> np.ndarray:
    """The part of this rank."""
    return np.asarray(array.addressable_shards[0].data)[0]


def works(size=1000, factor=1):
    """Calls with all ranks, and checks the result."""
    run = program(size)
    meet()
    got = local(run(operand(size, factor)))
    np.testing.assert_array_equal(got, np.broadcast_to(_right(factor, got), got.shape))


def assert_fails(size=1000, recorded=True) -> str:
    """Calls while a rank is at fault: an error in time, and no number.

    recorded: whether jax_overlap.last_errors() has to have it; else it may be raised
    only, as by a call that does not even begin.
    """
    x = operand(size)
    start = time.monotonic()
    raised, got = "", None
    try:
        got = local(program(size)(x))
    except Exception as error:
        raised = str(error)
    while not (errors := jax_overlap.last_errors()) and (recorded or not raised):
        assert time.monotonic() - start < WAIT_S + SLACK_S, f"no error: {got} {raised}"
        time.sleep(0.05)
    waited = time.monotonic() - start
    assert waited < WAIT_S + SLACK_S, f"{waited} s for {errors} {raised}"
    assert raised or np.isnan(got).all(), f"numbers in spite of {errors}: {got}"
    text = errors[0] if errors else raised
    print(f"rank {RANK} saw: {' '.join(text.split())}", flush=True)
    jax_overlap.clear_errors()
    return text

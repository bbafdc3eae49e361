"""What the programs of this folder share: psum on all ranks, and how it may fail.

psum_faults_test.py starts each program as the ranks of launch.py, with a short
JAX_OVERLAP_WAIT_TIMEOUT_S. A rank prints "rank R saw: TEXT" for the error it got.
"""

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
WAIT_S = float(os.environ["JAX_OVERLAP_WAIT_TIMEOUT_S"])
SLACK_S = 5

# JAX must not end the others before they have seen the error of their op.
assert jax_overlap.testing.initialize(heartbeat_timeout_s=300), "to be run by launch"
RANK, RANKS = jax.process_index(), jax.process_count()
LAST = RANKS - 1  # the one at fault, as rank 0 is also the coordinator
_MESH = jax.sharding.Mesh(jax.devices(), ("x",))


@jax.jit
@jax.shard_map(mesh=_MESH, in_specs=P("x"), out_specs=P("x"))
def program(x):
    """The psum of one rank's row; it varies, so that each rank has its own."""
    return lax.pcast(jax_overlap.psum(x, "x"), ("x",), to="varying")


def operand(size, factor=1):
    """One row a rank, of rank + 1 times the factor."""
    rows = np.arange(1, RANKS + 1, dtype=np.float32)[:, None] * np.ones(size) * factor
    return jax.make_array_from_callback(
        rows.shape,
        NamedSharding(_MESH, P("x")),
        lambda index: rows[index].astype(np.float32),
    )


def local(array) -> np.ndarray:
    """The row of this rank."""
    return np.asarray(array.addressable_shards[0].data)[0]


def works(size=1000, factor=1):
    """Calls with all ranks, and checks the sum."""
    got = local(program(operand(size, factor)))
    np.testing.assert_array_equal(got, factor * RANKS * (RANKS + 1) / 2)


def assert_fails(size=1000, recorded=True) -> str:
    """Calls while a rank is at fault: an error in time, and no number.

    recorded: whether jax_overlap.last_errors() has to have it; else it may be raised
    only, as by a call that does not even begin.
    """
    x = operand(size)
    start = time.monotonic()
    raised, got = "", None
    try:
        got = local(program(x))
    except Exception as error:
        raised = str(error)
    while not (errors := jax_overlap.last_errors()) and (recorded or not raised):
        assert time.monotonic() - start < WAIT_S + SLACK_S, f"no error: {got} {raised}"
        time.sleep(0.05)
    waited = time.monotonic() - start
    assert waited < WAIT_S + SLACK_S, f"{waited} s for {errors} {raised}"
    assert raised or jnp.isnan(got).all(), f"numbers in spite of {errors}: {got}"
    text = errors[0] if errors else raised
    print(f"rank {RANK} saw: {' '.join(text.split())}", flush=True)
    jax_overlap.clear_errors()
    return text

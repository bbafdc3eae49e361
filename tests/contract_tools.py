"""What the tests of every op share: layouts of devices, data, and programs.

Arrays are *stacked*: entry p of the leading dimension belongs to the device at
flat position p of the mesh, both for arguments and for results. So each rank's
result is seen by itself, and a replica that differs is seen too.
"""

import dataclasses
import os
import re
import subprocess
import sys

import cpu_devices  # noqa: F401  sets the environment, before jax comes
import jax
import jax.numpy as jnp
import numpy as np
from contract_devices import LAYOUTS as LAYOUTS
from contract_devices import Layout
from contract_devices import line as line
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap.testing

BF16 = jnp.bfloat16
F16 = np.float16

# Unit roundoff of a rounding to the type. A float64 sum has no wider oracle that
# every machine has, so np.longdouble stands in for it.
ROUNDOFF = {
    np.dtype(BF16): 2.0**-8,
    np.dtype(F16): 2.0**-11,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float64): 2.0**-53,
}


def stacked(fn, layout: Layout, *, check_vma: bool = True):
    """`fn` of one rank's arrays, as a function of stacked arrays under shard_map."""
    spec = P(layout.names)

    def local(*args):
        args = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: jnp.asarray(a)[None], fn(*args))

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )


def place(tree, layout: Layout, axis: int = 0):
    """Puts stacked numpy arrays on the devices, each process its own parts.

    axis: the dimension along which they are stacked.
    """
    sharding = NamedSharding(layout.mesh, P(*(None,) * axis, layout.names))
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda i: a[i]), tree
    )


def fetch(array) -> dict[int, np.ndarray]:
    """The parts of a stacked array that this process holds, by position."""
    return {
        shard.index[0].start or 0: np.array(shard.data)[0]
        for shard in array.addressable_shards
    }


def bits(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def exact(seed: int, shape, dtype) -> np.ndarray:
    """Small integers: every partial sum is representable, so results are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def normal(seed: int, shape, dtype) -> np.ndarray:
    """Normal numbers, larger on later positions, so that ranks weigh unlike."""
    scale = np.arange(1.0, shape[0] + 1).reshape((-1,) + (1,) * (len(shape) - 1))
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def wide(array) -> np.ndarray:
    """The array in a type in which sums of it are exact or nearly so."""
    if array.dtype == np.float64:
        return array.astype(np.longdouble)
    return array.astype(np.float64 if array.dtype.kind not in "iu" else np.int64)


def in_rank_order(x) -> np.ndarray:
    """The sum over the ranks, stacked: one after the other, in fp32 or a wider type."""
    adding = x.dtype if x.dtype.itemsize >= 4 else np.dtype(np.float32)
    total = x[0].astype(adding)
    for part in x[1:]:
        total = total + part.astype(adding)
    return np.broadcast_to(total.astype(x.dtype), x.shape)


def custom_calls(hlo: str, target: str) -> int:
    return len(re.findall(f'custom_call_target="{re.escape(target)}"', hlo))


_COLLECTIVE = re.compile(  # a long tuple has comments: (f32[2], /*index=5*/f32[3])
    r"= (\S+|\((?:[^=]|index=)*?\)) (all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(hlo: str) -> list[str]:
    """XLA's own collectives in a compiled program: ["all-reduce f32[4]{0}", ...]."""
    return [f"{kind} {shape}" for shape, kind in _COLLECTIVE.findall(hlo)]


@dataclasses.dataclass
class Child:
    """What a Python program run in a process of its own left behind."""

    code: int
    out: str
    err: str
    timed_out: bool = False


def child_path() -> str:
    """Children import these tools, and whatever jax_overlap this process uses."""
    here = os.path.dirname(os.path.abspath(__file__))
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def run_child(*argv: str, env: dict[str, str | None] | None = None, limit: float = 60):
    """Runs `python *argv`, `env` added to the environment, for `limit` seconds."""

    full = dict(os.environ, PYTHONFAULTHANDLER="1", PYTHONPATH=child_path())
    full.pop(jax_overlap.testing.LAUNCH, None)  # the child is no rank
    for key, value in (env or {}).items():
        full.pop(key, None)
        if value is not None:
            full[key] = value
    process = subprocess.Popen(
        [sys.executable, "-P", *argv],  # not the package that lies in this folder
        env=full,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=limit)
        return Child(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Child(process.returncode, out, err, timed_out=True)

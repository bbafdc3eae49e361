"""Operands for benchmarks on GPUs that no process has in full, and what comes of them.

Each rank makes its part by itself, and any process can make that of any rank. Results
are compared with those of `jax.lax`, or where it does not run, a few rows of them with
those of numpy.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_overlap.bench import harness

_SAMPLES = 4  # rows of a rank's result
# Matmuls of float32 may have the precision of TF32 in jax.lax.
_LEAST_ROUNDING = 2.0**-11


def local_shape(shape, spec: P, ranks: int) -> tuple[int, ...]:
    """The part of a rank; raises ValueError if the parts are not equal."""
    axes = (*spec, *(None,) * (len(shape) - len(spec)))
    if uneven := [n for n, a in zip(shape, axes, strict=True) if a and n % ranks]:
        raise ValueError(f"{uneven[0]} is not divisible by {ranks} ranks")
    return tuple(n // ranks if a else n for n, a in zip(shape, axes, strict=True))


def operand(mesh: Mesh, seed: int, shape, spec: P, dtype) -> jax.Array:
    """A random array of this shape and sharding, of axis "x"."""
    local = local_shape(shape, spec, mesh.devices.size)
    # Sharded by hand: the ranks must not communicate here.
    make = jax.shard_map(
        lambda: _values(seed, lax.axis_index("x"), local, dtype),
        mesh=mesh,
        in_specs=(),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(make)()


def _values(seed, rank, shape, dtype):
    key = jax.random.fold_in(jax.random.key(seed), rank)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -3, 4, dtype)
    return jax.random.normal(key, shape, dtype)


_values_here = jax.jit(_values, static_argnums=(2, 3))


def on_host(mesh: Mesh, seed: int, shape, spec: P, dtype) -> np.ndarray:
    """The same array in full."""
    ranks = mesh.devices.size
    local = local_shape(shape, spec, ranks)
    parts = [np.asarray(_values_here(seed, r, local, dtype)) for r in range(ranks)]
    return np.concatenate(parts, axis=spec.index("x"))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def tolerance(dtype, ranks: int) -> float:
    """How far two correct results may differ, over the largest element of one.

    A sum over ranks rounds each addend, and again after each addition, so at most
    2 x ranks times by half a unit of an element that is not much larger than the
    largest of the result; both sides do.
    """
    rounding = max(float(jnp.finfo(dtype).eps) / 2, _LEAST_ROUNDING)
    return 4 * ranks * rounding


def error_to_lax(y, reference, mesh: Mesh, spec: P) -> float:
    """The largest difference here, over the largest element of the reference."""
    errors = harness.on_ranks(
        _error_on_rank, mesh, [y, reference], (spec, spec), P("x")
    )()
    return max(float(shard.data[0]) for shard in errors.addressable_shards)


def _error_on_rank(y, reference, axis):
    wide = partial(jnp.asarray, dtype=jnp.float32)
    error = jnp.max(jnp.abs(wide(y) - wide(reference)))
    # A NaN is no maximum everywhere.
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    return (error / jnp.max(jnp.abs(wide(reference))))[None]


def error_to_numpy(y, x: np.ndarray, w: np.ndarray) -> float:
    """The same for a few rows of x @ w of each rank here."""
    random = np.random.default_rng(0)
    worst = 0.0
    for shard in y.addressable_shards:
        rows, cols = (range(n)[i] for n, i in zip(y.shape, shard.index, strict=True))
        count = min(_SAMPLES, len(rows))
        picked = np.sort(random.choice(len(rows), count, replace=False))
        expected = _wide(x[rows.start + picked]) @ _wide(w[:, cols.start : cols.stop])
        seen = _wide(np.asarray(shard.data)[picked])
        error = np.max(np.abs(seen - expected)) / np.max(np.abs(expected))
        worst = max(worst, float(error) if np.isfinite(error) else np.inf)
    return worst

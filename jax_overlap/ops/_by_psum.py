"""The fused matmuls by one psum: what small ones are on GPUs.

    matmul_all_reduce        psum(x w)
    matmul_reduce_scatter    own part of psum(x w)
    all_gather_matmul        psum(x at its place among zeros) w

The other forms launch something for each part, and read w again for each. What is
small is there before that is done: psum is one launch, and the product is that of XLA,
which reads w once. It is our psum, planned, counted and named in errors as such.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_overlap import config
from jax_overlap._plan import LEFT_TO_LAX, choose_psum_algorithm
from jax_overlap.ops import psum

NAME = "by_psum"

# What a psum has waited for in vain is the smallest integer on GPUs, which would be
# -0.0. With these bits flipped before and after it is NaN, in every type.
_FLIPPED = np.int32(~0x8000)


# ------------------------------------------------------------------- the choice
def choose(
    nbytes: int, team, situation, *, algorithm, implementation, groups, by_choice: bool
) -> tuple[str, str] | None:
    """The algorithm and the reason, or None: not by psum.

    Args:
      nbytes: what is added, of one rank.
      team: of the call.
      situation: of the call.
      algorithm: that is asked for, or None.
      implementation: that is asked for, or None.
      groups: the axis_index_groups, of which there have to be none.
      by_choice: whether small ones go so without being asked to, on GPUs.
    """
    forced = algorithm == NAME
    by_choice = by_choice and algorithm is None and situation.on_gpu
    if groups is not None or not (forced or by_choice):
        return None
    limit = None if forced else config.BY_PSUM_MAX_BYTES.read()
    if limit is not None and nbytes > limit:
        return None
    implementation = "native" if forced else implementation
    inner, why = choose_psum_algorithm(nbytes, team, situation, implementation, None)
    if inner == LEFT_TO_LAX:
        return None
    small = f"{nbytes} bytes are at most {limit} ({config.BY_PSUM_MAX_BYTES.name})"
    first = f"algorithm={NAME!r}" if forced else small
    return NAME, f"{first}; psum by {inner}, as {why}"


# ------------------------------------------------------------- inside of lowering
def rounded_once(product, dtype):
    """What `product(dtype)` makes, but of sums in float32, at least, until the end.

    XLA on GPUs rounds more often on the way to a result in a half type.
    """
    wide = product(jnp.promote_types(dtype, np.float32))
    return jax.tree.map(lambda y: y.astype(dtype), wide)


def total(y, axes):
    """The sum of y over the ranks, on every rank."""
    params = {"axis_index_groups": None, "algorithm": None}
    # As it is planned: native, or `choose` would not have chosen.
    return psum.bind([y], axes, False, implementation="native", **params)[0]


def own_part(y, axes, dimension: int, ranks: int):
    """The part of y that belongs to the rank."""
    part = y.shape[dimension] // ranks
    start = lax.axis_index(axes) * part
    return lax.dynamic_slice_in_dim(y, start, part, dimension)


def gathered(x, axes, dimension: int, ranks: int):
    """The x of all ranks along a dimension, in their very bits, of NaN and -0, too."""
    bits = lax.expand_dims(_bits(x), [dimension])
    shape = [ranks if i == dimension else n for i, n in enumerate(bits.shape)]
    place = lax.broadcasted_iota(np.int32, shape, dimension)
    parts = lax.select(
        place == lax.axis_index(axes),
        lax.broadcast_in_dim(bits, shape, range(bits.ndim)),
        lax.full(shape, np.int32(0)),
    )
    full = _values(total(parts, axes), x.dtype, x.shape[-1])
    whole = [n * (ranks if i == dimension else 1) for i, n in enumerate(x.shape)]
    return lax.reshape(full, whole)


def gathered_bytes(x, ranks: int) -> int:
    """What `gathered` adds: x of all ranks, its rows padded to whole integers."""
    row = -(-x.shape[-1] * x.dtype.itemsize // 4) * 4
    return ranks * x.size // x.shape[-1] * row


def _bits(x):
    """The bits of the rows of x as int32, padded to whole ones."""
    *outer, row = x.shape
    if x.dtype.itemsize < 4:  # as integers at once: what pads floats may change NaNs
        small, each = _parts_of_int32(x.dtype)
        x = lax.bitcast_convert_type(x, small)
        x = lax.pad(x, small(0), [*[(0, 0, 0)] * len(outer), (0, -row % each, 0)])
        x = lax.reshape(x, (*outer, x.shape[-1] // each, each))
    bits = lax.bitcast_convert_type(x, np.int32)
    if x.dtype.itemsize == 8:
        bits = lax.reshape(bits, (*outer, 2 * row))
    return bits ^ _FLIPPED


def _values(bits, dtype, row: int):
    """The rows, `row` long, of which these are the bits."""
    *outer, ints = bits.shape
    bits = bits ^ _FLIPPED
    if dtype.itemsize == 8:
        bits = lax.reshape(bits, (*outer, row, 2))
    if dtype.itemsize < 4:
        small, each = _parts_of_int32(dtype)
        bits = lax.bitcast_convert_type(bits, small)
        bits = lax.reshape(bits, (*outer, each * ints))
        bits = lax.slice_in_dim(bits, 0, row, axis=len(outer))
    return lax.bitcast_convert_type(bits, dtype)


def _parts_of_int32(dtype):
    """The unsigned integer as large as a type, and how many of it an int32 has."""
    return {1: np.uint8, 2: np.uint16}[dtype.itemsize], 4 // dtype.itemsize

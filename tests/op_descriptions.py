"""Each op as the contract (op_contract.py) needs to know it.

What cuts an operand in parts is described twice: in the middle of it, with rows of
every length (`Values`), and along the first or the last dimension, the other way of
`tiled` where lax has it right (for `Transforms` and `Batching`).
"""

import functools

import contract_tools as tools
import numpy as np
from jax import lax
from op_contract import Op

import jax_overlap


def total(x):
    """Each rank has the sum over the ranks."""
    return np.broadcast_to(x.sum(0), x.shape)


def _psum_bound(operands, dtype):
    """Of n terms added in fp32 (float64: in float64), and rounded once at the end."""
    (x,) = operands
    unit = tools.ROUNDOFF[np.dtype(dtype)]
    adding = min(unit, 2.0**-24) * len(x) * np.abs(x).sum(0)
    return np.broadcast_to(unit * np.abs(x.sum(0)) + adding, x.shape)


PSUM = Op(
    name="psum",
    call=jax_overlap.psum,
    lax=lax.psum,
    reference=total,
    vjp=lambda i, operands, cts: total(cts),
    # A rank's own cotangent under check_vma, where the result is one value that all
    # ranks share; without, lax sums the cotangents of all ranks.
    inside_vjp=lambda i, operands, cts, vma: cts if vma else total(cts),
    shapes=lambda team, size: ((size,),),
    bound=_psum_bound,
    algorithms=("one_shot", "two_shot", "nvrar"),
    switches=True,
)


def _rows(size):
    """Two rows of about `size` elements in all."""
    return -(-size // 2)


def _cut(x, dimension):
    """[ranks, ..] as [ranks, parts, ..]: `dimension` of each rank's cut for all."""
    return np.stack(np.split(x, len(x), axis=dimension + 1), axis=1)


def _put_together(parts, dimension):
    """[ranks, parts, ..] as [ranks, ..], each rank's parts along `dimension`."""
    return np.concatenate(np.moveaxis(parts, 1, 0), axis=dimension + 1)


def scatter(x, dimension):
    """Rank r has part r of the sum."""
    return np.swapaxes(_cut(x, dimension), 0, 1).sum(1)


def gather(x, dimension):
    """Each rank has the operands of all."""
    return _put_together(np.broadcast_to(x, (len(x), *x.shape)), dimension)


def _exchange(x, split, concat):
    """Part j of rank r is part r of rank j."""
    return _put_together(np.swapaxes(_cut(x, split), 0, 1), concat)


def _nothing(operands, dtype):
    """The bound of what only moves numbers."""
    return np.zeros_like(operands[0])


def _scatter_bound(operands, dtype):
    rank = np.arange(len(operands[0]))
    return _cut(_psum_bound(operands, dtype), 1)[rank, rank]


def _linear(forward, transposed, **fields):
    """An op whose VJP is `transposed` in every mode: each rank's result is its own."""
    return Op(
        reference=forward,
        vjp=lambda i, operands, cts: transposed(cts),
        inside_vjp=lambda i, operands, cts, vma: transposed(cts),
        algorithms=(),
        invariant=False,
        **fields,
    )


def _both(name, **options):
    """The op of jax_overlap and that of lax, with options."""
    return {
        "name": name,
        "call": functools.partial(getattr(jax_overlap, name), **options),
        "lax": functools.partial(getattr(lax, name), **options),
    }


PSUM_SCATTER = _linear(
    lambda x: scatter(x, 1),
    lambda ct: gather(ct, 1),
    **_both("psum_scatter", scatter_dimension=1, tiled=True),
    shapes=lambda team, size: ((2, team * _rows(size)),),
    bound=_scatter_bound,
    mixes_with_vmap=False,
)


# Not tiled: the dimension goes.
PSUM_SCATTER_FIRST = _linear(
    lambda x: scatter(x, 0)[:, 0],
    lambda ct: gather(ct[:, None], 0),
    **_both("psum_scatter"),
    shapes=lambda team, size: ((team, size),),
    bound=_psum_bound,
    mixes_with_vmap=False,
)

ALL_GATHER = _linear(
    lambda x: gather(x[:, :, None], 1),
    lambda ct: scatter(ct, 1)[:, :, 0],
    **_both("all_gather", axis=1),
    shapes=lambda team, size: ((2, _rows(size)),),
    bound=lambda operands, dtype: gather(0 * operands[0][:, :, None], 1),
    mixes_with_vmap=False,
)
ALL_GATHER_LAST = _linear(
    lambda x: gather(x, 1),
    lambda ct: scatter(ct, 1),
    **_both("all_gather", axis=-1, tiled=True),
    shapes=lambda team, size: ((3, size),),
    bound=lambda operands, dtype: gather(0 * operands[0], 1),
    mixes_with_vmap=False,
)

ALL_TO_ALL = _linear(
    lambda x: _exchange(x, 1, 1),
    lambda ct: _exchange(ct, 1, 1),
    **_both("all_to_all", split_axis=1, concat_axis=1, tiled=True),
    shapes=lambda team, size: ((2, team * _rows(size)),),
    bound=_nothing,
)
ALL_TO_ALL_FIRST_TO_LAST = _linear(
    lambda x: _exchange(x, 0, 1),
    lambda ct: _exchange(ct, 1, 0),
    **_both("all_to_all", split_axis=0, concat_axis=1, tiled=True),
    shapes=lambda team, size: ((2 * team, size),),
    bound=_nothing,
    mixes_with_vmap=False,  # as it would need operands for 12 ranks
)

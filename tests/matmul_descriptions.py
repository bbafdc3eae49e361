"""The fused matmuls as the contract (op_contract.py) needs to know them.

About `size` elements travel from rank to rank; the other dimensions are small, and
change with the size, so that all shapes of tiles come up. Contractions are short: the
sums of products of small integers are exact in every float type, and so is each
rank's own sum, which travels in the type of the result on GPUs.
"""

import dataclasses
import functools

import cpu_devices
import numpy as np
from contract_tools import BF16, F16, ROUNDOFF
from jax import lax
from op_contract import Op
from op_descriptions import gather, scatter, total

import jax_overlap

DTYPES = (np.float32, BF16, F16, np.float64)
# Where peers' operands cannot be addressed there is no "in_place": it lowers to lax.
ON_GPU = not cpu_devices.ON_CPU
ALGORITHMS = ("sliced",) if ON_GPU else ("in_place", "sliced")
ALL_REDUCE_ALGORITHMS = ("sliced",) if ON_GPU else ("in_place",)
BY_PSUM = "by_psum"  # on every backend, if asked for
MANY = 200_003  # elements: "sliced" sends 4096 narrow rows at a time


def dot(x, w):
    """Each rank's x @ w: [ranks, .., k] and [ranks, k, n]."""
    y = x.reshape(len(x), -1, x.shape[-1]) @ w
    return y.reshape(*x.shape[:-1], w.shape[-1])


def turned(w):
    return np.swapaxes(w, 1, 2)


def of_weight(x, ct):
    """Each rank's cotangent of w in x @ w."""
    flat = [a.reshape(len(a), -1, a.shape[-1]) for a in (x, ct)]
    return turned(flat[0]) @ flat[1]


def bound(reference, operands, k, adds_ranks, dtype, rounds_ranks=ON_GPU):
    """How far the result of a matmul may be off; `reference` gives the right one.

    Of sums of products in fp32 (float64: in float64), rounded once at the end. k: how
    many products a rank adds, and adds_ranks: whether those of all ranks are added.
    Each has been rounded, and takes part in as many additions, in whatever order they
    are made. On GPUs tensor cores truncate, which counts four times, and what a rank
    has added is rounded to the type of the result before it travels (rounds_ranks).
    """
    unit = ROUNDOFF[np.dtype(dtype)]
    adding = min(unit, 2.0**-24)
    absolute = reference(*map(np.abs, operands))
    rounded = unit * np.abs(reference(*operands))
    ranks = len(operands[0]) if adds_ranks else 1
    if not rounds_ranks:
        return rounded + (ranks * k + 1) * adding * absolute
    off = rounded + 4 * (k + ranks) * adding * absolute
    for rank in range(ranks if ranks > 1 else 0):
        off += (ranks - 1) * unit * np.abs(reference(*_only(rank, *operands)))
    return off


def _only(rank, x, *ws):
    """Operands of which those of one rank are left."""
    mine = (np.arange(len(x)) == rank).reshape(-1, *(1,) * (x.ndim - 1))
    return np.where(mine, x, 0), *ws


def _bound(reference, adds_ranks, rounds_ranks=ON_GPU):
    """`bound` of an op."""

    def of(operands, dtype):
        k = operands[1].shape[1]
        return bound(reference, operands, k, adds_ranks, dtype, rounds_ranks)

    return of


def _wide(size):
    """Columns of a weight, and what is contracted."""
    return 1 + size % 17, 3 + size % 4


def _rows(size, columns):
    return -(-size // columns)


def _sliced(op):
    """The op by the algorithm whose ranks wait for each other, in every test."""
    return dataclasses.replace(
        op, call=functools.partial(op.call, algorithm="sliced"), algorithms=()
    )


def _by_psum(op):
    """The op by a matmul and a psum, in every test: each rank rounds what it has."""

    def call(*operands, algorithm=BY_PSUM, **options):
        return op.call(*operands, algorithm=algorithm, **options)

    adds_ranks = op.name != "all_gather_matmul"
    return dataclasses.replace(
        op,
        call=call,
        called="psum",
        algorithms=(BY_PSUM,),
        bound=_bound(op.reference, adds_ranks, rounds_ranks=True),
    )


def _reduce_scatter(dimension, shapes):
    def forward(x, w):
        return scatter(dot(x, w), dimension)

    def vjp(i, operands, cts):
        x, w = operands
        ct = gather(cts, dimension)
        return of_weight(x, ct) if i else dot(ct, turned(w))

    def lax_(x, w, axis_name):
        return lax.psum_scatter(
            x @ w, axis_name, scatter_dimension=dimension, tiled=True
        )

    return Op(
        name="matmul_reduce_scatter",
        call=functools.partial(
            jax_overlap.matmul_reduce_scatter, scatter_dimension=dimension
        ),
        lax=lax_,
        reference=forward,
        vjp=vjp,
        inside_vjp=lambda i, operands, cts, vma: vjp(i, operands, cts),
        shapes=shapes,
        bound=_bound(forward, adds_ranks=True),
        algorithms=ALGORITHMS,
        dtypes=DTYPES,
        invariant=False,
        mixes_with_vmap=False,
        many=MANY,
    )


def _reduce_scatter_shapes(team, size):
    n, k = _wide(size)
    return (team * _rows(size, n), k), (k, n)


def _reduce_scatter_last_shapes(team, size):
    n, k = _wide(size)
    return (2, _rows(size, 2 * n), k), (k, team * n)


MATMUL_REDUCE_SCATTER = _reduce_scatter(0, _reduce_scatter_shapes)
MATMUL_REDUCE_SCATTER_LAST = _reduce_scatter(2, _reduce_scatter_last_shapes)


MATMUL_REDUCE_SCATTER_SLICED = _sliced(MATMUL_REDUCE_SCATTER)
MATMUL_REDUCE_SCATTER_BY_PSUM = _by_psum(MATMUL_REDUCE_SCATTER)


def _all_gather(dimension, shapes):
    def forward(x, w):
        return dot(gather(x, dimension), w)

    def vjp(i, operands, cts):
        x, w = operands
        if i:
            return of_weight(gather(x, dimension), cts)
        return scatter(dot(cts, turned(w)), dimension)

    def lax_(x, w, axis_name):
        return lax.all_gather(x, axis_name, axis=dimension, tiled=True) @ w

    return Op(
        name="all_gather_matmul",
        call=functools.partial(
            jax_overlap.all_gather_matmul, gather_dimension=dimension
        ),
        lax=lax_,
        reference=forward,
        vjp=vjp,
        inside_vjp=lambda i, operands, cts, vma: vjp(i, operands, cts),
        shapes=shapes,
        bound=_bound(forward, adds_ranks=False),
        algorithms=ALGORITHMS,
        dtypes=DTYPES,
        invariant=False,
        mixes_with_vmap=False,
        many=MANY,
    )


def _all_gather_shapes(team, size):
    n, k = 1 + size % 5, 3 + size % 4
    return (_rows(size, k), k), (k, n)


def _all_gather_last_shapes(team, size):
    n, k = 1 + size % 5, 3 + size % 4
    return (2, _rows(size, 2 * k), k), (team * k, n)


ALL_GATHER_MATMUL = _all_gather(0, _all_gather_shapes)
ALL_GATHER_MATMUL_LAST = _all_gather(2, _all_gather_last_shapes)
ALL_GATHER_MATMUL_SLICED = _sliced(ALL_GATHER_MATMUL)
ALL_GATHER_MATMUL_BY_PSUM = _by_psum(ALL_GATHER_MATMUL)


def _all_reduce(x, w):
    return total(dot(x, w))


def _all_reduce_vjp(i, operands, cts):
    """Of one rank's own cotangent; all ranks' are summed before, where they are."""
    x, w = operands
    return of_weight(x, cts) if i else dot(cts, turned(w))


MATMUL_ALL_REDUCE = Op(
    name="matmul_all_reduce",
    call=jax_overlap.matmul_all_reduce,
    lax=lambda x, w, axis_name: lax.psum(x @ w, axis_name),
    reference=_all_reduce,
    vjp=lambda i, operands, cts: _all_reduce_vjp(i, operands, total(cts)),
    inside_vjp=lambda i, operands, cts, vma: _all_reduce_vjp(
        i, operands, cts if vma else total(cts)
    ),
    shapes=lambda team, size: (
        (_rows(size, _wide(size)[0]), _wide(size)[1]),
        _wide(size)[::-1],
    ),
    bound=_bound(_all_reduce, adds_ranks=True),
    algorithms=ALL_REDUCE_ALGORITHMS,
    dtypes=DTYPES,
    many=MANY,
)
MATMUL_ALL_REDUCE_BY_PSUM = _by_psum(MATMUL_ALL_REDUCE)

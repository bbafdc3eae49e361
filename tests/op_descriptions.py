"""Each op as the contract (op_contract.py) needs to know it."""

import contract_tools as tools
import numpy as np
from jax import lax
from op_contract import Op

import jax_overlap


def _total(x):
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
    reference=_total,
    vjp=lambda i, operands, cts: _total(cts),
    # A rank's own cotangent under check_vma, where the result is one value that all
    # ranks share; without, lax sums the cotangents of all ranks.
    inside_vjp=lambda i, operands, cts, vma: cts if vma else _total(cts),
    shapes=lambda team, size: ((size,),),
    bound=_psum_bound,
    algorithms=("one_shot", "two_shot", "nvrar"),
)

"""What one rank computes in a tensor-parallel layer; no mesh and no Flax here.

A pair of matmuls is cut along the hidden features, one slice a rank:

    x (same on all ranks) --enter--> x @ up[:, r] --act--> h[:, r]   column parallel
    h[:, r] @ down[r, :] --leave--> y (same on all ranks)            row parallel

`leave` is the psum of the forward pass. `enter` costs nothing forward; its transpose
is the psum of the backward pass, for each rank has only its part of dx.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jax_overlap

COLLECTIVES = ("overlap", "xla")


@dataclasses.dataclass(frozen=True)
class Options:
    """What all layers of a model share: the axis, its collectives, the arithmetic."""

    axis_name: str
    collectives: str = "overlap"
    dtype: Any = None
    precision: Any = None

    def check(self, owner: str) -> None:
        if not isinstance(self.axis_name, str):
            raise TypeError(
                f"{owner}: axis_name must be the name of one mesh axis, such as 'tp'; "
                f"got {self.axis_name!r}."
            )
        if self.collectives not in COLLECTIVES:
            raise ValueError(
                f"{owner}: collectives must be 'overlap' (jax_overlap.psum) or 'xla' "
                f"(jax.lax.psum); got {self.collectives!r}."
            )


def _psum(x: jax.Array, axis_name: str, collectives: str) -> jax.Array:
    op = jax_overlap.psum if collectives == "overlap" else lax.psum
    return op(x, axis_name)


# JAX's own invariant -> varying cast is transposed to `lax.psum`. This one is
# transposed to the psum the layer asked for. It is linear, so forward mode, vmap and
# higher derivatives work, which a `custom_vjp` would forbid.
_to_varying_p = Primitive("jax_overlap_to_varying")
_to_varying_p.def_impl(lambda x, **_: x)
mlir.register_lowering(_to_varying_p, lambda ctx, x, **_: [x])
batching.defvectorized(_to_varying_p)


@_to_varying_p.def_abstract_eval
def _to_varying_type(x, *, axis_name, collectives):
    del collectives
    varying = x.mat.varying | {axis_name}
    return x.update(manual_axis_type=x.mat.update(varying=varying))


def _to_varying_transpose(ct, x, *, axis_name, collectives):
    del x
    return [_psum(ct, axis_name, collectives)]


ad.deflinear2(_to_varying_p, _to_varying_transpose)


def enter(x: jax.Array, options: Options) -> jax.Array:
    """Identity; the cotangents of the ranks are summed by the chosen psum."""
    axis = options.axis_name
    # Under check_vma=False (and vmap, pmap) nothing is typed as varying, and the sum
    # belongs to whoever transposes the shard_map: a second one would be n-fold.
    tracked = axis in jax.typeof(lax.axis_index(axis)).mat.varying
    if not tracked or axis in jax.typeof(x).mat.varying:
        return x
    return _to_varying_p.bind(x, axis_name=axis, collectives=options.collectives)


def leave(y: jax.Array, options: Options) -> jax.Array:
    """The sum of the ranks' partial results, the same on all ranks."""
    return _psum(y, options.axis_name, options.collectives)


def promote(dtype: Any, *arrays: jax.Array | None) -> list[Any]:
    """Casts to `dtype`, or to the common floating type as the plain layers do."""
    if dtype is None:
        dtype = jnp.result_type(*[a for a in arrays if a is not None])
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return [None if a is None else jnp.asarray(a, dtype) for a in arrays]


def dot(x: jax.Array, kernel: jax.Array, contracted: int, precision: Any) -> jax.Array:
    """Contracts the last `contracted` dimensions of x with the first of kernel."""
    dims = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return lax.dot_general(x, kernel, (dims, ((), ())), precision=precision)


def column(x, kernel, bias, options: Options) -> jax.Array:
    """This rank's columns of x @ kernel + bias."""
    x, kernel, bias = promote(options.dtype, x, kernel, bias)
    y = dot(enter(x, options), kernel, 1, options.precision)
    return y if bias is None else y + bias


def row(x, kernel, bias, options: Options, contracted: int = 1) -> jax.Array:
    """The sum over ranks of x @ kernel, plus bias: after the sum, hence once."""
    x, kernel, bias = promote(options.dtype, x, kernel, bias)
    y = leave(dot(x, kernel, contracted, options.precision), options)
    return y if bias is None else y + bias


Params = Sequence[tuple[jax.Array, jax.Array | None]]  # (kernel, bias) of each part


def attention(
    inputs: Sequence[jax.Array],
    which: Sequence[int],
    params: Params,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    options: Options,
) -> jax.Array:
    """Attention of this rank's heads, then the row-parallel output projection.

    `which` says which of the distinct `inputs` feeds query, key and value: one that
    feeds several is entered once, so self-attention has one psum in the backward pass.
    """
    entered = [enter(promote(options.dtype, x)[0], options) for x in inputs]
    heads = [column(entered[i], *params[n], options) for n, i in enumerate(which)]
    kernel, bias = params[3]
    return row(attend(*heads), kernel, bias, options, contracted=2)


def flat_init(init: Callable, key, shape: Sequence[int], split: int, dtype) -> Any:
    """Initial values as `DenseGeneral` makes them: on the flattened 2-D (or 1-D) shape.

    The first `split` dimensions count as inputs, which decides the variance.
    """
    sides = (shape[:split], shape[split:])
    return init(key, tuple(math.prod(s) for s in sides if s), dtype)

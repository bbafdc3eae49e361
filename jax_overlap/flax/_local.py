"""What one rank computes in a tensor-parallel layer; no mesh and no Flax here.

A pair of matmuls is cut along the hidden features, one slice a rank:

    x (same on all ranks) --enter--> x @ up[:, r] --act--> h[:, r]   column parallel
    h[:, r] @ down[r, :] --all-reduce--> y (same on all ranks)       row parallel

The all-reduce is part of the matmul. `enter` costs nothing forward; its transpose is
the psum of the backward pass, for each rank has only its part of dx.

In the sequence-parallel form x and y are cut along the sequence instead, and what is
between the pairs (norms, residuals, dropout) is done once, not once on every rank:

    x[r] --all-gather--> x @ up[:, r] --act--> h[:, r]               column parallel
    h[:, r] @ down[r, :] --reduce-scatter--> y[r]                    row parallel

Each collective is the other's transpose, so the backward pass has one of each, too.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_overlap
from jax_overlap.ops._pvary import to_varying_p

COLLECTIVES = ("overlap", "xla")


@dataclasses.dataclass(frozen=True)
class Options:
    """What all layers of a model share: the axis, its collectives, the arithmetic."""

    axis_name: str
    collectives: str = "overlap"
    dtype: Any = None
    precision: Any = None
    sequence_parallel: bool = False
    save_gathered: bool = True

    def check(self, owner: str) -> None:
        if not isinstance(self.axis_name, str):
            raise TypeError(
                f"{owner}: axis_name must be the name of one mesh axis, such as 'tp'; "
                f"got {self.axis_name!r}."
            )
        if self.collectives not in COLLECTIVES:
            raise ValueError(
                f"{owner}: collectives must be 'overlap' (those of jax_overlap, fused "
                f"with the matmuls) or 'xla' (those of jax.lax); got "
                f"{self.collectives!r}."
            )


def enter(x: jax.Array, options: Options) -> jax.Array:
    """Identity; the cotangents of the ranks are summed by the chosen psum."""
    axis = options.axis_name
    # Under check_vma=False (and vmap, pmap) nothing is typed as varying, and the sum
    # belongs to whoever transposes the shard_map: a second one would be n-fold.
    tracked = axis in jax.typeof(lax.axis_index(axis)).mat.varying
    if not tracked or axis in jax.typeof(x).mat.varying:
        return x
    if options.collectives == "xla":
        return lax.pcast(x, axis, to="varying")
    return to_varying_p.bind(x, axes=(axis,))


def promote(dtype: Any, *arrays: jax.Array | None) -> list[Any]:
    """Casts to `dtype`, or to the common floating type as the plain layers do."""
    if dtype is None:
        dtype = jnp.result_type(*[a for a in arrays if a is not None])
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return [None if a is None else jnp.asarray(a, dtype) for a in arrays]


# (kernel, bias) of one linear map.
Params = tuple[jax.Array, jax.Array | None]


def _dims(ndim: int, contracted: int) -> Any:
    """The last `contracted` dimensions of x, with as many first ones of the kernel."""
    return (tuple(range(ndim - contracted, ndim)), tuple(range(contracted))), ((), ())


def columns(x: jax.Array, maps: Sequence[Params], options: Options) -> list[jax.Array]:
    """This rank's columns of x @ kernel + bias for each of `maps`; x comes in once."""
    kernels, biases = zip(*maps, strict=True)
    x, *rest = promote(options.dtype, x, *kernels, *biases)
    kernels, biases = rest[: len(maps)], rest[len(maps) :]
    dims, axis = _dims(x.ndim, 1), options.axis_name
    if options.sequence_parallel and options.collectives == "overlap":
        ys: Any = jax_overlap.all_gather_matmul(
            x,
            tuple(kernels),
            axis,
            gather_dimension=x.ndim - 2,
            dimension_numbers=dims,
            bias=tuple(biases),
            precision=options.precision,
            save_gathered=options.save_gathered,
        )
        return list(ys)

    def multiply(x, kernels):
        if options.sequence_parallel:
            x = lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
        return [lax.dot_general(x, k, dims, options.precision) for k in kernels]

    if options.sequence_parallel and not options.save_gathered:
        multiply = jax.checkpoint(multiply)
    x = x if options.sequence_parallel else enter(x, options)
    ys = multiply(x, kernels)
    return [y if b is None else y + b for y, b in zip(ys, biases, strict=True)]


def column(x, kernel, bias, options: Options) -> jax.Array:
    """This rank's columns of x @ kernel + bias."""
    return columns(x, [(kernel, bias)], options)[0]


def row(x, kernel, bias, options: Options, contracted: int = 1) -> jax.Array:
    """The sum over ranks of x @ kernel, plus bias: after the sum, hence once.

    Sequence parallel, each rank gets its part of the sequence of that.
    """
    x, kernel, bias = promote(options.dtype, x, kernel, bias)
    dims, axis = _dims(x.ndim, contracted), options.axis_name
    sequence = x.ndim - contracted - 1
    if options.sequence_parallel and bias is not None:
        # Each rank adds it to other rows, and has only their part of its gradient.
        bias = enter(bias, options)
    if options.collectives == "overlap":
        more = {
            "dimension_numbers": dims,
            "bias": bias,
            "precision": options.precision,
        }
        if options.sequence_parallel:
            return jax_overlap.matmul_reduce_scatter(
                x, kernel, axis, scatter_dimension=sequence, **more
            )
        return jax_overlap.matmul_all_reduce(x, kernel, axis, **more)
    y = lax.dot_general(x, kernel, dims, options.precision)
    if options.sequence_parallel:
        y = lax.psum_scatter(y, axis, scatter_dimension=sequence, tiled=True)
    else:
        y = lax.psum(y, axis)
    return y if bias is None else y + bias


def attention(
    inputs: Sequence[jax.Array],
    which: Sequence[int],
    maps: Sequence[Params],
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    options: Options,
) -> jax.Array:
    """Attention of this rank's heads, then the row-parallel output projection.

    `which` says which of the distinct `inputs` feeds query, key and value: one that
    feeds several comes in once, so self-attention has one psum (or one of each
    collective) in the backward pass. `maps` are those of query, key, value and output.
    """
    heads: list[Any] = [None] * 3
    for i, x in enumerate(inputs):
        fed = [n for n in range(3) if which[n] == i]
        for n, y in zip(fed, columns(x, [maps[n] for n in fed], options), strict=True):
            heads[n] = y
    kernel, bias = maps[3]
    return row(attend(*heads), kernel, bias, options, contracted=2)


def flat_init(init: Callable, key, shape: Sequence[int], split: int, dtype) -> Any:
    """Initial values as `DenseGeneral` makes them: on the flattened 2-D (or 1-D) shape.

    The first `split` dimensions count as inputs, which decides the variance.
    """
    sides = (shape[:split], shape[split:])
    return init(key, tuple(math.prod(s) for s in sides if s), dtype)

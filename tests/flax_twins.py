"""The sequence-parallel nnx and linen layers as functions of the same parameters.

They are twins with the same parameter trees, so both can be held against the plain
linen layers: `twin` makes the one or the other, `expected` what it has to give.
"""

import functools

import flax.linen as nn
import flax_tools as ft
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_overlap.flax.linen as tp_linen
import jax_overlap.flax.nnx as tp_nnx

BATCH, LENGTH, WIDTH, HIDDEN, OUT, HEADS = 4, 8, 32, 64, 5, 8
X = ft.inputs(0, BATCH, LENGTH, WIDTH)
KEY = jax.random.key(1)
CAUSAL = nn.make_causal_mask(jnp.ones((1, LENGTH)))
NORMAL = nn.initializers.normal(1.0)


class PlainMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, bias_init=NORMAL, name="up")(x)
        return nn.Dense(x.shape[-1], bias_init=NORMAL, name="down")(jax.nn.gelu(h))


def plain_attention(**kw):
    kw = {"bias_init": NORMAL, "out_features": 12, **kw}
    return nn.MultiHeadDotProductAttention(HEADS, **kw)


# The plain layer, the names of its twins, their sizes, arguments of the call.
CASES = {
    "column": (
        nn.Dense(HIDDEN, bias_init=NORMAL),
        ("ColumnParallelDense", "ColumnParallelLinear"),
        (HIDDEN,),
        {},
    ),
    "row": (
        nn.Dense(OUT, bias_init=NORMAL),
        ("RowParallelDense", "RowParallelLinear"),
        (OUT,),
        {},
    ),
    "mlp": (PlainMLP(), ("TensorParallelMLP",) * 2, (HIDDEN,), {}),
    "attention": (
        plain_attention(),
        ("TensorParallelAttention",) * 2,
        (HEADS,),
        {"mask": CAUSAL},
    ),
}


@functools.cache
def params_of(case):
    plain, _, _, call = CASES[case]
    # As numpy: whatever mesh is set now, they are for all.
    return jax.tree.map(np.asarray, plain.init(KEY, X, **call)["params"])


def twin_layer(case, **kw):
    """The linen layer."""
    _, names, sizes, _ = CASES[case]
    kw = {"axis_name": "tp", "sequence_parallel": True, "bias_init": NORMAL, **kw}
    if case == "attention":
        kw = {"out_features": 12, **kw}
    return getattr(tp_linen, names[0])(*sizes, **kw)


def twin(library, case, **kw):
    """(apply(params, x), partition specs) of the parallel layer."""
    _, names, sizes, call = CASES[case]
    if library == "linen":
        layer = twin_layer(case, **kw)
        boxed = jax.eval_shape(layer.init, KEY, X, **call)
        return (
            lambda params, x, **more: layer.apply({"params": params}, x, **call | more),
            nn.get_partition_spec(boxed)["params"],
        )
    kw = {"axis_name": "tp", "sequence_parallel": True, **kw}
    if case == "attention":
        kw = {"out_features": 12, **kw}
    sizes = (*sizes, WIDTH) if case == "attention" else (WIDTH, *sizes)
    graph, state = nnx.split(getattr(tp_nnx, names[1])(*sizes, rngs=nnx.Rngs(0), **kw))

    def apply(params, x, **more):
        leaves = jax.tree.leaves(params)
        state_ = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return nnx.merge(graph, state_)(x, **call | more)

    return apply, nnx.to_pure_dict(nnx.get_partition_spec(state))


def specs_of(case, batch):
    """The shardings of input and output."""
    rows, features = P(*(batch or (None,)), "tp"), P(*(batch or (None,)), None, "tp")
    return (
        features if case == "row" else rows,
        features if case == "column" else rows,
    )


def placed(tree, specs):
    return jax.tree.map(jax.device_put, tree, specs)


def scalar_of(apply):
    def scalar(params, x):
        y = apply(params, x)
        return jnp.sin(y).sum(dtype=y.dtype), y

    return scalar


def as_results(grads):
    (params, dx), y = grads
    return {"y": y, "dx": dx, "params": params}


def results(apply, params, x):
    """Output and gradients of a scalar with cotangents that differ by element."""
    grad = jax.grad(scalar_of(apply), argnums=(0, 1), has_aux=True)
    return as_results(jax.jit(grad)(params, x))


def expected(apply, params, x):
    """The same of the plain layer on one device: in float32, and in float64."""
    exact = ft.at_float64(functools.partial(results, apply), params, x)
    return results(apply, params, x), exact


@functools.cache
def expected_of(case):
    plain, _, _, call = CASES[case]
    apply = lambda params, x: plain.apply({"params": params}, x, **call)  # noqa: E731
    return expected(apply, params_of(case), X)


def inside_and_outside(apply, in_specs, y_spec, **kw):
    """The gradients of `apply` on shards: of shard_map, and in shard_map."""

    def scalar(params, x):
        total, y = scalar_of(apply)(params, x)
        varying = tuple(jax.typeof(total).mat.varying)
        return (lax.psum(total, varying) if varying else total), y

    outside = jax.grad(
        jax.shard_map(scalar, in_specs=in_specs, out_specs=(P(), y_spec), **kw),
        argnums=(0, 1),
        has_aux=True,
    )
    inside = jax.shard_map(
        jax.grad(scalar, argnums=(0, 1), has_aux=True),
        in_specs=in_specs,
        out_specs=(in_specs, y_spec),
        **kw,
    )
    return outside, inside

"""One transformer block in the shape of Llama 3.1, and what is measured of it.

    x -> RMSNorm -> query, key, value -> RoPE, attention -> out -> + x
      -> RMSNorm -> gate, up -> silu(gate) * up -> down -> + ...

Its layers are those of `jax_overlap.flax.nnx`, inside one `jax.shard_map`. Each rank
has a part of the heads and of the hidden features, and between the layers

- forward and backward: its part of the sequence. Two `all_gather_matmul`, one for
  query, key and value, one for gate and up, and two `matmul_reduce_scatter`;
- in a decode step, whose tokens are few: all of them. Two `matmul_all_reduce`.

The model of examples/llama_block.py, which sets up the devices first. The frequencies
of RoPE are not rescaled for long contexts, as those of Llama 3.1 are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_overlap
import jax_overlap.flax.nnx as tp

ROPE_THETA, EPSILON = 500_000.0, 1e-5
# Query and key of random weights are made this much larger, so that attention looks at
# a few tokens. From the mean of all, which is nearly 0, no fault would be seen.
SHARPER = 3**0.5
TOKENS, CACHE = P("tp"), P(None, None, "tp")


def rope(x: jax.Array, positions: Any) -> jax.Array:
    """Turns (tokens, heads, features) by the positions of the tokens."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.asarray(positions, jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **_) -> jax.Array:
    """Causal attention of this rank's heads; query heads share those of the key."""
    positions = jnp.arange(len(q))
    q, k = rope(q, positions), rope(k, positions)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Block(nnx.Module):
    """The block on the shards of one rank."""

    def __init__(self, shape, parallel: dict, dtype: Any, rngs: nnx.Rngs):
        norm = {"epsilon": EPSILON, "param_dtype": dtype, "rngs": rngs}
        layer = {"axis_name": "tp", "use_bias": False, "param_dtype": dtype}
        layer |= {"rngs": rngs, **parallel}
        self.attention_norm = nnx.RMSNorm(shape.width, **norm)
        self.attention = tp.TensorParallelAttention(
            shape.heads,
            shape.width,
            num_kv_heads=shape.kv_heads,
            attention_fn=attend,
            **layer,
        )
        self.mlp_norm = nnx.RMSNorm(shape.width, **norm)
        # The columns of each rank are its gate, then its up: one matmul for both.
        self.gate_up = tp.ColumnParallelLinear(shape.width, 2 * shape.hidden, **layer)
        self.down = tp.RowParallelLinear(shape.hidden, shape.width, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)

    def decode(self, x: jax.Array, keys: jax.Array, values: jax.Array):
        """One more token of each sequence: the last place of the cache is theirs."""
        last = keys.shape[1] - 1

        def attend(q, k, v, **_):
            nonlocal keys, values
            put = functools.partial(lax.dynamic_update_index_in_dim, index=last, axis=1)
            keys, values = put(keys, rope(k, last)), put(values, v)
            y = jax.nn.dot_product_attention(rope(q, last)[:, None], keys, values)
            return y[:, 0]

        self.attention.attention_fn = attend
        return self(x), keys, values


class Model:
    """The block over a mesh with random weights, which all its programs share."""

    def __init__(self, shape, dtype: str, mesh: jax.sharding.Mesh, seed: int = 0):
        self.shape, self.dtype, self.mesh = shape, jnp.dtype(dtype), mesh
        self.drawn = seed
        _, state = self._split({})
        self.specs = nnx.get_partition_spec(state)
        self.weights = jax.tree_util.tree_map_with_path(self._weight, state, self.specs)

    def _split(self, parallel: dict):
        def make():
            return Block(self.shape, parallel, self.dtype, nnx.Rngs(0))

        with jax.set_mesh(self.mesh), nnx.use_eager_sharding(False):
            return nnx.split(nnx.eval_shape(make))

    def _weight(self, path, leaf, spec: P) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return self.normal(leaf.shape, spec, 0.1, 1.0)
        inputs = math.prod(leaf.shape[:-1]) if "out" in name else leaf.shape[0]
        sharper = SHARPER if "query" in name or "key" in name else 1.0
        return self.normal(leaf.shape, spec, sharper * inputs**-0.5)

    def normal(self, shape, spec: P, scale: float = 1.0, mean: float = 0.0):
        """Random numbers, others in each call; each device makes its own part."""
        self.drawn += 1

        def draw(seed):
            x = jax.random.normal(jax.random.key(seed), shape)
            return (mean + scale * x).astype(self.dtype)

        sharding = NamedSharding(self.mesh, spec)
        return jax.jit(draw, out_shardings=sharding)(np.uint32(self.drawn))

    def forward(self, collectives: str) -> Callable:
        """(weights, x [tokens, width]) -> y, both cut along the tokens."""
        graph, _ = self._split({"collectives": collectives, "sequence_parallel": True})
        return jax.shard_map(
            lambda weights, x: nnx.merge(graph, weights)(x),
            mesh=self.mesh,
            in_specs=(self.specs, TOKENS),
            out_specs=TOKENS,
        )

    def backward(self, collectives: str) -> Callable:
        """(weights, x, cotangent of y) -> y, and the gradients of weights and x."""
        forward = self.forward(collectives)

        def both(weights, x, cotangent):
            y, pull = jax.vjp(forward, weights, x)
            return y, pull(cotangent)

        return both

    def decode(self, collectives: str) -> Callable:
        """(weights, x [batch, width], keys, values) -> y, keys, values."""
        graph, _ = self._split({"collectives": collectives})
        return jax.shard_map(
            lambda weights, *args: nnx.merge(graph, weights).decode(*args),
            mesh=self.mesh,
            in_specs=(self.specs, P(), CACHE, CACHE),
            out_specs=(P(), CACHE, CACHE),
        )


@jax.jit
def relative_errors(ours: Any, theirs: Any) -> Any:
    """|ours - theirs| / |theirs| for each pair of arrays."""

    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    return jax.tree.map(error, ours, theirs)


def named(result: Any) -> dict[str, Any]:
    """The arrays of a result, that of `backward` too, with what they are."""
    y, (weights, x) = result if isinstance(result, tuple) else (result, ({}, None))
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    arrays = {"outputs": y} if x is None else {"outputs": y, "gradients of x": x}
    for path, value in jax.tree_util.tree_leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        arrays[f"gradients of {name}"] = value
    return arrays


@dataclasses.dataclass(frozen=True)
class Step:
    """A method of Model (and of the reference), and what it is called with."""

    method: str
    name: str
    inputs: tuple


def steps(model: Model, tokens: int, decode: Sequence[int], cache: int):
    """One after the other, as the inputs of all would take much memory."""
    width, heads = model.shape.width, model.shape.kv_heads
    if tokens:
        x, cotangent = (model.normal((tokens, width), TOKENS) for _ in range(2))
        yield Step("forward", f"forward, {tokens} tokens", (x,))
        yield Step("backward", f"forward and backward, {tokens} tokens", (x, cotangent))
    for batch in decode:
        shape = batch, cache, heads, width // model.shape.heads
        x = model.normal((batch, width), P())
        keys, values = (model.normal(shape, CACHE, s) for s in (SHARPER, 1.0))
        name = f"decode, {batch} x 1 token, cache of {cache}"
        yield Step("decode", name, (x, keys, values))


class Call:
    """A step with the collectives of one form; a cache is updated in place."""

    def __init__(self, model: Model, step: Step, collectives: str):
        function = getattr(model, step.method)(collectives)
        x, *others = step.inputs
        self.hands_on = step.method == "decode"
        if self.hands_on:
            others = [jnp.copy(a) for a in others]
        self.args = [model.weights, x, *others]
        self.plans = jax_overlap.explain(function, *self.args)
        donated = (2, 3) if self.hands_on else ()
        self.function = jax.jit(function, donate_argnums=donated)

    def __call__(self) -> Any:
        result = self.function(*self.args)
        if self.hands_on:
            result, *self.args[2:] = result
        return result

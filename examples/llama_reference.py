"""The block of examples/llama.py by jax.numpy alone: float32, on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from llama import EPSILON, Model, rope


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: Any) -> jax.Array:
    """Attention of (tokens, heads, features); query heads share those of the key."""
    k, v = (jnp.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    logits = jnp.einsum("thf,shf->hts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shf->thf", weights, v)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    t = jnp.arange(len(q))
    return softmax_attention(rope(q, t), rope(k, t), v, t[:, None] >= t)


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def block(weights: dict, ranks: int, x: jax.Array, attention: Callable) -> jax.Array:
    part = weights["attention"]
    h = normed(x, weights["attention_norm"]["scale"])
    q, k, v = (
        jnp.einsum("td,dhf->thf", h, part[name]["kernel"])
        for name in ("query", "key", "value")
    )
    x = x + jnp.einsum("thf,hfd->td", attention(q, k, v), part["out"]["kernel"])
    h = normed(x, weights["mlp_norm"]["scale"]) @ weights["gate_up"]["kernel"]
    # For each rank the columns of its gate, then those of its up.
    h = h.reshape(len(x), ranks, 2, -1)
    gate, up = h[:, :, 0].reshape(len(x), -1), h[:, :, 1].reshape(len(x), -1)
    return x + (gate * jax.nn.sigmoid(gate) * up) @ weights["down"]["kernel"]


def forward(weights: dict, ranks: int, x: jax.Array) -> jax.Array:
    return block(weights, ranks, x, causal)


def backward(weights: dict, ranks: int, x: jax.Array, cotangent: jax.Array) -> Any:
    y, pull = jax.vjp(lambda w, x: forward(w, ranks, x), weights, x)
    return y, pull(cotangent)


def decode(weights: dict, ranks: int, x: jax.Array, keys, values) -> jax.Array:
    last = keys.shape[1] - 1

    def attention(q, k, v):
        k = jnp.concatenate([keys[:, :last], rope(k, last)[:, None]], axis=1)
        v = jnp.concatenate([values[:, :last], v[:, None]], axis=1)
        one = jax.vmap(lambda q, k, v: softmax_attention(q, k, v, True))
        return one(rope(q, last)[:, None], k, v)[:, 0]

    return block(weights, ranks, x, attention)


class Reference:
    """The steps of a model on its weights, put together."""

    def __init__(self, model: Model):
        self.mesh = model.mesh
        self.weights = nnx.to_pure_dict(self.whole(model.weights))

    def whole(self, tree: Any) -> Any:
        """Arrays that are cut over the ranks, in full and in float32."""
        together = jax.device_put(tree, NamedSharding(self.mesh, P()))
        return jax.tree.map(lambda a: np.asarray(a, np.float32), together)

    def __call__(self, method: str, *inputs: Any) -> Any:
        function = {"forward": forward, "backward": backward, "decode": decode}[method]
        with jax.default_matmul_precision("highest"):
            jitted = jax.jit(function, static_argnums=1)
            return jitted(self.weights, self.mesh.size, *inputs)

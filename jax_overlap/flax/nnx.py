"""Tensor-parallel layers for Flax nnx.

Each layer is its plain counterpart with the parameters cut over one mesh axis: same
names, same global shapes, same initial values, so checkpoints go both ways. A layer
is used (a) inside `jax.shard_map` over its axis, on local shards, or (b) under plain
`jit` with `jax.set_mesh(mesh)`, on global arrays; it finds out which.

Arguments that all layers share, beside those of the plain layers:

- `axis_name`: the mesh axis over which the layer is cut.
- `collectives`: "overlap" for those of `jax_overlap`, which are fused with the
  matmuls; "xla" for those of `jax.lax`.
- `sequence_parallel`: what is cut between the layers. False: nothing, activations
  there are the same on all ranks; a row-parallel layer ends in a `matmul_all_reduce`.
  True: the sequence, the dimension before the features, as in
  https://arxiv.org/abs/2205.05198. A column-parallel layer begins with an
  `all_gather_matmul`, a row-parallel one ends in a `matmul_reduce_scatter`. That moves
  as much, while norms, residuals and dropout in between cost a rank its part only, in
  time and memory.
- `save_gathered`: in that form, whether the gathered input is kept for the backward
  pass, or gathered again there.
- `batch_spec`: in use (b) on a mesh with Auto axes, the PartitionSpec of the
  dimensions before the features, such as `P("data")`: nothing else can tell it there.
  Without it the layer computes the same, by `jax.lax`, and warns. On a mesh with
  Explicit axes the type of the input tells it.

Gradients taken inside `shard_map` need its default `check_vma=True`; with False they
are what `jax.lax` gives there: those behind a sum over n ranks are n times too large
and, sequence parallel, that of a row-parallel layer's bias is each rank's part only.
"""

import functools
from collections.abc import Callable
from typing import Any

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        f"jax_overlap.flax.nnx needs Flax, which cannot be imported here ({error}). "
        "Install it: pip install 'jax-overlap[flax]'"
    ) from error

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_overlap.flax import _local, _region, _sharding

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelMLP",
]

_lecun_normal = nnx.initializers.lecun_normal()
_zeros = nnx.initializers.zeros_init()


def _check_cut(owner: str, what: str, count: int, axis_name: str) -> None:
    # Without eager sharding a model may be built before there is a mesh.
    if nnx.using_eager_sharding() or _sharding.known(axis_name):
        _sharding.check_divisible(owner, what, count, axis_name)


def _cut(layer: Any, specs: tuple[P, P], axis_name: str) -> None:
    """Gives the parameters of a plain layer their place: made whole, then cut.

    So the values are those of the plain layer, whatever the number of ranks.
    """
    for name, spec in zip(("kernel", "bias"), specs, strict=True):
        param = getattr(layer, name)
        if param is None or "out_sharding" in param.get_metadata():
            continue  # an initializer with a placement of its own knows better
        setattr(layer, name, _placed(param[...], spec, axis_name))


def _placed(value: jax.Array, spec: P, axis_name: str) -> nnx.Param:
    if _sharding.bound_size(axis_name) is None:
        return nnx.Param(nnx.with_partitioning(lambda: value, tuple(spec))())
    # Inside shard_map there is nothing for Flax to place. The metadata is the same
    # as outside, so that the specs of a model made there serve as out_specs here.
    param = nnx.Param(_sharding.local_slice(value, spec, axis_name))
    param.set_metadata(out_sharding=tuple(spec), mesh=None)
    return param


def _values(layer: Any, owner: str, shapes, specs, axis_name: str) -> tuple[Any, Any]:
    """(kernel, bias), and an error where they are not what this place needs."""
    values = layer.kernel[...], None if layer.bias is None else layer.bias[...]
    rows = zip(("kernel", "bias"), values, shapes, specs, strict=True)
    for name, value, shape, spec in rows:
        _sharding.check_local(owner, name, value, shape, spec, axis_name)
    return values


class _Linear(nnx.Module):
    """What the two linear layers share; they differ in what is cut."""

    _cut_argument = ""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str,
        collectives: str = "overlap",
        sequence_parallel: bool = False,
        save_gathered: bool = True,
        batch_spec: P | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable = _lecun_normal,
        bias_init: Callable = _zeros,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.out_features = in_features, out_features
        self.options = _local.Options(
            axis_name, collectives, dtype, precision, sequence_parallel, save_gathered
        )
        self.batch_spec = batch_spec
        self.options.check(type(self).__name__)
        self._check()
        plain = nnx.Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        _cut(plain, self._specs(), axis_name)
        self.kernel, self.bias = plain.kernel, plain.bias

    def _check(self) -> None:
        owner, cut = type(self).__name__, self._cut_argument
        _check_cut(owner, cut, getattr(self, cut), self.options.axis_name)

    def _specs(self) -> tuple[P, P]:
        raise NotImplementedError

    def _apply(self, body: Callable, x: Any, last: tuple) -> jax.Array:
        owner, axis, specs = type(self).__name__, self.options.axis_name, self._specs()
        self._check()  # the mesh may be another than that of the construction
        shapes = (self.in_features, self.out_features), (self.out_features,)
        params = _values(self, owner, shapes, specs, axis)
        return _region.apply_linear(
            body, owner, self.options, self.batch_spec, x, params, specs, last
        )


class ColumnParallelLinear(_Linear):
    """`nnx.Linear` with its output features cut over a mesh axis.

    Its input is the same on all ranks: no communication, and in the backward pass a
    psum, for the gradient of the input. Sequence parallel, it is cut along the
    sequence: an `all_gather_matmul`, backward a `matmul_reduce_scatter`.

    Shapes: `kernel` (in_features, out_features), placed `P(None, axis_name)`; `bias`
    (out_features,), placed `P(axis_name)`; both of `param_dtype`. Inside `shard_map`
    they are the shards of that.

    Input: (..., in_features), the features not sharded. Sequence parallel,
    (..., sequence, in_features) sharded over `axis_name` in the sequence (or not
    sharded there: each rank then takes its part); inside `shard_map`
    (..., sequence / n, in_features). Output: (..., out_features) sharded over
    `axis_name` in the last dimension; inside `shard_map` (..., out_features / n),
    varying over the axis. Its dtype is `dtype`, or that to which input and parameters
    promote.

    Raises:
      ValueError: out_features (or the sequence, where it is cut) is not divisible by
        the size of the axis; there is no mesh, or not with this axis; the input has
        other features or, on an Explicit mesh, a sharding that would have to be
        gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> with jax.set_mesh(mesh):
      ...     layer = ColumnParallelLinear(16, 32, axis_name="tp", rngs=nnx.Rngs(0))
      ...     y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((4, 16)))
      >>> y.shape, tuple(y.sharding.spec)
      ((4, 32), (None, 'tp'))
    """

    _cut_argument = "out_features"

    def _specs(self) -> tuple[P, P]:
        axis = self.options.axis_name
        return P(None, axis), P(axis)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        _sharding.check_last(type(self).__name__, inputs, self.in_features)
        return self._apply(_local.column, inputs, (None, self.options.axis_name))


class RowParallelLinear(_Linear):
    """`nnx.Linear` with its input features cut over a mesh axis; one sum of ranks.

    It is part of the matmul: a `matmul_all_reduce` or, sequence parallel, a
    `matmul_reduce_scatter`. The bias is added after the sum, hence once.

    Shapes: `kernel` (in_features, out_features), placed `P(axis_name, None)`; `bias`
    (out_features,), placed `P(None)`; both of `param_dtype`. Inside `shard_map` they
    are the shards of that.

    Input: (..., in_features) sharded over `axis_name` in the last dimension (or not
    sharded there: each rank then takes its slice); inside `shard_map`
    (..., in_features / n). Output: (..., out_features), the same on all ranks of the
    axis (invariant, inside `shard_map`). Sequence parallel, (..., sequence,
    out_features) sharded over `axis_name` in the sequence; inside `shard_map`
    (..., sequence / n, out_features), varying over the axis.

    Raises:
      ValueError: in_features (or the sequence, where it is cut) is not divisible by
        the size of the axis; there is no mesh, or not with this axis; the input has
        other features or, on an Explicit mesh, a sharding that would have to be
        gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> with jax.set_mesh(mesh):
      ...     layer = RowParallelLinear(32, 16, axis_name="tp", rngs=nnx.Rngs(0))
      ...     y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((4, 32)))
      >>> y.shape
      (4, 16)
    """

    _cut_argument = "in_features"

    def _specs(self) -> tuple[P, P]:
        return P(self.options.axis_name, None), P(None)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        axis = self.options.axis_name
        features = self.in_features // (_sharding.bound_size(axis) or 1)
        _sharding.check_last(type(self).__name__, inputs, features)
        return self._apply(_local.row, inputs, (axis, None))


class TensorParallelMLP(nnx.Module):
    """A column-parallel layer `up`, an activation, a row-parallel layer `down`.

    One `matmul_all_reduce` forward, one psum backward (for the gradient of the input);
    sequence parallel, an `all_gather_matmul` and a `matmul_reduce_scatter` forward, and
    again backward (and a psum for the bias of `down`). A plain MLP that names its two
    `nnx.Linear` `up` and `down` has the same parameter tree.

    Input: (..., in_features), the features not sharded. Output: (..., out_features)
    (default: in_features), the same on all ranks of the axis. Sequence parallel, both
    are sharded over it in the dimension before the features. `activation` works on the
    hidden features element by element, as each rank has only its own.

    Raises:
      ValueError: as the two layers; hidden_features is what must be divisible.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> with jax.set_mesh(mesh):
      ...     mlp = TensorParallelMLP(16, 64, axis_name="tp", rngs=nnx.Rngs(0))
      ...     y = nnx.jit(lambda mlp, x: mlp(x))(mlp, jnp.ones((4, 16)))
      >>> y.shape
      (4, 16)
      >>> with jax.set_mesh(mesh):
      ...     mlp = TensorParallelMLP(
      ...         16, 64, axis_name="tp", sequence_parallel=True, rngs=nnx.Rngs(0)
      ...     )
      ...     x = jax.device_put(jnp.ones((2, 8, 16)), P(None, "tp"))
      ...     y = nnx.jit(lambda mlp, x: mlp(x))(mlp, x)
      >>> y.shape, tuple(y.sharding.spec)
      ((2, 8, 16), (None, 'tp', None))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        out = in_features if out_features is None else out_features
        self.activation = activation
        self.up = ColumnParallelLinear(
            in_features, hidden_features, rngs=rngs, **kwargs
        )
        self.down = RowParallelLinear(hidden_features, out, rngs=rngs, **kwargs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(inputs)))


class TensorParallelAttention(nnx.Module):
    """`nnx.MultiHeadAttention` with its heads cut over a mesh axis.

    Query, key and value are projected for the local heads, attention runs on these, and
    the output projection is row parallel. Self-attention has one `matmul_all_reduce`
    forward and one psum backward; sequence parallel, one `all_gather_matmul` for all
    three and one `matmul_reduce_scatter` forward, and again backward (and a psum for
    the bias of `out`). Parameters are those of the plain layer, in `query`, `key`,
    `value` (kernel (features, heads, head_dim), placed `P(None, axis_name, None)`) and
    `out` (kernel (heads, head_dim, out_features), placed `P(axis_name, None, None)`).
    Dropout, the decoding cache and `normalize_qk` of the plain layer are not here.

    Inputs: (batch..., length, in_features), neither length nor features sharded.
    Output: (batch..., length, out_features), the same on all ranks of the axis.
    Sequence parallel, inputs and output are sharded over the axis in their lengths.
    `mask`: broadcastable to (batch..., heads, length, kv_length), True where a query
    may look; inside `shard_map` its heads are 1 or the local ones. `is_causal`: each
    query sees the keys up to its own position. `attention_fn` gets local heads and the
    whole lengths.

    Raises:
      ValueError: num_heads (or num_kv_heads, or a length, where it is cut) is not
        divisible by the size of the axis; there is no mesh, or not with this axis; the
        input has other features or, on an Explicit mesh, a sharding that would have to
        be gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> with jax.set_mesh(mesh):
      ...     layer = TensorParallelAttention(8, 32, axis_name="tp", rngs=nnx.Rngs(0))
      ...     y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((2, 5, 32)))
      >>> y.shape
      (2, 5, 32)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        axis_name: str,
        collectives: str = "overlap",
        sequence_parallel: bool = False,
        save_gathered: bool = True,
        batch_spec: P | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable = _lecun_normal,
        out_kernel_init: Callable | None = None,
        bias_init: Callable = _zeros,
        out_bias_init: Callable | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = nnx.dot_product_attention,
        rngs: nnx.Rngs,
    ):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.in_features = in_features
        self.in_kv_features = in_kv_features or in_features
        self.options = _local.Options(
            axis_name, collectives, dtype, precision, sequence_parallel, save_gathered
        )
        self.batch_spec = batch_spec
        self.attention_fn = attention_fn
        self.options.check(type(self).__name__)
        self._check()
        # The plain layer makes the parameters, as nobody knows better which, from
        # which keys, and on which flattened shape.
        plain = nnx.MultiHeadAttention(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            bias_init=bias_init,
            out_bias_init=out_bias_init,
            use_bias=use_bias,
            rngs=rngs,
        )
        self.head_dim, self.out_features = plain.head_dim, plain.out_features
        for name, specs in self._specs().items():
            part = getattr(plain, name)
            _cut(part, specs, axis_name)
            setattr(self, name, part)

    def _check(self) -> None:
        owner, axis = type(self).__name__, self.options.axis_name
        for what in ("num_heads", "num_kv_heads"):
            _check_cut(owner, what, getattr(self, what), axis)

    def _specs(self) -> dict[str, tuple[P, P]]:
        axis = self.options.axis_name
        heads = P(None, axis, None), P(axis, None)
        out = P(axis, None, None), P(None)
        return {"query": heads, "key": heads, "value": heads, "out": out}

    def _params(self, owner: str) -> list[tuple[Any, Any]]:
        q, kv = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        shapes = {
            "query": ((self.in_features, *q), q),
            "key": ((self.in_kv_features, *kv), kv),
            "value": ((self.in_kv_features, *kv), kv),
            "out": ((*q, self.out_features), (self.out_features,)),
        }
        axis = self.options.axis_name
        return [
            _values(getattr(self, name), f"{owner}.{name}", shapes[name], specs, axis)
            for name, specs in self._specs().items()
        ]

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        owner = type(self).__name__
        self._check()
        dtype, precision = self.options.dtype, self.options.precision
        attend = functools.partial(
            self.attention_fn, dtype=dtype, precision=precision, is_causal=is_causal
        )
        features = self.in_features, self.in_kv_features, self.in_kv_features
        return _region.apply_attention(
            attend,
            owner,
            self.options,
            self.batch_spec,
            _region.qkv_inputs(owner, (inputs_q, inputs_k, inputs_v), features),
            mask,
            self._params(owner),
            list(self._specs().values()),
        )

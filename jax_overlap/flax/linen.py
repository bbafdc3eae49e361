"""Tensor-parallel layers for Flax linen: the twins of `jax_overlap.flax.nnx`.

Each layer is its plain counterpart with the parameters cut over one mesh axis: same
names, same global shapes, same initial values, so checkpoints go both ways. `init`
and `apply` are called (a) inside `jax.shard_map` over the layer's axis, on local
shards, or (b) under plain `jit` with `jax.set_mesh(mesh)`, on global arrays. `init`
also works without a mesh; it returns `nn.Partitioned` parameters, as layers with
`nn.with_partitioning` do, and `apply` takes them with or without these boxes. Linen
names a layer after its class: where names matter (checkpoints, initial values of a
layer in a model), pass `name=` to the plain and to the parallel layer alike.

Fields that all layers share, beside those of the plain layers:

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
from collections.abc import Callable, Sequence
from typing import Any

try:
    import flax.linen as nn
except ImportError as error:
    raise ImportError(
        f"jax_overlap.flax.linen needs Flax, which cannot be imported here ({error}). "
        "Install it: pip install 'jax-overlap[flax]'"
    ) from error

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_overlap.flax import _local, _region, _sharding

__all__ = [
    "ColumnParallelDense",
    "RowParallelDense",
    "TensorParallelAttention",
    "TensorParallelMLP",
]

_lecun_normal = nn.initializers.lecun_normal()
_zeros = nn.initializers.zeros_init()


def _bare(value: Any) -> Any:
    """The array in a box, without the constraint that `unbox` would put on it.

    A box names mesh axes, which inside shard_map are not there to be named.
    """
    return value.value if isinstance(value, nn.Partitioned) else nn.meta.unbox(value)


def _param(
    module: Any, name: str, init: Callable, shape: Sequence[int], spec: P, split: int
) -> jax.Array:
    """A parameter of global `shape`, or inside shard_map this rank's shard of it.

    The first `split` dimensions count as inputs when it is initialised.
    """
    owner, axis = type(module).__name__, module.axis_name

    def make(key: jax.Array) -> Any:
        value = _local.flat_init(init, key, shape, split, module.param_dtype)
        if isinstance(value, nn.meta.AxisMetadata):
            # An initializer with a placement of its own knows better.
            return value.replace_boxed(jnp.reshape(_bare(value), shape))
        value = _sharding.cut(jnp.reshape(value, shape), spec, axis)
        return nn.with_partitioning(lambda: value, tuple(spec))()

    if module.has_variable("params", name):  # before Flax finds it of another shape
        given = _bare(module.get_variable("params", name))
        _sharding.check_local(owner, name, given, shape, spec, axis)
    return _bare(module.param(name, make, unbox=False))


def _params(
    module: Any,
    inputs: Sequence[int],
    outputs: Sequence[int],
    specs: tuple[P, P],
) -> tuple[jax.Array, jax.Array | None]:
    """(kernel, bias) of a linear map, made in the order of the plain layers."""
    shape = (*inputs, *outputs)
    kernel = _param(module, "kernel", module.kernel_init, shape, specs[0], len(inputs))
    if not module.use_bias:
        return kernel, None
    return kernel, _param(module, "bias", module.bias_init, outputs, specs[1], 0)


def _options(module: Any) -> _local.Options:
    options = _local.Options(
        module.axis_name,
        module.collectives,
        module.dtype,
        module.precision,
        module.sequence_parallel,
        module.save_gathered,
    )
    options.check(type(module).__name__)
    return options


def _check_cut(module: nn.Module, what: str, count: int, axis_name: str) -> None:
    # `init` may run before there is a mesh.
    if not module.is_initializing() or _sharding.known(axis_name):
        _sharding.check_divisible(type(module).__name__, what, count, axis_name)


class _Dense(nn.Module):
    """What the two dense layers share; they differ in what is cut."""

    features: int
    axis_name: str
    collectives: str = "overlap"
    sequence_parallel: bool = False
    save_gathered: bool = True
    batch_spec: P | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable = _lecun_normal
    bias_init: Callable = _zeros

    def _apply(self, body: Callable, x: Any, in_features: int, specs, last) -> Any:
        params = _params(self, (in_features,), (self.features,), specs)
        return _region.apply_linear(
            body,
            type(self).__name__,
            _options(self),
            self.batch_spec,
            x,
            params,
            specs,
            last,
            initializing=self.is_initializing(),
        )


class ColumnParallelDense(_Dense):
    """`nn.Dense` with its output features cut over a mesh axis.

    Its input is the same on all ranks: no communication, and in the backward pass a
    psum, for the gradient of the input. Sequence parallel, it is cut along the
    sequence: an `all_gather_matmul`, backward a `matmul_reduce_scatter`.

    Shapes: `kernel` (in_features, features), placed `P(None, axis_name)`; `bias`
    (features,), placed `P(axis_name)`; both of `param_dtype`. Inside `shard_map` they
    are the shards of that.

    Input: (..., in_features), the features not sharded. Sequence parallel,
    (..., sequence, in_features) sharded over `axis_name` in the sequence (or not
    sharded there: each rank then takes its part); inside `shard_map`
    (..., sequence / n, in_features). Output: (..., features) sharded over `axis_name`
    in the last dimension; inside `shard_map` (..., features / n), varying over the
    axis. Its dtype is `dtype`, or that to which input and parameters promote.

    Raises:
      ValueError: features (or the sequence, where it is cut) is not divisible by the
        size of the axis; there is no mesh, or not with this axis; or, on an Explicit
        mesh, the input has a sharding that would have to be gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> layer, x = ColumnParallelDense(32, axis_name="tp"), jnp.ones((4, 16))
      >>> with jax.set_mesh(mesh):
      ...     y = jax.jit(layer.apply)(layer.init(jax.random.key(0), x), x)
      >>> y.shape, tuple(y.sharding.spec)
      ((4, 32), (None, 'tp'))
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        axis = self.axis_name
        _options(self)
        _check_cut(self, "features", self.features, axis)
        specs = P(None, axis), P(axis)
        return self._apply(
            _local.column, inputs, jnp.shape(inputs)[-1], specs, (None, axis)
        )


class RowParallelDense(_Dense):
    """`nn.Dense` with its input features cut over a mesh axis; one sum of ranks.

    It is part of the matmul: a `matmul_all_reduce` or, sequence parallel, a
    `matmul_reduce_scatter`. The bias is added after the sum, hence once.

    Shapes: `kernel` (in_features, features), placed `P(axis_name, None)`; `bias`
    (features,), placed `P(None)`; both of `param_dtype`. Inside `shard_map` they are
    the shards of that.

    Input: (..., in_features) sharded over `axis_name` in the last dimension (or not
    sharded there: each rank then takes its slice); inside `shard_map`
    (..., in_features / n). Output: (..., features), the same on all ranks of the axis
    (invariant, inside `shard_map`). Sequence parallel, (..., sequence, features)
    sharded over `axis_name` in the sequence; inside `shard_map`
    (..., sequence / n, features), varying over the axis.

    Raises:
      ValueError: the features of the input (or its sequence, where it is cut) are not
        divisible by the size of the axis; there is no mesh, or not with this axis;
        or, on an Explicit mesh, the input has a sharding that would have to be
        gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> layer, x = RowParallelDense(16, axis_name="tp"), jnp.ones((4, 32))
      >>> with jax.set_mesh(mesh):
      ...     y = jax.jit(layer.apply)(layer.init(jax.random.key(0), x), x)
      >>> y.shape
      (4, 16)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        axis = self.axis_name
        _options(self)
        in_features = jnp.shape(inputs)[-1] * (_sharding.bound_size(axis) or 1)
        _check_cut(self, "the input's features", in_features, axis)
        specs = P(axis, None), P(None)
        return self._apply(_local.row, inputs, in_features, specs, (axis, None))


_SHARED = (
    "axis_name",
    "collectives",
    "sequence_parallel",
    "save_gathered",
    "batch_spec",
    "use_bias",
    "dtype",
    "param_dtype",
    "precision",
    "kernel_init",
    "bias_init",
)


class TensorParallelMLP(nn.Module):
    """A column-parallel layer `up`, an activation, a row-parallel layer `down`.

    One `matmul_all_reduce` forward, one psum backward (for the gradient of the input);
    sequence parallel, an `all_gather_matmul` and a `matmul_reduce_scatter` forward, and
    again backward (and a psum for the bias of `down`). A plain MLP that names its two
    `nn.Dense` `up` and `down` has the same parameter tree.

    Input: (..., in_features), the features not sharded. Output: (..., out_features)
    (default: in_features), the same on all ranks of the axis. Sequence parallel, both
    are sharded over it in the dimension before the features. `activation` works on the
    hidden features element by element, as each rank has only its own.

    Raises:
      ValueError: as the two layers; hidden_features is what must be divisible.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> mlp, x = TensorParallelMLP(64, axis_name="tp"), jnp.ones((4, 16))
      >>> with jax.set_mesh(mesh):
      ...     y = jax.jit(mlp.apply)(mlp.init(jax.random.key(0), x), x)
      >>> y.shape
      (4, 16)
      >>> mlp = TensorParallelMLP(64, axis_name="tp", sequence_parallel=True)
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jnp.ones((2, 8, 16)), P(None, "tp"))
      ...     y = jax.jit(mlp.apply)(mlp.init(jax.random.key(0), x), x)
      >>> y.shape, tuple(y.sharding.spec)
      ((2, 8, 16), (None, 'tp', None))
    """

    hidden_features: int
    axis_name: str
    out_features: int | None = None
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu
    collectives: str = "overlap"
    sequence_parallel: bool = False
    save_gathered: bool = True
    batch_spec: P | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable = _lecun_normal
    bias_init: Callable = _zeros

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        shared = {name: getattr(self, name) for name in _SHARED}
        out = self.out_features or jnp.shape(inputs)[-1]
        up = ColumnParallelDense(self.hidden_features, **shared, name="up")
        down = RowParallelDense(out, **shared, name="down")
        return down(self.activation(up(inputs)))


class _Projection(nn.Module):
    """Only the parameters of a linear map, under the name of the plain layer's."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    specs: tuple[P, P]
    axis_name: str
    use_bias: bool
    param_dtype: Any
    kernel_init: Callable
    bias_init: Callable

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        return _params(self, self.inputs, self.outputs, self.specs)


class TensorParallelAttention(nn.Module):
    """`nn.MultiHeadDotProductAttention` with its heads cut over a mesh axis.

    Query, key and value are projected for the local heads, attention runs on these, and
    the output projection is row parallel. Self-attention has one `matmul_all_reduce`
    forward and one psum backward; sequence parallel, one `all_gather_matmul` for all
    three and one `matmul_reduce_scatter` forward, and again backward (and a psum for
    the bias of `out`). Parameters are those of the plain layer, in `query`, `key`,
    `value` (kernel (features, heads, head_dim), placed `P(None, axis_name, None)`) and
    `out` (kernel (heads, head_dim, out_features), placed `P(axis_name, None, None)`).
    Dropout, the decoding cache and `normalize_qk` of the plain layer are not here.

    Inputs: (batch..., length, features), neither length nor features sharded. Output:
    (batch..., length, out_features), the same on all ranks of the axis. Sequence
    parallel, inputs and output are sharded over the axis in their lengths. `mask`:
    broadcastable to (batch..., heads, length, kv_length), True where a query may look;
    inside `shard_map` its heads are 1 or the local ones. `attention_fn` gets local
    heads and the whole lengths.

    Raises:
      ValueError: num_heads (or a length, where it is cut) is not divisible by the size
        of the axis, or qkv_features by num_heads; there is no mesh, or not with this
        axis; or, on an Explicit mesh, the input has a sharding that would have to be
        gathered.

    Example:
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tp",))
      >>> layer, x = TensorParallelAttention(8, axis_name="tp"), jnp.ones((2, 5, 32))
      >>> with jax.set_mesh(mesh):
      ...     y = jax.jit(layer.apply)(layer.init(jax.random.key(0), x), x)
      >>> y.shape
      (2, 5, 32)
    """

    num_heads: int
    axis_name: str
    qkv_features: int | None = None
    out_features: int | None = None
    collectives: str = "overlap"
    sequence_parallel: bool = False
    save_gathered: bool = True
    batch_spec: P | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable = _lecun_normal
    out_kernel_init: Callable | None = None
    bias_init: Callable = _zeros
    out_bias_init: Callable | None = None
    use_bias: bool = True
    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        owner = type(self).__name__
        options = _options(self)
        _check_cut(self, "num_heads", self.num_heads, self.axis_name)
        qkv = _region.qkv_inputs(owner, (inputs_q, inputs_k, inputs_v))
        attend = functools.partial(
            self.attention_fn, dtype=self.dtype, precision=self.precision
        )
        projections = self._projections(owner, [x.shape[-1] for x in qkv])
        return _region.apply_attention(
            attend,
            owner,
            options,
            self.batch_spec,
            qkv,
            mask,
            [projection() for projection in projections],
            [projection.specs for projection in projections],
            initializing=self.is_initializing(),
        )

    def _projections(self, owner: str, features: Sequence[int]) -> list[_Projection]:
        axis = self.axis_name
        qkv_features = self.qkv_features or features[0]
        if qkv_features % self.num_heads:
            raise ValueError(
                f"{owner}: qkv_features = {qkv_features} is not divisible by num_heads "
                f"= {self.num_heads}. Pass qkv_features= a multiple of it."
            )
        heads = self.num_heads, qkv_features // self.num_heads
        part = functools.partial(
            _Projection,
            axis_name=axis,
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
        )
        column = functools.partial(
            part,
            outputs=heads,
            specs=(P(None, axis, None), P(axis, None)),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        projections = [
            column((n,), name=name)
            for name, n in zip(("query", "key", "value"), features, strict=True)
        ]
        out = part(
            heads,
            (self.out_features or features[0],),
            (P(axis, None, None), P(None)),
            name="out",
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
        )
        return [*projections, out]

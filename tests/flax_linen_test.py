"""The linen layers equal the plain layers, inside shard_map and under plain jit."""

import doctest
import functools

import contract_tools as tools
import flax.linen as nn
import flax_tools as ft
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax_tools import GRID, LINE, PLACES
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_overlap.flax.linen as tp

BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 4, 6, 32, 64, 8
X = ft.inputs(0, BATCH, LENGTH, WIDTH)
CAUSAL = nn.make_causal_mask(jnp.ones((BATCH, LENGTH)))
MASK = jax.random.bernoulli(jax.random.key(9), 0.7, (BATCH, HEADS, LENGTH, LENGTH))
MASK = MASK | jnp.eye(LENGTH, dtype=bool)  # a query sees at least itself
KEY = jax.random.key(1)


class PlainMLP(nn.Module):
    hidden: int
    kw: dict

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.hidden, name="up", **self.kw)(x)
        return nn.Dense(x.shape[-1], name="down", **self.kw)(jax.nn.gelu(h))


def plain_mlp(hidden, **kw):
    return PlainMLP(hidden, kw)


def case(parallel, plain, size, call=None, **kw):
    """(make the parallel layer, make the plain one, arguments of their calls)."""
    kw = {"bias_init": nn.initializers.normal(1.0), **kw}
    return (
        lambda **more: parallel(size, axis_name="tp", **{**kw, **more}),
        lambda **more: plain(size, **{**kw, **more}),
        call or {},
    )


attention = functools.partial(
    case, tp.TensorParallelAttention, nn.MultiHeadDotProductAttention, HEADS
)
LAYERS = {
    "column": case(tp.ColumnParallelDense, nn.Dense, HIDDEN),
    "row": case(tp.RowParallelDense, nn.Dense, 5),
    "mlp": case(tp.TensorParallelMLP, plain_mlp, HIDDEN),
    "attention": attention(),
    "attention_causal": attention(
        {"mask": CAUSAL}, qkv_features=16, out_features=12, use_bias=False
    ),
    "attention_mask": attention({"mask": MASK}),
}


def bare(tree):
    """The arrays in the boxes, without the constraints that nn.unbox puts on them."""
    boxed = lambda a: isinstance(a, nn.Partitioned)  # noqa: E731
    return jax.tree.map(lambda a: a.value if boxed(a) else a, tree, is_leaf=boxed)


def scalar_of(layer, **call):
    def scalar(variables, x):
        y = layer.apply(variables, x, **call)
        return jnp.sin(y).sum(dtype=y.dtype), y

    return scalar


def as_results(grads):
    (params, dx), y = grads
    return {"y": y, "dx": dx, "params": bare(params)}


def results(layer, variables, x, **call):
    """Output and gradients of a scalar with cotangents that differ by element."""
    grad = jax.grad(scalar_of(layer, **call), argnums=(0, 1), has_aux=True)
    return as_results(jax.jit(grad)(variables, x))


@functools.cache
def expected(name, dtype=jnp.float32):
    """The same of the plain layer on one device: in `dtype`, and in float64."""
    _, make, call = LAYERS[name]
    layer, x = make(param_dtype=dtype), X.astype(dtype)
    variables = layer.init(KEY, x, **call)
    exact = ft.at_float64(lambda v, x: results(layer, v, x, **call), variables, x)
    return results(layer, variables, x, **call), exact


def out_spec(name, batch):
    return P(*batch, *[None] * (2 - len(batch)), "tp") if name == "column" else batch


class EqualsPlain(parameterized.TestCase):
    @parameterized.product(name=list(LAYERS), place=("auto_grid", "explicit_line"))
    def test_under_jit(self, name, place):
        make, _, call = LAYERS[name]
        place = PLACES[place]
        with place.mesh():
            layer, x = make(batch_spec=place.batch_spec), jax.device_put(X, place.batch)
            variables = layer.init(KEY, x, **call)
            # With the boxes of `init`, or, as from a checkpoint, without.
            given = variables if place.kind == ft.AUTO else bare(variables)
            got = results(layer, given, x, **call)
        ft.assert_as_exact_as(self, got, *expected(name))

    @parameterized.product(
        name=[name for name in LAYERS if name != "attention_mask"],
        place=("explicit_grid",),
    )
    def test_inside_shard_map(self, name, place):
        make, _, call = LAYERS[name]
        call = {"mask": CAUSAL[:1]} if call else {}
        place, layer = PLACES[place], make()
        with place.mesh():
            x, batch = jax.device_put(X, place.batch), place.batch
            x_spec = out_spec("column" if name == "row" else "row", batch)
            if place.kind == ft.EXPLICIT:
                x = jax.sharding.reshard(x, x_spec)
            variables = layer.init(KEY, x, **call)
            specs = nn.get_partition_spec(variables)

            def scalar(variables, x):
                total, y = scalar_of(layer, **call)(variables, x)
                varying = tuple(jax.typeof(total).mat.varying)
                return (lax.psum(total, varying) if varying else total), y

            shape = {"in_specs": (specs, x_spec)}
            y_spec = out_spec(name, batch)
            outside = jax.grad(
                jax.shard_map(scalar, out_specs=(P(), y_spec), **shape),
                argnums=(0, 1),
                has_aux=True,
            )
            inside = jax.shard_map(
                jax.grad(scalar, argnums=(0, 1), has_aux=True),
                out_specs=((specs, x_spec), y_spec),
                **shape,
            )
            for program, given in ((outside, bare(variables)), (inside, variables)):
                got = as_results(jax.jit(program)(given, x))
                ft.assert_as_exact_as(self, got, *expected(name))

    def test_half_types(self):
        dtype = jnp.bfloat16
        with LINE.mesh():
            layer = LAYERS["mlp"][0](param_dtype=dtype)
            variables = layer.init(KEY, X.astype(dtype))
            got = results(layer, variables, X.astype(dtype))
        ft.assert_as_exact_as(self, got, *expected("mlp", dtype), dtype)

    def test_cross_attention(self):
        kv = ft.inputs(5, BATCH, 3, 12)
        make, plain, _ = attention()
        variables = plain().init(KEY, X, kv, 2 * kv)

        def grad(layer):
            def scalar(x, kv):
                return jnp.sin(layer.apply(variables, x, kv, 2 * kv)).sum()

            return jax.jit(jax.grad(scalar, argnums=(0, 1)))

        want = grad(plain())(X, kv)
        with PLACES["explicit_grid"].mesh():
            got = grad(make())(*(jax.device_put(a, P("data")) for a in (X, kv)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Parameters(parameterized.TestCase):
    @parameterized.product(
        name=list(LAYERS), where=("no_mesh", "auto_line", "explicit_grid")
    )
    def test_init_gives_those_of_the_plain_layer(self, name, where):
        make, plain, call = LAYERS[name]
        want = plain().init(KEY, X, **call)
        if where == "no_mesh":
            got = make().init(KEY, X, **call)
        else:
            with PLACES[where].mesh():
                got = make(batch_spec=PLACES[where].batch_spec).init(KEY, X, **call)
            self.assert_placed(name, got)
        jax.tree.map(np.testing.assert_array_equal, bare(got), want)

    def assert_placed(self, name, variables):
        specs = jax.tree.leaves_with_path(
            nn.get_partition_spec(variables), is_leaf=lambda s: isinstance(s, P)
        )
        leaves = jax.tree.leaves(bare(variables))
        for (path, spec), leaf in zip(specs, leaves, strict=True):
            keys = [key.key for key in path]
            whole = name == "row" or keys[-2] in ("down", "out")
            cut = 0 if whole else leaf.ndim - (2 if "attention" in name else 1)
            if keys[-1] == "bias":
                cut = None if whole else 0
            names = tuple("tp" if i == cut else None for i in range(leaf.ndim))
            self.assertEqual(tuple(spec), names, path)
            self.assertTrue(
                leaf.sharding.is_equivalent_to(
                    jax.NamedSharding(leaf.sharding.mesh, spec), leaf.ndim
                ),
                path,
            )

    @parameterized.parameters("column", "row", "attention")
    def test_made_inside_shard_map(self, name):
        make, plain, call = LAYERS[name]
        layer = make()
        with LINE.mesh():
            specs = nn.get_partition_spec(layer.init(KEY, X, **call))
            x_spec = P(None, None, "tp") if name == "row" else P()
            made = jax.jit(
                jax.shard_map(
                    lambda x: layer.init(KEY, x, **call),
                    in_specs=x_spec,
                    out_specs=specs,
                )
            )(X)
        # Compiled, the initializers may round differently.
        near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        jax.tree.map(near, bare(made), plain().init(KEY, X, **call))

    def test_an_initializer_with_a_placement_of_its_own(self):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "tp"))
        layer = tp.ColumnParallelDense(HIDDEN, axis_name="tp", kernel_init=init)
        place = PLACES["explicit_grid"]
        with place.mesh():
            x = jax.device_put(X, place.batch)
            variables = layer.init(KEY, x)
            self.assertEqual(variables["params"]["kernel"].names, ("data", "tp"))
            y = layer.apply(variables, x)
        want = nn.Dense(HIDDEN).init_with_output(KEY, X)[0]
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("mlp", "attention")
    def test_checkpoints_go_both_ways(self, name):
        make, plain, call = LAYERS[name]
        parallel, plain = make(), plain()
        with LINE.mesh():
            ours = bare(parallel.init(KEY, X, **call))
            theirs = plain.init(jax.random.key(7), X, **call)
            for source, target in ((ours, theirs), (theirs, ours)):
                read = ft.through_orbax(source, target)
                jax.tree.map(np.testing.assert_array_equal, read, source)
                y, want = (m.apply(read, X, **call) for m in (parallel, plain))
                np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


class BiasOnce(absltest.TestCase):
    """A bias added by every rank, or a gradient summed over them, would be 8-fold."""

    layer = tp.RowParallelDense(5, axis_name="tp", bias_init=nn.initializers.ones)

    def both(self, variables, x):
        grad = jax.grad(lambda v: self.layer.apply(v, x).sum())(variables)
        return self.layer.apply(variables, x), grad["params"]["bias"]

    def check(self, y, grad):
        np.testing.assert_array_equal(y, np.ones((3, 5)))
        np.testing.assert_array_equal(grad, np.full(5, 3.0))

    def test_under_jit(self):
        x = jnp.zeros((3, WIDTH))
        with LINE.mesh():
            self.check(*self.both(bare(self.layer.init(KEY, x)), x))

    def test_inside_shard_map(self):
        x = jnp.zeros((3, WIDTH))
        with LINE.mesh():
            variables = self.layer.init(KEY, x)
            specs = nn.get_partition_spec(variables), P(None, "tp")
            program = jax.shard_map(self.both, in_specs=specs, out_specs=(P(), P()))
            self.check(*program(bare(variables), x))


class Training(absltest.TestCase):
    def test_three_steps(self):
        make, plain, _ = LAYERS["mlp"]
        alone = self.losses(plain())
        for place in (PLACES["explicit_grid"],):
            with place.mesh():
                ours, theirs = (
                    self.losses(make(collectives=collectives), place.batch)
                    for collectives in ("overlap", "xla")
                )
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
            np.testing.assert_allclose(ours, alone, rtol=1e-5)

    def losses(self, layer, batch=None):
        x = X if batch is None else jax.device_put(X, batch)
        variables = layer.init(KEY, x)
        optimizer = optax.adam(1e-2)
        state = optimizer.init(variables)

        @jax.jit
        def step(variables, state, x):
            def loss_fn(variables):
                return ((layer.apply(variables, x) - jnp.sin(x)) ** 2).mean()

            loss, grads = jax.value_and_grad(loss_fn)(variables)
            updates, state = optimizer.update(grads, state, variables)
            return optax.apply_updates(variables, updates), state, loss

        losses = []
        for _ in range(4):
            variables, state, loss = step(variables, state, x)
            losses.append(float(loss))
        return losses


class Communication(parameterized.TestCase):
    """What the compiled programs exchange: not one all-reduce more, and no gather."""

    def program(self, name, place, backward, **kw):
        make, _, call = LAYERS[name]
        layer = make(**{"batch_spec": place.batch_spec, **kw})
        x = jax.device_put(X, place.batch)
        variables = layer.init(KEY, x, **call)

        def forward(variables, x):
            return layer.apply(variables, x, **call)

        def scalar(variables, x):
            return jnp.sin(forward(variables, x)).sum()

        fn = jax.grad(scalar, argnums=(0, 1)) if backward else forward
        return ft.compiled(fn, variables, x)

    @parameterized.product(
        name=("mlp", "attention"), place=("auto_line",), backward=(False, True)
    )
    def test_one_sum_each_way(self, name, place, backward):
        place = PLACES[place]
        with place.mesh():
            ours = self.program(name, place, backward)
            theirs = self.program(name, place, backward, collectives="xla")
        ft.assert_collectives(self, ours, ft.ALL_REDUCES[backward])
        ft.assert_collectives(self, theirs, {}, {"all-reduce": 1 + backward})

    @parameterized.product(name=("mlp", "attention"), place=("explicit_grid",))
    def test_forward_with_a_sharded_batch(self, name, place):
        with PLACES[place].mesh():
            hlo = self.program(name, PLACES[place], False)
        ft.assert_collectives(self, hlo, ft.ALL_REDUCES[False])

    @parameterized.parameters(["auto_grid"])
    def test_backward_with_a_sharded_batch(self, place):
        """XLA adds what data parallelism needs: the parameters' gradients."""
        with PLACES[place].mesh():
            hlo = self.program("mlp", PLACES[place], True)
        self.assertEqual(ft.ours_in(hlo), ft.ALL_REDUCES[True])
        kinds = {line.split()[0] for line in tools.collectives(hlo)}
        self.assertEqual(kinds, {"all-reduce"})


class Errors(parameterized.TestCase):
    def message(self, layer, x=X, place=LINE, **call):
        with place.mesh():
            return ft.error_of(self, lambda: layer.init(KEY, x, **call))

    def column(self, features=HIDDEN, **kw):
        return tp.ColumnParallelDense(features, **{"axis_name": "tp", **kw})

    def test_features_that_do_not_divide(self):
        text = self.message(self.column(30))
        self.assertIn("ColumnParallelDense: features = 30 is not divisible", text)
        self.assertIn("8 ranks of axis 'tp'. Use 32", text)
        text = self.message(tp.RowParallelDense(5, axis_name="tp"), X[..., :30])
        self.assertIn("RowParallelDense: the input's features = 30", text)

    def test_heads_that_do_not_divide(self):
        layer = tp.TensorParallelAttention(4, axis_name="tp")
        self.assertIn("num_heads = 4 is not divisible", self.message(layer))
        layer = tp.TensorParallelAttention(8, axis_name="tp", qkv_features=20)
        self.assertIn("by num_heads = 8", self.message(layer))

    def test_an_axis_that_is_not_there(self):
        text = self.message(self.column(axis_name="model"))
        self.assertIn("'model' is not an axis of the mesh", text)

    def test_no_mesh(self):
        variables = self.column().init(KEY, X)
        text = ft.error_of(self, lambda: self.column().apply(variables, X))
        self.assertIn("no mesh is set. Wrap the call in `with jax.set_mesh", text)

    def test_arguments(self):
        text = self.message(self.column(collectives="nccl"))
        self.assertIn("collectives must be 'overlap'", text)
        layer = tp.TensorParallelAttention(8, axis_name=("a", "b"))  # pyright: ignore
        self.assertIn("the name of one mesh axis", self.message(layer))
        self.assertIn(
            "must not use the layer's own axis",
            self.message(self.column(batch_spec=P("tp")), place=GRID),
        )

    def test_an_auto_mesh_that_nobody_explains(self):
        variables = self.column().init(KEY, X)
        with GRID.mesh(), self.assertWarnsRegex(UserWarning, "Pass batch_spec="):
            jax.jit(self.column().apply)(variables, X)

    def test_a_sharding_that_would_have_to_be_gathered(self):
        with PLACES["explicit_grid"].mesh():
            x = jax.device_put(X, P(None, None, "tp"))
            text = ft.error_of(self, lambda: self.column().init(KEY, x))
        self.assertIn("expected an input sharded as P(None, None, None)", text)

    def test_values_without_keys(self):
        layer = tp.TensorParallelAttention(8, axis_name="tp")
        with LINE.mesh():
            text = ft.error_of(self, lambda: layer.init(KEY, X, None, X))
        self.assertIn("inputs_v was given without inputs_k", text)

    def test_whole_parameters_inside_shard_map(self):
        with LINE.mesh():
            variables = self.column().init(KEY, X)
            program = jax.shard_map(self.column().apply, in_specs=P(), out_specs=P())
            text = ft.error_of(self, lambda: program(bare(variables), X))
        self.assertIn("kernel must be the local shard of shape (32, 8)", text)
        self.assertIn("got (32, 64)", text)


class Examples(absltest.TestCase):
    def test_docstrings(self):
        failed, tried = doctest.testmod(tp)
        self.assertEqual(failed, 0)
        self.assertGreaterEqual(tried, 12)


if __name__ == "__main__":
    absltest.main()

"""The nnx layers equal the plain layers, inside shard_map and under plain jit."""

import doctest
import functools
import itertools

import contract_tools as tools
import flax_tools as ft
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx
from flax_tools import GRID, LINE, PLACES
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_overlap.flax.nnx as tp

BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 4, 6, 32, 64, 8
X = ft.inputs(0, BATCH, LENGTH, WIDTH)
MASK = jax.random.bernoulli(jax.random.key(9), 0.7, (BATCH, HEADS, LENGTH, LENGTH))
MASK = MASK | jnp.eye(LENGTH, dtype=bool)  # a query sees at least itself

biased = {"bias_init": nnx.initializers.normal(1.0)}


class PlainMLP(nnx.Module):
    def __init__(self, width, hidden, rngs, **kw):
        self.up = nnx.Linear(width, hidden, rngs=rngs, **kw)
        self.down = nnx.Linear(hidden, width, rngs=rngs, **kw)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def case(parallel, plain, *sizes, call=None, **kw):
    """(make the parallel layer, make the plain one, arguments of their calls)."""
    plain_kw = {"decode": False} if plain is nnx.MultiHeadAttention else {}
    return (
        lambda seed=1, **more: parallel(
            *sizes, axis_name="tp", rngs=nnx.Rngs(seed), **{**biased, **kw, **more}
        ),
        lambda seed=1, **more: plain(
            *sizes, rngs=nnx.Rngs(seed), **{**biased, **plain_kw, **kw, **more}
        ),
        call or {},
    )


attention = functools.partial(
    case, tp.TensorParallelAttention, nnx.MultiHeadAttention, HEADS, WIDTH
)
LAYERS = {
    "column": case(tp.ColumnParallelLinear, nnx.Linear, WIDTH, HIDDEN),
    "row": case(tp.RowParallelLinear, nnx.Linear, WIDTH, 5),
    "mlp": case(tp.TensorParallelMLP, PlainMLP, WIDTH, HIDDEN),
    "attention": attention(),
    "attention_causal": attention(16, 12, call={"is_causal": True}, use_bias=False),
    "attention_mask": attention(call={"mask": MASK}),
}
everywhere = parameterized.parameters(
    *itertools.product(LAYERS, ("auto_line", "auto_grid", "explicit_grid")),
    *itertools.product(("mlp",), ("explicit_line", "explicit_grid_tp_first")),
)


def results(model, x, **call):
    """Output and gradients of a scalar with cotangents that differ by element."""

    def scalar(model, x):
        y = model(x, **call)
        return jnp.sin(y.astype(jnp.float32)).sum(dtype=y.dtype), y

    grads = nnx.jit(nnx.grad(scalar, argnums=(0, 1), has_aux=True))(model, x)
    (params, dx), y = grads
    return {"y": y, "dx": dx, "params": nnx.to_pure_dict(nnx.state(params))}


@functools.cache
def expected(layer, dtype=jnp.float32):
    """The same of the plain layer on one device: in `dtype`, and in float64."""
    _, make, call = LAYERS[layer]
    model, x = make(param_dtype=dtype), X.astype(dtype)
    graph, state = nnx.split(model)
    merged = functools.partial(nnx.merge, graph)
    exact = ft.at_float64(lambda s, x: results64(merged(s), x, **call), state, x)
    return results(model, x, **call), exact


def results64(model, x, **call):
    def scalar(model, x):
        y = model(x, **call)
        return jnp.sin(y).sum(), y

    (params, dx), y = nnx.grad(scalar, argnums=(0, 1), has_aux=True)(model, x)
    return {"y": y, "dx": dx, "params": nnx.to_pure_dict(nnx.state(params))}


def out_spec(layer, batch):
    return P(*batch, *[None] * (2 - len(batch)), "tp") if layer == "column" else batch


class EqualsPlain(parameterized.TestCase):
    @everywhere
    def test_under_jit(self, layer, place):
        make, _, call = LAYERS[layer]
        place = PLACES[place]
        with place.mesh():
            model = make(batch_spec=place.batch_spec)
            got = results(model, jax.device_put(X, place.batch), **call)
            want = out_spec(layer, place.batch)
            self.assertTrue(
                got["y"].sharding.is_equivalent_to(
                    jax.NamedSharding(jax.sharding.get_mesh(), want), X.ndim
                )
                or place.kind == ft.AUTO,  # where XLA has the last word
                got["y"].sharding,
            )
        ft.assert_as_exact_as(self, got, *expected(layer))

    @parameterized.product(
        layer=("column", "row", "mlp", "attention_causal"),
        place=("auto_line", "explicit_grid"),
    )
    def test_inside_shard_map(self, layer, place):
        make, _, call = LAYERS[layer]
        place = PLACES[place]
        with place.mesh():
            graph, state = nnx.split(make())
            specs, batch = nnx.get_partition_spec(state), place.batch
            x = jax.device_put(X, batch)
            x_spec = P(*batch, *[None] * (2 - len(batch)), "tp")
            x_spec = x_spec if layer == "row" else batch
            if layer == "row" and place.kind == ft.EXPLICIT:
                x = jax.sharding.reshard(x, x_spec)

            def scalar(state, x):
                y = nnx.merge(graph, state)(x, **call)
                total = jnp.sin(y).sum()
                varying = tuple(jax.typeof(total).mat.varying)
                return (lax.psum(total, varying) if varying else total), y

            shape = {"in_specs": (specs, x_spec)}
            y_spec = out_spec(layer, batch)
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
            for program in (outside, inside):
                (params, dx), y = jax.jit(program)(state, x)
                got = {"y": y, "dx": dx, "params": nnx.to_pure_dict(params)}
                ft.assert_as_exact_as(self, got, *expected(layer))

    def test_without_check_vma(self):
        """The gradient outside is right there too: nothing is summed twice."""
        with LINE.mesh():
            graph, state = nnx.split(LAYERS["mlp"][0]())
            specs = nnx.get_partition_spec(state)

            def scalar(state, x):
                y = nnx.merge(graph, state)(x)
                return jnp.sin(y).sum(), y

            program = jax.shard_map(
                scalar, in_specs=(specs, P()), out_specs=(P(), P()), check_vma=False
            )
            grad = jax.jit(jax.grad(program, argnums=(0, 1), has_aux=True))
            (params, dx), y = grad(state, X)
        got = {"y": y, "dx": dx, "params": nnx.to_pure_dict(params)}
        ft.assert_as_exact_as(self, got, *expected("mlp"))

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_half_types(self, dtype):
        with LINE.mesh():
            model = LAYERS["mlp"][0](param_dtype=dtype)
            got = results(model, X.astype(dtype))
        ft.assert_as_exact_as(self, got, *expected("mlp", dtype), dtype)

    def test_dtype_of_the_computation(self):
        with LINE.mesh():
            y = LAYERS["mlp"][0](dtype=jnp.bfloat16)(X)
        self.assertEqual(y.dtype, LAYERS["mlp"][1](dtype=jnp.bfloat16)(X).dtype)

    def test_cross_and_grouped_attention(self):
        kv = ft.inputs(5, BATCH, 3, 12)
        kw = {"num_kv_heads": 4, "in_kv_features": 12}
        make, plain, _ = attention(**kw)

        def scalar(model, x, kv):
            return jnp.sin(model(x, kv, 2 * kv)).sum()

        grad = nnx.jit(nnx.grad(scalar, argnums=(1, 2)))
        graph, state = nnx.split(plain())
        exact = ft.at_float64(
            lambda s, *a: nnx.grad(scalar, argnums=(1, 2))(nnx.merge(graph, s), *a),
            *(state, X, kv),
        )
        with PLACES["explicit_grid"].mesh():
            got = grad(make(), *(jax.device_put(a, P("data")) for a in (X, kv)))
        ft.assert_as_exact_as(self, got, grad(plain(), X, kv), exact)

    def test_forward_mode_and_vmap(self):
        """What a custom_vjp in the layers would forbid."""
        plain = LAYERS["mlp"][1]()
        with LINE.mesh():
            model = LAYERS["mlp"][0]()

            def second(model):
                def slope(x):
                    return jax.grad(lambda x: jnp.sin(model(x)).sum())(x)

                return jax.jit(lambda x: jax.jvp(slope, (x,), (x,))[1])

            got = second(model)(X)
            mapped = jax.jit(jax.vmap(model))(X)
        np.testing.assert_allclose(got, second(plain)(X), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(mapped, plain(X), rtol=1e-5, atol=1e-5)


class Parameters(parameterized.TestCase):
    @parameterized.product(layer=list(LAYERS), place=("auto_line", "explicit_grid"))
    def test_names_shapes_values_and_placement(self, layer, place):
        make, plain, _ = LAYERS[layer]
        with PLACES[place].mesh() as mesh:
            state = nnx.state(make())
            specs = nnx.get_partition_spec(state)
        want = nnx.to_pure_dict(nnx.state(plain()))
        got = nnx.to_pure_dict(state)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        for (path, leaf), (_, spec) in zip(
            nnx.to_flat_state(state), nnx.to_flat_state(specs), strict=True
        ):
            whole = layer == "row" or path[0] in ("down", "out")
            cut = 0 if whole else leaf.ndim - (2 if "attention" in layer else 1)
            if path[-1] == "bias":
                cut = None if whole else 0
            names = tuple("tp" if i == cut else None for i in range(leaf.ndim))
            self.assertEqual(tuple(spec.get_value()), names, path)
            placed = jax.NamedSharding(mesh, P(*names))
            self.assertTrue(leaf.sharding.is_equivalent_to(placed, leaf.ndim), path)

    @parameterized.parameters("column", "row", "attention")
    def test_made_inside_shard_map(self, layer):
        make, plain, _ = LAYERS[layer]
        with LINE.mesh():
            specs = nnx.get_partition_spec(nnx.state(make()))
            made = jax.jit(
                jax.shard_map(lambda: nnx.state(make()), in_specs=(), out_specs=specs)
            )()
        want = nnx.to_pure_dict(nnx.state(plain()))
        # Compiled, the initializers may round differently.
        near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        jax.tree.map(near, nnx.to_pure_dict(made), want)

    def test_made_before_there_is_a_mesh(self):
        with nnx.use_eager_sharding(False):
            model = LAYERS["mlp"][0]()
        with LINE.mesh():
            y = model(X)
        np.testing.assert_allclose(y, LAYERS["mlp"][1]()(X), rtol=1e-5, atol=1e-5)

    def test_an_initializer_with_a_placement_of_its_own(self):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "tp"))
        place = PLACES["explicit_grid"]
        with place.mesh():
            layer = tp.ColumnParallelLinear(
                WIDTH, HIDDEN, axis_name="tp", kernel_init=init, rngs=nnx.Rngs(1)
            )
            self.assertEqual(
                layer.kernel.get_metadata()["out_sharding"], ("data", "tp")
            )
            y = layer(jax.device_put(X, place.batch))
        want = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(1))(X)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("mlp", "attention")
    def test_checkpoints_go_both_ways(self, layer):
        make, plain, call = LAYERS[layer]
        pure = lambda model: nnx.to_pure_dict(nnx.state(model))  # noqa: E731
        with LINE.mesh():
            for source, target in ((make(), plain(7)), (plain(), make(7))):
                read = ft.through_orbax(pure(source), pure(target))
                jax.tree.map(np.testing.assert_array_equal, read, pure(source))
                state = nnx.state(target)
                nnx.replace_by_pure_dict(state, read)
                nnx.update(target, state)
                y, want = target(X, **call), source(X, **call)
                np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


class BiasOnce(parameterized.TestCase):
    """A bias added by every rank, or a gradient summed over them, would be 8-fold."""

    @parameterized.parameters("overlap", "xla")
    def test_under_jit(self, collectives):
        with LINE.mesh():
            layer = self.layer(collectives)
            y, grad = self.both(layer, jnp.zeros((3, WIDTH)))
        np.testing.assert_array_equal(y, np.ones((3, 5)))
        np.testing.assert_array_equal(grad.bias[...], np.full(5, 3.0))

    def test_inside_shard_map(self):
        with LINE.mesh():
            graph, state = nnx.split(self.layer("overlap"))
            specs = nnx.get_partition_spec(state)
            y, grad = jax.shard_map(
                lambda s, x: self.both(nnx.merge(graph, s), x),
                in_specs=(specs, P(None, "tp")),
                out_specs=(P(), specs),
            )(state, jnp.zeros((3, WIDTH)))
        np.testing.assert_array_equal(y, np.ones((3, 5)))
        np.testing.assert_array_equal(grad.bias[...], np.full(5, 3.0))

    def layer(self, collectives):
        return tp.RowParallelLinear(
            WIDTH,
            5,
            axis_name="tp",
            collectives=collectives,
            bias_init=nnx.initializers.ones_init(),
            rngs=nnx.Rngs(0),
        )

    def both(self, layer, x):
        grad = nnx.grad(lambda layer, x: layer(x).sum())(layer, x)
        return layer(x), nnx.state(grad)


class Training(absltest.TestCase):
    def test_three_steps(self):
        plain = self.losses(LAYERS["mlp"][1]())
        for place in (LINE, PLACES["explicit_grid"]):
            with place.mesh():
                ours, theirs = (
                    self.losses(
                        LAYERS["mlp"][0](
                            collectives=collectives, batch_spec=place.batch_spec
                        ),
                        place.batch,
                    )
                    for collectives in ("overlap", "xla")
                )
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
            np.testing.assert_allclose(ours, plain, rtol=1e-5)

    def losses(self, model, batch=None):
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss_fn(model):
                return ((model(x) - jnp.sin(x)) ** 2).mean()

            loss, grads = nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return loss

        x = X if batch is None else jax.device_put(X, batch)
        return [float(step(model, optimizer, x)) for _ in range(4)]


class Communication(parameterized.TestCase):
    """What the compiled programs exchange: not one all-reduce more, and no gather."""

    def program(self, layer, place, backward, **kw):
        make, _, call = LAYERS[layer]
        graph, state = nnx.split(make(**{"batch_spec": place.batch_spec, **kw}))

        def forward(state, x):
            return nnx.merge(graph, state)(x, **call)

        def scalar(state, x):
            return jnp.sin(forward(state, x)).sum()

        fn = jax.grad(scalar, argnums=(0, 1)) if backward else forward
        return ft.compiled(fn, state, jax.device_put(X, place.batch))

    @parameterized.product(
        layer=("mlp", "attention_causal"), place=("explicit_line",), backward=(0, 1)
    )
    def test_one_sum_each_way(self, layer, place, backward):
        place = PLACES[place]
        with place.mesh():
            ours = self.program(layer, place, backward)
            theirs = self.program(layer, place, backward, collectives="xla")
        ft.assert_collectives(self, ours, ft.ALL_REDUCES[backward])
        ft.assert_collectives(self, theirs, {}, {"all-reduce": 1 + backward})

    @parameterized.product(layer=("mlp", "attention_causal"), place=("auto_grid",))
    def test_forward_with_a_sharded_batch(self, layer, place):
        with PLACES[place].mesh():
            hlo = self.program(layer, PLACES[place], False)
        ft.assert_collectives(self, hlo, ft.ALL_REDUCES[False])

    @parameterized.parameters(["explicit_grid"])
    def test_backward_with_a_sharded_batch(self, place):
        """XLA adds what data parallelism needs: the parameters' gradients."""
        with PLACES[place].mesh():
            hlo = self.program("mlp", PLACES[place], True)
        self.assertEqual(ft.ours_in(hlo), ft.ALL_REDUCES[True])
        kinds = {line.split()[0] for line in tools.collectives(hlo)}
        self.assertEqual(kinds, {"all-reduce"})

    def test_an_auto_mesh_that_nobody_explains(self):
        """No gather, right values, and a warning that it is not our psum."""
        with GRID.mesh(), self.assertWarnsRegex(UserWarning, "Pass batch_spec="):
            hlo = self.program("mlp", GRID, False, batch_spec=None)
            model = LAYERS["mlp"][0]()
            y = nnx.jit(lambda m, x: m(x))(model, jax.device_put(X, P("data")))
        ft.assert_collectives(self, hlo, {}, {"all-reduce": 1})
        ft.assert_as_exact_as(self, {"y": y}, *({"y": e["y"]} for e in expected("mlp")))


class Errors(parameterized.TestCase):
    def message(self, fn, place=LINE):
        with place.mesh():
            return ft.error_of(self, fn)

    def linear(self, kind=tp.ColumnParallelLinear, sizes=(WIDTH, HIDDEN), **kw):
        return kind(*sizes, rngs=nnx.Rngs(0), **{"axis_name": "tp", **kw})

    def test_features_that_do_not_divide(self):
        text = self.message(lambda: self.linear(sizes=(WIDTH, 30)))
        self.assertIn("ColumnParallelLinear: out_features = 30 is not divisible", text)
        self.assertIn("8 ranks of axis 'tp'. Use 32", text)
        text = self.message(lambda: self.linear(tp.RowParallelLinear, (30, 5)))
        self.assertIn("RowParallelLinear: in_features = 30", text)

    def test_heads_that_do_not_divide(self):
        make = attention(num_kv_heads=4)[0]
        self.assertIn("num_kv_heads = 4 is not divisible", self.message(make))

    def test_an_axis_that_is_not_there(self):
        text = self.message(lambda: self.linear(axis_name="model"))
        self.assertIn("'model' is not an axis of the mesh", text)

    def test_no_mesh(self):
        text = ft.error_of(self, self.linear)
        self.assertIn("no mesh is set. Wrap the call in `with jax.set_mesh", text)
        with LINE.mesh():
            layer = self.linear()
        self.assertIn("no mesh is set", ft.error_of(self, lambda: layer(X)))

    def test_arguments(self):
        text = self.message(lambda: self.linear(collectives="nccl"))
        self.assertIn("collectives must be 'overlap'", text)
        text = self.message(lambda: self.linear(axis_name=("a", "b")))
        self.assertIn("the name of one mesh axis", text)

    def test_inputs_of_other_features(self):
        text = self.message(lambda: self.linear()(X[..., :7]))
        self.assertIn("expected inputs with 32 features", text)
        self.assertIn("(4, 6, 7)", text)

    @parameterized.parameters(
        (P("tp"), "must not use the layer's own axis"),
        (P("dat"), "which is not an axis of the mesh"),
        (P(None, None, "data"), "about the dimensions before the last"),
    )
    def test_batch_specs(self, spec, text):
        self.assertIn(text, self.message(lambda: self.linear(batch_spec=spec)(X), GRID))

    @parameterized.named_parameters(
        ("_rows", P("tp")),
        ("_features", P(None, None, "tp")),
        ("_features_over_another_axis", P(None, None, "data")),
    )
    def test_a_sharding_that_would_have_to_be_gathered(self, spec):
        place = PLACES["explicit_grid"]
        with place.mesh():
            text = ft.error_of(self, lambda: self.linear()(jax.device_put(X, spec)))
        self.assertIn("expected an input sharded as P(None, None, None)", text)
        self.assertIn("jax.sharding.reshard", text)

    def test_a_sharded_sequence(self):
        place = PLACES["explicit_grid"]
        x = ft.inputs(0, 2, 4, WIDTH)
        with place.mesh():
            x = jax.device_put(x, P(None, "data"))
            text = ft.error_of(self, lambda: attention()[0]()(x))
        self.assertIn("the sequence (the dimension before the features)", text)

    def test_values_without_keys(self):
        text = self.message(lambda: attention()[0]()(X, None, X))
        self.assertIn("inputs_v was given without inputs_k", text)

    def test_whole_parameters_inside_shard_map(self):
        with LINE.mesh():
            graph, state = nnx.split(self.linear())
            program = jax.shard_map(
                lambda s, x: nnx.merge(graph, s)(x), in_specs=P(), out_specs=P()
            )
            text = ft.error_of(self, lambda: program(state, X))
        self.assertIn("kernel must be the local shard of shape (32, 8)", text)
        self.assertIn("got (32, 64)", text)


class Imports(absltest.TestCase):
    def run_python(self, text):
        child = tools.run_child("-c", text)
        self.assertEqual((child.code, child.out.strip()), (0, "ok"), child.err)

    def test_only_on_use(self):
        self.run_python(
            "import sys, jax_overlap, jax_overlap.flax;"
            "assert 'flax' not in sys.modules;"
            "jax_overlap.flax.nnx.TensorParallelMLP; assert 'flax' in sys.modules;"
            "print('ok')"
        )

    def test_without_flax(self):
        self.run_python(
            "import sys; sys.modules['flax'] = None\n"
            "import jax_overlap.flax\n"
            "for name in ('nnx', 'linen'):\n"
            "    try: getattr(jax_overlap.flax, name)\n"
            "    except ImportError as e: assert name + ' needs Flax' in str(e)\n"
            "    else: raise SystemExit('no error')\n"
            "print('ok')"
        )


class Examples(absltest.TestCase):
    def test_docstrings(self):
        failed, tried = doctest.testmod(tp)
        self.assertEqual(failed, 0)
        self.assertGreaterEqual(tried, 12)


if __name__ == "__main__":
    absltest.main()

"""The sequence-parallel form of the Flax layers equals the plain layers."""

import functools

import contract_tools as tools
import flax.linen as nn
import flax_tools as ft
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax_tools import GRID, LINE, PLACES
from flax_twins import (
    BATCH,
    CASES,
    CAUSAL,
    HEADS,
    KEY,
    LENGTH,
    WIDTH,
    X,
    as_results,
    expected,
    expected_of,
    inside_and_outside,
    params_of,
    placed,
    plain_attention,
    results,
    scalar_of,
    specs_of,
    twin,
    twin_layer,
)
from jax.sharding import PartitionSpec as P

import jax_overlap.flax.linen as tp_linen

GATHER_MATMUL = "jax_overlap.all_gather_matmul"
MATMUL_SCATTER = "jax_overlap.matmul_reduce_scatter"
GATHER = "jax_overlap.all_gather"


class EqualsPlain(parameterized.TestCase):
    @parameterized.product(
        case=list(CASES),
        where=(
            ("nnx", "auto_grid"),
            ("nnx", "explicit_line"),
            ("linen", "auto_line"),
            ("linen", "explicit_grid"),
        ),
    )
    def test_under_jit(self, case, where):
        library, place = where[0], PLACES[where[1]]
        x_spec, y_spec = specs_of(case, place.batch)
        with place.mesh() as mesh:
            apply, specs = twin(library, case, batch_spec=place.batch_spec)
            x = jax.device_put(X, x_spec)
            got = results(apply, placed(params_of(case), specs), x)
            if place.kind == ft.EXPLICIT:  # with Auto axes XLA has the last word
                want = jax.NamedSharding(mesh, y_spec)
                self.assertTrue(got["y"].sharding.is_equivalent_to(want, X.ndim))
                want = jax.NamedSharding(mesh, x_spec)
                self.assertTrue(got["dx"].sharding.is_equivalent_to(want, X.ndim))
        ft.assert_as_exact_as(self, got, *expected_of(case))

    @parameterized.product(
        case=list(CASES), where=(("nnx", "explicit_grid"), ("linen", "auto_line"))
    )
    def test_inside_shard_map(self, case, where):
        library, place = where[0], PLACES[where[1]]
        x_spec, y_spec = specs_of(case, place.batch)
        with place.mesh():
            apply, specs = twin(library, case)
            params, x = placed(params_of(case), specs), jax.device_put(X, x_spec)
            for program in inside_and_outside(apply, (specs, x_spec), y_spec):
                got = as_results(jax.jit(program)(params, x))
                ft.assert_as_exact_as(self, got, *expected_of(case))

    @parameterized.parameters("mlp", "attention")
    def test_without_check_vma(self, case):
        """The gradient outside is right there too: nothing is summed twice."""
        x_spec, y_spec = specs_of(case, P())
        with LINE.mesh():
            apply, specs = twin("nnx", case)

            def scalar(params, x):
                total, y = scalar_of(apply)(params, x)
                return total[None], y

            program = jax.shard_map(
                scalar,
                in_specs=(specs, x_spec),
                out_specs=(P("tp"), y_spec),
                check_vma=False,
            )

            def total(params, x):
                parts, y = program(params, x)
                return parts.sum(), y

            grad = jax.grad(total, argnums=(0, 1), has_aux=True)
            got = as_results(jax.jit(grad)(placed(params_of(case), specs), X))
        ft.assert_as_exact_as(self, got, *expected_of(case))

    @parameterized.parameters(
        {"collectives": "xla"},
        {"save_gathered": False},
        {"collectives": "xla", "save_gathered": False},
    )
    def test_other_ways(self, **kw):
        with LINE.mesh():
            apply, specs = twin("nnx", "mlp", **kw)
            got = results(apply, placed(params_of("mlp"), specs), X)
        ft.assert_as_exact_as(self, got, *expected_of("mlp"))

    def test_half_types(self):
        half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
        plain = CASES["mlp"][0]
        params, x = half(params_of("mlp")), half(X)
        want = expected(lambda p, x: plain.apply({"params": p}, x), params, x)
        with LINE.mesh():
            apply, specs = twin("nnx", "mlp")
            got = results(apply, placed(params, specs), x)
        ft.assert_as_exact_as(self, got, *want, jnp.bfloat16)

    def test_forward_mode_and_vmap(self):
        plain = CASES["mlp"][0]
        params = params_of("mlp")

        def second(apply):
            def slope(x):
                return jax.grad(lambda x: jnp.sin(apply(params, x)).sum())(x)

            return jax.jit(lambda x: jax.jvp(slope, (x,), (x,))[1])

        reference = lambda params, x: plain.apply({"params": params}, x)  # noqa: E731
        want, mapped = second(reference)(X), reference(params, X)
        with LINE.mesh():
            apply, specs = twin("nnx", "mlp")
            params = placed(params, specs)
            got = second(apply)(X)
            each = jax.jit(jax.vmap(apply, in_axes=(None, 0)))(params, X)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(each, mapped, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("row", "mlp", "attention")
    def test_init_before_there_is_a_mesh(self, case):
        """The linen layers then compute as a single rank."""
        made = twin_layer(case).init(KEY, X)["params"]
        boxed = lambda a: isinstance(a, nn.Partitioned)  # noqa: E731
        made = jax.tree.map(lambda a: a.value, made, is_leaf=boxed)
        jax.tree.map(np.testing.assert_array_equal, made, params_of(case))

    @parameterized.parameters("auto_grid", "explicit_grid")
    def test_tokens_without_a_batch(self, place):
        """Rows over both axes; on the data axis each rank has its own."""
        place, tokens = PLACES[place], X.reshape(-1, WIDTH)
        plain = CASES["mlp"][0]
        want = expected(
            lambda params, x: plain.apply({"params": params}, x),
            params_of("mlp"),
            tokens,
        )
        with place.mesh():
            apply, specs = twin("linen", "mlp", batch_spec=place.batch_spec)
            x = jax.device_put(tokens, P(("data", "tp")))
            got = results(apply, placed(params_of("mlp"), specs), x)
        ft.assert_as_exact_as(self, got, *want)

    def test_cross_attention(self):
        """Two gathers, one of them for key and value."""
        kv = ft.inputs(5, BATCH, 16, WIDTH)
        plain = CASES["attention"][0]
        both = functools.partial(jnp.split, indices_or_sections=[LENGTH], axis=1)
        joined = jnp.concatenate([X, kv], axis=1)  # results() takes one input
        want = expected(
            lambda p, x: plain.apply({"params": p}, *both(x)),
            params_of("attention"),
            joined,
        )
        with PLACES["auto_line"].mesh():
            apply, specs = twin("nnx", "attention")
            params = placed(params_of("attention"), specs)

            def cross(params, x):
                q, k = both(x)
                return apply(params, q, inputs_k=k, mask=None)

            got = results(cross, params, joined)
            hlo = ft.compiled(cross, params, joined)
        ft.assert_as_exact_as(self, got, *want)
        self.assertEqual(tools.custom_calls(hlo, GATHER_MATMUL), 2)


class Block(parameterized.TestCase):
    """Norms and residuals between the layers work on each rank's rows."""

    def setUp(self):
        super().setUp()
        keys = jax.random.split(KEY, 4)
        norm = lambda a, b: {  # noqa: E731
            "scale": 1 + jax.random.normal(a, (WIDTH,)) / 4,
            "bias": jax.random.normal(b, (WIDTH,)),
        }
        plain = plain_attention(out_features=WIDTH)
        self.params = {
            "norm1": norm(*keys[:2]),
            "attention": plain.init(KEY, X)["params"],
            "norm2": norm(*keys[2:]),
            "mlp": params_of("mlp"),
        }
        mlp = CASES["mlp"][0]
        self.plain = self.block(
            lambda p, x: plain.apply({"params": p}, x, mask=CAUSAL),
            lambda p, x: mlp.apply({"params": p}, x),
        )

    def block(self, attention, mlp):
        def apply(params, x):
            norm = lambda name, x: nn.LayerNorm().apply({"params": params[name]}, x)  # noqa: E731
            x = x + attention(params["attention"], norm("norm1", x))
            return x + mlp(params["mlp"], norm("norm2", x))

        return apply

    def twin(self, **kw):
        layer = tp_linen.TensorParallelAttention(
            HEADS, axis_name="tp", sequence_parallel=True, **kw
        )
        attend = lambda p, x: layer.apply({"params": p}, x, mask=CAUSAL)  # noqa: E731
        mlp, mlp_specs = twin("linen", "mlp", **kw)
        norm = {"scale": P(), "bias": P()}
        specs = {"norm1": norm, "norm2": norm, "mlp": mlp_specs}
        specs["attention"] = twin("linen", "attention", **kw)[1]
        return self.block(attend, mlp), specs

    @functools.cached_property
    def want(self):
        return expected(self.plain, self.params, X)

    @parameterized.parameters("auto_grid", "explicit_grid")
    def test_under_jit(self, place):
        place = PLACES[place]
        x_spec, _ = specs_of("mlp", place.batch)
        with place.mesh():
            apply, specs = self.twin(batch_spec=place.batch_spec)
            params, x = placed(self.params, specs), jax.device_put(X, x_spec)
            got = results(apply, params, x)
        ft.assert_as_exact_as(self, got, *self.want)

    def test_inside_shard_map(self):
        x_spec, y_spec = specs_of("mlp", GRID.batch)
        with GRID.mesh():
            apply, specs = self.twin(batch_spec=GRID.batch_spec)
            params, x = placed(self.params, specs), jax.device_put(X, x_spec)
            for program in inside_and_outside(apply, (specs, x_spec), y_spec):
                got = as_results(jax.jit(program)(params, x))
                ft.assert_as_exact_as(self, got, *self.want)
            forward = jax.shard_map(apply, in_specs=(specs, x_spec), out_specs=y_spec)
            hlo = ft.compiled(forward, params, x)
        ft.assert_collectives(self, hlo, {GATHER_MATMUL: 2, MATMUL_SCATTER: 2})


class Communication(parameterized.TestCase):
    """What the compiled programs exchange."""

    def program(self, case, place, backward, library="nnx", **kw):
        with place.mesh():
            kw = {"batch_spec": place.batch_spec, **kw}
            apply, specs = twin(library, case, **kw)
            scalar = lambda params, x: scalar_of(apply)(params, x)[0]  # noqa: E731
            fn = jax.grad(scalar, argnums=(0, 1)) if backward else apply
            x = jax.device_put(X, specs_of(case, place.batch)[0])
            return ft.compiled(fn, placed(params_of(case), specs), x)

    @parameterized.product(
        case=("mlp", "attention"),
        where=(("nnx", "explicit_grid"), ("linen", "auto_grid")),
    )
    def test_forward(self, case, where):
        """One of each: query, key and value share the gather."""
        hlo = self.program(case, PLACES[where[1]], False, where[0])
        ft.assert_collectives(self, hlo, {GATHER_MATMUL: 1, MATMUL_SCATTER: 1})

    @parameterized.parameters("mlp", "attention")
    def test_backward(self, case):
        """Each is transposed to the other; a psum for the bias after the scatter."""
        hlo = self.program(case, LINE, True)
        want = {GATHER_MATMUL: 2, MATMUL_SCATTER: 2, ft.PSUM: 1}
        ft.assert_collectives(self, hlo, want)

    def test_gathers_again(self):
        hlo = self.program("mlp", LINE, True, save_gathered=False)
        want = {GATHER_MATMUL: 2, MATMUL_SCATTER: 2, GATHER: 1, ft.PSUM: 1}
        ft.assert_collectives(self, hlo, want)

    def test_those_of_xla(self):
        hlo = self.program("mlp", LINE, False, collectives="xla")
        ft.assert_collectives(self, hlo, {}, {"all-gather": 1, "reduce-scatter": 1})

    def test_an_input_that_is_not_cut_yet(self):
        """Each rank takes its part, for nothing."""
        place = PLACES["explicit_grid"]
        with place.mesh():
            apply, specs = twin("nnx", "mlp")
            params = placed(params_of("mlp"), specs)
            x = jax.device_put(X, place.batch)
            hlo = ft.compiled(apply, params, x)
            y = jax.jit(apply)(params, x)
        ft.assert_collectives(self, hlo, {GATHER_MATMUL: 1, MATMUL_SCATTER: 1})
        np.testing.assert_allclose(y, expected_of("mlp")[0]["y"], rtol=1e-5, atol=1e-5)

    @parameterized.parameters("overlap", "xla")
    def test_an_auto_mesh_that_nobody_explains(self, collectives):
        """The values are right, but it warns, as XLA gathers the batch."""
        kw = {"collectives": collectives}
        with self.assertWarnsRegex(UserWarning, "gathers the batch, too. Pass"):
            hlo = self.program("mlp", GRID, False, batch_spec=None, **kw)
        self.assertEqual(ft.ours_in(hlo), {})
        with GRID.mesh(), self.assertWarns(UserWarning):
            apply, specs = twin("nnx", "mlp", **kw)
            params = placed(params_of("mlp"), specs)
            y = jax.jit(apply)(params, jax.device_put(X, P("data", "tp")))
        np.testing.assert_allclose(y, expected_of("mlp")[0]["y"], rtol=1e-5, atol=1e-5)


@parameterized.parameters("nnx", "linen")
class Errors(parameterized.TestCase):
    def message(self, library, case, x, place=LINE, spec=None, **kw):
        with place.mesh():
            apply, specs = twin(library, case, **kw)
            params = placed(params_of(case), specs)
            x = x if spec is None else jax.device_put(x, spec)
            return ft.error_of(self, lambda: apply(params, x))

    def test_sequences_that_do_not_divide(self, library):
        for case in ("column", "row", "attention"):
            text = self.message(library, case, X[:, :6])
            self.assertIn("sequence_parallel=True cuts dimension 1 of the input", text)
            self.assertIn("(4, 6, 32), but 6 is not divisible by the 8 ranks", text)
            self.assertIn("axis 'tp'. Pad it to 8", text)
        tokens = X.reshape(-1, WIDTH)[:12]
        text = self.message(library, "mlp", tokens, GRID, batch_spec=P("data"))
        self.assertIn("8 ranks of axes 'data' and 'tp'. Pad it to 16", text)

    def test_sequences_that_do_not_divide_inside_shard_map(self, library):
        with LINE.mesh():
            apply, specs = twin(library, "row")
            program = jax.shard_map(
                apply, in_specs=(specs, P(None, None, "tp")), out_specs=P(None, "tp")
            )
            text = ft.error_of(self, lambda: program(params_of("row"), X[:, :6]))
        self.assertIn("(4, 6, 4), but 6 is not divisible by the 8 ranks", text)

    def test_no_sequence(self, library):
        text = self.message(library, "mlp", X[0, 0])
        self.assertIn("needs inputs (..., sequence, features), got shape (32,)", text)

    def test_a_sharding_that_would_have_to_be_gathered(self, library):
        place = PLACES["explicit_grid"]
        for spec in (P("tp"), P(None, None, "tp"), P(None, ("tp", "data"))):
            text = self.message(library, "column", X, place, spec)
            want = P(None, ("data", "tp") if "data" in str(spec) else "tp", None)
            self.assertIn(f"expected an input sharded as {want}", text)
            self.assertIn("jax.sharding.reshard", text)
        text = self.message(library, "row", X, place, P(None, "tp"))
        self.assertIn("expected an input sharded as P(None, None, 'tp')", text)

    def test_a_sequence_that_is_cut_over_another_axis(self, library):
        place, spec = PLACES["explicit_grid"], P(None, ("data", "tp"))
        text = self.message(library, "attention", X, place, spec)
        self.assertIn("sharded over 'data', but every query needs all keys", text)


if __name__ == "__main__":
    absltest.main()

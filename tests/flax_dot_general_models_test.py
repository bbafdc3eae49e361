"""Flax's own layers with jax_overlap.flax.dot_general, on Explicit meshes."""

import functools

import contract_tools as tools
import flax.linen as nn
import flax_tools as ft
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from flax_dot_general_tools import AG, AR, GRID, RS, TURNED, compiled, custom_calls, put
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_overlap.flax import dot_general

XH, WH = (4, 8, 8, 2), (8, 2, 24)


def split(*axes, init=nnx.initializers.lecun_normal):
    return nnx.with_partitioning(init(), axes)


class MLP(nnx.Module):
    """As in Flax's guide to sharding: kernels and calls say how they are cut."""

    def __init__(self, width, hidden, rngs, dot):
        zeros = nnx.initializers.normal
        self.up = nnx.Linear(
            width,
            hidden,
            rngs=rngs,
            dot_general=dot,
            kernel_init=split(None, "tp"),
            bias_init=split("tp", init=zeros),
        )
        self.down = nnx.Linear(
            hidden,
            width,
            rngs=rngs,
            dot_general=dot,
            kernel_init=split("tp", None),
            bias_init=split(None, init=zeros),
        )

    def __call__(self, x, out):
        h = jax.nn.gelu(self.up(x, out_sharding=P("dp", None, "tp")))
        return self.down(h, out_sharding=out)


class Attention(nnx.Module):
    def __init__(self, width, heads, rngs, dot):
        make = functools.partial(nnx.LinearGeneral, rngs=rngs, dot_general=dot)
        shape = (heads, width // heads)
        self.qkv = nnx.List(
            [
                make(
                    width,
                    shape,
                    kernel_init=split(None, "tp", None),
                    bias_init=split("tp", None, init=nnx.initializers.normal),
                )
                for _ in range(3)
            ]
        )
        self.out = make(
            shape,
            width,
            axis=(-2, -1),
            use_bias=False,
            kernel_init=split("tp", None, None),
        )

    def __call__(self, x, out):
        heads = P("dp", None, "tp", None)
        q, k, v = (linear(x, out_sharding=heads) for linear in self.qkv)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
        return self.out(y, out_sharding=out)


class Block(nnx.Module):
    def __init__(self, width, heads, rngs, dot):
        self.attention = Attention(width, heads, rngs, dot)
        self.mlp = MLP(width, 4 * width, rngs, dot)

    def __call__(self, x, out):
        x = x + self.attention(x, out)
        return x + self.mlp(x, out)


def results(model, x, **call):
    """Output and gradients, with cotangents that differ by element."""

    def scalar(model, x):
        y = model(x, **call)
        return jnp.sin(y).sum(), y

    grads, y = nnx.jit(nnx.grad(scalar, argnums=(0, 1), has_aux=True))(model, x)
    return {"y": y, "dx": grads[1], "params": nnx.to_pure_dict(nnx.state(grads[0]))}


class Models(parameterized.TestCase):
    @parameterized.parameters(("tp", GRID), (None, TURNED))
    def test_nnx_models_equal_those_of_lax(self, sequence, layout):
        """With sequence parallelism (gather and scatter), and without (all-reduce)."""
        x = ft.inputs(0, 4, 8, 16)
        out = P("dp", sequence, None)
        with jax.set_mesh(layout.mesh):
            plain, ours = (
                Block(16, 4, nnx.Rngs(0), dot) for dot in (lax.dot_general, dot_general)
            )
            x = put(x, out)
            want, got = (results(m, x, out=out) for m in (plain, ours))
            for (name, a), (_, b) in zip(
                jax.tree.leaves_with_path(got),
                jax.tree.leaves_with_path(want),
                strict=True,
            ):
                self.assertEqual(jax.typeof(a), jax.typeof(b), name)
                np.testing.assert_allclose(
                    a, b, rtol=2e-5, atol=2e-5, err_msg=str(name)
                )
            hlo = compiled(nnx.jit(lambda m, x: m(x, out)), ours, x)
        calls = {AG: 4, RS: 2} if sequence else {AR: 2}
        self.assertEqual(custom_calls(hlo), calls)
        self.assertEqual(tools.collectives(hlo), [])

    def test_multi_head_attention_of_flax(self):
        """Its arguments qkv_sharding and out_sharding reach dot_general."""
        with jax.set_mesh(GRID.mesh):
            make = functools.partial(
                nnx.MultiHeadAttention,
                *(4, 16),
                decode=False,
                rngs=nnx.Rngs(0),
                kernel_init=split(None, "tp", None),
                out_kernel_init=split("tp", None, None),
                use_bias=False,
            )
            model = make(qkv_dot_general=dot_general, out_dot_general=dot_general)
            x = put(ft.inputs(0, 4, 8, 16), P("dp", "tp"))
            call = lambda m, x: m(  # noqa: E731
                x, qkv_sharding=P("dp", None, "tp"), out_sharding=P("dp", "tp")
            )
            hlo = compiled(nnx.jit(call), model, x)
            self.assertEqual(custom_calls(hlo), {AG: 3, RS: 1})
            np.testing.assert_allclose(
                call(model, x), call(make(rngs=nnx.Rngs(0)), x), rtol=1e-5, atol=1e-5
            )

    def test_einsum(self):
        einsum = functools.partial(jnp.einsum, _dot_general=dot_general)
        with jax.set_mesh(GRID.mesh):
            model = nnx.Einsum(
                "bshd,hdn->bsn",
                WH,
                einsum_op=einsum,
                kernel_init=split("tp", None, None),
                rngs=nnx.Rngs(0),
            )
            lhs = put(tools.exact(0, XH, np.float32), P("dp", None, "tp"))
            call = lambda m, x: m(x, out_sharding=P("dp", "tp", None))  # noqa: E731
            self.assertEqual(custom_calls(compiled(nnx.jit(call), model, lhs)), {RS: 1})
            want = np.einsum("bshd,hdn->bsn", lhs, model.kernel[...])
            np.testing.assert_allclose(call(model, lhs), want, rtol=1e-5, atol=1e-5)

    def test_linen_dense(self):
        """Which passes no out_sharding: the gather needs none, the scatter is told."""
        scatter = functools.partial(dot_general, out_sharding=P("dp", "tp", None))

        class LinenMLP(nn.Module):
            overlap: bool

            @nn.compact
            def __call__(self, x):
                kw = [{"dot_general": d} for d in (dot_general, scatter)]
                init = nn.initializers.lecun_normal()
                if not self.overlap:
                    kw = [{}, {}]
                up = nn.Dense(
                    64, kernel_init=nn.with_partitioning(init, (None, "tp")), **kw[0]
                )
                down = nn.Dense(
                    16, kernel_init=nn.with_partitioning(init, ("tp", None)), **kw[1]
                )
                return down(nn.gelu(up(x)))

        x = ft.inputs(0, 4, 8, 16)
        ours, plain = LinenMLP(True), LinenMLP(False)
        params = plain.init(jax.random.key(0), x)
        loss = lambda m: lambda p, x: jnp.sin(m.apply(p, x)).sum()  # noqa: E731
        specs, params = nn.get_partition_spec(params), nn.unbox(params)
        want_y = plain.apply(params, x)
        want = jax.grad(loss(plain))(params, x)
        with jax.set_mesh(GRID.mesh):
            placed = jax.tree.map(put, params, specs)
            x = put(x, P("dp", "tp"))
            hlo = compiled(ours.apply, placed, x)
            self.assertEqual(custom_calls(hlo), {AG: 1, RS: 1})
            self.assertEqual(tools.collectives(hlo), [])
            np.testing.assert_allclose(
                ours.apply(placed, x), want_y, rtol=1e-5, atol=1e-5
            )
            got = jax.jit(jax.grad(loss(ours)))(placed, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
            got,
            want,
        )


if __name__ == "__main__":
    absltest.main()

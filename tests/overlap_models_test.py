"""jax_overlap.overlap on models that do not know of this library."""

import collections
import functools
import gc
import random
import re
import weakref
from unittest import mock

import contract_tools as tools
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from flax import nnx
from jax import lax
from jax.extend.core import check_jaxpr
from jax.sharding import PartitionSpec as P
from overlap_tools import OverlapCase, both, equations, exact, of_lax, quick, to_varying

import jax_overlap
from jax_overlap import _compat
from jax_overlap._rewrite_edit import Context
from jax_overlap._rewrite_walk import Rewriter

RANKS = 4
MESH = jax.sharding.Mesh(jax.devices()[:RANKS], ("tp",))
LENGTH, WIDTH, HEADS, DEPTH, HIDDEN = 8, 16, 8, 4, 64
RS, AR, AG = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"
OURS = re.compile('custom_call_target="jax_overlap[.]([a-z_]+)"')


def normal(seed, *shape):
    """Normal numbers of variance 1 / (size of the first dimension), in float64."""
    return jax.random.normal(jax.random.key(seed), shape, float) / np.sqrt(shape[0])


def normal_like(tree):
    """A tree of normal numbers of these shapes."""
    leaves, treedef = jax.tree.flatten(tree)
    new = [1 + normal(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, new)


# ------------------------------------------------------------- a Flax linen MLP
class LinenMLP(nn.Module):
    """One rank's part: `hidden` is the number of its own hidden features."""

    width: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(self.hidden, name="up")(x))
        y = lax.psum(nn.Dense(self.width, use_bias=False, name="down")(h), "tp")
        return y + self.param("bias", nn.initializers.zeros, (self.width,))


def linen_mlp(check_vma):
    whole = LinenMLP(WIDTH, HIDDEN)
    local = LinenMLP(WIDTH, HIDDEN // RANKS)
    specs = {
        "up": {"kernel": P(None, "tp"), "bias": P("tp")},
        "down": {"kernel": P("tp")},
        "bias": P(),
    }
    init = jax.vmap(whole.init, axis_name="tp", in_axes=None, axis_size=1)
    shapes = jax.eval_shape(init, jax.random.key(0), jnp.ones((LENGTH, WIDTH)))
    params = normal_like(jax.tree.map(lambda a: a[0], zeros(shapes["params"])))
    fn = jax.shard_map(
        lambda params, x: local.apply({"params": params}, x),
        mesh=MESH,
        in_specs=(specs, P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    return fn, (params, normal(1, LENGTH, WIDTH))


def zeros(shapes):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


# ------------------------------------------------------ an nnx transformer block
class Block(nnx.Module):
    """One rank's part of a pre-norm transformer block, tensor parallel by hand."""

    def __init__(self, heads, hidden, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv = nnx.LinearGeneral(
            WIDTH, (heads, 3 * DEPTH), use_bias=False, rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (heads, DEPTH), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.up, self.down = linear(WIDTH, hidden), linear(hidden, WIDTH)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        x = x + lax.psum(self.out(nnx.dot_product_attention(q, k, v)), "tp")
        h = self.down(jax.nn.gelu(self.up(self.norm2(x))))
        return x + lax.psum(h, "tp")


def nnx_block(check_vma):
    whole = nnx.eval_shape(lambda: Block(HEADS, HIDDEN, nnx.Rngs(0)))
    local = nnx.eval_shape(lambda: Block(HEADS // RANKS, HIDDEN // RANKS, nnx.Rngs(0)))
    graph, state = nnx.split(local)
    columns, rows = P(None, "tp"), P("tp")
    of = {"qkv": columns, "up": columns, "out": rows, "down": rows}
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: next((s for n, s in of.items() if n in str(path[0])), P()),
        state,
    )
    fn = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=MESH,
        in_specs=(specs, P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    params = normal_like(zeros(nnx.split(whole)[1]))
    return fn, (params, normal(1, 2, LENGTH, WIDTH))


# ------------------------------------------------ an attention written by hand
def attention(x, q, k, v, out):
    """Sequence parallel outside, heads inside; x is this rank's part of the rows."""
    whole = lax.all_gather(x, "tp", tiled=True)
    q, k, v = (jnp.einsum("sd,dhk->shk", whole, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("shk,thk->hst", q, k) / np.sqrt(DEPTH))
    y = jnp.einsum("hst,thk->shk", weights, v)
    y = jnp.einsum("shk,hkd->sd", y, out)
    return lax.psum_scatter(y, "tp", scatter_dimension=0, tiled=True)


def attention_by_hand(check_vma):
    heads = P(None, "tp")
    fn = jax.shard_map(
        attention,
        mesh=MESH,
        in_specs=(P("tp"), heads, heads, heads, P("tp")),
        out_specs=P("tp"),
        check_vma=check_vma,
    )
    projections = [normal(i, WIDTH, HEADS, DEPTH) for i in (2, 3, 4)]
    x, out = normal(1, LENGTH, WIDTH), normal(5, HEADS, DEPTH, WIDTH)
    return fn, (x, *projections, out)


# ------------------------------------------------------------------- the tests
class Models(OverlapCase):
    def assert_near(self, got, want):
        """Equal but for the order of sums; all is in float64."""
        self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            self.assertEqual(
                (a.shape, a.dtype, b.dtype), (b.shape, b.dtype, np.float64)
            )
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * (1 + np.abs(b).max()))

    def compile(self, fn, args):
        """(the compiled program, its calls of ours, its collectives of XLA's)."""
        program = quick(fn).lower(*args).compile()
        hlo = program.as_text()
        calls = collections.Counter(OURS.findall(hlo))
        return program, calls, tools.collectives(hlo)

    def check_model(self, model, check_vma, forward, backward):
        with jax.enable_x64(True):
            self._check_model(*model(check_vma), check_vma, forward, backward)

    def _check_model(self, fn, args, check_vma, forward, backward):
        new = jax_overlap.overlap(fn)
        got = collections.Counter(row.became for row in new.report(*args))
        self.assertEqual(got, forward)
        program, calls, theirs = self.compile(new, args)
        self.assert_near(program(*args), jax.jit(fn)(*args))
        self.assertEqual((calls, theirs), (forward, []))

        def gradient(fn):
            return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1))

        want = quick(gradient(fn))(*args)
        program, calls, theirs = self.compile(gradient(new), args)
        self.assert_near(program(*args), want)
        self.assertContainsSubset(forward, calls)
        if check_vma:  # or shard_map adds the cotangents of what is the same on all
            self.assertEmpty(theirs)

        program, calls, theirs = self.compile(jax_overlap.overlap(gradient(fn)), args)
        self.assert_near(program(*args), want)
        self.assertEqual((calls, theirs), (backward, []))

    @both
    def test_linen_mlp(self, check_vma):
        backward = {AR: 2} if check_vma else {AR: 2, "psum": 2}
        self.check_model(linen_mlp, check_vma, {AR: 1}, backward)

    @both
    def test_nnx_transformer_block(self, check_vma):
        backward = {AR: 4} if check_vma else {AR: 2, "psum": 3}
        self.check_model(nnx_block, check_vma, {AR: 2}, backward)

    @both
    def test_attention_by_hand(self, check_vma):
        # The sum of the cotangents of three projections is no matmul.
        backward = {AG: 2, RS: 1, "psum_scatter": 1}
        self.check_model(attention_by_hand, check_vma, {AG: 1, RS: 1}, backward)


def random_program(seed, steps=14):
    """Gathers, matmuls and sums of each other's results, in a random order."""

    def fn(x, w):
        choose = random.Random(seed).choice
        rows, whole, results = [x, w], [lax.all_gather(w, "tp", tiled=True)], []
        for _ in range(steps):
            a, b, g, h = choose(rows), choose(rows), choose(whole), choose(whole)
            kind = choose(("add", "gather", "use", "scatter", "sum", "rows", "both"))
            if kind == "add":
                rows.append(to_varying(lax.psum(a, "tp") % 5, ("tp",)) + b)
            elif kind == "gather":
                whole.append(lax.all_gather(a, "tp", tiled=True))
            elif kind == "use":
                results += [g @ a, g @ b]
            elif kind == "scatter":
                rows.append(lax.psum_scatter(g @ a, "tp", tiled=True) % 5)
            elif kind == "sum":
                rows.append(to_varying(lax.psum(a @ b, "tp") % 5, ("tp",)))
            elif kind == "rows":
                rows.append(g[4:8])
            else:
                rows.append((g.T @ h) % 3)
        return [to_varying(y, ("tp",))[None] for y in (*rows, *whole, *results)]

    return fn


class RandomPrograms(OverlapCase):
    @both
    def test_same(self, check_vma):
        """Whatever is moved before whatever else, results are the same numbers."""
        fused = collections.Counter()
        args = exact(4 * RANKS, 4), exact(4 * RANKS, 4, seed=1)
        for seed in range(5):
            fn = jax.shard_map(
                random_program(seed + 100 * check_vma),
                mesh=MESH,
                in_specs=P("tp"),
                out_specs=P("tp"),
                check_vma=check_vma,
            )
            new = jax_overlap.overlap(fn)
            jaxpr = jax.make_jaxpr(new)(*args)
            check_jaxpr(jaxpr.jaxpr)
            self.assertEmpty(of_lax(e.primitive.name for e in equations(jaxpr.jaxpr)))
            want, got = quick(lambda *args, f=fn, g=new: (f(*args), g(*args)))(*args)
            self.assert_same(got, want)
            fused.update(row.became for row in new.report(*args))
        self.assertContainsSubset({RS, AR, AG, "psum", "all_gather"}, fused)


class Depth(OverlapCase):
    """The work: each equation is looked at once, and alike layers are traced once."""

    def deep(self, layers):
        def model(x, layers):
            for q, k, v, out, up, down in layers:
                x = x + attention(x / 2, q, k, v, out)
                h = jax.nn.gelu(lax.all_gather(x, "tp", tiled=True) @ up)
                x = x + lax.psum_scatter(h @ down, "tp", tiled=True)
            return x

        columns, rows = P(None, "tp"), P("tp")
        specs = [(columns, columns, columns, rows, columns, rows)] * layers
        fn = jax.shard_map(
            model, mesh=MESH, in_specs=(P("tp"), specs), out_specs=P("tp")
        )
        projection = (WIDTH, HEADS, DEPTH)
        shapes = (*(projection,) * 3, (HEADS, DEPTH, WIDTH))
        shapes = (*shapes, (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        layer = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        x = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)
        return fn, (x, [layer] * layers)

    def test_48_layers(self):
        visited = {}
        for layers in (6, 48):
            fn, args = self.deep(layers)
            gradient = jax.grad(lambda *args, fn=fn: fn(*args).sum(), 1)
            jaxpr = jax.make_jaxpr(gradient)(*args)
            rewriter = Rewriter()
            with mock.patch.object(_compat, "trace", wraps=_compat.trace) as trace:
                _, rows = rewriter.jaxpr(jaxpr, Context(check_vma=False))
            became = collections.Counter(row.became for row in rows)
            self.assertGreaterEqual(became[AG], 2 * layers)
            self.assertGreaterEqual(became[RS], 2 * layers)
            self.assertNotIn(None, became)
            self.assertLess(trace.call_count, 20)
            visited[layers] = rewriter.visited
        self.assertGreater(visited[48], 5000)
        self.assertLess(visited[48], 8.5 * visited[6])

    def test_an_inner_jaxpr_is_rewritten_once(self):
        """All calls of a layer, in all traces, share one: it is compiled once."""
        layer = jax.jit(lambda x: jnp.sin(lax.psum(x * x, "tp")) * x)

        def model(x):
            for _ in range(50):
                x = layer(x)
            return x

        fn = jax.shard_map(model, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
        x = jnp.ones(LENGTH)
        rewriter = Rewriter()
        _, rows = rewriter.jaxpr(jax.make_jaxpr(fn)(x), Context(check_vma=False))
        self.assertLen(rows, 50)
        self.assertLess(rewriter.visited, 60)
        inner = set()
        for _ in range(2):
            for eqn in equations(jax.make_jaxpr(jax_overlap.overlap(fn))(x).jaxpr):
                if eqn.primitive.name == "jit" and "psum" in str(eqn.params["jaxpr"]):
                    inner.add(id(eqn.params["jaxpr"]))
        self.assertLen(inner, 1)

    def test_jaxprs_that_are_gone_are_forgotten(self):
        rewriter = Rewriter()
        fn = jax.shard_map(
            lambda x: lax.psum(x, "tp"), mesh=MESH, in_specs=P("tp"), out_specs=P()
        )
        jaxpr = jax.make_jaxpr(lambda x: fn(x + 1))(jnp.ones(LENGTH))
        rewriter.jaxpr(jaxpr, Context(check_vma=False))
        gone = weakref.ref(jaxpr)
        del jaxpr
        gc.collect()
        self.assertIsNone(gone())


if __name__ == "__main__":
    absltest.main()

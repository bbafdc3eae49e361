"""jax_overlap.overlap: what it takes, gives back and reports, and what it keeps."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P
from overlap_tools import (
    OverlapCase,
    equations,
    exact,
    names_of,
    of_lax,
    ours,
    shard,
    to_varying,
)

import jax_overlap

RING = [(i, (i + 1) % 4) for i in range(4)]
total = shard(lambda x: lax.psum(x, "x"), out_specs=P())


class Arguments(OverlapCase):
    def test_pytrees_keywords_and_python_values(self):
        def fn(tree, *rest, scale, flag=True, mode="sum"):
            self.assertIsInstance(scale, int)
            self.assertIsInstance(flag, bool)
            y = total(tree["a"][0] * scale) if flag and mode == "sum" else tree["b"]
            return {"y": y, "rest": rest, "mode": mode, "n": scale}

        new = jax_overlap.overlap(fn)
        args = {"a": (exact(8, 3),), "b": exact(3)}, exact(2), None
        for kw in ({"scale": 3}, {"scale": 2, "flag": False}, {"scale": 2, "mode": ""}):
            got, want = new(*args, **kw), fn(*args, **kw)
            self.assertEqual(
                (got.pop("mode"), want.pop("mode")), (kw.get("mode", "sum"),) * 2
            )
            self.assertEqual((got.pop("n"), want.pop("n")), (kw["scale"],) * 2)
            self.assert_same(got, want)
        self.assertLen(new.report(*args, scale=1), 1)
        self.assertEmpty(new.report(*args, scale=1, flag=False))

    def test_signature_name_and_doc(self):
        def fn(x, *, power: int = 2):
            """Sums."""
            return total(x**power)

        new = jax_overlap.overlap(fn)
        self.assertEqual(inspect.signature(new), inspect.signature(fn))
        self.assertEqual((new.__name__, new.__doc__), ("fn", "Sums."))
        self.assertIs(new.__wrapped__, fn)

    def test_values_closed_over_may_be_traced_and_may_change(self):
        box = [exact(8, 3)]
        new = jax_overlap.overlap(lambda x: total(x * box[0]))
        x = exact(8, 3, seed=1)
        self.assert_same(new(x), total(x * box[0]))
        box[0] = box[0] + 1
        self.assert_same(new(x), total(x * box[0]))

        def loss(w, overlap):
            fn = lambda x: total(x * w).sum()  # noqa: E731
            return (jax_overlap.overlap(fn) if overlap else fn)(x)

        got, want = (jax.grad(loss)(box[0], overlap) for overlap in (True, False))
        self.assert_same(got, want)

    def test_methods_partials_and_numpy_arrays(self):
        @dataclasses.dataclass
        class Model:
            scale: float

            @jax_overlap.overlap
            def __call__(self, x, add=0.0):
                return total(x * self.scale + add)

        x = np.asarray(exact(8, 3))
        self.assert_same(Model(2.0)(x), total(2 * x))
        part = jax_overlap.overlap(functools.partial(Model(3.0), add=1.0))
        self.assert_same(part(x), total(3 * x + 1))

    def test_results_that_are_constants_or_arguments(self):
        c = exact(3)
        fn = lambda x: (x, c, 3, None, "s", total(x))  # noqa: E731
        x = exact(8, 3)
        got, want = jax_overlap.overlap(fn)(x), fn(x)
        self.assertEqual(got[2:5], want[2:5])
        self.assert_same((got[:2], got[5]), (want[:2], want[5]))

    def test_errors_of_the_function_are_its_own(self):
        with self.assertRaisesRegex(NameError, "unbound axis name"):
            jax_overlap.overlap(lambda x: lax.psum(x, "x"))(exact(3))
        with self.assertRaisesRegex(KeyError, "mine"):
            jax_overlap.overlap(lambda x: {}["mine"])(exact(3))


class Kept(OverlapCase):
    def test_parameters_of_jit(self):
        inner = jax.jit(
            lambda x, y: total(x) + y, donate_argnums=1, keep_unused=True, inline=False
        )
        args = exact(8, 3), exact(2, 3)
        before, after = (
            next(e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "jit")
            for f in (inner, jax_overlap.overlap(inner))
        )
        for name, value in before.params.items():
            if name != "jaxpr":
                self.assertEqual(after.params[name], value, name)
        y = exact(2, 3)
        jax_overlap.overlap(inner)(args[0], y)
        self.assertTrue(y.is_deleted())

    def test_a_jitted_function_is_compiled_once(self):
        """Outside of jit each call traces again, and finds what it compiled."""
        traced = []

        @jax.jit
        def fn(x):
            traced.append(1)
            return total(x)

        new = jax_overlap.overlap(fn)
        with jax.log_compiles():
            new(exact(8, 3))
            with self.assertNoLogs("jax._src.interpreters.pxla", "WARNING"):
                new(exact(8, 3, seed=1))
        self.assertLen(traced, 1)

    def test_name_stack_and_source_line(self):
        def fn(x):
            with jax.named_scope("my_scope"):
                return lax.psum(x @ x.T, "x")

        fn = shard(fn, out_specs=P())
        (row,) = jax_overlap.overlap(fn).report(exact(8, 3))
        line = inspect.getsourcelines(type(self).test_name_stack_and_source_line)[1] + 3
        self.assertIn(f"overlap_report_test.py:{line}", row.where)
        jaxpr = jax.make_jaxpr(jax_overlap.overlap(fn))(exact(8, 3)).jaxpr
        (op,) = (e for e in equations(jaxpr) if "jax_overlap" in e.primitive.name)
        self.assertIn("my_scope", str(op.source_info.name_stack))
        hlo = (
            jax.jit(jax_overlap.overlap(fn)).lower(exact(8, 3)).as_text(debug_info=True)
        )
        self.assertIn("my_scope", hlo)

    def test_effects_and_their_order(self):
        seen = []

        def fn(x):
            jax.debug.callback(seen.append, x[0, 0], ordered=False)
            y = total(x)
            jax.debug.callback(seen.append, y[0, 0], ordered=False)
            return y

        jax.block_until_ready(jax.jit(jax_overlap.overlap(fn))(exact(8, 3)))
        jax.effects_barrier()
        self.assertLen(seen, 2)
        effects = jax.make_jaxpr(jax_overlap.overlap(fn))(exact(8, 3)).effects
        self.assertEqual(effects, jax.make_jaxpr(fn)(exact(8, 3)).effects)

    def test_policies_of_checkpoint(self):
        """As much is kept for the backward pass as without."""

        def kept(fn, *args):
            backward = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
            return sorted(leaf.shape for leaf in jax.tree.leaves(backward))

        def body(x, w):
            return checkpoint_name(lax.psum(jnp.sin(x @ w), "x"), "y") + lax.psum(
                jnp.cos(x) @ w, "x"
            )

        for policy in (
            checkpoint_policies.dots_saveable,
            checkpoint_policies.nothing_saveable,
            checkpoint_policies.save_only_these_names("y"),
            lambda prim, *_, **__: prim.name.startswith("psum"),
            None,
        ):
            inner = jax.checkpoint(body, policy=policy)
            fn = shard(
                lambda x, w, inner=inner: jnp.sin(inner(x, w)),
                in_specs=(P(None, "x"), P("x")),
                out_specs=P(),
            )
            args = exact(8, 16), exact(16, 8)
            self.assertEqual(kept(jax_overlap.overlap(fn), *args), kept(fn, *args))

    def test_inside_of_vmap_with_a_name_of_the_mesh(self):
        fn = shard(
            jax.vmap(lambda x: lax.psum(x, "x"), in_axes=1, out_axes=1), out_specs=P()
        )
        self.check(fn, (exact(8, 3),), ["psum"])

    def test_jaxprs_are_well_formed(self):
        def fn(x):
            g = lax.all_gather(x, "x", tiled=True)
            s, y = lax.psum(g, "x"), g @ x.T
            return to_varying(s).sum() + y + g @ (x * 2).T

        fn = shard(fn, out_specs=P(None, "x"))
        jaxpr = jax.make_jaxpr(jax_overlap.overlap(fn))(exact(8, 3))
        jex.check_jaxpr(jaxpr.jaxpr)
        self.check(fn, (exact(8, 3),), ["all_gather_matmul", "psum"])


class Report(OverlapCase):
    def test_what_was_rewritten_has_nothing_left_to_rewrite(self):
        self.assertEmpty(
            jax_overlap.overlap(jax_overlap.overlap(total)).report(exact(8))
        )

    def test_rows(self):
        def fn(x, w):
            y = lax.psum(x @ w, "x")
            return to_varying(y) + lax.pmax(lax.all_gather(w, "x"), "x")[0, 0]

        fn = shard(fn, in_specs=(P(None, "x"), P("x")))
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 4))]
        fused, gathered, kept = jax_overlap.overlap(fn).report(*shapes)
        self.assertEqual(fused.primitives, ("dot_general", "psum_invariant"))
        self.assertEqual(fused.axes, ("x",))
        self.assertEqual(fused.operands, ("float32[8,4]{V:x}", "float32[4,4]{V:x}"))
        self.assertEqual(fused.became, "matmul_all_reduce")
        self.assertEqual(gathered.became, "all_gather")
        self.assertIsNone(kept.became)
        for row in (fused, gathered, kept):
            self.assertNotIn("\n", str(row))
            self.assertIn("overlap_report_test.py", str(row))
        self.assertRegex(
            str(fused), r"dot_general \+ psum_invariant over .*: matmul_all"
        )
        self.assertRegex(str(kept), r"pmax over .*: stays \(there is no such op\)")
        with self.assertRaises(dataclasses.FrozenInstanceError):
            kept.became = "psum"

    def test_every_call_of_a_helper_is_a_row(self):
        helper = jax.jit(lambda x: lax.psum(x, "x"))
        fn = shard(lambda x: helper(x) + helper(2 * x) + helper(x), out_specs=P())
        rows = jax_overlap.overlap(fn).report(exact(8, 3))
        self.assertEqual([row.became for row in rows], ["psum"] * 3)

    def test_says_what_is_done(self):
        """The rows and the rewritten program have the same ops."""
        fn = shard(
            lambda x: lax.all_to_all(
                lax.psum_scatter(x, "x", tiled=True), "x", 1, 0, tiled=True
            )
        )
        new = jax_overlap.overlap(fn)
        names = names_of(new, exact(32, 8))
        self.assertEmpty(of_lax(names))
        became = [row.became for row in new.report(exact(32, 8))]
        self.assertEqual(became, ours(names))


class Left(OverlapCase):
    def stays(self, fn, x, reason, left=(), **kw):
        fn = shard(fn, **kw)
        rows = jax_overlap.overlap(fn).report(x)
        self.assertEqual([row.became for row in rows], [None] * len(rows))
        self.assertRegex(rows[0].reason if rows else "", reason)
        self.check(fn, (x,), [None] * len(rows), grad=False, left=left)

    def test_other_collectives(self):
        for op in (lax.pmax, lax.pmin, functools.partial(lax.ppermute, perm=RING)):
            fn = lambda x, op=op: to_varying(op(x, "x"))  # noqa: E731
            self.stays(fn, exact(8, 3), "no such op")

    def test_constants(self):
        self.stays(lambda x: x * lax.psum(1, "x"), exact(8, 3), "^$")

    def test_unused(self):
        def fn(x):
            lax.psum(x, "x")
            return x

        self.stays(fn, exact(8, 3), "not used", left=["psum_invariant"])

    def test_no_collectives_at_all_is_the_same_jaxpr(self):
        inner = jax.jit(lambda x: lax.scan(lambda c, y: (c + y, y), 0.0, x))
        fn = lambda x: inner(x * 2)  # noqa: E731
        x = exact(8)
        before = jax.make_jaxpr(fn)(x).eqns[-1].params["jaxpr"]
        after = jax.make_jaxpr(jax_overlap.overlap(fn))(x).eqns[-1].params["jaxpr"]
        self.assertIs(after, before)


if __name__ == "__main__":
    absltest.main()

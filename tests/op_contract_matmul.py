"""The contract of the fused matmuls, second part: arguments, types and sizes."""

import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_tools import BF16, F16, line
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_descriptions import bound
from op_contract import TAKES_NO_ELEMENTS, Near, lowered, named
from op_contract_matmul_forms import GRID, RANKS, REFUSALS, WIDE, MatmulForms, form
from op_contract_transforms import both_modes

import jax_overlap


class Matmuls(MatmulForms):
    """A subclass has an op and its forms."""

    # What is refused, left to lax, or needs no call.

    def refusal(self, call, shapes, **options):
        fn = tools.stacked(functools.partial(call, **options), line(RANKS))
        with self.assertRaises(Exception) as caught:
            jax.eval_shape(fn, *(jnp.ones((RANKS, *shape)) for shape in shapes))
        return type(caught.exception), str(caught.exception)

    def test_refused_at_trace_time_in_the_words_of_lax(self):
        theirs = functools.partial(self.lax, axis_name="x")
        for shapes, options in self.refused:
            with self.subTest(shapes=shapes, **options):
                ours = self.refusal(self.call, shapes, **options)
                self.assertEqual(ours, self.refusal(theirs, shapes, **options))
                self.assertTrue(issubclass(ours[0], REFUSALS), ours)

    def test_operands_that_are_no_matmul(self):
        name = self.op.name
        for shapes in (((), (4, 3)), ((8, 4), (4,)), ((8, 4), (2, 4, 3)), ((4,), ())):
            error, text = self.refusal(self.call, shapes)
            self.assertEqual(error, ValueError)
            self.assertRegex(
                text,
                f"{name}.*dimension_numbers.*{shapes[0]}".replace("(", r"\(").replace(
                    ")", r"\)"
                ),
            )
        fn = getattr(jax_overlap, name)
        x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
        for operands in (({"a": x}, w), (x, {"a": w}), (None, w)):
            call = tools.stacked(lambda _, o=operands: fn(*o, "x"), line(RANKS))
            with self.assertRaises((TypeError, ValueError)):
                jax.eval_shape(call, jnp.ones(RANKS))

    def test_options_that_are_not_there(self):
        name = self.op.name
        shapes, _ = self.forms(RANKS)[0]
        for option, legal in (
            ("implementation", ("reference", "native")),
            ("algorithm", self.op.algorithms),
        ):
            for value in ("nope", "", 3):
                error, text = self.refusal(self.call, shapes, **{option: value})
                self.assertEqual(error, ValueError)
                self.assertRegex(text, f"{name}: {option}={value!r}")
                for word in legal:  # of algorithms there may be others, elsewhere
                    self.assertIn(repr(word), text)
        for axes, error in (("nope", NameError), (("x", "x"), ValueError)):
            kind, text = self.refusal(self.call, shapes, axis_name=axes)
            self.assertTrue(issubclass(kind, error))
            self.assertRegex(text, "nope|twice")
        if self.takes_groups:
            but_last = range(RANKS - 1)
            unlike = [[[*but_last], [RANKS - 1]]] if RANKS > 2 else []
            for groups in ([[0, 1], [1, 2]], [[i] for i in but_last], *unlike):
                kind, text = self.refusal(self.call, shapes, axis_index_groups=groups)
                self.assertEqual(kind, ValueError)
                self.assertRegex(text, f"{name}: axis_index_groups")

    @named(i32=(np.int32,), i8=(np.int8,), c64=(np.complex64,))
    def test_types_that_are_not_native(self, dtype):
        """They go to lax and are counted; with "native" they are refused."""
        self.need_lax()
        forms = self.forms(RANKS)[:1]
        (operands,) = self.data(forms, dtype=dtype)
        name = np.dtype(dtype).name
        before = lowered(self.op.name, "lax", name)
        fn = jax.jit(tools.stacked(self.call, line(RANKS)))
        got = fn(*tools.place(operands, line(RANKS)))
        self.assertEqual(lowered(self.op.name, "lax", name), before + 1)
        wide = np.complex64 if dtype == np.complex64 else np.int64
        want = self.numpy(*(a.astype(wide) for a in operands))
        self.assert_stacked(got, [np.asarray(y).astype(dtype) for y in want])
        error, text = self.refusal(
            lambda *a, **kw: self.call(*(v.astype(dtype) for v in a), **kw),
            forms[0][0],
            implementation="native",
        )
        self.assertEqual(error, TypeError)
        self.assertRegex(text, f"{self.op.name}.*{name}.*float32")

    def test_native_is_ours_and_reference_is_lax(self):
        forms = self.forms(RANKS)[:1]
        for kind, calls in (("native", 1), ("reference", 0)):
            if kind == "reference":
                self.need_lax()
            for dtype in (np.float32, BF16, F16):
                data = self.data(forms, dtype=dtype)
                ((right,),) = self.right(data, forms)
                want = right.astype(dtype)
                self.check(
                    self.each(forms, implementation=kind),
                    line(RANKS),
                    (data,),
                    want,
                    calls=calls,
                    foreign=kind == "reference",
                    repeats=1,
                )

    def test_partly_manual_shard_map_goes_to_lax(self):
        self.need_lax()
        ranks = line(GRID.team)  # which hold the operands; those along "a" the same
        forms = self.forms(ranks.size)[:1]
        (operands,) = self.data(forms, ranks)
        ((want,),) = self.right([operands], forms)
        along_b = NamedSharding(GRID.mesh, P("b"))
        operands = [
            jax.make_array_from_callback(a.shape, along_b, lambda i, a=a: a[i])
            for a in operands
        ]
        fn = lambda kind: jax.jit(  # noqa: E731
            jax.shard_map(
                lambda *a: self.call(
                    *(v[0] for v in a), axis_name="b", implementation=kind
                )[0][None],
                mesh=GRID.mesh,
                in_specs=P("b"),
                out_specs=P("b"),
                axis_names={"b"},
            )
        )
        before = lowered(self.op.name, "lax", "automatic")
        compiled = fn(None).lower(*operands).compile()
        self.assertEqual(lowered(self.op.name, "lax", "automatic"), before + 1)
        self.assertEqual(tools.custom_calls(compiled.as_text(), self.op.target), 0)
        self.assert_global(compiled(*operands), want)
        with self.assertRaisesRegex(NotImplementedError, "'a'.*automatic"):
            fn("native").lower(*operands)

    @both_modes
    def test_without_elements(self, check_vma):
        """Zeros without a call, also where lax cannot do it; and so the gradients."""
        if not TAKES_NO_ELEMENTS:
            self.skipTest("needs a newer jax: XLA crashes on no elements on GPUs")
        data = self.data(self.empty)

        def fn(data):
            out = []
            for operands, (_, options) in zip(data, self.empty, strict=True):
                loss = lambda *a, o=options: sum(y.sum() for y in self.call(*a, **o))  # noqa: E731
                argnums = tuple(range(len(operands)))
                ys = self.call(*operands, **options)
                out.append((ys, jax.grad(loss, argnums)(*operands)))
            return out

        want = [
            (ys, [np.zeros_like(a) for a in operands])
            for ys, operands in zip(self.right(data, self.empty), data, strict=True)
        ]
        kw = {"calls": 0, "check_vma": check_vma, "repeats": 1}
        self.check(fn, line(RANKS), (data,), want, **kw)

    # Transforms under which nothing, or nothing at all, is mapped.

    @named(vma=(True,), no_vma=(False,))
    def test_the_primal_result_is_not_mapped_with_the_tangents(self, check_vma):
        self.need_lax()
        self.multiply_exactly()
        (operands,) = self.data(self.forms(RANKS)[:1])
        operands = tools.place(operands, line(RANKS))

        def transformed(call, *operands):
            fn = tools.stacked(lambda *a: call(*a)[0], line(RANKS), check_vma=check_vma)
            loss = lambda x, w: (fn(x, w) ** 2).sum()  # noqa: E731
            beside = jax.vmap(lambda z, *a: (fn(*a), z), (0, None, None), (None, 0))
            return (
                jax.jacfwd(fn)(*operands),
                jax.hessian(loss, 1)(*operands),
                beside(jnp.arange(3.0), *operands),
            )

        # The whole of it in each process.
        whole = NamedSharding(line(RANKS).mesh, P())
        run = jax.jit(transformed, static_argnums=0, out_shardings=whole)
        theirs = functools.partial(self.lax, axis_name="x")
        got, want = (run(call, *operands) for call in (self.call, theirs))
        jax.tree.map(np.testing.assert_array_equal, got, want)

    @named(both=((0, 0),), x=((0, None),), w=((None, 0),))
    def test_a_batch_of_none(self, which):
        operands, *_ = self.data(self.forms(RANKS)[:1])
        none = [
            a if d is None else np.zeros((RANKS, 0, *a.shape[1:]), a.dtype)
            for a, d in zip(operands, which, strict=True)
        ]
        one = tools.stacked(lambda *a: self.call(*a)[0], line(RANKS))
        fn = tools.stacked(
            lambda *a: jax.vmap(lambda *b: self.call(*b)[0], which)(*a), line(RANKS)
        )
        shape = jax.eval_shape(one, *operands).shape
        got = jax.eval_shape(fn, *none)
        self.assertEqual(got.shape, (RANKS, 0, *shape[1:]))
        total = lambda *a: fn(*a).sum()  # noqa: E731
        grads = jax.eval_shape(jax.grad(total, (0, 1)), *none)
        self.assertEqual([g.shape for g in grads], [a.shape for a in none])

    # Other operands.

    def test_booleans_are_added_as_lax_adds_them(self):
        ((x, w),) = self.data(self.forms(RANKS)[:1])
        self.need_lax()
        a = tools.place((x > 0, w > 0), line(RANKS))
        ours = lambda *a: self.call(*a)[0]  # noqa: E731
        theirs = lambda *a: self.lax(*a, axis_name="x")[0]  # noqa: E731
        try:
            want = jax.jit(tools.stacked(theirs, line(RANKS)))(*a)
        except Exception as error:  # then ours is refused as lax refuses it
            with self.assertRaises(type(error)):
                jax.jit(tools.stacked(ours, line(RANKS)))(*a)
            return
        got = jax.jit(tools.stacked(ours, line(RANKS)))(*a)
        self.assertEqual(got.dtype, want.dtype)
        self.assert_same(got, want)

    def shapes_of_first(self):
        (x, *ws), _ = self.forms(RANKS)[0]
        return x, ws[0]

    def test_a_pair_of_precisions_may_be_a_list(self):
        shapes = self.shapes_of_first()
        data = self.data([form(*shapes)])
        want = self.right(data, [form(*shapes)])
        fn = self.each([form(*shapes, precision=["highest", "default"])])
        self.check(fn, line(RANKS), (data,), want, calls=1, repeats=1)

    @named(
        bias=({"bias": np.ones(7)}, "bias of shape (7,) cannot be added"),
        rank=({"bias": np.ones((2, 2, 2, 2, 2))}, "cannot be added to a result"),
        dims=({"dimension_numbers": ((1,), (0,))}, "have to be ((contracting of x"),
    )
    def test_says_what_is_wrong_with(self, options, text):
        kind, told = self.refusal(self.call, self.shapes_of_first(), **options)
        self.assertIn(kind, (ValueError, TypeError))
        self.assertIn(text, told)
        self.assertIn(self.op.name, told)

    @both_modes
    def test_constants_and_what_does_not_vary(self, check_vma):
        """An operand that all ranks share is taken as varying, and goes to our call."""
        ((x, w),) = self.data(self.forms(RANKS)[:1])
        same = [a[0] for a in (x, w)]
        wholes = [np.broadcast_to(a, (RANKS, *a.shape)) for a in same]
        pairs = {  # what is given, and what it is on all ranks
            "a numpy array": (lambda x, w: (same[0], w), (wholes[0], w)),
            "an array": (lambda x, w: (x, jnp.asarray(same[1])), (x, wholes[1])),
            "both": (lambda x, w: (2 * same[0], same[1]), (2 * wholes[0], wholes[1])),
            "a sum": (
                lambda x, w: (x, jax_overlap.psum(w, "x")),
                (x, np.broadcast_to(w.sum(0), w.shape)),
            ),
        }

        def fn(x, w):
            return [
                self.call(*make(x, w), axis_name=["x"], implementation="native")
                for make, _ in pairs.values()
            ]

        want = self.right([o for _, o in pairs.values()], [((), {})] * len(pairs))
        # Of psums that is one more, and one less where XLA finds two alike.
        kw = {"calls": None if self.op.called else len(pairs), "repeats": 1}
        self.check(fn, line(RANKS), (x, w), want, check_vma=check_vma, **kw)

    def test_explain(self):
        ((x, w), _), *_ = self.forms(RANKS)

        def fn(x, w):
            for algorithm in self.algorithms:
                self.call(x, w, algorithm=algorithm)
            self.call(x, w, implementation="reference")
            self.call(x.astype(jnp.int16), w.astype(jnp.int16))
            self.call(x[..., :0], w[:0])

        operands = [jnp.ones((RANKS, *shape)) for shape in (x, w)]
        stacked = tools.stacked(lambda *a: (fn(*a), a[0])[1], line(RANKS))
        plans = jax_overlap.explain(stacked, *operands)
        native = [("native", a or self.op.algorithms[0]) for a in self.algorithms]
        kinds = [(p.implementation, p.algorithm) for p in plans]
        others = [("lax", None), ("lax", None), ("identity", None)]
        self.assertEqual(kinds, [*native, *others])
        self.assertEqual({(p.op, p.ranks) for p in plans}, {(self.op.name, RANKS)})
        self.assertIn("reference", plans[-3].reason)
        self.assertIn("int16", plans[-2].reason)

    # Types.

    def test_wide_results_of_narrow_operands(self):
        """bf16 and f16 in, f32 out: sums that neither type could hold."""
        ((x, w), _), *_ = self.forms(RANKS)
        forms = [form((*x[:-1], 1000), (1000, *w[1:]), **WIDE)] * 2
        data = [
            tuple(abs(a).astype(dtype) for a in operands)
            for operands, dtype in zip(self.data(forms), (BF16, F16), strict=True)
        ]
        want = self.right(data, [(None, {})] * 2)
        self.assertGreater(max(y.max() for ys in want for y in ys), 2048)
        for algorithm in self.algorithms:
            fn = self.each(forms, algorithm=algorithm)
            self.check(fn, line(RANKS), (data,), want, calls=2, repeats=1)

        def grads(data):
            return [
                jax.grad(lambda *a: self.call(*a, **WIDE)[0].sum(), (0, 1))(*o)
                for o in data
            ]

        got = jax.jit(tools.stacked(grads, line(RANKS)))(tools.place(data, line(RANKS)))
        for operands, of_operands in zip(data, got, strict=True):
            for a, g in zip(operands, of_operands, strict=True):
                self.assertEqual((a.shape, a.dtype), (g.shape, g.dtype))

    def test_a_result_that_is_not_native(self):
        """f32 in, f64 out is left to lax."""
        self.need_lax()
        forms = self.forms(RANKS)[:1]
        with jax.enable_x64():
            data = self.data(forms)
            want = jax.tree.map(np.float64, self.right(data, forms))
            fn = self.each(forms, preferred_element_type=np.float64)
            kw = {"calls": 0, "foreign": True, "repeats": 1}
            self.check(fn, line(RANKS), (data,), want, **kw)

    def test_operands_of_unlike_types(self):
        """Promoted as x @ w does it, and each gradient in its operand's type."""
        forms = self.forms(RANKS)[:1]
        (operands,) = self.data(forms)
        (want,) = self.right([operands], forms)
        for pair in ((BF16, np.float32), (np.float32, F16), (BF16, F16)):
            mixed = [a.astype(d) for a, d in zip(operands, pair, strict=True)]
            wide = jnp.result_type(*pair)

            def fn(*a):
                grads = jax.grad(
                    lambda *a: self.call(*a)[0].astype(jnp.float32).sum(), (0, 1)
                )(*a)
                return self.call(*a), grads

            placed = tools.place(mixed, line(RANKS))
            got, grads = jax.jit(tools.stacked(fn, line(RANKS)))(*placed)
            self.assert_stacked(got, [y.astype(wide) for y in want])
            self.assertEqual(tuple(g.dtype for g in grads), tuple(map(np.dtype, pair)))
        mixed = (operands[0].astype(np.int8), operands[1].astype(BF16))
        want = [y.astype(BF16) for y in want]
        self.check(self.call, line(RANKS), mixed, want, calls=1, repeats=1)

    # Sizes.

    def ragged(self, ranks):
        """Forms with rows, columns and contractions around the edges of tiles."""
        raise NotImplementedError

    def test_sizes_that_fill_no_tile(self):
        forms = self.ragged(RANKS)
        for algorithm in self.algorithms:
            with self.subTest(algorithm=algorithm):
                self.check_forms(forms, algorithm=algorithm)

    def large(self, ranks):
        """A form with a contraction of 1000 and 700 columns."""
        raise NotImplementedError

    @named(f32=(np.float32,), bf16=(BF16,), f16=(F16,), f64=(np.float64,))
    def test_large_ones_stay_within_the_derived_bound(self, dtype):
        self.multiply_exactly()
        with jax.enable_x64(dtype == np.float64):
            forms = [self.large(RANKS)]
            make = lambda *a: (tools.normal(*a) / 4).astype(dtype)  # noqa: E731
            data = self.data(forms, dtype=dtype, make=make)
            (options,) = (o for _, o in forms)
            wide = [a.astype(np.float64) for a in data[0]]
            right = lambda *a: np.asarray(self.numpy(*a, **options)[0])  # noqa: E731
            rounds = self.rounds_ranks
            off = bound(right, wide, 1000, self.adds_ranks, dtype, rounds)
            if dtype == np.float64:
                off *= 2  # the oracle is off by as much itself
            want = [[Near(right(*wide), off, np.dtype(dtype))]]
            for algorithm in self.algorithms:
                self.check(
                    self.each(forms, algorithm=algorithm),
                    line(RANKS),
                    (data,),
                    want,
                    calls=1,
                    repeats=1,
                )

    def test_what_is_not_finite_stays_in_its_rows_and_columns(self):
        """Nothing that pads a tile may meet an inf or a NaN."""
        forms = self.ragged(RANKS)[:2]
        data = self.data(forms)
        for x, w in data:
            x[1, -1, 0], x[min(2, RANKS - 1), 0, -1] = np.inf, np.nan
            w[0, 0, -1] = -np.inf
        with np.errstate(invalid="ignore"):
            want = self.right(data, forms)
        for algorithm in self.algorithms:
            fn = self.each(forms, algorithm=algorithm)
            self.check(fn, line(RANKS), (data,), want, calls=2, repeats=1)

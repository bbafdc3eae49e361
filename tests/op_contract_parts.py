"""The contract of the ops that cut operands in parts: psum_scatter and its kin.

Their forms (which dimension, tiled or not) are run all in one program and compared
with numpy. That a gradient is right is seen from <ct, op(x)> = <transposed(ct), x>,
exactly, as all data are small integers.
"""

import functools

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_tools import BF16, F16, Layout, line
from jax import lax
from jax.sharding import PartitionSpec as P
from op_contract import Contract, lowered, named
from op_contract_transforms import both_modes

import jax_overlap

GRID = Layout((2, 4), ("a", "b"), ("b",))
RANKS = 4


def sized(dimension, size):
    """A shape of three unlike sizes of which one is `size`."""
    shape = [2, 3, 5]
    shape[dimension] = size
    return tuple(shape)


class Parts(Contract):
    """A subclass has an op, its forms, and what lax refuses."""

    forms: tuple  # (shape of an operand on four ranks, options)
    refused: tuple  # the same
    empty: tuple  # forms without elements
    alone: tuple  # forms on one rank
    numpy: staticmethod  # (operands of a team, **options) -> results
    adds = False  # whether the op adds, so that its operands have to be numbers

    def as_lax_takes(self, options):
        return options

    def call(self, x, axis_name="x", **options):
        return getattr(jax_overlap, self.op.name)(x, axis_name, **options)

    def lax(self, x, axis_name="x", **options):
        return getattr(lax, self.op.name)(x, axis_name, **options)

    def data(self, forms, layout=None, dtype=np.float32, seed=0):
        layout = line(RANKS) if layout is None else layout
        return [
            tools.exact(self.seed + seed + i, (layout.size, *shape), dtype)
            for i, (shape, _) in enumerate(forms)
        ]

    def right(self, xs, forms):
        return [
            self.numpy(x, **options) for x, (_, options) in zip(xs, forms, strict=True)
        ]

    def each(self, make, forms):
        """A function of one rank's operands: `make` of each form's, on its operands."""
        fns = [
            make(functools.partial(self.call, **options), i)
            for i, (_, options) in enumerate(forms)
        ]

        def fn(*groups):
            return [f(*args) for f, *args in zip(fns, *groups, strict=True)]

        return fn

    # Values and derivatives of every form.

    @both_modes
    def test_every_form(self, check_vma):
        xs = self.data(self.forms)
        self.check(
            self.each(lambda call, i: call, self.forms),
            line(RANKS),
            (xs,),
            self.right(xs, self.forms),
            calls=len(self.forms),
            check_vma=check_vma,
            repeats=1,
        )

    @both_modes
    def test_every_form_is_typed_as_by_lax(self, check_vma):
        def types(call):
            seen = []

            def fn(*xs):
                for x, (_, options) in zip(xs, self.forms, strict=True):
                    seen.append(jax.typeof(call(x, **self.as_lax_takes(options))))

            jax.eval_shape(
                tools.stacked(fn, line(RANKS), check_vma=check_vma),
                *self.data(self.forms),
            )
            return seen

        self.assertLen(self.forms, len(types(self.call)))
        self.assertEqual(types(self.call), types(self.lax))

    @both_modes
    def test_the_transpose_of_every_form(self, check_vma):
        xs = self.data(self.forms)
        want = self.right(xs, self.forms)
        cts = [
            tools.exact(self.seed + 99 + i, w.shape, w.dtype)
            for i, w in enumerate(want)
        ]

        def both(call, i):
            def fn(x, ct):
                once = jax.linear_transpose(call, x)
                twice = jax.linear_transpose(lambda ct: once(ct)[0], ct)
                value, vjp = jax.vjp(call, x)
                return once(ct)[0], vjp(ct)[0], twice(x)[0], value

            return fn

        fn = tools.stacked(
            self.each(both, self.forms), line(RANKS), check_vma=check_vma
        )
        got = jax.jit(fn)(*tools.place((xs, cts), line(RANKS)))
        for i, (once, vjp, twice, value) in enumerate(got):
            form = str(self.forms[i])
            self.assertEqual(once.shape, xs[i].shape, form)
            self.assertEqual(np.vdot(cts[i], want[i]), np.vdot(once, xs[i]), form)
            np.testing.assert_array_equal(vjp, once, form)
            np.testing.assert_array_equal(twice, want[i], form)
            np.testing.assert_array_equal(value, want[i], form)

    def test_every_form_under_vmap(self):
        """The batch dimension at each place, before and behind that of the parts."""
        both = [self.data(self.forms, seed=seed) for seed in (0, 1000)]
        wanted = [self.right(xs, self.forms) for xs in both]
        xs, want = [], []
        for i, (shape, _) in enumerate(self.forms):
            xs.append(np.stack([b[i] for b in both], 1 + i % (1 + len(shape))))
            ndim = wanted[0][i].ndim
            want.append(np.stack([w[i] for w in wanted], 1 + i % ndim))

        def batched(call, i):
            at = i % (1 + len(self.forms[i][0]))
            return jax.vmap(call, in_axes=at, out_axes=i % wanted[0][i].ndim)

        self.check(
            self.each(batched, self.forms),
            line(RANKS),
            (xs,),
            want,
            calls=len(self.forms),
            repeats=1,
        )

    # Groups.

    @both_modes
    def test_groups(self, check_vma):
        """Equal groups of the four along "b" of a mesh of 2 x 4."""
        for groups in ([[0, 2], [3, 1]], [[3, 1, 0, 2]], [[2], [0], [3], [1]]):
            size = len(groups[0])
            forms = [
                (tuple(s * size // RANKS if s % RANKS == 0 else s for s in shape), o)
                for shape, o in self.forms
            ]
            xs = self.data(forms, GRID)
            ranks = [4 * row + np.array(g) for row in range(2) for g in groups]
            want = []
            for x, (_, options) in zip(xs, forms, strict=True):
                parts = {tuple(r): self.numpy(x[r], **options) for r in ranks}
                out = np.zeros((8, *next(iter(parts.values())).shape[1:]), x.dtype)
                for r, part in parts.items():
                    out[list(r)] = part
                want.append(out)
            fn = self.each(
                lambda call, i, g=groups: functools.partial(
                    call, axis_name="b", axis_index_groups=g
                ),
                forms,
            )
            with self.subTest(groups=groups):
                calls = len(forms) if size > 1 else 0
                kw = {"calls": calls, "check_vma": check_vma, "repeats": 1}
                self.check(fn, GRID, (xs,), want, **kw)

    def test_the_gradient_over_groups(self):
        shape, options = self.forms[0]
        shape = tuple(s // 2 if s % RANKS == 0 else s for s in shape)
        groups = [[3, 0], [1, 2]]
        x = tools.exact(self.seed, (RANKS, *shape), np.float32)
        call = functools.partial(self.call, axis_index_groups=groups, **options)
        fn = jax.jit(tools.stacked(call, line(RANKS)))
        value, vjp = jax.vjp(fn, tools.place(x, line(RANKS)))
        for group in groups:
            want = self.numpy(x[group], **options)
            np.testing.assert_array_equal(np.asarray(value)[group], want)
        ct = tools.exact(self.seed + 1, value.shape, np.float32)
        (got,) = vjp(tools.place(ct, line(RANKS)))
        for group in groups:  # nothing passes from one group to the other
            right = np.vdot(ct[group], np.asarray(value)[group])
            self.assertEqual(np.vdot(np.asarray(got)[group], x[group]), right)

    @named(
        overlapping=([[0, 1], [1, 2]],),
        one_twice=([[0, 0], [1, 2]],),
        one_left_out=([[0], [1], [2]],),
        empty=([[], [0, 1, 2, 3]],),
        negative=([[0, 1], [2, -1]],),
        out_of_range=([[0, 1], [2, 4]],),
        unequal=([[0, 1, 2], [3]],),
    )
    def test_malformed_groups(self, groups):
        (shape, options), *_ = self.forms
        fn = tools.stacked(
            lambda x: self.call(x, axis_index_groups=groups, **options), line(RANKS)
        )
        with self.assertRaisesRegex(ValueError, f"{self.op.name}: axis_index_groups"):
            jax.eval_shape(fn, jnp.ones((RANKS, *shape)))

    # What is refused, left to lax, or needs no call.

    def test_refused_at_trace_time_in_the_words_of_lax(self):
        for shape, options in self.refused:
            texts = []
            for call in (self.call, self.lax):
                fn = tools.stacked(functools.partial(call, **options), line(RANKS))
                with self.assertRaises(Exception) as caught:
                    jax.eval_shape(fn, jnp.ones((RANKS, *shape)))
                texts.append((type(caught.exception), str(caught.exception)))
            with self.subTest(shape=shape, **options):
                self.assertEqual(*texts)
                self.assertTrue(issubclass(texts[0][0], (ValueError, IndexError)))

    def test_axes_that_are_not_there_and_axes_twice(self):
        shape, options = self.forms[0]
        x = jnp.ones((RANKS, *shape))
        for axes, error in (("nope", NameError), (("x", "x"), ValueError)):
            fn = tools.stacked(
                lambda x, a=axes: self.call(x, a, **options), line(RANKS)
            )
            with self.assertRaisesRegex(error, "nope|twice"):
                jax.eval_shape(fn, x)

    @named(
        u8=(np.uint8,), i16=(np.int16,), c64=(np.complex64,), e4m3=(jnp.float8_e4m3fn,)
    )
    def test_types_that_are_not_ours(self, dtype):
        """They go to lax and are counted; with "native" they are refused."""
        name = np.dtype(dtype).name
        ((_, options),) = forms = self.forms[:1]
        (x,) = self.data(forms, dtype=np.int32)
        x = abs(x).astype(dtype)
        fn = lambda x, **kw: self.call(x, **options, **kw)  # noqa: E731
        before = lowered(self.op.name, "lax", name)
        got = jax.jit(tools.stacked(fn, line(RANKS)))(tools.place(x, line(RANKS)))
        self.assertEqual(lowered(self.op.name, "lax", name), before + 1)
        wide = np.complex64 if dtype == np.complex64 else np.float32
        want = self.numpy(x.astype(wide), **options).astype(dtype)
        self.assert_stacked(got, want)
        native = functools.partial(fn, implementation="native")
        with self.assertRaisesRegex(TypeError, f"{self.op.name}.*{name}.*float32"):
            jax.eval_shape(tools.stacked(native, line(RANKS)), x)

    def test_bools(self):
        shape, options = self.forms[0]
        x = tools.exact(self.seed, (RANKS, *shape), np.int32) > 0
        fn = tools.stacked(lambda x: self.call(x, **options), line(RANKS))
        if self.adds:
            with self.assertRaisesRegex(TypeError, "bool"):
                jax.jit(fn).lower(x)
            return
        self.assert_stacked(jax.jit(fn)(x), self.numpy(x, **options))

    def test_keys_of_random_numbers(self):
        """A type of which numpy knows nothing."""
        if self.adds:
            return
        shape, options = self.forms[0]
        data = np.random.default_rng(self.seed).integers(2**32, size=(RANKS, *shape, 2))
        data = data.astype(np.uint32)

        def fn(data):
            keys = self.call(jax.random.wrap_key_data(data), **options)
            return jax.random.key_data(keys)

        before = lowered(self.op.name, "lax", "key<")
        got = jax.jit(tools.stacked(fn, line(RANKS)))(tools.place(data, line(RANKS)))
        self.assertEqual(lowered(self.op.name, "lax", "key<"), before + 1)
        halves = [self.numpy(data[..., i], **options) for i in range(2)]
        self.assert_stacked(got, np.stack(halves, -1))

    def test_native_is_ours_and_reference_is_lax(self):
        _, options = self.forms[0]
        for dtype in (np.float32, BF16, F16, np.int32, np.int8):
            (x,) = self.data(self.forms[:1], dtype=dtype)
            want = self.numpy(x, **options)
            for kind, calls in (("native", 1), ("reference", 0)):
                self.check(
                    lambda x, k=kind: self.call(x, implementation=k, **options),
                    line(RANKS),
                    (x,),
                    want.astype(dtype),
                    calls=calls,
                    foreign=kind == "reference",
                    repeats=1,
                )

    def test_unknown_implementation(self):
        shape, options = self.forms[0]
        for value in ("nope", "", 3):
            fn = tools.stacked(
                lambda x, v=value: self.call(x, implementation=v, **options),
                line(RANKS),
            )
            words = f"{self.op.name}.*implementation={value!r}.*'reference', 'native'"
            with self.assertRaisesRegex(ValueError, words):
                jax.eval_shape(fn, jnp.ones((RANKS, *shape)))

    def test_partly_manual_shard_map_goes_to_lax(self):
        shape, options = self.forms[0]
        x = tools.exact(self.seed, (RANKS, *shape), np.float32)
        fn = lambda kind: jax.jit(  # noqa: E731
            jax.shard_map(
                lambda x: self.call(x[0], "b", implementation=kind, **options)[None],
                mesh=GRID.mesh,
                in_specs=P("b"),
                out_specs=P("b"),
                axis_names={"b"},
            )
        )
        before = lowered(self.op.name, "lax", "automatic")
        compiled = fn(None).lower(x).compile()
        self.assertEqual(lowered(self.op.name, "lax", "automatic"), before + 1)
        self.assertEqual(tools.custom_calls(compiled.as_text(), self.op.target), 0)
        np.testing.assert_array_equal(compiled(x), self.numpy(x, **options))
        with self.assertRaisesRegex(NotImplementedError, "'a'.*automatic"):
            fn("native").lower(x)

    @both_modes
    def test_one_rank_needs_no_call(self, check_vma):
        xs = self.data(self.alone, line(1))
        for kind in (None, "native"):
            fn = self.each(
                lambda call, i, k=kind: functools.partial(call, implementation=k),
                self.alone,
            )
            want = self.right(xs, self.alone)
            kw = {"calls": 0, "check_vma": check_vma, "repeats": 1}
            self.check(fn, line(1), (xs,), want, **kw)

    @both_modes
    def test_without_elements(self, check_vma):
        """No call and no collective, also where lax cannot do it."""
        xs = self.data(self.empty)
        kw = {"calls": 0, "check_vma": check_vma, "repeats": 1}

        def both(call, i):
            def fn(x):
                value, vjp = jax.vjp(call, x)
                return value, vjp(value)[0]

            return fn

        want = [*zip(self.right(xs, self.empty), xs, strict=True)]
        self.check(self.each(both, self.empty), line(RANKS), (xs,), want, **kw)

    # Other operands.

    def test_a_tree(self):
        shape, options = self.forms[0]
        dtypes = (np.float32, BF16, np.int32, np.float32)
        tree = {
            str(i): tools.exact(self.seed + i, (RANKS, *shape), dtype)
            for i, dtype in enumerate(dtypes)
        }
        want = {k: self.numpy(v, **options).astype(v.dtype) for k, v in tree.items()}
        seen = []

        def fn(tree):
            out = self.call({"in": (tree, None), "none": []}, **options)
            seen.append(jax.tree.structure(out))
            return out["in"][0]

        self.check(fn, line(RANKS), (tree,), want, calls=len(tree))
        given = jax.tree.structure({"in": (tree, None), "none": []})
        self.assertEqual(seen[0], given)

    @both_modes
    def test_constants_and_what_does_not_vary(self, check_vma):
        """An operand that all ranks share is taken as varying, and goes to our call."""
        shape, options = self.forms[0]
        same = tools.exact(self.seed, shape, np.float32)
        (x,) = self.data(self.forms[:1])
        makes = {  # unlike, or XLA makes one call of two
            "a numpy array": lambda x: same,
            "an array": lambda x: jnp.asarray(3 * same),
            "a weakly typed one": lambda x: jnp.full(shape, 2.0) * 1.0,
            "a sum": lambda x: lax.psum(x, "x"),
        }
        wanted = [same, 3 * same, np.full(shape, 2.0, np.float32), x.sum(0)]
        want = [
            self.numpy(np.broadcast_to(w, x.shape).astype(np.float32), **options)
            for w in wanted
        ]
        fn = lambda x: [  # noqa: E731
            self.call(make(x), implementation="native", **options)
            for make in makes.values()
        ]
        kw = {"check_vma": check_vma, "foreign": True, "repeats": 1}
        self.check(fn, line(RANKS), (x,), want, calls=len(makes), **kw)

    def test_layouts_of_memory(self):
        """Transposed, cut and reversed before the op."""
        _, options = self.forms[0]
        (x,) = self.data(self.forms[:1])
        changes = [
            (x.swapaxes(1, 3), lambda x: x.T),
            (np.repeat(x, 2, 2), lambda x: x[:, ::2]),
            (x[:, :, ::-1], lambda x: x[:, ::-1]),
        ]
        self.check(
            lambda *xs: [
                self.call(change(x), **options)
                for x, (_, change) in zip(xs, changes, strict=True)
            ],
            line(RANKS),
            tuple(np.ascontiguousarray(x) for x, _ in changes),
            [self.numpy(x, **options)] * 3,
            calls=3,
            repeats=1,
        )

    def test_a_list_of_axes(self):
        _, options = self.forms[0]
        (x,) = self.data(self.forms[:1])
        fn = lambda x: self.call(x, ["x"], **options)  # noqa: E731
        self.check(fn, line(RANKS), (x,), self.numpy(x, **options), calls=1)

    def test_explain(self):
        shape, options = self.forms[0]

        def fn(x):
            return (
                self.call(x, **options),
                self.call(x, implementation="reference", **options),
                self.call(x.astype(jnp.int16), **options),
                jax.linear_transpose(lambda x: self.call(x, **options), x)(
                    self.call(x, **options)
                ),
            )

        plans = jax_overlap.explain(
            tools.stacked(fn, line(RANKS)), jnp.ones((RANKS, *shape))
        )
        self.assertLen(plans, 5)
        kinds = [(p.op, p.implementation, p.algorithm, p.ranks) for p in plans[:4]]
        name = self.op.name
        self.assertEqual(kinds[0], (name, "native", "direct", RANKS))
        self.assertEqual(kinds[1], (name, "lax", None, RANKS))
        self.assertEqual(kinds[2], (name, "lax", None, RANKS))
        self.assertEqual(kinds[3], (name, "native", "direct", RANKS))
        self.assertIn("reference", plans[1].reason)
        self.assertIn("int16", plans[2].reason)
        self.assertEqual(plans[4].op, self.transposed)

    def test_operand_type_is_the_users(self):
        """Nothing around the call makes other bytes travel, nor the parts twice."""
        _, options = self.forms[0]
        (x,) = self.data(self.forms[:1], dtype=BF16)
        fn = jax.jit(tools.stacked(lambda x: self.call(x, **options), line(RANKS)))
        hlo = fn.lower(tools.place(x, line(RANKS))).compile().as_text()
        (call,) = [text for text in hlo.splitlines() if f'"{self.op.target}"' in text]
        self.assertIn("bf16[", call)
        self.assertNotIn("f32[", call)

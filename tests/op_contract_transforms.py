"""The contract, third part: derivatives, batching, loops, checkpoints.

Operands are small integers here too, so that derivatives are exact. An op is linear
in each operand, hence its JVP is itself, and what a VJP must be is known in numpy.
"""

import contract_devices as devices
import contract_processes as processes
import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from contract_tools import line
from jax import lax
from op_contract import Contract, over_teams

both_modes = parameterized.named_parameters(("_vma", True), ("_no_vma", False))


class OnFourRanks(Contract):
    """Small operands on four ranks, and what derivatives of the op have to be."""

    layout = line(devices.ranks(4))
    size = 6

    def setUp(self):
        super().setUp()
        self.multiply_exactly()
        self.operands = self.op.operands(self.layout, self.size, np.float32, self.seed)
        self.tangents = self.op.operands(
            self.layout, self.size, np.float32, self.seed + 1
        )
        self.right = self.want(self.layout, self.operands, np.float32)
        self.cts = tools.exact(self.seed + 2, self.right.shape, np.float32)

    def call(self, *operands, axis_name="x", **kw):
        return self.op.call(*operands, axis_name, **kw)

    def vjp_wanted(self, i, operands=None, cts=None):
        operands = self.operands if operands is None else operands
        cts = self.cts if cts is None else cts
        return over_teams(
            self.layout,
            lambda cts, *operands: self.op.vjp(i, operands, cts),
            cts,
            *operands,
        ).astype(np.float32)

    def inside_vjp_wanted(self, i, cts, check_vma):
        return over_teams(
            self.layout,
            lambda cts, *operands: self.op.inside_vjp(i, operands, cts, check_vma),
            cts,
            *self.operands,
        ).astype(np.float32)

    def jvp_wanted(self, i, tangent):
        operands = [*self.operands]
        operands[i] = tangent
        return self.want(self.layout, operands, np.float32)

    def need_lax_to_transpose(self, check_vma):
        """What varies a result that does not has lax.psum as its transpose."""
        if check_vma and self.op.invariant:
            self.need_lax()

    def each_operand(self):
        for i in range(len(self.operands)):
            with self.subTest(operand=i):
                try:
                    yield i
                except GeneratorExit:  # the loop was left, which fails the subtest
                    if not self.skipping:
                        raise
                    return


class Transforms(OnFourRanks):
    def of_operand(self, i, operands, call=None):
        """The op as a function of operand i alone."""
        call = self.call if call is None else call
        return lambda x: call(*operands[:i], x, *operands[i + 1 :])

    def same_as_lax(self, transformed, wanted, *, check_vma=True, operands=None):
        """Values as `wanted`; and types as the same transformation of lax's op has."""
        operands = self.operands if operands is None else operands
        lax_too, types = processes.lax_runs(), []

        def theirs(*operands):
            return transformed(lambda *a: self.op.lax(*a, "x"), *operands)

        def fn(*operands):
            ours = transformed(self.call, *operands)
            types.append(jax.tree.map(jax.typeof, ours))
            return (ours, theirs(*operands)) if lax_too else (ours,)

        def lax_types(*operands):
            types.append(jax.tree.map(jax.typeof, theirs(*operands)))
            return ()

        run = jax.jit(tools.stacked(fn, self.layout, check_vma=check_vma))
        self.need_lax_for(run, *operands)
        for got in run(*tools.place(operands, self.layout)):
            self.assert_stacked(got, wanted)  # if lax is wrong, the test is
        jax.eval_shape(
            tools.stacked(lax_types, self.layout, check_vma=check_vma), *operands
        )
        self.assertEqual(types[0], types[-1])

    # Derivatives of the whole program, taken outside of shard_map.

    @both_modes
    def test_vjp(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        fn = jax.jit(tools.stacked(self.call, self.layout, check_vma=check_vma))
        placed = tools.place(self.operands, self.layout)
        value, vjp = jax.vjp(fn, *placed)
        self.assert_stacked(value, self.right)
        got = vjp(tools.place(self.cts, self.layout))
        self.assert_stacked(got, [self.vjp_wanted(i) for i in range(len(got))])

    @both_modes
    def test_value_and_grad(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        fn = tools.stacked(self.call, self.layout, check_vma=check_vma)
        cts = tools.place(self.cts, self.layout)
        placed = tools.place(self.operands, self.layout)
        for i in self.each_operand():
            # What spans processes has to be an argument.
            loss = jax.value_and_grad(
                lambda *a: jnp.sum(a[-1] * fn(*a[:-1])), argnums=i
            )
            self.need_lax_for(loss, *placed, cts)
            if processes.lax_runs():  # which adds what the ranks have
                value, got = jax.jit(loss)(*placed, cts)
                self.assertEqual(float(value), float(np.sum(self.cts * self.right)))
            else:
                got = jax.jit(lambda *a, loss=loss: loss(*a)[1])(*placed, cts)
            self.assert_stacked(got, self.vjp_wanted(i))

    @both_modes
    def test_jvp(self, check_vma):
        fn = jax.jit(tools.stacked(self.call, self.layout, check_vma=check_vma))
        placed = tools.place(self.operands, self.layout)
        for i in self.each_operand():
            tangents = [np.zeros_like(a) for a in self.operands]
            tangents[i] = self.tangents[i]
            value, got = jax.jvp(fn, placed, tuple(tools.place(tangents, self.layout)))
            self.assert_stacked(value, self.right)
            self.assert_stacked(got, self.jvp_wanted(i, self.tangents[i]))

    @both_modes
    def test_second_order(self, check_vma):
        """Of sum(y ** 3): the gradient is the VJP of 3 y^2, and so on."""
        self.need_lax_to_transpose(check_vma)
        fn = tools.stacked(self.call, self.layout, check_vma=check_vma)
        for i in self.each_operand():
            placed = tools.place(self.operands, self.layout)

            def grad(x, others, i=i):
                def loss(x):
                    return jnp.sum(self.of_operand(i, others, fn)(x) ** 3)

                return jax.grad(loss)(x)

            def grad_and_jvp(x, t, others, grad=grad):
                return jax.jvp(lambda x: grad(x, others), (x,), (t,))

            tangent = tools.place(self.tangents[i], self.layout)
            self.need_lax_for(grad_and_jvp, placed[i], tangent, placed)
            got, along = jax.jit(grad_and_jvp)(placed[i], tangent, placed)
            self.assert_stacked(got, self.vjp_wanted(i, cts=3 * self.right**2))
            moved = 6 * self.right * self.jvp_wanted(i, self.tangents[i])
            self.assert_stacked(along, self.vjp_wanted(i, cts=moved))
            backward = jax.jit(
                # Reverse over reverse.
                jax.grad(lambda x, t, others: jnp.vdot(grad(x, others), t))
            )(placed[i], tangent, placed)
            self.assert_stacked(backward, self.vjp_wanted(i, cts=moved))

    # Derivatives that a rank takes for itself, inside.

    @both_modes
    def test_vjp_inside(self, check_vma):
        ones = np.ones_like(self.right)
        for i in self.each_operand():

            def transformed(call, *operands, i=i):
                y, vjp = jax.vjp(self.of_operand(i, operands, call), operands[i])
                return y, vjp(jnp.ones_like(y))[0]

            wanted = (self.right, self.inside_vjp_wanted(i, ones, check_vma))
            self.same_as_lax(transformed, wanted, check_vma=check_vma)

    @both_modes
    def test_grad_inside(self, check_vma):
        """With check_vma=False this is lax's n-fold gradient, for psum."""
        for i in self.each_operand():

            def transformed(call, *operands, i=i):
                loss = lambda x: jnp.sum(self.of_operand(i, operands, call)(x) ** 2)  # noqa: E731
                return jax.grad(loss)(operands[i])

            wanted = self.inside_vjp_wanted(i, 2 * self.right, check_vma)
            self.same_as_lax(transformed, wanted, check_vma=check_vma)

    @both_modes
    def test_jvp_inside(self, check_vma):
        for i in self.each_operand():

            def transformed(call, *both, i=i):
                operands, tangent = both[:-1], both[-1]
                return jax.jvp(
                    self.of_operand(i, operands, call), (operands[i],), (tangent,)
                )

            wanted = (self.right, self.jvp_wanted(i, self.tangents[i]))
            self.same_as_lax(
                transformed,
                wanted,
                check_vma=check_vma,
                operands=(*self.operands, self.tangents[i]),
            )

    @both_modes
    def test_jacrev_inside(self, check_vma):
        for i in self.each_operand():

            def transformed(call, *operands, i=i):
                return jax.jacrev(self.of_operand(i, operands, call))(operands[i])

            basis = np.eye(self.right[0].size, dtype=np.float32)
            rows = [
                self.inside_vjp_wanted(
                    i,
                    np.broadcast_to(e.reshape(self.right.shape[1:]), self.right.shape),
                    check_vma,
                )
                for e in basis
            ]
            shape = (
                self.layout.size,
                *self.right.shape[1:],
                *self.operands[i].shape[1:],
            )
            wanted = np.stack(rows, 1).reshape(shape)
            self.same_as_lax(transformed, wanted, check_vma=check_vma)

    @both_modes
    def test_linearize_and_transpose_twice(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        ones = np.ones_like(self.right)
        for i in self.each_operand():

            def transformed(call, *both, i=i):
                operands, tangent = both[:-1], both[-1]
                fn = self.of_operand(i, operands, call)
                y, linear = jax.linearize(fn, operands[i])
                once = jax.linear_transpose(fn, operands[i])
                twice = jax.linear_transpose(lambda ct: once(ct)[0], y)
                back = once(jnp.ones_like(y))[0]
                return y, linear(tangent), back, twice(operands[i])[0]

            wanted = (
                self.right,
                self.jvp_wanted(i, self.tangents[i]),
                self.inside_vjp_wanted(i, ones, check_vma),
                self.right,
            )
            self.same_as_lax(
                transformed,
                wanted,
                check_vma=check_vma,
                operands=(*self.operands, self.tangents[i]),
            )

    @both_modes
    def test_remat(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        fn = tools.stacked(
            jax.checkpoint(lambda *a: self.call(*a) ** 2),
            self.layout,
            check_vma=check_vma,
        )
        placed = tools.place(self.operands, self.layout)
        value, vjp = jax.vjp(jax.jit(fn), *placed)
        self.assert_stacked(value, self.right**2)
        cts = 2 * self.right * self.cts
        wanted = [self.vjp_wanted(i, cts=cts) for i in range(len(placed))]
        self.assert_stacked(vjp(tools.place(self.cts, self.layout)), wanted)

    @both_modes
    def test_inside_custom_vjp(self, check_vma):
        """Its forward and its backward may both use the op."""

        @jax.custom_vjp
        def fn(*operands):
            return self.call(*operands)

        def forward(*operands):
            return fn(*operands), operands

        def backward(operands, ct):
            _, vjp = jax.vjp(self.call, *operands)
            return jax.tree.map(lambda g: 2 * g, vjp(ct))

        fn.defvjp(forward, backward)
        ones = np.ones_like(self.right)

        def transformed(call, *operands):
            y, vjp = jax.vjp(fn if call == self.call else call, *operands)
            grads = vjp(jnp.ones_like(y))
            scale = 1 if call == self.call else 2
            return jax.tree.map(lambda g: scale * g, grads)

        wanted = tuple(
            2 * self.inside_vjp_wanted(i, ones, check_vma)
            for i in range(len(self.operands))
        )
        self.same_as_lax(transformed, wanted, check_vma=check_vma)

    # Loops.

    @both_modes
    def test_scan_and_its_gradient(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        factors = np.arange(1, 6, dtype=np.float32)

        def fn(*operands):
            def step(carry, factor):
                first, *rest = operands
                return carry, self.call(first * factor, *rest)

            return lax.scan(jax.checkpoint(step), 0, factors)[1]

        outer = jax.jit(tools.stacked(fn, self.layout, check_vma=check_vma))
        value, vjp = jax.vjp(outer, *tools.place(self.operands, self.layout))
        scale = factors.reshape((1, -1) + (1,) * (self.right.ndim - 1))
        self.assert_stacked(value, self.right[:, None] * scale)
        cts = np.repeat(self.cts[:, None], 5, 1)
        got = vjp(tools.place(cts, self.layout))
        total = factors.sum()  # operand i enters each step `factor` times
        wanted = [self.vjp_wanted(i) * total for i in range(len(got))]
        self.assert_stacked(got, wanted)

    @both_modes
    def test_fori_loop_while_and_cond(self, check_vma):
        def fn(*operands):
            first, *rest = operands

            def step(i, total):
                on = lambda: self.call(first * i, *rest)  # noqa: E731
                off = lambda: jnp.zeros_like(total)  # noqa: E731
                return total + lax.cond(i % 2 == 0, on, off)

            zero = jnp.zeros_like(self.call(*operands))
            looped = lax.fori_loop(0, 10, step, zero)
            small = lambda c: c[0] < 3  # noqa: E731
            body = lambda c: (c[0] + 1, c[1] + self.call(*operands))  # noqa: E731
            return looped, lax.while_loop(small, body, (0, zero))[1]

        self.check(
            fn,
            self.layout,
            self.operands,
            (20 * self.right, 3 * self.right),
            check_vma=check_vma,
        )

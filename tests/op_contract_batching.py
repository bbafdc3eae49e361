"""The contract, fourth part: jax.vmap around an op, inside and outside of shard_map."""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from contract_tools import Layout
from op_contract_transforms import OnFourRanks, both_modes


class Batching(OnFourRanks):
    @both_modes
    def test_vmap_over_each_dimension(self, check_vma):
        """vmap inside of shard_map, batch dimension first, last, or in one operand."""
        batch = [
            self.op.operands(self.layout, self.size, np.float32, self.seed + i)
            for i in range(3)
        ]
        wanted = np.stack([self.want(self.layout, o, np.float32) for o in batch], 1)
        together = tuple(np.stack(group, 1) for group in zip(*batch, strict=True))
        for axis in (0, 1, -1):
            moved = tuple(
                np.moveaxis(a, 1, axis + 1 if axis >= 0 else -1) for a in together
            )
            self.check(
                lambda *a, axis=axis: jax.vmap(self.call, in_axes=axis)(*a),
                self.layout,
                moved,
                wanted,
                calls=1,
                check_vma=check_vma,
            )
            self.check(
                lambda *a, axis=axis: jax.vmap(self.call, in_axes=axis, out_axes=-1)(
                    *a
                ),
                self.layout,
                moved,
                np.moveaxis(wanted, 1, -1),
                check_vma=check_vma,
            )
        for i in self.each_operand():
            mixed = tuple(o if j != i else together[i] for j, o in enumerate(batch[0]))
            singles = [
                self.want(
                    self.layout, (*batch[0][:i], b[i], *batch[0][i + 1 :]), np.float32
                )
                for b in batch
            ]
            axes = tuple(0 if j == i else None for j in range(len(mixed)))
            self.check(
                lambda *a, axes=axes: jax.vmap(self.call, in_axes=axes)(*a),
                self.layout,
                mixed,
                np.stack(singles, 1),
                check_vma=check_vma,
            )
        alone = lambda *a: jax.vmap(  # noqa: E731
            lambda z, *a: (self.call(*a), z), in_axes=(0, *(None,) * len(a))
        )(jnp.arange(3), *a)[0]
        want = np.repeat(self.right[:, None], 3, 1)
        self.check(alone, self.layout, self.operands, want, check_vma=check_vma)

    def test_vmap_of_vmap(self):
        batch = [
            self.op.operands(self.layout, self.size, np.float32, self.seed + i)
            for i in range(6)
        ]
        wanted = np.stack([self.want(self.layout, o, np.float32) for o in batch], 1)
        together = tuple(np.stack(group, 1) for group in zip(*batch, strict=True))
        grid = tuple(a.reshape(-1, 2, 3, *a.shape[2:]) for a in together)
        self.check(
            lambda *a: jax.vmap(jax.vmap(self.call))(*a),
            self.layout,
            grid,
            wanted.reshape(-1, 2, 3, *wanted.shape[2:]),
            calls=1,
        )

    @both_modes
    def test_vmap_of_shard_map(self, check_vma):
        """The batch dimension outside: each operand's first, second, or none."""
        batch = [
            self.op.operands(self.layout, self.size, np.float32, self.seed + i)
            for i in range(3)
        ]
        fn = tools.stacked(self.call, self.layout, check_vma=check_vma)
        wanted = np.stack([self.want(self.layout, o, np.float32) for o in batch])
        for axis in (0, 1):
            together = [np.stack(group, axis) for group in zip(*batch, strict=True)]
            placed = tools.place(together, self.layout, axis=1 - axis)
            got = jax.jit(jax.vmap(fn, in_axes=axis))(*placed)
            self.assert_global(got, wanted)
        both = jax.vmap(lambda z, *a: fn(*a), in_axes=(0, *(None,) * len(batch[0])))
        got = jax.jit(both)(jnp.arange(2), *tools.place(batch[0], self.layout))
        self.assert_global(got, np.stack([wanted[0]] * 2))

    @both_modes
    def test_grad_of_vmap(self, check_vma):
        self.need_lax_to_transpose(check_vma)
        batch = [
            self.op.operands(self.layout, self.size, np.float32, self.seed + i)
            for i in range(3)
        ]
        together = tuple(np.stack(group, 1) for group in zip(*batch, strict=True))
        cts = np.stack([self.cts, 2 * self.cts, -self.cts], 1)
        fn = tools.stacked(jax.vmap(self.call), self.layout, check_vma=check_vma)
        _, vjp = jax.vjp(jax.jit(fn), *tools.place(together, self.layout))
        got = vjp(tools.place(cts, self.layout))
        for i in self.each_operand():
            singles = [self.vjp_wanted(i, o, cts[:, j]) for j, o in enumerate(batch)]
            self.assert_stacked(got[i], np.stack(singles, 1))

    def test_vmap_with_the_axis_named(self):
        """Ranks that are a vmapped dimension, not devices: as lax has it."""
        n = self.layout.size
        fn = jax.vmap(self.call, axis_name="x")
        for run in (fn, jax.jit(fn)):
            np.testing.assert_array_equal(run(*self.operands), self.right)
        _, vjp = jax.vjp(fn, *self.operands)
        for i, got in enumerate(vjp(self.cts)):
            wanted = self.inside_vjp_wanted(i, self.cts, check_vma=False)
            np.testing.assert_array_equal(got, wanted)
        if not self.op.mixes_with_vmap:
            return
        # A vmapped axis together with one of devices; lax refuses it under check_vma.
        layout = Layout((n,), ("x",), ("x",))
        batch = [
            self.op.operands(layout, 6, np.float32, self.seed + i) for i in range(3)
        ]
        together = tuple(np.stack(group, 1) for group in zip(*batch, strict=True))
        program = jax.jit(
            tools.stacked(
                lambda *a: jax.vmap(
                    lambda *b: self.call(*b, axis_name=("v", "x")), axis_name="v"
                )(*a),
                layout,
                check_vma=False,
            )
        )
        self.need_lax_for(program, *together)
        got = program(*tools.place(together, layout))
        # Rank (v, x): "v" is major, so stack the teams that way.
        flat = tuple(np.concatenate(group) for group in zip(*batch, strict=True))
        wanted = np.asarray(self.op.reference(*(tools.wide(a) for a in flat)))
        wanted = wanted.reshape(3, n, *wanted.shape[1:]).swapaxes(0, 1)
        self.assert_global(got, wanted)

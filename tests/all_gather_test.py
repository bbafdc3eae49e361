"""jax_overlap.all_gather: the contract of all ops, and what is its own."""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import op_contract
import op_contract_batching
import op_contract_parts
import op_contract_programs
import op_contract_transforms
from absl.testing import absltest
from contract_tools import line
from op_contract_transforms import both_modes
from op_descriptions import ALL_GATHER, ALL_GATHER_LAST

import jax_overlap


class AllGatherValues(op_contract.Values):
    op = ALL_GATHER


class AllGatherPrograms(op_contract_programs.Programs):
    op = ALL_GATHER


class AllGatherTransforms(op_contract_transforms.Transforms):
    op = ALL_GATHER


class AllGatherBatching(op_contract_batching.Batching):
    op = ALL_GATHER


class AllGatherLastTransforms(op_contract_transforms.Transforms):
    op = ALL_GATHER_LAST


class AllGatherLastBatching(op_contract_batching.Batching):
    op = ALL_GATHER_LAST


class AllGatherParts(op_contract_parts.Parts):
    op = ALL_GATHER
    transposed = "psum_scatter"
    forms = (
        *(((2, 3, 5), {"axis": d, "tiled": True}) for d in range(-3, 3)),
        *(((2, 3, 5), {"axis": d}) for d in range(-4, 4)),
        ((), {}),
        ((), {"axis": -1}),
        ((7,), {"tiled": True}),
    )
    refused = (
        ((2, 3), {"axis": 3}),
        ((2, 3), {"axis": -4}),
        ((2, 3), {"axis": 2, "tiled": True}),
        ((2, 3), {"axis": -3, "tiled": True}),
        ((), {"tiled": True}),
        ((2, 3), {"to": "nowhere"}),
    )
    empty = (
        ((0,), {}),
        ((0, 3), {"tiled": True}),
        ((3, 0), {"axis": 1}),
        ((3, 0), {"axis": -2, "tiled": True}),
    )
    alone = (((3, 2), {"tiled": True}), ((3, 2), {"axis": 1}), ((), {"axis": -1}))

    @staticmethod
    def numpy(x, axis=0, tiled=False):
        together = (np.concatenate if tiled else np.stack)(list(x), axis)
        return np.broadcast_to(together, (len(x), *together.shape))

    @both_modes
    def test_python_numbers(self, check_vma):
        x = tools.exact(self.seed, (4, 3), np.float32)

        def both(gather, x):
            return [gather(v, "x") for v in (2, 1.5, np.float32(3))]

        fn = lambda x: both(jax_overlap.all_gather, x)  # noqa: E731
        got = jax.jit(tools.stacked(fn, line(4), check_vma=check_vma))(x)
        fn = lambda x: both(jax.lax.all_gather, x)  # noqa: E731
        want = jax.jit(tools.stacked(fn, line(4), check_vma=check_vma))(x)
        self.assert_stacked(got, [np.asarray(w) for w in want])

    @both_modes
    def test_other_kinds_of_result_are_those_of_lax(self, check_vma):
        """to="invarying" has equal values, types and gradients, by lax."""
        x = tools.exact(self.seed, (4, 2, 3), np.float32)

        def result(gather, tiled):
            types = []

            def fn(x):
                call = lambda x: gather(  # noqa: E731
                    x, "x", axis=1, tiled=tiled, to="invarying"
                )
                value, vjp = jax.vjp(call, x)
                types.append(jax.typeof(value))
                return value, vjp(value)[0]

            got = jax.jit(tools.stacked(fn, line(4), check_vma=check_vma))(x)
            return types, jax.tree.map(lambda a: np.asarray(a).tolist(), got)

        for tiled in (True, False):
            ours = result(jax_overlap.all_gather, tiled)
            self.assertEqual(ours, result(jax.lax.all_gather, tiled))
            self.assertEqual(ours[1][0], self.numpy(x, axis=1, tiled=tiled).tolist())

    def test_reduced_is_that_of_lax(self):
        x = tools.exact(self.seed, (4, 3), np.float32)
        types = []
        for gather in (jax_overlap.all_gather, jax.lax.all_gather):

            def fn(x, gather=gather):
                types.append(jax.typeof(gather(x, "x", to="reduced")))
                return x

            jax.eval_shape(tools.stacked(fn, line(4)), x)
        self.assertEqual(*types)
        self.assertEqual(types[0].mat.reduced, {"x"})

    def test_native_refuses_other_kinds(self):
        fn = lambda x: jax_overlap.all_gather(  # noqa: E731
            x, "x", to="invarying", implementation="native"
        )
        with self.assertRaisesRegex(NotImplementedError, "all_gather.*'invarying'"):
            jax.eval_shape(tools.stacked(fn, line(4)), jnp.ones((4, 3)))


if __name__ == "__main__":
    absltest.main()

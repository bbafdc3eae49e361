"""jax_overlap.all_to_all: the contract of all ops, and what is its own."""

import functools

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
from op_contract_parts import RANKS, sized
from op_descriptions import ALL_TO_ALL, ALL_TO_ALL_FIRST_TO_LAST


class AllToAllValues(op_contract.Values):
    op = ALL_TO_ALL


class AllToAllPrograms(op_contract_programs.Programs):
    op = ALL_TO_ALL


class AllToAllTransforms(op_contract_transforms.Transforms):
    op = ALL_TO_ALL


class AllToAllBatching(op_contract_batching.Batching):
    op = ALL_TO_ALL


class AllToAllFirstToLastTransforms(op_contract_transforms.Transforms):
    op = ALL_TO_ALL_FIRST_TO_LAST


class AllToAllFirstToLastBatching(op_contract_batching.Batching):
    op = ALL_TO_ALL_FIRST_TO_LAST


def form(split, concat, tiled, ranks=RANKS):
    """Operand and options; the other sizes are all unlike."""
    shape = sized(split, ranks * (1 + tiled))
    return shape, {"split_axis": split, "concat_axis": concat, "tiled": tiled}


class AllToAllParts(op_contract_parts.Parts):
    op = ALL_TO_ALL
    transposed = "all_to_all"
    forms = tuple(
        form(split, concat, tiled)
        for split in range(-3, 3)
        for concat in range(-3, 3)
        for tiled in (True, False)
    )
    refused = tuple(
        (shape, {"split_axis": split, "concat_axis": concat, "tiled": tiled})
        for shape, split, concat, tiled in (
            ((6, 3), 0, 0, True),
            ((6, 3), -1, 0, True),
            ((8, 3), 0, 1, False),
            ((2, 3), 0, 0, False),
            ((4, 3), 2, 0, False),
            ((4, 3), -3, 0, False),
            ((4, 3), 0, 2, True),
            ((4, 3), 0, -3, True),
            ((), 0, 0, False),
        )
    )
    empty = tuple(
        (shape, {"split_axis": split, "concat_axis": concat, "tiled": tiled})
        for shape, split, concat, tiled in (
            ((4, 0), 0, 0, False),
            ((4, 0), 0, 1, False),
            ((0, 3), 0, 0, True),
            ((0, 3), 0, 1, True),
            ((3, 0), 1, 0, True),
            ((4, 0), 0, 1, True),
        )
    )
    alone = tuple(
        form(split, concat, tiled, ranks=1)
        for split, concat in ((0, 0), (0, 1), (2, 0), (1, -1))
        for tiled in (True, False)
    )

    def as_lax_takes(self, options):
        """Before jax 0.12 lax mistakes negative dimensions, unless tiled."""
        return {k: v % 3 if k.endswith("axis") else v for k, v in options.items()}

    @staticmethod
    def numpy(x, split_axis, concat_axis, tiled=False):
        parts = [np.split(operand, len(x), split_axis) for operand in x]
        if not tiled:
            parts = [[np.squeeze(p, split_axis) for p in row] for row in parts]
        join = np.concatenate if tiled else np.stack
        return np.stack([join(row, concat_axis) for row in zip(*parts, strict=True)])

    def test_there_and_back(self):
        xs = self.data(self.forms)

        def both(call, i):
            options = self.forms[i][1]
            ndim = 3
            split, concat = options["split_axis"] % ndim, options["concat_axis"] % ndim
            back = {"split_axis": concat, "concat_axis": split}
            return lambda x: self.call(call(x), **back, tiled=options["tiled"])

        fn = self.each(both, self.forms)
        self.check(fn, line(RANKS), (xs,), xs, calls=2 * len(self.forms), repeats=1)

    def test_without_axes_as_lax(self):
        for split, concat, tiled in ((0, 1, True), (0, 1, False), (0, 0, False)):
            options = {"split_axis": split, "concat_axis": concat, "tiled": tiled}
            for shape in ((1, 3), (4, 3)):
                outcomes = []
                for call in (self.call, self.lax):
                    of_none = functools.partial(call, axis_name=(), **options)
                    fn = tools.stacked(of_none, line(RANKS))
                    try:
                        outcomes.append(jax.eval_shape(fn, jnp.ones((RANKS, *shape))))
                    except ValueError as error:
                        outcomes.append(str(error))
                self.assertEqual(*outcomes)


if __name__ == "__main__":
    absltest.main()

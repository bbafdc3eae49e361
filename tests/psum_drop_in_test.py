"""jax_overlap.psum takes, gives and refuses whatever jax.lax.psum does.

Here `lax` is the judge: of types, of what is folded, of errors. Values that come out
of a custom call are compared with numpy too.
"""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import BF16, Layout, line
from jax import lax
from op_contract import Contract, named
from op_descriptions import PSUM

import jax_overlap

GRID = Layout((2, 4), ("a", "b"), ("a", "b"))
both_modes = parameterized.named_parameters(("_vma", True), ("_no_vma", False))

# What may be given to psum in a rank of GRID; x is f32[2, 3] and varies over both.
DROP_IN = {
    "an_axis": lambda psum, x: psum(x, "a"),
    "a_tuple_of_axes": lambda psum, x: psum(x, ("a", "b")),
    "a_list_of_axes": lambda psum, x: psum(x, ["b", "a"]),
    "no_axes": lambda psum, x: psum(x, ()),
    "by_keyword": lambda psum, x: psum(x=x, axis_name="b"),
    "a_tree": lambda psum, x: psum({"p": x, "q": (x[0], None, [x.T])}, "b"),
    "an_empty_tree": lambda psum, x: psum({}, "b"),
    "none": lambda psum, x: psum(None, "b"),
    "a_python_int": lambda psum, x: psum(1, "b"),
    "a_python_float": lambda psum, x: psum(2.5, ("a", "b")),
    "a_python_bool": lambda psum, x: psum(True, "b"),
    "a_python_complex": lambda psum, x: psum(1j, "b"),
    "a_numpy_scalar": lambda psum, x: psum(np.float32(3), "b"),
    "a_numpy_array": lambda psum, x: psum(np.arange(3), "b"),
    "a_numpy_bfloat16": lambda psum, x: psum(np.ones(3, BF16), "b"),
    "a_constant_tree": lambda psum, x: psum((1, 2.0, np.ones(2)), "b"),
    "constants_and_tracers": lambda psum, x: psum((1, x, 2.0), "b"),
    "a_python_int_and_no_axes": lambda psum, x: psum(3, ()),
    "an_array_that_does_not_vary": lambda psum, x: psum(jnp.ones(3), "b"),
    "an_array_that_varies_over_the_other_axis": lambda psum, x: psum(psum(x, "b"), "b"),
    "an_array_that_varies_over_one_of_two": lambda psum, x: psum(
        psum(x, "a"), ("a", "b")
    ),
    "a_scalar_array": lambda psum, x: psum(x[0, 0], "a"),
    "a_weakly_typed_array": lambda psum, x: psum(jnp.asarray(2.0) * 3, "a"),
    "bools": lambda psum, x: psum(x > 0, "b"),
    "the_axis_index": lambda psum, x: psum(lax.axis_index("b"), "b"),
    "unsigned_ints": lambda psum, x: psum(x.astype(jnp.uint32), "b"),
    "short_ints": lambda psum, x: psum(x.astype(jnp.int16), "b"),
    "complex_numbers": lambda psum, x: psum(x + 1j * x, "b"),
    "zero_size": lambda psum, x: psum(x[:, :0], "b"),
    "zero_size_of_a_type_not_ours": lambda psum, x: psum(
        x[:, :0].astype(jnp.uint8), "b"
    ),
    "a_positional_axis": lambda psum, x: psum(x, 0),
    "a_positional_and_a_named_axis": lambda psum, x: psum(x, (1, "b")),
    "an_axis_that_is_not_there": lambda psum, x: psum(x, "nope"),
    "one_of_two_axes_not_there": lambda psum, x: psum(x, ("a", "nope")),
    "a_number_for_an_axis": lambda psum, x: psum(x, 1.5),
    "a_positional_axis_out_of_range": lambda psum, x: psum(x, 7),
    "no_array": lambda psum, x: psum("text", "b"),
    "an_object": lambda psum, x: psum(object(), "b"),
    "under_vmap": lambda psum, x: jax.vmap(lambda r: psum(r, "b"))(x),
    "under_vmap_positional": lambda psum, x: jax.vmap(lambda r: psum(r, 0))(x),
    "over_a_vmapped_axis": lambda psum, x: jax.vmap(
        lambda r: psum(r, "v"), axis_name="v"
    )(x),
    "over_a_vmapped_axis_and_one_of_devices": lambda psum, x: jax.vmap(
        lambda r: psum(r, ("v", "b")), axis_name="v"
    )(x),
    "a_tree_in_vmap_over_part": lambda psum, x: jax.vmap(
        lambda r, z: psum((r, z), "b"), in_axes=(0, None)
    )(x, x),
    "the_gradient_of_a_tree": lambda psum, x: jax.grad(
        lambda t: sum(jnp.sum(v**2) for v in jax.tree.leaves(psum(t, "b")))
    )({"p": x, "q": 2 * x}),
    "the_gradient_of_a_constant": lambda psum, x: jax.grad(
        lambda x: jnp.sum(x) * psum(1, "b")
    )(x),
    "groups": lambda psum, x: psum(x, "b", axis_index_groups=[[0, 3], [1, 2]]),
    "one_group": lambda psum, x: psum(x, "b", axis_index_groups=[[2, 0, 1, 3]]),
    "groups_of_one": lambda psum, x: psum(
        x, "b", axis_index_groups=[[0], [1], [2], [3]]
    ),
    "unequal_groups": lambda psum, x: psum(x, "b", axis_index_groups=[[0, 1, 3], [2]]),
    "groups_of_a_constant": lambda psum, x: psum(
        1, "b", axis_index_groups=[[0, 1], [2, 3]]
    ),
    "groups_of_two_axes": lambda psum, x: psum(
        x, ("a", "b"), axis_index_groups=[[0, 5, 2, 7], [1, 4, 3, 6]]
    ),
    "the_gradient_of_groups": lambda psum, x: jax.grad(
        lambda x: jnp.sum(psum(x, "b", axis_index_groups=[[0, 3], [1, 2]]) ** 2)
    )(x),
    "groups_under_vmap": lambda psum, x: jax.vmap(
        lambda r: psum(r, "b", axis_index_groups=[[0, 3], [1, 2]])
    )(x),
}


# What ours may raise where lax raises something else.
CLEAR_ERRORS = (NameError, TypeError, ValueError)


def outcome(case, psum, check_vma):
    """(tree, types, values) that a case gives, or the exception it raises."""
    types = []

    def fn(x):
        result = case(psum, x)
        types.append(
            jax.tree.map(
                lambda a: jax.typeof(a) if isinstance(a, jax.Array) else type(a), result
            )
        )
        return result

    x = tools.place(tools.exact(3, (8, 2, 3), np.float32), GRID)
    try:
        got = jax.jit(tools.stacked(fn, GRID, check_vma=check_vma))(x)
    except Exception as error:  # whatever lax raises, ours must too
        return error
    values = [
        sorted((p, v.tolist()) for p, v in tools.fetch(a).items())
        for a in jax.tree.leaves(got)
    ]
    return str(jax.tree.structure(got)), types[0], values


class DropIn(Contract):
    op = PSUM

    @parameterized.named_parameters(
        *((f"_{name}", case) for name, case in DROP_IN.items())
    )
    def test_as_lax(self, case):
        loose = outcome(case, lax.psum, check_vma=False)
        for check_vma in (False, True):
            with self.subTest(check_vma=check_vma):
                theirs = outcome(case, lax.psum, check_vma)
                ours = outcome(case, jax_overlap.psum, check_vma)
                if not isinstance(theirs, Exception):
                    self.assertEqual(ours, theirs)
                elif isinstance(ours, Exception):
                    self.assertIsInstance(ours, (type(theirs), *CLEAR_ERRORS))
                else:  # ours takes more than lax, so it has to be right
                    self.assertEqual(ours[2], loose[2])

    @named(
        an_axis_twice=(("b", "b"), None),
        groups_that_overlap=("b", [[0, 1], [1, 2, 3]]),
        groups_of_one_size_that_overlap=("b", [[0, 1], [1, 2]]),
        groups_of_one_size_that_leave_one_out=("b", [[0], [1], [2]]),
        an_index_twice=("b", [[0, 0], [1, 2]]),
        an_empty_group=("b", [[], [0, 1, 2, 3]]),
        a_negative_index=("b", [[0, 1], [2, -1]]),
        groups_that_leave_one_out=("b", [[0, 1], [2]]),
        groups_out_of_range=("b", [[0, 1], [2, 9]]),
    )
    def test_malformed_axes_and_groups(self, axes, groups):
        """lax lets these through to XLA, which aborts the process."""
        x = tools.exact(self.seed, (8, 3), np.float32)
        fn = tools.stacked(
            lambda x: jax_overlap.psum(x, axes, axis_index_groups=groups),
            GRID,
            check_vma=False,
        )
        with self.assertRaises(ValueError):
            jax.jit(fn).lower(x)

    def test_an_unknown_axis_is_named(self):
        for axes in ("nope", ("a", "nope")):
            for check_vma in (True, False):
                fn = tools.stacked(
                    lambda x, a=axes: jax_overlap.psum(x, a), GRID, check_vma=check_vma
                )
                with self.assertRaisesRegex(NameError, "nope"):
                    jax.eval_shape(fn, jnp.ones((8, 3)))

    @both_modes
    def test_a_tree_is_packed_into_one_call_for_each_type(self, check_vma):
        shapes = [
            ((3,), np.float32),
            ((0, 4), np.float32),
            ((), BF16),
            ((5, 7), np.float32),
            ((9,), BF16),
            ((2, 2), np.int32),
            ((1000,), np.float32),
            ((), np.float32),
        ]
        tree = {
            str(i): tools.exact(self.seed + i, (8, *shape), dtype)
            for i, (shape, dtype) in enumerate(shapes)
        }
        want = {k: np.stack([v.sum(0, dtype=v.dtype)] * 8) for k, v in tree.items()}
        self.check(
            lambda tree: jax_overlap.psum(tree, "x"),
            line(8),
            (tree,),
            want,
            calls=3,
            check_vma=check_vma,
            replicas=True,
        )

    def test_a_tree_of_which_only_part_is_ours(self):
        tree = {
            "ours": tools.exact(self.seed, (4, 10), np.float32),
            "lax": tools.exact(self.seed + 1, (4, 10), np.int16),
        }
        want = {k: np.stack([v.sum(0, dtype=v.dtype)] * 4) for k, v in tree.items()}
        fn = lambda tree: jax_overlap.psum(tree, "x")  # noqa: E731
        self.check(fn, line(4), (tree,), want, calls=1, foreign=True)

    @both_modes
    def test_groups_have_the_right_values(self, check_vma):
        """axis_index_groups, by numpy (under check_vma, refused as by lax)."""
        x = tools.exact(self.seed, (8, 100), np.float32)
        for groups in (
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[7, 0], [1, 6], [5, 2], [3, 4]],
            [[0, 1, 2, 3, 4, 5, 6, 7]],
            [[0, 2, 4], [1, 3, 5, 6], [7]],
        ):
            fn = lambda x, g=groups: jax_overlap.psum(x, "x", axis_index_groups=g)  # noqa: E731
            if check_vma:
                with self.assertRaises(NotImplementedError):
                    jax.eval_shape(tools.stacked(fn, line(8)), x)
                continue
            want = np.zeros_like(x)
            for group in groups:
                want[group] = x[group].sum(0)
            got = jax.jit(tools.stacked(fn, line(8), check_vma=False))(x)
            self.assert_stacked(got, want)

    def test_groups_within_one_axis_of_two(self):
        x = tools.exact(self.seed, (2, 4, 33), np.float32)
        groups = [[0, 2], [3, 1]]
        fn = lambda x: jax_overlap.psum(x, "b", axis_index_groups=groups)  # noqa: E731
        want = np.zeros_like(x)
        for group in groups:
            want[:, group] = x[:, group].sum(1, keepdims=True)
        got = jax.jit(tools.stacked(fn, GRID, check_vma=False))(x.reshape(8, 33))
        self.assert_stacked(got, want.reshape(8, 33))


if __name__ == "__main__":
    absltest.main()

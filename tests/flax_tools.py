"""What the tests of the nnx and of the linen layers share: meshes and tolerances."""

import collections
import contextlib
import dataclasses
import re
import tempfile

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

MATMUL_PSUM, PSUM = "jax_overlap.matmul_all_reduce", "jax_overlap.psum"
# What a pair of layers calls that is not sequence parallel, by whether it goes back.
ALL_REDUCES = {MATMUL_PSUM: 1}, {MATMUL_PSUM: 1, PSUM: 1}

OURS = re.compile('custom_call_target="(jax_overlap[.][a-z_]+)"')


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh with the axis "tp", and how the batch lies on its other axis."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    kind: AxisType

    @property
    def batch(self) -> P:
        return P("data") if "data" in self.names else P()

    @property
    def batch_spec(self) -> P | None:
        """What the layer has to be told."""
        told = self.kind == AxisType.Auto and "data" in self.names
        return self.batch if told else None

    @contextlib.contextmanager
    def mesh(self):
        mesh = tools.Layout(self.shape, self.names, ("tp",), axis_type=self.kind).mesh
        with jax.set_mesh(mesh):
            yield mesh


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LINE = Place((8,), ("tp",), AUTO)
GRID = Place((2, 4), ("data", "tp"), AUTO)
PLACES = {
    "auto_line": LINE,
    "explicit_line": Place((8,), ("tp",), EXPLICIT),
    "auto_grid": GRID,
    "explicit_grid": Place((2, 4), ("data", "tp"), EXPLICIT),
    "explicit_grid_tp_first": Place((4, 2), ("tp", "data"), EXPLICIT),
}


def inputs(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def at_float64(fn, *trees):
    """fn(*trees) computed in float64, as numpy."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), trees)
        return jax.tree.map(np.asarray, fn(*wide))


def assert_as_exact_as(test, got, plain, exact, dtype=np.float32) -> None:
    """`got` is as near to the float64 values as the plain layer comes in `dtype`.

    Both round in different places, so eight times its error is allowed; and one
    roundoff of the largest value, as the plain layer's error may happen to be 0.
    """
    got, plain, exact = (dict(leaves(tree)) for tree in (got, plain, exact))
    test.assertEqual(list(got), list(exact))
    unit = tools.ROUNDOFF[np.dtype(dtype)]
    for name, want in exact.items():
        test.assertEqual(got[name].shape, want.shape, name)
        test.assertEqual(got[name].dtype, plain[name].dtype, name)
        error = np.abs(tools.wide(got[name]) - want).max()
        theirs = np.abs(tools.wide(plain[name]) - want).max()
        scale = max(np.abs(want).max(), 1.0)
        test.assertLessEqual(error, 8 * theirs + 4 * unit * scale, name)


def leaves(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf)


def compiled(fn, *args) -> str:
    return jax.jit(fn).lower(*args).compile().as_text()


def ours_in(hlo: str) -> dict[str, int]:
    """How often each of our targets is called in a compiled program."""
    return collections.Counter(OURS.findall(hlo))


def assert_collectives(test, hlo: str, ours: dict, theirs: dict | None = None) -> None:
    """The program has so many calls of ours, and of XLA's collectives; no others."""
    kinds = collections.Counter(line.split()[0] for line in tools.collectives(hlo))
    test.assertEqual(ours_in(hlo), ours)
    test.assertEqual(kinds, theirs or {})


def error_of(test, fn) -> str:
    """The text of the ValueError or TypeError that fn() raises, on one line."""
    with test.assertRaises((ValueError, TypeError)) as caught:
        fn()
    return re.sub(r"\s+", " ", str(caught.exception))


def through_orbax(source, target):
    """What a model with the tree `target` reads of a checkpoint with `source`."""
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    with (
        tempfile.TemporaryDirectory() as folder,
        ocp.StandardCheckpointer() as checkpointer,
    ):
        checkpointer.save(f"{folder}/it", source)
        checkpointer.wait_until_finished()
        return checkpointer.restore(f"{folder}/it", wanted)

"""What the tests of `jax_overlap.overlap` share.

Data are small integers, so results are compared exactly, whatever the order of
summation; the function as it was is what they are compared with.
"""

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

import jax_overlap

MESH = jax.sharding.Mesh(jax.devices()[:4], ("x",))
GRID = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))

_OF_LAX = ("psum", "psum_invariant", "reduce_scatter", "all_gather", "all_to_all")


X = P("x")  # cut along the first dimension


def shard(fn, mesh=MESH, in_specs=X, out_specs=X, check_vma=True, **kw):
    return jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **kw
    )


def exact(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(tools.exact(seed + len(shape) + shape[0], shape, dtype))


def to_varying(x, axes=("x",)):
    """Marks `x` as varying where types say so, that is under check_vma=True."""
    tracked = all(a in jax.typeof(lax.axis_index(a)).mat.varying for a in axes)
    if not tracked:
        return x
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def both(test):
    """Runs a test with check_vma=True and False."""
    return parameterized.named_parameters(("checked", True), ("unchecked", False))(test)


def quick(fn):
    """`jax.jit` that compiles with little effort."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def equations(jaxpr):
    """All equations, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def names_of(fn, *args) -> list[str]:
    """The primitives of `fn`."""
    return [e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)]


def ours(names) -> list[str]:
    """The ops of this library among primitives: "psum" for "jax_overlap_psum"."""
    found = [n.removeprefix("jax_overlap_") for n in names if "jax_overlap_" in n]
    return [name for name in found if name != "pvary"]


def of_lax(names) -> list[str]:
    """The collectives of lax among primitives that there is an op for."""
    return [name for name in names if name in _OF_LAX]


def with_gradients(fn, args):
    """(results, gradients) of `fn`, as a function of the same arguments."""
    where = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(*args):
        outs = fn(*args)
        weighted = (
            jnp.sum(out * (1 + jnp.arange(out.size).reshape(out.shape) % 3))
            for out in jax.tree.leaves(outs)
        )
        return sum(weighted), outs

    return jax.grad(loss, tuple(where), has_aux=True)


class OverlapCase(parameterized.TestCase):
    def assert_same(self, got, want):
        self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            self.assertEqual(a.dtype, b.dtype)

    def check(self, fn, args, became, grad=True, left=()):
        """Report, types, values and gradients of `overlap(fn)`, against `fn`."""
        new = jax_overlap.overlap(fn)
        self.assertEqual([row.became for row in new.report(*args)], list(became))
        before, after = (jax.make_jaxpr(f)(*args) for f in (fn, new))
        names = [e.primitive.name for e in equations(after.jaxpr)]
        self.assertCountEqual(ours(names), [b for b in became if b])
        self.assertCountEqual(of_lax(names), left)
        self.assertEqual(after.out_avals, before.out_avals)
        self.assertEqual(after.effects, before.effects)
        jex.check_jaxpr(after.jaxpr)
        if grad:
            programs = [with_gradients(fn, args), with_gradients(new, args)]
            programs.append(jax_overlap.overlap(programs[0]))
        else:
            programs = [fn, new]
        # One compilation is quicker than several.
        want, *results = quick(lambda *args: [f(*args) for f in programs])(*args)
        for got in results:
            self.assert_same(got, want)
        return want

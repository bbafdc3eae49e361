"""Gradients of small tensor-parallel networks agree with fp64, to a derived bound.

The network is plain: blocks of RMS norm, gated matmul and matmul back, with residuals.
Its gradient's jaxpr is run in float64 by numpy, and beside each value goes a bound on
how far the same value may be off in float32 (`Bounded`). A sharded network computes
the same sums of the same products; only the order in which it adds them is its own,
and the bound holds for every order.
"""

import dataclasses
import functools
from collections.abc import Callable

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import Layout
from jax import lax
from jax.sharding import PartitionSpec as P
from op_contract_matmul_forms import dot_general

import jax_overlap

U = 2.0**-24  # unit roundoff of float32

ROWS, WIDTH, HIDDEN, BLOCKS = 16, 16, 24, 2


# ------------------------------------------------------------------- the bound
class Bounded:
    """The right value, and how far that of a float32 program may be off.

    count: how many roundings, each of a relative error of U, the last operation adds
    to what it was given. Together they are off by count * U / (1 - count * U), which
    Higham calls gamma (Accuracy and Stability of Numerical Algorithms, 3.1).
    """

    def __init__(self, value, off=0.0, count=0, size=None):
        self.value = np.asarray(value, np.float64)
        size = np.abs(self.value) + off if size is None else size
        off = off + count * U / (1 - count * U) * size
        self.off = np.broadcast_to(off, self.value.shape)

    @property
    def size(self):
        """The most that the absolute value may be."""
        return np.abs(self.value) + self.off


# XLA may write an operation of elements as up to four: a / b as a * (1 / b), say.
ELEMENT = 4


def _add(a, b, sign=1, **_):
    return Bounded(a.value + sign * b.value, a.off + b.off, ELEMENT)


def _mul(a, b, **_):
    off = a.size * b.size - np.abs(a.value * b.value)
    return Bounded(a.value * b.value, off, ELEMENT)


def _div(a, b, **_):
    value = a.value / b.value
    off = (a.off + np.abs(value) * b.off) / (np.abs(b.value) - b.off)
    return Bounded(value, off, ELEMENT)


def _sqrt(a, **_):
    root = np.sqrt(a.value)  # |sqrt(a) - sqrt(b)| = |a - b| / (sqrt(a) + sqrt(b))
    return Bounded(root, a.off / root, ELEMENT)


def _integer_pow(a, y, **_):
    value, far = a.value**y, np.abs(a.value) + (a.off if y > 0 else -a.off)
    return Bounded(value, np.abs(far**y - np.abs(value)), ELEMENT)


def _dot(a, b, dimension_numbers, **_):
    """K products, each rounded, and K - 1 additions, in any order.

    Where a program adds two such dots (those of a product's derivative) it may do it
    in one go, so that a product takes part in twice as many.
    """
    dot = functools.partial(dot_general, dims=dimension_numbers)
    value, size = dot(a.value, b.value), dot(a.size, b.size)
    terms = np.prod([a.value.shape[d] for d in dimension_numbers[0][0]])
    off = size - dot(np.abs(a.value), np.abs(b.value))
    return Bounded(value, off, 2 * terms, size)


def _reduce_sum(a, axes, **_):
    terms = np.prod([a.value.shape[d] for d in axes])
    sums = (np.sum(x, tuple(axes)) for x in (a.value, a.off, a.size))
    value, off, size = sums
    return Bounded(value, off, terms, size)


def _broadcast(x, shape, broadcast_dimensions):
    ones = [1] * len(shape)
    for size, d in zip(x.shape, broadcast_dimensions, strict=True):
        ones[d] = size
    return np.broadcast_to(x.reshape(ones), shape)


def _slice(x, start_indices, limit_indices, **_):
    return x[tuple(map(slice, start_indices, limit_indices))]


def _pad(x, padding_config):
    """With zeros; where less than nothing is added, something is cut off."""
    for axis, (low, high, _) in enumerate(padding_config):
        kept = x.take(range(max(0, -low), x.shape[axis] + min(0, high)), axis)
        ends = [(0, 0)] * x.ndim
        ends[axis] = max(0, low), max(0, high)
        x = np.pad(kept, ends)
    return x


def _moved(function):
    """A rule for what only moves numbers."""
    return lambda a, **params: Bounded(
        function(a.value, **params), function(a.off, **params)
    )


RULES = {
    "add": _add,
    "add_any": _add,
    "sub": functools.partial(_add, sign=-1),
    "mul": _mul,
    "div": _div,
    "sqrt": _sqrt,
    "integer_pow": _integer_pow,
    "square": lambda a, **_: _integer_pow(a, 2),
    "neg": lambda a, **_: Bounded(-a.value, a.off),
    "dot_general": _dot,
    "reduce_sum": _reduce_sum,
    "broadcast_in_dim": _moved(
        lambda x, shape, broadcast_dimensions, **_: _broadcast(
            x, shape, broadcast_dimensions
        )
    ),
    "transpose": _moved(lambda x, permutation, **_: x.transpose(permutation)),
    "reshape": _moved(lambda x, new_sizes, **_: x.reshape(new_sizes)),
    "slice": _moved(_slice),
    "pad": lambda a, zero, padding_config, **_: _moved(_pad)(
        a, padding_config=padding_config
    ),
    "squeeze": _moved(lambda x, dimensions, **_: np.squeeze(x, tuple(dimensions))),
    "convert_element_type": _moved(lambda x, **_: x),
    "copy": _moved(lambda x, **_: x),
}


def bounded(fn, *args):
    """`fn` of float32 arrays, run in float64: a tree of `Bounded`s."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = [Bounded(a) for a in jax.tree.leaves(args)]
    return jax.tree.unflatten(jax.tree.structure(shape), _run(closed, leaves))


def _run(closed, args):
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))
    env |= dict(zip(jaxpr.constvars, map(Bounded, closed.consts), strict=True))
    read = lambda v: Bounded(v.val) if hasattr(v, "val") else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if inner := eqn.params.get("jaxpr"):
            results = _run(inner, operands)
        else:
            results = [RULES[eqn.primitive.name](*operands, **eqn.params)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


# ----------------------------------------------------------------- the networks
# All constants are numbers of float32, so that float64 runs with the same.
def norm(x, gain):
    mean = jnp.sum(x * x, -1, keepdims=True) * (1 / WIDTH)
    return x / jnp.sqrt(mean + 2.0**-10) * gain


def gated(gate, up):
    """Smooth, and of operations that are rounded as they should be."""
    return gate / jnp.sqrt(1 + gate * gate) * up


def plain_block(x, w):
    u = norm(x, w["gain"])
    return x + gated(u @ w["gate"], u @ w["up"]) @ w["down"]


def plain_loss(x, params):
    for i in range(BLOCKS):
        x = plain_block(x, jax.tree.map(lambda a, i=i: a[i], params))
    return jnp.sum(x * x) * 0.5


def sequence_block(x, w, **kw):
    """Of a part of the rows; the gathered ones exist in the matmuls only."""
    u = norm(x, w["gain"])
    hidden = jax_overlap.all_gather_matmul(u, (w["gate"], w["up"]), "tensor", **kw)
    return x + jax_overlap.matmul_reduce_scatter(gated(*hidden), w["down"], "tensor")


def all_reduce_block(x, w):
    u = norm(x, w["gain"])
    hidden = gated(u @ w["gate"], u @ w["up"])
    return x + jax_overlap.matmul_all_reduce(hidden, w["down"], "tensor")


def summed_block(x, w, add=lambda y: jax_overlap.psum(y, "tensor")):
    u = norm(x, w["gain"])
    return x + add(gated(u @ w["gate"], u @ w["up"]) @ w["down"])


@dataclasses.dataclass(frozen=True)
class Form:
    """A block, whether a rank has a part of the rows there, and ops of its program."""

    block: Callable
    by_rows: bool
    ops: tuple[str, ...]


FORMS = {
    "sequence": Form(
        sequence_block, True, ("all_gather_matmul", "matmul_reduce_scatter")
    ),
    "sequence_gathered_again": Form(
        functools.partial(sequence_block, save_gathered=False),
        True,
        ("all_gather_matmul", "matmul_reduce_scatter", "all_gather"),
    ),
    "all_reduce": Form(all_reduce_block, False, ("matmul_all_reduce",)),
    "psum": Form(summed_block, False, ("psum",)),
}
GRID = Layout((2, 4), ("data", "tensor"), ("tensor",), order=(3, 1, 4, 0, 5, 7, 2, 6))
MESHES = {
    "tensor_first": Layout((4, 2), ("tensor", "data"), ("tensor",)),
    "no_data": Layout((8,), ("tensor",), ("tensor",), order=(7, 2, 0, 4, 6, 1, 3, 5)),
    "three_axes": Layout((2, 2, 2), ("data", "other", "tensor"), ("tensor",)),
}


def sharded_loss(form, layout, *, check_vma=True, partly=False, inside=False):
    """The loss of the whole batch, by blocks in a scan, each computed again backward.

    partly: only "tensor" is manual, XLA takes care of the others.
    inside: not the loss but its gradients, taken by each rank.
    """
    data = ("data",) if "data" in layout.names and not partly else ()
    rows = (*data, "tensor") if form.by_rows else data
    specs = {
        "gain": P(),
        "gate": P(None, None, "tensor"),
        "up": P(None, None, "tensor"),
        "down": P(None, "tensor"),
    }

    def local(x, params):
        step = lambda x, w: (jax.checkpoint(form.block)(x, w), None)  # noqa: E731
        x, _ = lax.scan(step, x, params)
        loss = jnp.sum(x * x) * 0.5
        return lax.psum(loss, rows) if rows else loss

    in_specs = (P(rows or None), specs)
    return jax.shard_map(
        jax.grad(local, (0, 1)) if inside else local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=in_specs if inside else P(),
        check_vma=check_vma,
        **({"axis_names": {"tensor"}} if partly else {}),
    )


each_form = parameterized.named_parameters((f"_{n}", f) for n, f in FORMS.items())


class Gradients(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        make = np.random.default_rng(7)
        shapes = {
            "gain": (BLOCKS, WIDTH),
            "gate": (BLOCKS, WIDTH, HIDDEN),
            "up": (BLOCKS, WIDTH, HIDDEN),
            "down": (BLOCKS, HIDDEN, WIDTH),
        }
        normal = lambda *s: make.standard_normal(s).astype(np.float32)  # noqa: E731
        cls.x = normal(ROWS, WIDTH)
        cls.params = {k: normal(*s) / np.float32(4) for k, s in shapes.items()}
        cls.tangents = (normal(ROWS, WIDTH), {k: normal(*s) for k, s in shapes.items()})
        cls.args = (cls.x, cls.params)
        cls.right = bounded(jax.value_and_grad(plain_loss, (0, 1)), *cls.args)

    def excess(self, got, right):
        """By how much each number is off, as a multiple of what it may be off."""
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True)
        off = [(np.abs(np.asarray(g, np.float64) - b.value), b.off) for g, b in leaves]
        return [float(np.max(o / limit)) for o, limit in off]

    def assert_right(self, got, right):
        self.assertLess(max(self.excess(got, right)), 1)

    def compiled(self, fn, form, native=True):
        compiled = jax.jit(fn).lower(*self.args).compile()
        for op in form.ops:
            found = tools.custom_calls(compiled.as_text(), f"jax_overlap.{op}")
            self.assertEqual(found > 0, native, op)
        return compiled

    # ------------------------------------------------------------ first order
    @parameterized.named_parameters(
        (f"_{n}_{'vma' if vma else 'no_vma'}", f, vma)
        for n, f in FORMS.items()
        for vma in (True, False)
    )
    def test_on_a_mesh_of_data_and_tensor(self, form, check_vma):
        """The devices in an order of their own; the gradient is that of shard_map."""
        loss = sharded_loss(form, GRID, check_vma=check_vma)
        got = self.compiled(jax.value_and_grad(loss, (0, 1)), form)(*self.args)
        self.assert_right(got, self.right)

    @each_form
    def test_taken_inside_of_shard_map(self, form):
        grads = sharded_loss(form, GRID, inside=True)
        got = self.compiled(grads, form)(*self.args)
        self.assert_right(got, self.right[1])

    @parameterized.named_parameters(
        (f"_{n}_{mesh}", f, MESHES[mesh])
        for n, f in FORMS.items()
        for mesh in MESHES
        if (n in ("sequence", "all_reduce")) or mesh == "no_data"
    )
    def test_on_other_meshes(self, form, layout):
        loss = jax.value_and_grad(sharded_loss(form, layout), (0, 1))
        self.assert_right(self.compiled(loss, form)(*self.args), self.right)

    @parameterized.named_parameters(
        (f"_{n}_{'vma' if vma else 'no_vma'}", FORMS[n], vma)
        for n in ("sequence", "all_reduce", "psum")
        for vma in (True, False)
    )
    def test_in_a_partly_manual_shard_map(self, form, check_vma):
        """The data axis is left to XLA, and so are the ops."""
        loss = sharded_loss(form, GRID, check_vma=check_vma, partly=True)
        fn = jax.value_and_grad(loss, (0, 1))
        compiled = self.compiled(fn, form, native=False)
        self.assert_right(compiled(*self.args), self.right)

    # ----------------------------------------------------------- second order
    @parameterized.named_parameters(
        ("_sequence_vma", FORMS["sequence"], True),
        ("_sequence_no_vma", FORMS["sequence_gathered_again"], False),
        ("_all_reduce_vma", FORMS["all_reduce"], True),
        ("_all_reduce_no_vma", FORMS["all_reduce"], False),
        ("_psum_no_vma", FORMS["psum"], False),
    )
    def test_second_order(self, form, check_vma):
        """The Hessian times a vector: reverse over reverse, forward over reverse."""

        def twice(loss):
            grads = jax.grad(loss, (0, 1))

            def along(args, tangents):
                each = jax.tree.map(jnp.vdot, grads(*args), tangents)
                return sum(jax.tree.leaves(each))

            return lambda args, tangents: (
                jax.grad(along)(args, tangents),
                jax.jvp(grads, args, tangents),
            )

        right = bounded(twice(plain_loss), self.args, self.tangents)
        loss = sharded_loss(form, GRID, check_vma=check_vma)
        got = jax.jit(twice(loss))(self.args, self.tangents)
        self.assert_right(got, right)

    # ----------------------------------------- the bound tells right from wrong
    def test_the_bound_is_of_the_size_of_float32(self):
        """At most 0.2 % of the largest entry, so that no wrong gradient hides in it."""
        for right in jax.tree.leaves(self.right):
            relative = np.max(right.off) / np.max(np.abs(right.value))
            self.assertLess(relative, 2e-3)

    def test_deliberate_faults_exceed_it(self):
        @jax.custom_vjp
        def one_way(y):
            return jax_overlap.psum(y, "tensor")

        one_way.defvjp(lambda y: (one_way(y), None), lambda _, ct: (ct,))
        rank = functools.partial(lax.axis_index, "tensor")
        total = functools.partial(jax_overlap.psum, axis_name="tensor")
        faults = {
            "no psum": lambda y: y,
            "no psum backward": one_way,
            "a rank left out": lambda y: total(jnp.where(rank() == 2, 0, y)),
            "a rank twice": lambda y: total(jnp.where(rank() == 2, 2 * y, y)),
            "in bfloat16": lambda y: total(y.astype(jnp.bfloat16)).astype(y.dtype),
        }
        for name, add in faults.items():
            block = functools.partial(summed_block, add=add)
            form = Form(block, by_rows=False, ops=())
            loss = sharded_loss(form, GRID, check_vma=False)
            _, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(*self.args)
            with self.subTest(name):
                self.assertGreater(min(self.excess(grads, self.right[1])), 1)


if __name__ == "__main__":
    absltest.main()

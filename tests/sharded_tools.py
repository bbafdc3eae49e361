"""What the tests of jax_overlap.sharded share: calls, meshes, where arrays lie."""

import contract_tools as tools
import jax
import numpy as np
from absl.testing import parameterized
from contract_tools import Layout, line
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_overlap import sharded

RS, AR, AG, A2A = (
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather_matmul",
    "all_to_all",
)
EXPLICIT = {"axis_type": AxisType.Explicit}
ORDER = (3, 1, 4, 0, 5, 7, 2, 6)
GRID = Layout((2, 4), ("dp", "tp"), ("tp",), **EXPLICIT)
AUTO_GRID = Layout((2, 4), ("dp", "tp"), ("tp",))
LAYOUTS = {
    "line": line(4),
    "line_explicit": line(4, **EXPLICIT),
    "line_permuted": line(8, order=ORDER),
    "grid": AUTO_GRID,
    "grid_explicit": GRID,
    "grid_permuted": Layout((4, 2), ("tp", "dp"), ("tp",), order=ORDER, **EXPLICIT),
    "grid_auto_permuted": Layout((4, 2), ("tp", "dp"), ("tp",), order=ORDER),
    "both_axes": Layout((2, 4), ("tp", "sp"), ("sp", "tp"), **EXPLICIT),
}
X, W = (2, 16, 16), (16, 24)


class Case:
    """A call on a mesh of this layout, and where arrays lie before and after."""

    def __init__(self, op, layout, **options):
        self.op, self.layout, self.options = op, layout, options
        self.dp = "dp" if "dp" in layout.names else None
        self.axis = tp = layout.axis_name
        self.x, self.w, self.out = {
            RS: (P(self.dp, None, tp), P(tp, None), P(self.dp, tp, None)),
            AR: (P(self.dp, None, tp), P(tp, None), P(self.dp, None, None)),
            AG: (P(self.dp, tp, None), P(None, tp), P(self.dp, None, tp)),
            A2A: (P(self.dp, tp, None), None, P(self.dp, None, tp)),
        }[op]
        if op in (RS, AG):
            option = {RS: "scatter_dimension", AG: "gather_dimension"}[op]
            self.options = {option: 1, **options}

    def told(self):
        """What Auto axes have to be told: only the batch, the rest is plain."""
        auto = self.layout.axis_type == AxisType.Auto
        return {"x_spec": P(self.dp)} if auto and self.dp else {}

    def operands(self, seed=0):
        arrays = [tools.exact(seed + i, s, np.float32) for i, s in enumerate((X, W))]
        return arrays[:1] if self.op == A2A else arrays

    def place(self, arrays):
        specs = (self.x, self.w)[: len(arrays)]
        return [self.put(a, s) for a, s in zip(arrays, specs, strict=True)]

    def put(self, a, spec):
        return jax.device_put(a, NamedSharding(self.layout.mesh, spec))

    def call(self, *arrays, **options):
        fn = getattr(sharded, self.op)
        options = {**self.options, **self.told(), **options}
        if self.op == A2A:
            return fn(*arrays, self.axis, 2, 1, **options)
        return fn(*arrays, self.axis, **options)

    def numpy(self, *arrays):
        return arrays[0] if self.op == A2A else arrays[0] @ arrays[1]


def calls(hlo: str, op: str) -> int:
    return tools.custom_calls(hlo, f"jax_overlap.{op}")


def compiled(fn, *args) -> str:
    return jax.jit(fn).lower(*args).compile().as_text()


class TestCase(parameterized.TestCase):
    def assert_lies(self, y, case, spec):
        want = NamedSharding(case.layout.mesh, spec)
        self.assertTrue(y.sharding.is_equivalent_to(want, y.ndim), y.sharding)
        if case.layout.axis_type == AxisType.Explicit:
            self.assertEqual(jax.typeof(y), jax.typeof(case.put(np.asarray(y), spec)))

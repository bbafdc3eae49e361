"""What the tests of jax_overlap.flax.dot_general share: meshes, and what to count."""

import contract_tools as tools
import jax
from jax.sharding import AxisType, NamedSharding

RS, AR, AG = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"
EXPLICIT = {"axis_type": AxisType.Explicit}
LINE = tools.line(4, **EXPLICIT)
GRID = tools.Layout((2, 4), ("dp", "tp"), ("tp",), **EXPLICIT)
TURNED = tools.Layout(
    (4, 2), ("tp", "dp"), ("tp",), order=(3, 1, 4, 0, 5, 7, 2, 6), **EXPLICIT
)


def put(a, spec):
    return jax.device_put(a, NamedSharding(jax.sharding.get_mesh(), spec))


def custom_calls(hlo: str) -> dict[str, int]:
    ops = (RS, AR, AG, "psum", "psum_scatter", "all_gather")
    counts = {op: tools.custom_calls(hlo, f"jax_overlap.{op}") for op in ops}
    return {op: n for op, n in counts.items() if n}


def compiled(fn, *args) -> str:
    return jax.jit(fn).lower(*args).compile().as_text()

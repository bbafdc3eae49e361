"""Which devices the tests may use, and in which meshes: all follows from their number.

On CPU eight devices of one process are there, and a mesh may take any of them. On
GPUs there are as many as there are; if they belong to several processes, every mesh
has to hold all of them, as every process takes part in every program.
"""

import dataclasses
import functools
import math

import cpu_devices
import jax
import numpy as np
from jax.sharding import AxisType

import jax_overlap.testing

if cpu_devices.DEVICES is not None:  # known without starting JAX's backend
    COUNT, WHOLE = cpu_devices.DEVICES, False
else:
    jax_overlap.testing.initialize()
    COUNT, WHOLE = jax.device_count(), jax.process_count() > 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the axes of it over which an op acts (major first)."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    axes: tuple[str, ...]
    order: tuple[int, ...] | None = None  # index of the device at each position
    axis_type: AxisType = AxisType.Auto

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def team(self) -> int:
        return int(np.prod([self.shape[self.names.index(a)] for a in self.axes]))

    @property
    def axis_name(self):
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        devices = np.array(
            jax.devices()[: self.size]
            if self.order is None
            else [jax.devices()[i] for i in self.order]
        )
        types = (self.axis_type,) * len(self.names)
        return jax.sharding.Mesh(devices.reshape(self.shape), self.names, types)

    @property
    def teams(self) -> np.ndarray:
        """Positions of the ranks of each team, in rank order: [teams, team]."""
        acted = [self.names.index(a) for a in self.axes]
        others = [i for i in range(len(self.names)) if i not in acted]
        grid = np.arange(self.size).reshape(self.shape)
        return grid.transpose(others + acted).reshape(-1, self.team)

    def __str__(self) -> str:
        text = "x".join(map(str, self.shape)) + "_over_" + "".join(self.axes)
        text += "" if self.order is None else "_order_" + "".join(map(str, self.order))
        return text + ("" if self.axis_type == AxisType.Auto else "_explicit")


def line(n: int, **kw) -> Layout:
    return Layout((n,), ("x",), ("x",), **kw)


LAYOUTS_OF_EIGHT = (
    line(8, order=(3, 1, 4, 0, 5, 7, 2, 6)),
    line(3, order=(7, 2, 5)),
    line(4, axis_type=AxisType.Explicit),
    Layout((2, 4), ("a", "b"), ("a",)),
    Layout((2, 4), ("a", "b"), ("b",)),
    Layout((2, 4), ("a", "b"), ("a", "b")),
    Layout((2, 4), ("a", "b"), ("b", "a")),
    Layout((3, 2), ("a", "b"), ("a",), order=(6, 1, 5, 0, 3, 2)),
    Layout((4, 2), ("a", "b"), ("b",), axis_type=AxisType.Explicit),
    Layout((1, 5), ("a", "b"), ("a", "b")),
    Layout((2, 2, 2), ("a", "b", "c"), ("b",)),
    Layout((2, 2, 2), ("a", "b", "c"), ("a", "c")),
    Layout((2, 2, 2), ("a", "b", "c"), ("c", "a", "b"), order=(7, 6, 5, 4, 3, 2, 1, 0)),
)
NODE_SPLITS_OF_EIGHT = (
    (8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (5, 1), (4, 2), (3, 1)
)  # fmt: skip


def ranks(wanted: int, count: int = COUNT, whole: bool = WHOLE) -> int:
    """How many ranks a test has that would like to have `wanted`."""
    return count if whole else min(wanted, count)


def team_sizes(wanted, count: int = COUNT, whole: bool = WHOLE) -> tuple[int, ...]:
    """Those of the wanted numbers of ranks that can be had; at least one."""
    able = [n for n in wanted if _fits(n, count, whole)]
    return tuple(able) or (count,)


def _fits(n: int, count: int, whole: bool) -> bool:
    return n == count if whole else n <= count


def divisors(n: int) -> tuple[int, ...]:
    """The sizes of nodes into which n ranks can be split, largest first."""
    return tuple(k for k in range(n, 0, -1) if n % k == 0)


def node_splits(count: int = COUNT, whole: bool = WHOLE) -> tuple[tuple[int, int], ...]:
    """(ranks, ranks in a node)."""
    if count == 8 and not whole:
        return NODE_SPLITS_OF_EIGHT
    return tuple((count, k) for k in divisors(count))


def permuted(n: int) -> tuple[int, ...]:
    """An order of n devices in which most are not at their own place."""
    step = max(k for k in range(1, max(2, n // 2 + 1)) if math.gcd(k, n) == 1)
    return tuple((step * i + 1) % n for i in range(n))


def grid(*axes: str, wanted: int = 8, n: int | None = None, **kw) -> Layout:
    """A mesh of "a" x "b" as square as may be, of `ranks(wanted)` devices: 2 x 4."""
    n = ranks(wanted) if n is None else n
    rows = max(k for k in divisors(n) if k * k <= n)
    return Layout((rows, n // rows), ("a", "b"), axes, **kw)


def alone() -> Layout:
    """A mesh in which each rank is a team by itself, over "x"."""
    return Layout((COUNT, 1), ("y", "x"), ("x",)) if WHOLE else line(1)


def groups(n: int) -> tuple[list[list[int]], ...]:
    """The indices of n ranks, not in their order, in groups of each possible size."""
    order = (3, 1, 0, 2) if n == 4 else permuted(n)
    return tuple(
        [list(order[i : i + size]) for i in range(0, n, size)] for size in divisors(n)
    )


def layouts(count: int = COUNT, whole: bool = WHOLE) -> tuple[Layout, ...]:
    """Lines and meshes over each axis, in the order of the devices and in others."""
    found = [
        layout
        for layout in LAYOUTS_OF_EIGHT
        if _fits(layout.size, count, whole) and max(layout.order or (0,)) < count
    ]
    if count != 8:
        order = permuted(count)
        found += [line(count), line(count, order=order)]
        found.append(line(count, axis_type=AxisType.Explicit))
        factors = [k for k in divisors(count) if 1 < k < count] or [1]
        for rows in factors:
            shape, names = (rows, count // rows), ("a", "b")
            found += [Layout(shape, names, axes) for axes in (("b",), ("a", "b"))]
            found.append(Layout(shape, names, ("b", "a"), order=order))
            if rows > 1:
                explicit = AxisType.Explicit
                found.append(Layout(shape, names, ("a",), axis_type=explicit))
    return tuple({str(layout): layout for layout in found}.values())


LAYOUTS = layouts()

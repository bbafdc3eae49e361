"""Teams: which devices take part in a collective, and which of them share a node."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_overlap import config


@dataclasses.dataclass(frozen=True)
class Team:
    """The groups of a collective over mesh axes.

    Attributes:
      groups: logical device ids (positions in the flattened mesh), int64
        [number of groups, ranks]; the position in a group is the rank. None if
        the groups differ in size.
      ranks: devices in a group; 0 if the groups differ in size.
      node_size: ranks in a node; divides `ranks`.
      note: how the nodes came about, if that is not plain.
      reaches_all: whether a rank's stores reach all others, not only its node.
    """

    groups: np.ndarray | None
    ranks: int
    node_size: int
    note: str = ""
    reaches_all: bool = True

    @property
    def nodes(self) -> int:
        """The number of nodes of a group."""
        return self.ranks // self.node_size


def make_team(mesh, axes, axis_index_groups=None, reach=None) -> Team:
    """The team of a collective over `axes` of `mesh`, in the order of `axes`.

    Args:
      mesh: a concrete or abstract mesh.
      axes: names of mesh axes; the first varies slowest in the rank.
      axis_index_groups: positions along `axes`, a list a group, as in `jax.lax`.
      reach: for each position in the mesh, the positions to which its stores reach;
        None: all.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    ranks = math.prod(sizes[a] for a in axes)
    ids = np.arange(mesh.size, dtype=np.int64).reshape(mesh.axis_sizes)
    source = [mesh.axis_names.index(a) for a in axes]
    ids = np.moveaxis(ids, source, range(ids.ndim - len(axes), ids.ndim))
    groups = ids.reshape(-1, ranks)
    if axis_index_groups is not None:
        if len({len(g) for g in axis_index_groups}) > 1:
            return Team(None, 0, 1)
        groups = np.concatenate([groups[:, list(g)] for g in axis_index_groups])
        ranks = groups.shape[1]
    if reach is None or all(set(g) <= reach[p] for g in groups for p in g):
        return Team(groups, ranks, *_node_size(ranks))
    return Team(groups, ranks, *_nodes_by_reach(groups, reach), reaches_all=False)


def _node_size(ranks: int) -> tuple[int, str]:
    """The ranks in a node on one host, and a note."""
    wanted = config.NODE_SIZE.read()
    if wanted is None:
        return ranks, ""
    if wanted >= ranks:
        return ranks, f"{config.NODE_SIZE.name}={wanted}"
    if ranks % wanted:
        return ranks, (
            f"one node, as {config.NODE_SIZE.name}={wanted} "
            f"does not divide {ranks} ranks"
        )
    return wanted, f"{config.NODE_SIZE.name}={wanted}"


def _nodes_by_reach(groups, reach) -> tuple[int, str]:
    """The largest nodes of consecutive ranks whose stores reach each other."""
    ranks = groups.shape[1]
    sizes = [n for n in range(ranks - 1, 0, -1) if ranks % n == 0]
    wanted = config.NODE_SIZE.read()
    if wanted is not None:
        sizes = [n for n in sizes if n <= wanted]
    for size in sizes:
        nodes = groups.reshape(-1, size)
        if all(set(node) <= reach[p] for node in nodes for p in node):
            return size, f"stores reach {size} ranks"
    return 1, "stores reach one rank"

"""Who computes, sends and adds which slice in which order: pure functions, and words.

The functions have a twin in ffi/core/schedule.h, by which the algorithms go. Slice s
belongs to rank s. `_timeline.py` has a model of what the orders are good for.
"""

from __future__ import annotations


# -------------------------------------------------------------------- slices
def slice_of(n: int, parts: int, index: int, align: int = 1) -> range:
    """The part of `n` elements that belongs to `index` of `parts`.

    Parts start at multiples of `align`, so only the last that is not empty is ragged.

    Example:
      >>> [slice_of(10, 4, index) for index in range(4)]
      [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    """
    step = -(-n // parts)
    step = -(-step // align) * align
    return range(min(n, step * index), min(n, step * (index + 1)))


def sub_slice_of(part: range, parts: int, index: int, align: int = 1) -> range:
    """The same of a slice: `index` of its `parts`, as elements of the whole.

    Example:
      >>> [sub_slice_of(range(3, 6), 2, index) for index in range(2)]
      [range(3, 5), range(5, 6)]
    """
    inner = slice_of(len(part), parts, index, align)
    return range(part.start + inner.start, part.start + inner.stop)


# -------------------------------------------------------------------- orders
def rotated(rank: int, k: int, size: int) -> int:
    """The k-th peer that `rank` serves, k = 1 .. size-1: no peer is served by two."""
    return (rank + k) % size


def own_first(rank: int, step: int, size: int) -> int:
    """The slice that `rank` computes in `step`, where operands are gathered.

    The own slice needs nothing; the others arrive meanwhile (arXiv:2604.24013).

    Example:
      >>> [own_first(2, step, 4) for step in range(4)]
      [2, 1, 0, 3]
    """
    return (rank + size - step) % size


def own_last(rank: int, step: int, size: int) -> int:
    """The slice that `rank` computes in `step`, where results are scattered.

    Nobody waits for the own slice; the others leave meanwhile (arXiv:2604.24013).

    Example:
      >>> [own_last(2, step, 4) for step in range(4)]
      [1, 0, 3, 2]
    """
    return (rank + size - 1 - step) % size


def own_first_step(rank: int, slice: int, size: int) -> int:
    """The step in which `rank` computes, and so needs, `slice`: of `own_first`."""
    return (rank + size - slice) % size


def own_last_step(rank: int, slice: int, size: int) -> int:
    """The step after which `rank` sends `slice` to its owner: of `own_last`."""
    return (rank + size - 1 - slice) % size


# --------------------------------------------------------------------- words
def describe(op: str, algorithm: str | None, ranks: int, nodes: int = 1) -> str:
    """What the ranks of a native call do, in a line; empty without an algorithm.

    Args:
      op: the public name.
      algorithm: of the call's `Plan`.
      ranks: of the team.
      nodes: of the team.

    Raises:
      ValueError: the op has no such algorithm.

    Example:
      >>> describe("psum_scatter", "direct", ranks=4)
      'rank r adds part r of the 4 operands where they are, in rank order'
    """
    if algorithm is None:
        return ""
    if (op, algorithm) not in _WORDS:
        known = ", ".join(a for o, a in _WORDS if o == op) or "none"
        raise ValueError(f"{op}: algorithm={algorithm!r}, but {op} has {known}.")
    steps = nodes.bit_length() - 1
    return _WORDS[op, algorithm].format(
        P=ranks,
        others=_count(ranks - 1, "other"),
        N=nodes,
        G=ranks // nodes,
        steps=_count(steps, "step") + (", and a fold" if 1 << steps < nodes else ""),
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


# As ffi/ops/ does it. On the CPU a rank can address the operands and results of the
# others.
_SLICED_SCATTER = (
    "own slice last: rank r computes those of its {others} in turn, from a "
    "neighbour's on, then slice r; each partial product goes to its owner's slot while "
    "the next is computed; {P} slots summed in rank order"
)
_IN_PLACE_SCATTER = (
    "rank r computes the {P} ranks' partial products of slice r, their operands read "
    "where they are, and accumulates them in rank order; nothing is sent"
)
_BY_PSUM = "rank r multiplies its operands; psum adds the {P} products on every rank"
_WORDS = {
    ("psum", "one_shot"): (
        "every rank sends its operand to the {others}, in cells that carry their own "
        "flag (large ones on GPUs in pieces, each before a flag); each adds all {P} in "
        "rank order"
    ),
    ("psum", "two_shot"): (
        "rank r adds slice r of the {P} operands, in rank order, and writes the sum to "
        "all {P} results (on GPUs operands and sums go through slots)"
    ),
    ("psum", "nvrar"): (
        "in each of {N} nodes, local rank r of {G} adds slice r of the node's operands "
        "in rank order; recursive doubling ({steps}) adds the sums across nodes, lower "
        "node + higher node; each slice goes to all {G} results of its node"
    ),
    ("psum_scatter", "direct"): (
        "rank r adds part r of the {P} operands where they are, in rank order"
    ),
    ("all_gather", "direct"): (
        "rank r writes its operand to part r of the {P} results, rank r+1's first, its "
        "own last"
    ),
    ("all_to_all", "direct"): (
        "rank r writes its part j to part r of rank j's result, j = r+1, r+2, .., r "
        "(mod {P})"
    ),
    ("matmul_reduce_scatter", "sliced"): _SLICED_SCATTER,
    ("matmul_reduce_scatter", "in_place"): _IN_PLACE_SCATTER,
    ("matmul_all_reduce", "sliced"): (
        _SLICED_SCATTER + ", piece by piece; each sum goes to the {others} while the "
        "next piece is computed"
    ),
    ("matmul_all_reduce", "in_place"): (
        _IN_PLACE_SCATTER.replace(
            "nothing is sent", "it writes the sum to all {P} results"
        )
    ),
    ("matmul_reduce_scatter", "by_psum"): (
        _BY_PSUM + ", in rank order within a node, and rank r keeps part r"
    ),
    ("matmul_all_reduce", "by_psum"): _BY_PSUM + ", in rank order within a node",
    ("all_gather_matmul", "by_psum"): (
        "psum gathers the {P} ranks' slices, as each adds zeros to those of the "
        "{others}; then rank r multiplies all"
    ),
    ("all_gather_matmul", "sliced"): (
        "own slice first: rank r computes slices r, r-1, .., r+1 (mod {P}), while its "
        "own goes to ranks r+1, r+2, .., in the order in which they need it"
    ),
    ("all_gather_matmul", "in_place"): (
        "rank r multiplies the {P} ranks' slices, read where they are; nothing is sent"
    ),
}

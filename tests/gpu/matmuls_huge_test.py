"""Fused matmuls of arrays with more than 2^32 elements: every index has to be wide.

Such an x has one element in each row that is not 0, so that a product is a row of w, or
what it is with the other sign: that is known without a matmul. Where that element is,
and the elements of w, are hashes, so an index that wraps around finds other ones. Two
ranks, which may share a GPU:

    python -m jax_overlap.testing.launch -n 2 -- pytest tests/gpu/matmuls_huge_test.py
"""

import functools
import json
import os
import subprocess

import contract_devices as devices
import contract_processes as processes
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from contract_stragglers import Counting
from contract_tools import BF16, collectives, custom_calls
from jax import lax
from matmul_descriptions import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    ON_GPU,
)
from op_contract import named

import jax_overlap

N = devices.ranks(2)
ROWS, INNER = 2**21, 2064  # of x; rows of 16-byte lines
CHECKED_ROWS = 2**13  # at a time
MOST_COUNTED = 2**20  # mistakes of as many rows, so that their number fits an int32
# Of a rank: XLA's allocator takes powers of two, here 32 GiB for x and the result; and
# for heap and kernels.
NEEDED_GB = 38


def hashed(*parts):
    """32 bits that depend on all parts, which are integers or arrays of them."""
    word = jnp.uint32(0x9E3779B9)
    for part in parts:
        word = (word ^ jnp.asarray(part).astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B)
        word = (word ^ (word >> 15)) * jnp.uint32(0xC2B2AE35)
        word ^= word >> 13
    return word


def the_one(step, rank, first, rows):
    """Column and value of the element, in each of these rows of x, that is not 0."""
    word = hashed(step, rank, first + jnp.arange(rows))
    sign = 1 - 2 * (word >> 31).astype(jnp.int32)
    return (word % INNER).astype(jnp.int32), sign


def x_rows(step, rank, first, rows):
    """Rows of the x of a rank."""
    at, value = the_one(step, rank, first, rows)
    columns = lax.broadcasted_iota(jnp.int32, (rows, INNER), 1)
    return jnp.where(columns == at[:, None], value[:, None], 0).astype(BF16)


def weight(step, rank, columns):
    """The w of a rank: integers from -1 to 1."""
    i, j = (lax.broadcasted_iota(jnp.int32, (INNER, columns), d) for d in range(2))
    return ((hashed(step, rank, i, j) % 3).astype(jnp.int32) - 1).astype(BF16)


def product_rows(step, x_rank, w, first, rows):
    """Rows of x @ w, without a matmul."""
    at, value = the_one(step, x_rank, first, rows)
    return value[:, None].astype(jnp.float32) * w[at].astype(jnp.float32)


def mistakes_in(y, right, first, rows):
    """How many elements of y are not those of `right`; most of them, if they are many.

    right: (row of y, rows) -> these rows of it, from the row `first` to first + rows.
    """

    def add(i, total):
        row = first + i * CHECKED_ROWS
        part = lax.dynamic_slice_in_dim(y, row, CHECKED_ROWS)
        wrong = jnp.logical_not(part == right(row, CHECKED_ROWS).astype(y.dtype))
        return total + jnp.minimum(jnp.sum(wrong, dtype=jnp.int32), MOST_COUNTED)

    return lax.fori_loop(0, rows // CHECKED_ROWS, add, jnp.int32(0))


@functools.cache
def room_gb() -> float:
    """What is free on the GPUs for each rank, in GB: the least of all processes."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    asked = subprocess.run(
        [
            *("nvidia-smi", "--query-gpu=memory.free"),
            *("--format=csv,noheader,nounits", *(("-i", gpus) if gpus else ())),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    free = min(int(line) for line in asked.stdout.split()) * 2**20 / 1e9
    told = [
        json.loads(v)
        for v in processes.gather("room", json.dumps([gpus, free]).encode())
    ]
    sharers = [sum(other == mine for other, _ in told) for mine, _ in told]
    return min(gb / n for (_, gb), n in zip(told, sharers, strict=True))


class Huge(Counting):
    op = MATMUL_REDUCE_SCATTER
    layout = devices.line(N)
    TIME_LIMIT_S = 300

    def setUp(self):
        super().setUp()
        if not ON_GPU:
            self.skipTest(f"needs a GPU with {NEEDED_GB} GB for each rank")
        if N != 2:
            self.skipTest(
                f"needs 2 GPUs, or two ranks that share one: here are {N} ranks"
            )
        if room_gb() < NEEDED_GB:
            why = f"{NEEDED_GB} GB for each rank: {room_gb():.0f} are free"
            self.skipTest(f"needs a GPU with {why}")

    def count(self, op, fn, shapes):
        """Runs fn(step, rank), which gives mistakes, twice.

        shapes: of arrays in it, each to have more than 2^32 elements.
        """
        for shape in shapes:
            self.assertGreater(np.prod(shape, dtype=np.int64), 2**32)
        program = self.program(
            lambda mistakes, step: mistakes + fn(step, lax.axis_index("x"))
        )
        mistakes = self.everywhere(0)
        run = program.lower(mistakes, mistakes).compile()
        self.assertEqual(collectives(run.as_text()), [])
        self.assertEqual(custom_calls(run.as_text(), op.target), 1)
        for step in range(2):
            mistakes = jax.block_until_ready(run(mistakes, self.everywhere(step)))
        self.assert_none(mistakes)

    @named(
        matmul_reduce_scatter=(MATMUL_REDUCE_SCATTER, N),
        matmul_all_reduce=(MATMUL_ALL_REDUCE, 1),
    )
    def test_sums(self, op, parts):
        rows, columns = ROWS // parts, INNER * parts

        def fn(step, me):
            x, w = x_rows(step, me, 0, ROWS), weight(step, me, columns)
            ws = [weight(step, rank, columns) for rank in range(N)]
            begin = me * rows if parts > 1 else 0

            def right(row, count):
                return sum(
                    product_rows(step, rank, ws[rank], begin + row, count)
                    for rank in range(N)
                )

            return mistakes_in(op.call(x, w, "x"), right, 0, rows)

        self.count(op, fn, [(ROWS, INNER), (rows, columns)])

    def test_all_gather_matmul(self):
        columns = INNER // N

        def fn(step, me):
            x, w = x_rows(step, me, 0, ROWS), weight(step, me, columns)
            y = jax_overlap.all_gather_matmul(x, w, "x")

            def wrong_of(rank):
                def right(row, count):
                    return product_rows(step, rank, w, row - rank * ROWS, count)

                return mistakes_in(y, right, rank * ROWS, ROWS)

            return sum(map(wrong_of, range(N)))

        self.count(ALL_GATHER_MATMUL, fn, [(ROWS, INNER), (N * ROWS, columns)])

    def test_the_gathered_x(self):
        """It is huge, and the result is not."""
        rows, columns = ROWS // N, 16

        def fn(step, me):
            x, w = x_rows(step, me, 0, rows), weight(step, me, columns)
            y, gathered = jax_overlap.all_gather_matmul(x, w, "x", return_gathered=True)

            def wrong_of(rank):
                first = rank * rows

                def right(row, count):
                    return product_rows(step, rank, w, row - first, count)

                def right_x(row, count):
                    return x_rows(step, rank, row - first, count)

                return mistakes_in(y, right, first, rows) + mistakes_in(
                    gathered, right_x, first, rows
                )

            return sum(map(wrong_of, range(N)))

        self.count(ALL_GATHER_MATMUL, fn, [(N * rows, INNER)])


if __name__ == "__main__":
    absltest.main()

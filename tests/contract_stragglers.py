"""What the tests of ranks that run ahead share: nothing waits for the host in them."""

import time

import contract_devices as devices
import contract_tools as tools
import jax
import numpy as np
from op_contract import Contract


def on_cpu() -> bool:
    """Where XLA takes few programs at once, so that each step has to be awaited."""
    return jax.default_backend() == "cpu"


def wait_on_cpu(results):
    if on_cpu():
        jax.block_until_ready(results)


class Counting(Contract):
    """Programs on the line of all ranks that count their mistakes on the device."""

    layout = devices.line(devices.ranks(8))

    def program(self, fn, **kw):
        """`fn` of one rank's arrays, compiled once for each shape."""
        return jax.jit(tools.stacked(fn, self.layout, check_vma=False), **kw)

    def everywhere(self, scalar, dtype=np.int32):
        """A scalar for each rank, or one for all."""
        data = np.broadcast_to(np.asarray(scalar, dtype), (self.layout.size,))
        return tools.place(np.ascontiguousarray(data), self.layout)

    def one_late(self, rng, most_s):
        """Makes one rank late: turns for `after_turns`, if the host does not."""
        ranks = self.layout.size
        who, seconds = int(rng.integers(ranks)), float(rng.uniform(0, most_s))
        turns = np.zeros(ranks, np.int32)
        if jax.process_count() > 1:
            time.sleep(seconds if who == jax.process_index() else 0)
        else:
            turns[who] = 1e5 * seconds  # a turn takes some 10 us on a GPU
        return self.everywhere(turns)

    def assert_none(self, mistakes):
        for position, count in tools.fetch(mistakes).items():
            self.assertEqual(int(count), 0, f"wrong elements at rank {position}")

"""Which meshes the contract takes, for numbers of devices that are not here."""

import os
import subprocess
import sys

import contract_devices as devices
import numpy as np
from absl.testing import absltest, parameterized
from op_contract import named

OTHERS = {"two": (2,), "three": (3,), "four": (4,), "six": (6,), "seven": (7,)}

WHO = """
import os, cpu_devices
print(cpu_devices.DEVICES, cpu_devices.ON_CPU)
print("XLA_FLAGS" in os.environ)
"""


class Meshes(parameterized.TestCase):
    def test_eight_devices_of_one_process_may_be_taken_apart(self):
        self.assertEqual(devices.layouts(8, False), devices.LAYOUTS_OF_EIGHT)
        self.assertEqual(devices.node_splits(8, False), devices.NODE_SPLITS_OF_EIGHT)
        self.assertEqual(devices.team_sizes((1, 3, 8), 8, False), (1, 3, 8))
        self.assertEqual(devices.ranks(4, 8, False), 4)
        self.assertEqual(devices.grid("b", n=8).shape, (2, 4))

    @named(**OTHERS, eight=(8,), nine=(9,))
    def test_of_several_processes_each_has_all_devices(self, n):
        layouts = devices.layouts(n, True)
        self.assertEqual({layout.size for layout in layouts}, {n})
        self.assertIn(n, {layout.team for layout in layouts})
        self.assertEqual(devices.ranks(4, n, True), n)
        self.assertEqual(devices.team_sizes((1, 3, 8), n, True), (n,))
        self.check(layouts, n)

    @named(**OTHERS)
    def test_of_one_process_it_has_what_there_is(self, n):
        layouts = devices.layouts(n, False)
        self.assertIn(n, {layout.size for layout in layouts})
        self.assertLessEqual(max(layout.size for layout in layouts), n)
        self.assertEqual(devices.ranks(4, n, False), min(4, n))
        self.check(layouts, n)

    def check(self, layouts, n):
        self.assertLen({str(layout) for layout in layouts}, len(layouts))
        permuted = [layout for layout in layouts if layout.order]
        self.assertNotEmpty(permuted)
        for layout in permuted:
            self.assertLen(set(layout.order), layout.size)
            self.assertLess(max(layout.order), n)
            self.assertNotEqual(layout.order, tuple(range(layout.size)))
        if n in (4, 6, 8, 9):  # a mesh over each of its axes, and over both
            axes = {layout.axes for layout in layouts if layout.names == ("a", "b")}
            self.assertContainsSubset({("a",), ("b",), ("b", "a")}, axes)

    @named(**OTHERS, eight=(8,), nine=(9,))
    def test_node_splits_divide(self, n):
        splits = devices.node_splits(n, True)
        self.assertContainsSubset({(n, n), (n, 1)}, splits)
        self.assertEqual({ranks % size for ranks, size in splits}, {0})

    @named(**OTHERS, five=(5,), eight=(8,), nine=(9,), twelve=(12,))
    def test_permuted(self, n):
        np.testing.assert_array_equal(sorted(devices.permuted(n)), np.arange(n))
        self.assertNotEqual(devices.permuted(n), tuple(range(n)))


class Platforms(parameterized.TestCase):
    @named(
        none=({}, "8 True"),
        cpu=({"JAX_PLATFORMS": "cpu"}, "8 True"),
        cuda=({"JAX_PLATFORMS": "cuda"}, "None False"),
        cuda_first=({"JAX_PLATFORMS": "cuda,cpu"}, "None False"),
        a_rank=({"JAX_OVERLAP_LAUNCH": "host:1,2,0"}, "None False"),
        a_rank_on_cpu=(
            {"JAX_OVERLAP_LAUNCH": "host:1,2,0", "JAX_PLATFORMS": "cpu"},
            "None True",
        ),
    )
    def test_devices_are_ours_to_set_on_cpu_only(self, given, said):
        taken = ("JAX_PLATFORMS", "JAX_OVERLAP_LAUNCH", "XLA_FLAGS", "NPROC")
        env = {k: v for k, v in os.environ.items() if k not in taken}
        env["PYTHONPATH"] = os.path.dirname(__file__)
        done = subprocess.run(
            [sys.executable, "-P", "-c", WHO],
            env={**env, **given},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        ours = str(not said.startswith("None"))
        self.assertEqual(done.stdout.split("\n")[:2], [said, ours])


if __name__ == "__main__":
    absltest.main()

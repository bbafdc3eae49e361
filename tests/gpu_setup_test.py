"""What is decided about GPUs before any is used: teams, algorithms, agreements."""

import dataclasses
import json
import os
from unittest import mock

import cpu_devices  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jax_overlap
from jax_overlap import _agreement, _compat, _cuda, _heaps
from jax_overlap._plan import (
    LEFT_TO_LAX,
    Situation,
    choose_psum_algorithm,
    why_not_native,
)
from jax_overlap.team import make_team

GPU = Situation(("cuda",), frozenset("x"), frozenset("x"), 1, gpu_code=True)


def mesh(*sizes):
    return AbstractMesh(sizes, ("x", "y")[: len(sizes)])


class Blocks(absltest.TestCase):
    def test_all_that_wait_are_resident(self):
        """One on each multiprocessor, of all who share it, in two programs at once."""
        most = _heaps.most_blocks
        self.assertEqual([most(132, n) for n in (1, 2, 8, 100)], [64, 32, 8, 1])
        self.assertEqual([most(58, n) for n in (1, 3)], [29, 9])


class Teams(absltest.TestCase):
    def nodes(self, reach, axes=("x",), sizes=(8,), node_size=""):
        with mock.patch.dict(os.environ, JAX_OVERLAP_NODE_SIZE=node_size):
            team = make_team(mesh(*sizes), axes, None, reach)
        return team.node_size, team.reaches_all

    def hosts(self, *sizes):
        """Of consecutive positions: those of a host reach each other."""
        out, begin = [], 0
        for size in sizes:
            out += [set(range(begin, begin + size))] * size
            begin += size
        return out

    def test_one_node_where_stores_reach_all(self):
        self.assertEqual(self.nodes(None), (8, True))
        self.assertEqual(self.nodes(self.hosts(8)), (8, True))

    def test_nodes_are_what_stores_reach(self):
        self.assertEqual(self.nodes(self.hosts(4, 4)), (4, False))
        self.assertEqual(self.nodes(self.hosts(2, 2, 2, 2)), (2, False))
        self.assertEqual(self.nodes(self.hosts(*[1] * 8)), (1, False))

    def test_uneven_nodes_are_split(self):
        self.assertEqual(self.nodes(self.hosts(6, 2)), (2, False))
        self.assertEqual(self.nodes(self.hosts(5, 3)), (1, False))

    def test_the_axis_decides(self):
        hosts = self.hosts(4, 4)
        self.assertEqual(self.nodes(hosts, ("y",), (2, 4)), (4, True))
        self.assertEqual(self.nodes(hosts, ("x",), (2, 4)), (1, False))
        self.assertEqual(self.nodes(hosts, ("y", "x"), (2, 4)), (1, False))

    def test_a_node_can_be_made_smaller_but_not_larger(self):
        self.assertEqual(self.nodes(self.hosts(4, 4), node_size="2"), (2, False))
        self.assertEqual(self.nodes(self.hosts(4, 4), node_size="8"), (4, False))


class Algorithms(absltest.TestCase):
    def choose(self, nbytes, ranks=8, forced=None, implementation=None, reach=None):
        team = make_team(mesh(ranks), ("x",), None, reach)
        return choose_psum_algorithm(nbytes, team, GPU, implementation, forced)[0]

    def test_by_size_and_ranks(self):
        self.assertEqual(self.choose(64 << 10), "one_shot")
        self.assertEqual(self.choose(128 << 10), "two_shot")
        self.assertEqual(self.choose(512 << 10, ranks=2), "one_shot")
        self.assertEqual(self.choose(1 << 20, ranks=3), "two_shot")

    def test_two_ranks_send_at_once(self):
        self.assertEqual(self.choose(2 << 20, ranks=2), "one_shot")
        self.assertEqual(self.choose((2 << 20) + 1, ranks=2), LEFT_TO_LAX)

    def test_large_ones_are_left_to_nccl(self):
        self.assertEqual(self.choose(2 << 20), "two_shot")
        self.assertEqual(self.choose((2 << 20) + 1), LEFT_TO_LAX)
        self.assertEqual(self.choose(1 << 30, implementation="native"), "two_shot")
        self.assertEqual(self.choose(1 << 30, forced="one_shot"), "one_shot")
        with mock.patch.dict(os.environ, JAX_OVERLAP_PSUM_MAX_BYTES="4096"):
            self.assertEqual(self.choose(4097), LEFT_TO_LAX)

    def test_only_nvrar_where_stores_do_not_reach(self):
        reach = [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
        for nbytes in (1, 1 << 20):
            self.assertEqual(self.choose(nbytes, 4, reach=reach), "nvrar")
        self.assertEqual(self.choose(8, 4, "nvrar", reach=reach), "nvrar")
        for forced in ("one_shot", "two_shot"):
            self.assertEqual(self.choose(8, 4, forced, reach=reach), LEFT_TO_LAX)

    def test_at_most_64_ranks(self):
        for ranks, word in ((64, ""), (65, "65 ranks are more than 64")):
            team = make_team(mesh(ranks), ("x",))
            why = why_not_native(team, np.dtype("float32"), GPU, None)
            self.assertEqual(why, word)

    def test_ops_without_kernels_say_so(self):
        team = make_team(mesh(2), ("x",))
        without = dataclasses.replace(GPU, gpu_code=False)
        why = why_not_native(team, np.dtype("float32"), without, None)
        self.assertEqual(why, "there is no native code for cuda yet")

    def test_explain_for_gpus_where_there_are_none(self):
        f = jax.shard_map(
            lambda x: jax_overlap.psum(x, "x"),
            mesh=Mesh(jax.devices()[:2], ("x",)),
            in_specs=P("x"),
            out_specs=P(),
        )
        (plan,) = jax_overlap.explain(f, jnp.ones(4), platform="cuda")
        self.assertEqual(plan.implementation, "lax")
        self.assertIn("CUDA", plan.reason)
        self.assertIn(plan.reason, jax_overlap.info()["gpu"]["why_not"])

    def test_init_does_nothing_without_gpus(self):
        jax_overlap.init()
        gpu = jax_overlap.info()["gpu"]
        self.assertEqual(
            (gpu["loaded"], gpu["team"], gpu["cutlass"]), (False, None, False)
        )

    def test_meshes_without_devices_or_gpus(self):
        with mock.patch.object(_cuda, "ffi", object()):
            self.assertIn("abstract", _heaps.why_not(mesh(2)))
            self.assertIn("not GPUs", _heaps.why_not(Mesh(jax.devices()[:2], ("x",))))


class Store:
    """The coordination service, in which other processes have said something."""

    def __init__(self, **said):
        self.said = {f"jax_overlap/topic/{p[1:]}": v for p, v in said.items()}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite  # the first try may have failed
        self.said[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.said:
            raise TimeoutError(f"{timeout_ms} ms")
        return self.said[key]


class Agreement(absltest.TestCase):
    def exchange(self, store, value="mine", count=3, **kw):
        with (
            mock.patch.object(_compat, "coordination_client", return_value=store),
            mock.patch.object(jax, "process_count", return_value=count),
        ):
            return _agreement.exchange("topic", value, **kw)

    def test_all_hear_all(self):
        store = Store(_1=json.dumps([1]), _2="null")
        self.assertEqual(self.exchange(store), {0: "mine", 1: [1], 2: None})

    def test_only_some_take_part(self):
        self.assertEqual(
            self.exchange(Store(_2="7"), processes=[0, 2]), {0: "mine", 2: 7}
        )

    def test_who_is_absent_is_named(self):
        with self.assertRaisesRegex(
            RuntimeError, r"processes \[1, 3\].*init\(\).*JAX_OVERLAP_WAIT_TIMEOUT_S"
        ):
            self.exchange(Store(_2="7"), count=4)

    def test_one_that_cannot_is_enough(self):
        self.assertEqual(_agreement.why_not({0: {"why": ""}, 1: {"why": ""}}), "")
        why = _agreement.why_not({0: {"why": ""}, 1: {"why": "no NVSHMEM"}})
        self.assertEqual(why, "process 1 cannot: no NVSHMEM")

    def test_settings_have_to_be_alike(self):
        same = {"abi": 1, "heap": 5, "limit": 60.0, "node": None, "most": 9}
        same |= {"by_psum": 9, "matmuls": 0, "nvshmem": [3, 4, 5]}
        self.assertEqual(_heaps._difference({0: same, 1: dict(same)}), "")
        why = _heaps._difference({0: same, 1: same | {"heap": 6}})
        self.assertEqual(
            why, "JAX_OVERLAP_HEAP_BYTES differs between processes: {0: 5, 1: 6}"
        )
        why = _heaps._difference({0: same, 1: same | {"matmuls": 1}})
        self.assertIn("JAX_OVERLAP_GPU_MATMULS differs", why)
        why = _heaps._difference({0: same, 1: same | {"by_psum": 0}})
        self.assertIn("JAX_OVERLAP_BY_PSUM_MAX_BYTES differs", why)

    def test_there_is_one_try(self):
        local = mock.patch.object(jax, "local_devices", return_value=[])
        several = mock.patch.object(jax, "process_count", return_value=2)
        late = mock.Mock(side_effect=RuntimeError("process 1 did not come."))
        with (
            local,
            several,
            mock.patch.object(_heaps, "_start_processes", late),
            mock.patch.object(_heaps, "_absence", None),
        ):
            with self.assertRaisesRegex(RuntimeError, "did not come"):
                _heaps.start()
            with self.assertRaisesRegex(RuntimeError, "did not come.*program anew"):
                _heaps.start()
        late.assert_called_once()

    def test_a_start_has_a_limit(self):
        self.assertEqual(_agreement.within_limit(lambda: 5, "it"), 5)

        def fails():
            raise RuntimeError("no device")

        with self.assertRaisesRegex(RuntimeError, "no device"):
            _agreement.within_limit(fails, "it")
        stuck = mock.Mock(side_effect=lambda: __import__("time").sleep(5))
        with (
            mock.patch.dict(os.environ, JAX_OVERLAP_WAIT_TIMEOUT_S="0.05"),
            self.assertRaisesRegex(RuntimeError, "it did not start within 0.05 s"),
        ):
            _agreement.within_limit(stuck, "it")

    def test_regions_are_halves_of_what_is_left(self):
        heaps = {0: 1 << 40, 1: 2 << 40}
        world = _heaps._World("p2p", heaps, 1 << 40, 1 << 20, {}, 4096)
        with (
            mock.patch.object(_heaps, "_world", world),
            mock.patch.object(_heaps, "_regions", {}),
            mock.patch.object(jax, "devices", return_value=jax.devices()),
        ):
            first = _heaps._make_region([0, 1])
            second = _heaps._make_region([1, 0])
            again = _heaps._make_region([0, 1])
            self.assertEqual(_heaps._agree([0, 1], [3, 4]), [3, 4])
        at = (1 << 40) + 4096
        self.assertEqual(first[0], [at, at + (1 << 40)])
        self.assertEqual(first[2:], ([0, 0], (1 << 19) - 4096))
        self.assertEqual(second[0][1] - at, first[3])
        self.assertLess(second[3], first[3])
        self.assertEqual(again, first)


if __name__ == "__main__":
    absltest.main()

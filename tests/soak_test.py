"""The soak runs, checks what each rank got, and notices what is wrong."""

import random

import contract_tools as tools
import jax
import numpy as np
from absl.testing import absltest

from jax_overlap import _native
from jax_overlap.testing import soak


class Soak(absltest.TestCase):
    def test_all_is_right(self):
        result = soak.run(rounds=25, seed=1)
        self.assertEqual((result.rounds, result.programs), (25, 5), result)
        self.assertEqual((result.wrong, result.reports), (0, []))
        self.assertGreaterEqual(sum(result.calls.values()), 25)

    def test_ranks_are_late(self):
        """XLA leaves out a loop whose result is not needed."""
        mesh = soak.meshes(jax.devices())[0]
        call = soak.Call("psum", None, "float32", ("x",), ((300, 7),))
        ints = [np.zeros(len(jax.devices()), np.int32)] * 3
        program = soak.make_program([call], mesh)
        self.assertIn(" while(", program.lower(*ints).compile().as_text())

    def test_the_same_seed_calls_the_same(self):
        def calls(seed):
            rng = random.Random(seed)
            mesh = soak.meshes(jax.devices())[1]
            return [soak.random_call(rng, soak.ON_CPU, mesh) for _ in range(200)]

        self.assertEqual(calls(3), calls(3))
        self.assertNotEqual(calls(3), calls(4))
        self.assertEqual({call.op for call in calls(3)}, set(soak.ON_CPU))
        self.assertEqual({call.axes for call in calls(3)}, {("a",), ("b",), ("a", "b")})

    def test_ranks_have_other_data(self):
        call = soak.Call("psum", None, "float32", ("x",), ((300, 7),))
        made = [np.asarray(soak.data(call, *of)[0]) for of in ((1, 0), (1, 1), (2, 0))]
        for i, a in enumerate(made):
            self.assertEqual(set(np.unique(a)), {-1, 0, 1})
            for b in made[:i]:  # two thirds, if they have nothing to do with each other
                self.assertBetween(np.mean(a != b), 0.6, 0.73)

    def test_a_deliberate_fault_is_noticed(self):
        argv = "-m", "jax_overlap.testing.soak", "--cpu", "4", "--minutes", "0.05"
        for mutant in ("skip_peer", None):
            child = tools.run_child(
                *argv, env={"JAX_OVERLAP_MUTANT": mutant}, limit=150
            )
            wrong = mutant and _native.ffi.testing  # a build for users has no mutants
            self.assertEqual(child.code, int(bool(wrong)), child.err)
            if wrong:
                self.assertRegex(child.err, r"round \d+, data \d+, rank \d: \d+ wrong")
            self.assertIn("4 ranks, ", child.out)


if __name__ == "__main__":
    absltest.main()

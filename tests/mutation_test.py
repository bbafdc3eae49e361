"""Proof that the suite can fail: each deliberate fault is noticed by named tests.

A test build of the library breaks one promise when JAX_OVERLAP_MUTANT names it
(ffi/core/mutants.h). The tests named here pass without, and fail with it.
"""

import json

import contract_tools as tools
from absl.testing import absltest, parameterized

from jax_overlap import _native

MUTANTS = {
    # A rank's contribution is left out.
    "skip_peer": (
        "psum_test.PsumValues.test_sizes_2_ranks",
        "psum_test.PsumValues.test_node_splits_8_ranks_by_4",
        "psum_test.PsumBits.test_summed_in_rank_order_f32",
        "psum_scatter_test.PsumScatterValues.test_sizes_2_ranks",
        "psum_scatter_test.PsumScatterParts.test_every_form_no_vma",
        "all_gather_test.AllGatherValues.test_sizes_2_ranks",
        "all_gather_test.AllGatherParts.test_the_transpose_of_every_form_vma",
        "all_to_all_test.AllToAllValues.test_sizes_2_ranks",
        "all_to_all_test.AllToAllParts.test_every_form_vma",
        "matmul_reduce_scatter_test.MatmulReduceScatterValues.test_sizes_2_ranks",
        "matmul_reduce_scatter_test.MatmulReduceScatterSlicedPrograms.test_jit_of_jit",
        "all_gather_matmul_test.AllGatherMatmulValues.test_sizes_2_ranks",
        "all_gather_matmul_test.AllGatherMatmulLastTransforms.test_vjp_vma",
        "matmul_all_reduce_test.MatmulAllReduceValues.test_sizes_2_ranks",
    ),
    # Ranks work on each other's slices.
    "wrong_slice": (
        "psum_test.PsumValues.test_sizes_4_ranks",
        "psum_test.PsumValues.test_layouts_2x4_over_a",
        "matmul_reduce_scatter_test.MatmulReduceScatterForms.test_every_form_no_vma",
        "matmul_reduce_scatter_test.MatmulReduceScatterSlicedPrograms.test_jit_of_jit",
        "matmul_all_reduce_test.MatmulAllReduceValues.test_sizes_4_ranks",
    ),
    # The elements after the last whole cell are not all sent.
    "tail_off_by_one": (
        "psum_test.PsumValues.test_sizes_5_ranks",
        "psum_test.PsumValues.test_types_i8",
    ),
    # bfloat16 and float16 are added in their own type.
    "half_accumulate": (
        "psum_test.PsumBits.test_bfloat16_is_summed_in_fp32",
        "psum_test.PsumBits.test_float16_does_not_overflow_on_the_way",
        "psum_test.PsumBits.test_summed_in_rank_order_bf16",
        "psum_scatter_test.PsumScatterBits.test_half_types_are_summed_in_fp32",
        "matmul_reduce_scatter_test.ScatteredBits.test_half_types_are_summed_in_fp32",
        "matmul_all_reduce_test.MatmulAllReduceBits.test_half_types_are_summed_in_fp32",
    ),
    # A rank that is ahead overwrites what others still read.
    "one_slot": (
        "psum_test.PsumValues.test_many_chunks_f32",
        "matmul_reduce_scatter_test.MatmulReduceScatterValues.test_many_chunks_f32",
        "all_gather_matmul_test.AllGatherMatmulValues.test_many_chunks_f32",
    ),
    "missing_ready_wait": (
        "psum_test.PsumBits.test_an_element_has_the_same_bits_in_a_larger_array_f32",
    ),
    # What an earlier call has left is taken for this call's.
    "stale_epoch": (
        "psum_test.PsumPrograms.test_shrinking_and_growing_sizes_8",
        "psum_test.PsumPrograms.test_200_calls_back_to_back_small",
        "matmul_reduce_scatter_test.MatmulReduceScatterValues.test_many_chunks_f32",
        "all_gather_matmul_test.AllGatherMatmulValues.test_many_chunks_f32",
    ),
    # Waits have no limit.
    "deadline_ignored": (
        "faults_test.MissingRanks.test_missing_in_one_step_of_a_loop",
    ),
    # Errors are not kept for those who do not read the result.
    "error_swallowed": (
        "faults_test.NothingIsLost.test_unacknowledged_errors_stop_the_next_call",
        "faults_test.NothingIsLost.test_reported_at_exit_result_dropped",
    ),
    # The cotangents of the other ranks are left out.
    "transpose_without_reduction": (
        "psum_test.PsumTransforms.test_vjp_no_vma",
        "psum_test.PsumTransforms.test_vjp_inside_no_vma",
        "psum_test.PsumTransforms.test_scan_and_its_gradient_no_vma",
        "matmul_all_reduce_test.MatmulAllReduceTransforms.test_vjp_no_vma",
        "matmul_all_reduce_test.MatmulAllReduceTransforms.test_vjp_inside_no_vma",
        "gradients_test.Gradients.test_on_a_mesh_of_data_and_tensor_all_reduce_no_vma",
    ),
}

# Runs the tests it is given; prints {name: "passed", or what failed}.
RUNNER = """
import json, sys, unittest
import contract_tools, jax_overlap
verdicts = {}
for name in sys.argv[1:]:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    bad = [text for _, text in result.failures + result.errors]
    ran = result.testsRun == 1 and not result.skipped
    verdicts[name] = bad[0] if bad else "passed" if ran else "did not run"
    jax_overlap.clear_errors()
print(json.dumps(verdicts))
"""


class Mutants(parameterized.TestCase):
    TIME_LIMIT_S = 300  # in tests/conftest.py

    def run_tests(self, names, mutant, **env):
        child = tools.run_child(
            "-c", RUNNER, *names, env={"JAX_OVERLAP_MUTANT": mutant, **env}, limit=270
        )
        self.assertFalse(child.timed_out, f"hangs\n{child.err}")
        self.assertEqual(child.code, 0, f"has to fail, not to crash\n{child.err}")
        return json.loads(child.out.splitlines()[-1])

    def test_without_mutants_the_named_tests_pass(self):
        names = sorted({name for named in MUTANTS.values() for name in named})
        for name, verdict in self.run_tests(names, None).items():
            self.assertEqual(verdict, "passed", name)

    @parameterized.named_parameters((f"_{m}", m) for m in MUTANTS)
    def test_is_noticed(self, mutant):
        # Short, as some faults are noticed by it; what is right may wait for longer.
        verdicts = self.run_tests(
            MUTANTS[mutant], mutant, JAX_OVERLAP_WAIT_TIMEOUT_S="3"
        )
        if not _native.ffi.testing:  # a build for users has no mutants in it
            self.assertEqual(set(verdicts.values()), {"passed"})
            return
        for name, verdict in verdicts.items():
            self.assertNotIn(verdict, ("passed", "did not run"), name)


if __name__ == "__main__":
    absltest.main()

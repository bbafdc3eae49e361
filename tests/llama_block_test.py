"""The example compares a block in both forms, and can see that they differ."""

import json
import pathlib
import tempfile

import contract_tools as tools
from absl.testing import absltest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "llama_block.py"
# The example sets up its devices itself.
FRESH = {"XLA_FLAGS": None, "NPROC": None, "JAX_PLATFORMS": None}
# To compile takes nearly all of the time.
QUICK = {**FRESH, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
STEPS = ["forward, 8 tokens", "forward and backward, 8 tokens"]
DECODE = "decode, 2 x 1 token, cache of 5"
SMALL = ("--tokens", "8", "--decode", "2", "--cache", "5", "--repeats", "2")


def run(*argv):
    return tools.run_child(*argv, env=QUICK, limit=150)


class LlamaBlock(absltest.TestCase):
    def test_both_forms(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "times.json")
            child = run(str(EXAMPLE), *SMALL, "--dtype", "float32", "--json", str(path))
            self.assertEqual(child.code, 0, child.err)
            told = json.loads(path.read_text())
        self.assertEqual(told["devices"], 4)
        self.assertEqual([row["step"] for row in told["steps"]], [*STEPS, DECODE])
        forward, backward, decode = told["steps"]
        fused = "{0} all_gather_matmul (native), {0} matmul_reduce_scatter (native)"
        self.assertEqual(forward["calls"]["overlap"], fused.format(2))
        self.assertEqual(backward["calls"]["overlap"], fused.format(4))
        self.assertEqual(decode["calls"]["overlap"], "2 matmul_all_reduce (native)")
        for row in told["steps"]:
            self.assertEqual(list(row["ms"]), ["overlap", "xla"])
            self.assertEqual(row["calls"]["xla"], "none of jax_overlap")
            self.assertLen(row["errors"], 3)
            self.assertLess(max(row["errors"].values()), 1e-5)
            self.assertIn(f"\n{row['step']}\n", child.out)
        self.assertIn("Results agree", child.out)

    def test_processes(self):
        launch = ("-m", "jax_overlap.testing.launch", "-n", "2", "--cpu", "--")
        argv = (*SMALL, "--collectives", "overlap", "--model", "tiny")
        child = run(*launch, "python", str(EXAMPLE), *argv)
        self.assertEqual(child.code, 0, child.out + child.err)
        self.assertIn("2 ranks on cpu, processes: 2", child.out)
        self.assertEqual(child.out.count("overlap and the reference differ by"), 3)
        self.assertNotIn("overlap and xla", child.out)
        self.assertEqual(child.out.count("Results agree"), 1)

    def test_results_that_differ(self):
        """The comparison can fail; all is timed and written all the same."""
        program = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import devices, llama_block as b
right = {{"outputs": 1e-9, "gradients": 1e-8}}
assert b.disagreement("step", "a and b", right, 1e-7) == ""
assert b.largest(right) == ("gradients", 1e-8)
for bad in (2e-7, float("nan")):
    for more in (0.0, 1e-7):
        errors = {{"outputs": more, "gradients": bad, "gradients of x": more}}
        why = b.disagreement("step", "a and b", errors, 1e-7)
        assert why.startswith("step: gradients of a and b differ by"), why
set_up = devices.set_up

def with_a_fault(args):
    set_up(args)
    import jax_overlap
    right = jax_overlap.matmul_reduce_scatter
    jax_overlap.matmul_reduce_scatter = lambda *a, **k: 1.1 * right(*a, **k)

devices.set_up = with_a_fault
b.main(["--devices", "2", "--tokens", "8", "--decode", "--json", sys.argv[1]])
"""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "times.json")
            child = run("-c", program, str(path))
            self.assertEqual(child.code, 1, child.err)
            told = json.loads(path.read_text())
        found = r"forward, 8 tokens: outputs of overlap and xla differ by 0\.0"
        self.assertRegex(child.err, f"^FAILED: {found}")
        self.assertRegex(child.out, f"FAILED: {found}")
        self.assertNotIn("agree", child.out)
        self.assertEqual([row["step"] for row in told["steps"]], STEPS)
        for row in told["steps"]:
            self.assertEqual(list(row["ms"]), ["overlap", "xla"])
            # With xla, and with the reference; which xla agrees with.
            self.assertLen(row["disagreements"], 2)
            self.assertGreater(row["errors"]["overlap and xla"], told["tolerance"])
            self.assertLess(row["errors"]["xla and the reference"], told["tolerance"])

    def test_sizes_that_will_not_do(self):
        child = run(str(EXAMPLE), "--tokens", "30")
        self.assertEqual(child.code, 1)
        self.assertIn("--tokens 30 is not divisible by the 4 ranks", child.err)
        self.assertIn("Use 32, or 0", child.err)
        child = run(str(EXAMPLE), "--devices", "3", "--tokens", "0")
        self.assertEqual(child.code, 1)
        self.assertIn("num_heads = 8 is not divisible by the 3 ranks", child.err)


if __name__ == "__main__":
    absltest.main()

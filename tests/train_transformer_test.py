"""The example trains, agrees with itself, and says in words what is wrong."""

import pathlib
import tempfile

import contract_tools as tools
from absl.testing import absltest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "train_transformer.py"
TINY = (
    *("--steps", "6", "--layers", "1", "--width", "32", "--heads", "4"),
    *("--batch", "2", "--window", "16", "--sample", "12"),
)
# The example sets up its devices itself.
FRESH = {"XLA_FLAGS": None, "NPROC": None, "JAX_PLATFORMS": None}
# To compile takes nearly all of the time.
QUICK = {**FRESH, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


class TrainTransformer(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name)

    def run_example(self, *argv, env=QUICK, before=()):
        argv = (*before, str(EXAMPLE), *TINY, "--out", str(self.out), *argv)
        child = tools.run_child(*argv, env=env, limit=120)
        self.assertFalse(child.timed_out, child.err)
        return child

    def file(self, text):
        path = self.out / "text"
        path.write_text(text)
        return str(path)

    def test_all_forms(self):
        child = self.run_example(env=FRESH)
        self.assertEqual(child.code, 0, child.err)
        self.assertIn("topics.py", child.out)
        self.assertEqual(child.out.count("and jax.lax, all-reduce agree"), 2)
        self.assertIn("all-reduce, forward: 2 matmul_all_reduce (native)", child.out)
        self.assertIn(
            "sequence parallel, forward: 2 all_gather_matmul (native), "
            "2 matmul_reduce_scatter (native)",
            child.out,
        )
        self.assertIn("and restored:", child.out)
        self.assertIn("training, tokens/s", child.err)  # the progress bar
        png = (self.out / "training.png").read_bytes()
        self.assertTrue(png.startswith(b"\x89PNG"))
        rows = (self.out / "losses.csv").read_text().split()
        self.assertEqual(
            (rows[0], len(rows)), ("step,xla,all_reduce,sequence_parallel", 7)
        )
        self.assertTrue((self.out / "checkpoint").is_dir())

    def test_two_forms_on_a_text_of_my_own(self):
        path = self.file("the quick brown fox jumps over the lazy dog\n" * 9)
        flags = "--xla_force_host_platform_device_count=5"  # is kept
        forms = ("sequence_parallel_xla", "sequence_parallel")
        child = self.run_example(
            *("--forms", *forms, "--devices", "2", "--text", path),
            env={**QUICK, "XLA_FLAGS": flags},
        )
        self.assertEqual(child.code, 0, child.err)
        self.assertIn(path, child.out)
        self.assertIn("jax.lax, sequence parallel, forward: none", child.out)
        self.assertIn("and jax.lax, sequence parallel agree", child.out)
        self.assertNotIn("all-reduce", child.out)
        rows = (self.out / "losses.csv").read_text().split()
        self.assertEqual(rows[0], "step,sequence_parallel_xla,sequence_parallel")

    def test_texts_that_will_not_do(self):
        for text, count in (("", 0), ("x" * 16, 16)):
            child = self.run_example("--text", self.file(text))
            self.assertEqual(child.code, 1)
            self.assertIn(f"The text has {count} characters", child.err)
            self.assertIn("needs at least 17", child.err)
        child = self.run_example("--text", "/nowhere/text")
        self.assertEqual(child.code, 1)
        self.assertIn("cannot read /nowhere/text", child.err)

    def test_sizes_that_will_not_do(self):
        child = self.run_example("--steps", "0")
        self.assertEqual(child.code, 2)
        self.assertIn("expected a number above 0", child.err)
        child = self.run_example("--devices", "3", "--forms", "all_reduce")
        self.assertNotEqual(child.code, 0)
        self.assertIn("num_heads = 4 is not divisible by the 3 ranks", child.err)
        child = self.run_example("--window", "18")
        self.assertNotEqual(child.code, 0)
        self.assertIn("--window 18 is not divisible by --devices 4", child.err)
        self.assertIn("Use 20, or only", child.err)

    def test_processes(self):
        """One form, as training takes long to compile; the first process writes."""
        launch = ("-m", "jax_overlap.testing.launch", "-n", "2", "--cpu", "--")
        argv = ("--forms", "sequence_parallel", "--steps", "2", "--sample", "2")
        child = self.run_example(*argv, before=(*launch, "python"))
        self.assertEqual(child.code, 0, child.out + child.err)
        self.assertEqual(child.out.count("and restored:"), 1)
        self.assertIn("The model writes:", child.out)
        self.assertTrue((self.out / "checkpoint").is_dir())
        rows = (self.out / "losses.csv").read_text().split()
        self.assertEqual((rows[0], len(rows)), ("step,sequence_parallel", 3))
        child = self.run_example("--devices", "1", before=(*launch, "python"))
        self.assertEqual(child.code, 1)
        self.assertIn("--devices 1: there are 2 ranks, each a process", child.err)

    def test_arguments(self):
        """--collectives chooses forms, and JAX_PLATFORMS the devices."""
        program = f"""
import argparse, os, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import devices, train_transformer as t
forms = lambda *argv: t.parse_arguments(argv).forms
assert forms() == ["xla", "all_reduce", "sequence_parallel"]
assert forms("--collectives", "overlap") == ["all_reduce", "sequence_parallel"]
assert forms("--collectives", "xla") == ["xla", "sequence_parallel_xla"]
assert forms("--collectives", "both") == list(t.FORMS)
os.environ["JAX_PLATFORMS"] = "cuda"
import jax
jax.device_count = lambda: 3
jax.process_count = lambda: 1
for given, count in (({{}}, 3), ({{"devices": 2}}, 2)):
    devices.set_up(args := argparse.Namespace(**given))
    assert args.devices == count, args
assert os.environ["JAX_OVERLAP_GPU_MATMULS"] == "1"
assert not {{"XLA_FLAGS", "NPROC"}} & set(os.environ)
try:
    devices.set_up(argparse.Namespace(devices=4))
except SystemExit as e:
    assert "--devices 4: JAX has only 3, as JAX_PLATFORMS='cuda'" in str(e), e
    print("all right")
"""
        child = tools.run_child("-c", program, env=FRESH)
        self.assertEqual(child.code, 0, child.err)
        self.assertIn("all right", child.out)

    def test_losses_that_differ(self):
        """The comparison can fail."""
        program = f"""
import sys, types
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import train_transformer as t
run = lambda *losses: types.SimpleNamespace(losses=losses)
labels = {{"a": "A", "b": "B", "c": "C"}}
near, right = run(3.0, 2.0 + 9e-4), run(3.0, 2.0)
t.compare({{"a": right, "b": near, "c": right}}, labels)
for bad in (2.002, float("nan")):
    try:
        t.compare({{"a": right, "b": near, "c": run(3.0, bad)}}, labels)
    except SystemExit as e:
        assert "FAILED: the losses of C and A" in str(e) and "step 1" in str(e), e
    else:
        raise AssertionError(bad)
print("all right")
"""
        child = tools.run_child("-c", program)
        self.assertEqual(child.code, 0, child.err)
        self.assertIn("all right", child.out)


if __name__ == "__main__":
    absltest.main()

"""`python -m jax_overlap.plan` draws what it is asked for, or says what is wrong."""

import pathlib
import tempfile

import contract_tools as tools
from absl.testing import absltest, parameterized

from jax_overlap import _plot, _timeline, plan

PNG = b"\x89PNG"
PICTURE = (
    pathlib.Path(__file__).parents[1] / "examples" / "plan_matmul_reduce_scatter.png"
)
PICTURE_LIMIT = 80_000
WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from jax_overlap import plan
plan.main(["--out", sys.argv[1]])
"""


class Command(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "new" / "plan.png"

    def refused(self, *argv):
        with self.assertRaises(SystemExit) as caught:
            plan.main([*argv, "--out", str(self.out)])
        self.assertFalse(self.out.exists())
        return str(caught.exception)

    def test_as_a_command(self):
        """Without a warning, and without starting a backend or needing a screen."""
        command = ("-W", "error", "-m", "jax_overlap.plan", "--ranks", "8")
        child = tools.run_child(
            *command,
            *("--op", "matmul_reduce_scatter", "--out", str(self.out)),
            env={"DISPLAY": None, "JAX_PLATFORMS": "nonesuch"},
            limit=60,
        )
        self.assertEqual((child.code, child.err), (0, ""))
        self.assertIn("matmul_reduce_scatter, 8 ranks: 8.40 x", child.out)
        self.assertIn(f"Wrote {self.out}", child.out)
        self.assertTrue(self.out.read_bytes().startswith(PNG))

    @parameterized.product(
        op=tuple(_timeline.OPS), size=(("1", "1"), ("2", "1"), ("5", "3"))
    )
    def test_every_op(self, op, size):
        ranks, sub_slices = size
        arguments = ("--op", op, "--ranks", ranks, "--sub-slices", sub_slices)
        plan.main([*arguments, "--out", str(self.out)])
        self.assertTrue(self.out.read_bytes().startswith(PNG))

    def test_other_formats(self):
        self.out = self.out.with_suffix(".svg")
        plan.main(["--out", str(self.out)])
        self.assertIn(b"<svg", self.out.read_bytes())

    @parameterized.parameters(
        (("--ranks", "0"), "ranks=0"),
        (("--sub-slices", "-1"), "sub_slices=-1"),
        (("--op", "psum", "--ratio", "0.5"), "psum: ratio=0.5"),
        (("--ratio", "nan"), "ratio=nan"),
    )
    def test_refuses_numbers(self, argv, words):
        self.assertIn(words, self.refused(*argv))

    def test_refuses_a_format(self):
        self.out = self.out.with_suffix(".txt")
        self.assertRegex(self.refused(), "--out .*'txt' is not supported")

    def test_refuses_a_folder(self):
        self.out.mkdir(parents=True)
        with self.assertRaisesRegex(SystemExit, f"--out {self.out}"):
            plan.main(["--out", str(self.out)])

    def test_without_matplotlib(self):
        child = tools.run_child("-c", WITHOUT_MATPLOTLIB, str(self.out), limit=60)
        self.assertEqual(child.code, 1)
        self.assertIn("needs matplotlib", child.err)
        self.assertIn("pip install matplotlib", child.err)
        self.assertNotIn("Traceback", child.err)


class Picture(absltest.TestCase):
    def test_shows_every_slice_and_every_send(self):
        figure = _plot.draw(_timeline.timeline("matmul_reduce_scatter", 8))
        (axes,) = figure.axes
        texts = [text.get_text() for text in axes.texts]
        for n in range(8):
            self.assertEqual(texts.count(str(n)), 8)
            self.assertEqual(texts.count(f"→{n}"), 7)
        self.assertEqual(texts.count("Σ"), 8)
        self.assertIn("matmul_reduce_scatter, 8 ranks", axes.get_title("left"))
        self.assertEqual(axes.get_xlabel(), "time / time to compute a slice")
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertLen(legend, 4)  # nobody waits

    def test_waits_are_drawn_where_sending_is_slower(self):
        figure = _plot.draw(_timeline.timeline("all_gather_matmul", 4, ratio=2))
        hatched = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
        self.assertLen(hatched, 4 * 3)
        self.assertIn("wait", [t.get_text() for t in figure.legends[0].get_texts()])

    def test_of_the_readme_is_small(self):
        png = PICTURE.read_bytes()
        self.assertTrue(png.startswith(PNG))
        self.assertLess(len(png), PICTURE_LIMIT)


if __name__ == "__main__":
    absltest.main()

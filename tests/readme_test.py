"""The code blocks of the README run, in order, as one program."""

import re
import subprocess
import sys
from pathlib import Path

from absl.testing import absltest

README = Path(__file__).parents[1] / "README.md"
TIME_LIMIT_S = 180


class ReadmeTest(absltest.TestCase):
    def test_code_blocks_run(self):
        blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
        self.assertGreaterEqual(len(blocks), 2)
        done = subprocess.run(
            [sys.executable, "-P", "-c", "".join(blocks)],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("psum over ('tp',) of float32[8,256]", done.stdout)
        self.assertIn("native two_shot, 4 ranks", done.stdout)
        self.assertIn("matmul_all_reduce", done.stdout)

    def test_docstring_examples_run(self):
        program = (
            "import doctest, importlib, sys\n"
            "for name in ('ops.psum', 'ops.psum_scatter', 'ops.all_gather',\n"
            "    'ops.all_to_all', 'ops.matmul_reduce_scatter',\n"
            "    'ops.all_gather_matmul', 'ops.matmul_all_reduce', 'explain',\n"
            "    'rewrite', 'schedule', 'sharded', 'testing'):\n"
            "    module = importlib.import_module('jax_overlap.' + name)\n"
            "    failed, run = doctest.testmod(module)\n"
            "    print(name, run)\n"
            "    if failed or not run: sys.exit(1)\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_table_of_variables_is_complete(self):
        from jax_overlap import config

        text = README.read_text()
        for variable in config.VARIABLES:
            self.assertIn(f"`{variable.name}`", text)


if __name__ == "__main__":
    absltest.main()

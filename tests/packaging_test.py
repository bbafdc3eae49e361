"""The package as it is installed: what importing it costs and does, and its files."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tomllib

from absl.testing import absltest

import jax_overlap
from jax_overlap import _nvshmem

_ROOT = pathlib.Path(__file__).parent.parent
_IMPORT_LIMIT_S = 0.5

_TIMED_IMPORT = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""

# Folders that exist on one machine only. `~`, relative paths and /usr are everyone's.
_MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(home|Users|root|work|workspace|scratch|mnt|data|tmp)/\w"
)


def _run(*args, timeout=60, **env):
    """Runs this Python, without the current folder on its path; returns its output."""
    process = subprocess.run(
        [sys.executable, "-P", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode != 0:
        raise AssertionError(
            f"{args} ended with {process.returncode}:\n{process.stderr}"
        )
    return process.stdout


class ImportTest(absltest.TestCase):
    def test_costs_little_more_than_jax(self):
        times = {"jax": [], "jax_overlap": []}
        for _ in range(5):
            for module, seconds in times.items():
                seconds.append(float(_run("-c", _TIMED_IMPORT.format(module=module))))
        jax_s, ours_s = (statistics.median(seconds) for seconds in times.values())
        self.assertLess(ours_s - jax_s, _IMPORT_LIMIT_S, times)

    def test_starts_no_backend(self):
        _run(
            "-c",
            "import jax_overlap\n"
            "from jax._src import xla_bridge\n"
            "assert not xla_bridge.backends_are_initialized()",
        )

    def test_imports_nothing_optional(self):
        optional = {"flax", "matplotlib", "optax", "orbax", "pytest", "tqdm"}
        loaded = _run("-c", "import jax_overlap, sys; print(*sys.modules)").split()
        self.assertEmpty(optional & set(loaded))

    def test_warns_of_nothing(self):
        _run("-W", "error", "-c", "import jax_overlap")

    def test_twice(self):
        # The second import registers every handler again, as reloading a notebook does.
        _run(
            "-c",
            "import sys, jax, jax_overlap\n"
            "for name in [n for n in sys.modules if n.startswith('jax_overlap')]:\n"
            "  if not name.endswith('_ffi'): del sys.modules[name]\n"
            "import jax_overlap\n"
            "jax.devices()",
        )

    def test_with_every_gpu_hidden(self):
        platform = _run(
            "-c",
            "import jax, jax_overlap; print(jax.devices()[0].platform)",
            CUDA_VISIBLE_DEVICES="",
        )
        self.assertEqual(platform.strip(), "cpu")


class VersionTest(absltest.TestCase):
    def test_is_that_of_the_installed_package(self):
        self.assertEqual(
            jax_overlap.__version__, importlib.metadata.version("jax-overlap")
        )

    def test_has_an_entry_in_the_changelog(self):
        changelog = (_ROOT / "CHANGELOG.md").read_text()
        self.assertIn(f"\n## {jax_overlap.__version__}", changelog)


class ExtrasTest(absltest.TestCase):
    def test_require_the_nvshmem_that_the_loader_takes(self):
        oldest, untested = (
            ".".join(map(str, version))
            for version in (_nvshmem.OLDEST, _nvshmem.FIRST_UNTESTED)
        )
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        for cuda in ("12", "13"):
            wheel = f"nvidia-nvshmem-cu{cuda}>={oldest},<{untested}"
            for extra in (f"cuda{cuda}", f"cuda{cuda}-local"):
                self.assertEqual(extras[extra], [f"jax[{extra}]", wheel])


class RepositoryTest(absltest.TestCase):
    def test_names_no_path_of_one_machine(self):
        found = []
        for path in _repository_files():
            if path == pathlib.Path(__file__):
                continue
            text = path.read_bytes().decode(errors="ignore")
            for number, line in enumerate(text.splitlines(), start=1):
                if str(_ROOT) in line or _MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(_ROOT)}:{number}: {line.strip()}")
        self.assertEmpty(found, "\n".join(found))


def _repository_files():
    """Every file that is committed or could be; of an unpacked sdist, its folders."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    if (_ROOT / ".git").exists() and shutil.which("git"):
        names = subprocess.run(
            [*git, "--cached", "--others", "--exclude-standard"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split("\0")
        paths = [_ROOT / name for name in names]
    else:
        folders = ("jax_overlap", "ffi", "tests", "examples")
        paths = [path for name in folders for path in (_ROOT / name).rglob("*.*")]
        # What .gitignore names there: Python and the build put the folder into these.
        paths = [p for p in paths if p.suffix not in (".pyc", ".so")]
    return [path for path in paths if path.is_file()]


if __name__ == "__main__":
    absltest.main()

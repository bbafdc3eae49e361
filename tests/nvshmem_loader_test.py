"""Which NVSHMEM is loaded, and what is said of those that cannot be.

Each case is a process of its own with a made-up package nvidia.nvshmem and a made-up
native module on its path, as loading a library is for good.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

_LOADER = pathlib.Path(__file__).parent.parent / "jax_overlap" / "_nvshmem.py"
_VERSION = (3, 4, 5)

_LIBRARY = """
void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) {
  *a = MAJOR, *b = MINOR, *c = PATCH;
}
"""

# Like the native module: it finds the library by its name, which has to be loaded.
_MODULE = """
import ctypes
built_version, built_cuda = {built}, 13
_library = ctypes.CDLL("libnvshmem_host.so.3")
def runtime_version():
  numbers = [ctypes.c_int() for _ in range(3)]
  _library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
  return tuple(n.value for n in numbers)
"""

# The loader needs nothing of jax_overlap, whose import would take a second a case.
_PROGRAM = """
import ctypes, importlib.util, sys, types
root, loader, *preload = sys.argv[1:]
sys.path.insert(0, root)
package = types.ModuleType("jax_overlap")
package.__path__ = [root + "/jax_overlap"]
sys.modules["jax_overlap"] = package
spec = importlib.util.spec_from_file_location("jax_overlap._nvshmem", loader)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for path in preload: ctypes.CDLL(path)
for _ in range(2): native, why = module.load()
print(native is not None, why)
"""


class LoadTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls._cache = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls._cache.cleanup)

    def _folder(self) -> pathlib.Path:
        return pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def setUp(self):
        super().setUp()
        self._root = self._folder()

    def _library(self, version):
        """A library of this version, compiled once."""
        path = pathlib.Path(self._cache.name, "-".join(map(str, version)) + ".so")
        if not path.exists():
            compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
            numbers = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
            subprocess.run(
                [
                    *(compiler, "-x", "c", "-shared", "-fPIC"),
                    *(f"-D{name}={value}" for name, value in numbers),
                    *("-Wl,-soname,libnvshmem_host.so.3", "-o", str(path), "-"),
                ],
                input=_LIBRARY,
                text=True,
                timeout=60,
                check=True,
            )
        return path

    def _install(self, version=_VERSION, soname="libnvshmem_host.so.3", cuda=(13,)):
        """Makes the package as a wheel does; returns the library's path."""
        path = self._root / "nvidia" / "nvshmem" / "lib" / soname
        path.parent.mkdir(parents=True)
        shutil.copy(self._library(version), path)
        for major in cuda:
            name = f"nvidia-nvshmem-cu{major}"
            info = self._root / f"{name.replace('-', '_')}-3.4.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name}\nVersion: 3.4.5\n")
        return str(path)

    def _load(self, *preload, built=_VERSION):
        """Whether it loads, and why not."""
        folder = self._root / "jax_overlap"
        folder.mkdir()
        if built:
            module = folder / "_ffi_nvshmem.py"
            module.write_text(_MODULE.format(built=built))
        process = subprocess.run(
            # Isolated, and without the packages that this Python really has.
            [sys.executable, "-IS", "-c", _PROGRAM, str(self._root), _LOADER, *preload],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        loaded, _, why = process.stdout.strip().partition(" ")
        return loaded == "True", why

    def _assert_refused(self, result, *parts):
        loaded, why = result
        self.assertFalse(loaded)
        for part in parts:
            self.assertIn(part, why)

    @parameterized.parameters((_VERSION,), ((3, 4, 6),))
    def test_loads(self, version):
        self._install(version)
        self.assertEqual(self._load(), (True, ""))

    def test_loads_what_no_wheel_owns(self):
        self._install(cuda=())
        self.assertEqual(self._load(), (True, ""))

    def test_loads_what_another_has_loaded_from_there(self):
        path = self._install()
        self.assertEqual(self._load(path), (True, ""))

    def test_built_without(self):
        self._install()
        self._assert_refused(self._load(built=None), "was built without NVSHMEM")

    def test_no_package(self):
        self._assert_refused(
            self._load(),
            "nvidia.nvshmem is not installed",
            "'jax-overlap[cuda12]' or pip install 'jax-overlap[cuda13]'",
        )

    def test_another_package_of_nvidia(self):
        (self._root / "nvidia" / "nccl").mkdir(parents=True)
        self._assert_refused(self._load(), "nvidia.nvshmem is not installed")

    def test_no_library(self):
        (self._root / "nvidia" / "nvshmem" / "include").mkdir(parents=True)
        self._assert_refused(self._load(), "lib has no libnvshmem_host.so.3. What to")

    def test_library_of_another_soname(self):
        self._install(soname="libnvshmem_host.so.4")
        self._assert_refused(
            self._load(), "no libnvshmem_host.so.3, only libnvshmem_host.so.4"
        )

    def test_library_that_is_none(self):
        pathlib.Path(self._install()).write_text("no ELF file")
        self._assert_refused(self._load(), "could not be loaded", "file too short")

    def test_another_major_version(self):
        path = self._install((4, 0, 0))
        self._assert_refused(
            self._load(),
            "built for NVSHMEM 3.4.5",
            path,
            "is 4.0.0",
            "jax-overlap[cuda13]",
        )

    def test_older_than_built_for(self):
        path = self._install((3, 4, 5))
        self._assert_refused(
            self._load(built=(3, 4, 6)), "built for NVSHMEM 3.4.6", path, "is 3.4.5"
        )

    @parameterized.parameters(((3, 5, 0),), ((3, 8, 0),))
    def test_too_new(self, version):
        path = self._install(version)
        text = ".".join(map(str, version))
        self._assert_refused(
            self._load(), f"{path} is NVSHMEM {text}", "built for 3.4.5", "below 3.5"
        )

    def test_older_than_tested(self):
        path = self._install((3, 3, 20))
        self._assert_refused(
            self._load(built=(3, 3, 20)), f"{path} is NVSHMEM 3.3.20", "3.4.5 and newer"
        )

    def test_for_another_cuda(self):
        path = self._install(cuda=(12,))
        self._assert_refused(
            self._load(), "built for CUDA 13", path, "nvidia-nvshmem-cu12", "[cuda13]"
        )

    def test_for_two_cudas(self):
        self._install(cuda=(12, 13))
        self._assert_refused(self._load(), "both nvidia-nvshmem-cu12 and", "[cuda13]")

    def test_two_paths(self):
        path = self._install()
        other = str(self._folder() / "libnvshmem_host.so.3")
        shutil.copy(self._library(_VERSION), other)
        self._assert_refused(self._load(other), other, path, "loaded in this process")


class PrepareEnvironmentTest(absltest.TestCase):
    def _prepare(self, **env):
        program = (
            "import os, runpy, sys\n"
            "runpy.run_path(sys.argv[1])['prepare_environment'](1 << 20)\n"
            "for name in ('NVSHMEM_SYMMETRIC_SIZE', 'NVSHMEM_DISABLE_NVLS'):\n"
            "  print(os.environ[name])\n"
        )
        output = subprocess.run(
            [sys.executable, "-IS", "-c", program, _LOADER],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        return output.split()

    def test_leaves_room_for_nvshmem_itself(self):
        self.assertEqual(self._prepare(), [str((1 << 20) + (32 << 20)), "1"])

    def test_leaves_what_is_set(self):
        env = {"NVSHMEM_SYMMETRIC_SIZE": "1G", "NVSHMEM_DISABLE_NVLS": "0"}
        self.assertEqual(self._prepare(**env), ["1G", "0"])


if __name__ == "__main__":
    absltest.main()

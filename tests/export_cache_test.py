"""Programs that outlive their process: exported, serialized, or in a compile cache."""

import hashlib
import pathlib
import pickle
import tempfile

import contract_tools as tools
import jax
import numpy as np
from absl.testing import absltest
from contract_tools import BF16, line
from jax import export
from jax.experimental import serialize_executable
from op_contract import Contract, named, node_size
from op_descriptions import PSUM

import jax_overlap

SAFE = [export.DisabledSafetyCheck.custom_call(PSUM.target)]


def sums(x):
    """Every algorithm, and one site more, in one program."""
    results = [jax_overlap.psum(x, "x", algorithm=a) for a in (None, *PSUM.algorithms)]
    return [*results, jax_overlap.psum(2 * x, "x")]


def digest(result) -> str:
    """Of all bits of all ranks."""
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves(result):
        for _, part in sorted(tools.fetch(leaf).items()):
            whole.update(tools.bits(part))
    return whole.hexdigest()


# The children: each is told a folder, where operand.npy lies, prints a digest.
OPERAND = """
import sys, pathlib, jax, numpy as np, jax_overlap
folder = pathlib.Path(sys.argv[1])
def operand():
    import contract_tools as tools
    x = np.load(folder / "operand.npy")
    return tools.place(x, tools.line(8))
"""
CALL_EXPORTED = (
    OPERAND
    + """
exported = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
x = operand()
from export_cache_test import digest
print(digest(jax.jit(exported.call)(x)))
"""
)
LOAD_EXECUTABLE = (
    OPERAND
    + """
import pickle
from jax.experimental import serialize_executable
loaded = serialize_executable.deserialize_and_load(
    *pickle.loads((folder / "executable").read_bytes()),
    execution_devices=jax.devices())
from export_cache_test import digest
print(digest(loaded(operand())))
"""
)
RUN = (
    OPERAND
    + """
import collections, contract_tools as tools
from export_cache_test import digest, sums
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **kw: events.update([name]))
program = jax.jit(tools.stacked(sums, tools.line(8)))
x = operand()
events.clear()
print(digest(program(x)))
print(events["/jax/compilation_cache/cache_hits"],
      events["/jax/compilation_cache/cache_misses"])
"""
)


class OutlivesTheProcess(Contract):
    op = PSUM

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.x = tools.normal(self.seed, (8, 20_001), np.float32)
        np.save(self.folder / "operand.npy", self.x)
        self.program = jax.jit(tools.stacked(sums, line(8)))
        self.operand = tools.place(self.x, line(8))

    def child(self, code, **env):
        child = tools.run_child("-c", code, str(self.folder), env=env, limit=100)
        self.assertFalse(child.timed_out, child.err)
        self.assertEqual(child.code, 0, child.err)
        return child.out.split()

    def test_same_bits_in_another_process(self):
        self.assertEqual(self.child(RUN)[0], digest(self.program(self.operand)))

    @named(cpu=(("cpu",),), cpu_and_cuda=(("cpu", "cuda"),))
    def test_exported(self, platforms):
        exported = export.export(
            self.program, platforms=platforms, disabled_checks=SAFE
        )(self.operand)
        self.assertIn(PSUM.target, exported.mlir_module())
        blob = exported.serialize()
        (self.folder / "program").write_bytes(blob)
        here = digest(self.program(self.operand))
        again = export.deserialize(bytearray(blob))
        self.assertEqual(digest(jax.jit(again.call)(self.operand)), here)
        self.assertEqual(self.child(CALL_EXPORTED)[0], here)

    def test_exported_with_its_nodes(self):
        """The node size is the exporter's, not of where the program runs."""
        with node_size("2"):
            program = jax.jit(tools.stacked(sums, line(8)))
            exported = export.export(program, disabled_checks=SAFE)(self.operand)
            here = digest(program(self.operand))
        self.assertNotEqual(here, digest(self.program(self.operand)))  # or no test
        (self.folder / "program").write_bytes(exported.serialize())
        found = self.child(CALL_EXPORTED, JAX_OVERLAP_NODE_SIZE=None)[0]
        self.assertEqual(found, here)

    def test_gradient_exported(self):
        x = tools.place(tools.exact(self.seed, (8, 50), BF16), line(8))

        def loss(x):
            return jax.numpy.sum(tools.stacked(sums, line(8))(x)[0] ** 2)

        program = jax.jit(jax.grad(loss))
        exported = export.export(program, disabled_checks=SAFE)(x)
        blob = exported.serialize(vjp_order=1)
        again = export.deserialize(bytearray(blob))
        np.testing.assert_array_equal(jax.jit(again.call)(x), program(x))

    def test_export_unchecked_is_refused_by_jax(self):
        """So users have to name the target; the name is part of our interface."""
        with self.assertRaisesRegex(ValueError, "jax_overlap.psum"):
            export.export(self.program)(self.operand)

    def test_executable_serialized(self):
        compiled = self.program.lower(self.operand).compile()
        (self.folder / "executable").write_bytes(
            pickle.dumps(serialize_executable.serialize(compiled))
        )
        self.assertEqual(
            self.child(LOAD_EXECUTABLE)[0], digest(self.program(self.operand))
        )

    def test_persistent_compile_cache(self):
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        here = digest(self.program(self.operand))
        found, hits, misses = self.child(RUN, **cache)
        self.assertEqual((found, hits), (here, "0"))
        self.assertGreater(int(misses), 0)
        found, hits, misses = self.child(RUN, **cache)
        self.assertEqual((found, misses), (here, "0"))
        self.assertGreater(int(hits), 0)

    def test_cache_knows_the_node_size(self):
        """Another split is another program: a hit would give the wrong one."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        whole, hits, _ = self.child(RUN, **cache)
        split, hits, _ = self.child(RUN, JAX_OVERLAP_NODE_SIZE="2", **cache)
        self.assertEqual(hits, "0")
        self.assertNotEqual(whole, split)


if __name__ == "__main__":
    absltest.main()

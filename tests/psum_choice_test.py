"""Which implementation and algorithm a psum takes, who is told, what is refused."""

import functools
import re
import socket
from concurrent import futures

import contract_tools as tools
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from contract_tools import BF16, F16, Layout, line
from jax.sharding import PartitionSpec as P
from op_contract import Contract, named
from op_descriptions import PSUM

import jax_overlap

GRID = Layout((2, 4), ("a", "b"), ("a", "b"))


def fallbacks(word):
    """How many psums were lowered to lax for a reason that has the word in it."""
    return sum(
        row["count"]
        for row in jax_overlap.info()["lowered"]
        if (row["op"], row["implementation"]) == ("psum", "lax")
        and word in row["reason"]
    )


class Choices(Contract):
    op = PSUM

    def lowered(self, x, layout=None, check_vma=True, **kw):
        layout = line(len(x)) if layout is None else layout
        fn = tools.stacked(
            lambda x: jax_overlap.psum(x, layout.axis_name, **kw),
            layout,
            check_vma=check_vma,
        )
        return jax.jit(fn).lower(tools.place(x, layout))

    def test_reference_is_lax(self):
        x = tools.exact(self.seed, (4, 10), np.float32)
        hlo = self.lowered(x, implementation="reference").compile().as_text()
        self.assertEqual(tools.custom_calls(hlo, PSUM.target), 0)
        self.assertLen(tools.collectives(hlo), 1)

    def test_native_is_ours(self):
        for dtype in (np.float32, BF16, F16, np.int32, np.int8):
            x = tools.exact(self.seed, (4, 10), dtype)
            self.check(
                lambda x: jax_overlap.psum(x, "x", implementation="native"),
                line(4),
                (x,),
                np.stack([x.sum(0, dtype=dtype)] * 4),
                calls=1,
            )

    @named(
        u8=(np.uint8,),
        u32=(np.uint32,),
        i16=(np.int16,),
        c64=(np.complex64,),
        e4m3=(jnp.float8_e4m3fn,),
        i64=(np.int64,),
        c128=(np.complex128,),
    )
    def test_types_that_are_not_ours(self, dtype):
        """They go to lax and are counted; with "native" they are refused."""
        with jax.enable_x64(True):
            x = tools.exact(self.seed, (4, 10), np.int32).clip(0).astype(dtype)
            before = fallbacks(np.dtype(dtype).name)
            hlo = self.lowered(x).compile().as_text()
            self.assertEqual(tools.custom_calls(hlo, PSUM.target), 0)
            self.assertEqual(fallbacks(np.dtype(dtype).name), before + 1)
            with self.assertRaises(TypeError) as caught:
                self.lowered(x, implementation="native")
            for word in ("psum", np.dtype(dtype).name, "float32", "bfloat16", "int8"):
                self.assertIn(word, str(caught.exception))

    @parameterized.product(
        option=("implementation", "algorithm"), value=("nope", "", 3, "NATIVE")
    )
    def test_unknown_options(self, option, value):
        legal = {
            "implementation": ("reference", "native"),
            "algorithm": ("one_shot", "two_shot", "nvrar"),
        }
        x = tools.exact(self.seed, (4, 10), np.float32)
        with self.assertRaises(ValueError) as caught:
            self.lowered(x, **{option: value})
        for word in (option, repr(value), *legal[option]):
            self.assertIn(word, str(caught.exception))

    def test_operand_type_is_the_users(self):
        """No conversion around the call doubles the bytes that travel."""
        x = tools.exact(self.seed, (4, 1000), BF16)
        hlo = self.lowered(x).compile().as_text()
        (call,) = [text for text in hlo.splitlines() if f'"{PSUM.target}"' in text]
        self.assertIn("bf16[1000]", call)
        self.assertNotIn("f32[1000]", call)

    def test_no_address_in_the_program(self):
        """Compile caches need programs that are alike in every process."""
        x = tools.exact(self.seed, (4, 1000), np.float32)
        texts = [self.lowered(x).as_text() for _ in range(2)]
        self.assertEqual(*texts)
        self.assertIn(PSUM.target, texts[0])
        for number in re.findall(r"(?<![\w.])-?\d{9,}", texts[0]):
            self.fail(f"{number} in the program looks like an address")

    def test_partly_manual_shard_map_goes_to_lax(self):
        """A custom call there would silently be gathered over the automatic axes."""
        x = tools.exact(self.seed, (8, 4, 16), np.float32)
        mesh = GRID.mesh

        def fn(implementation):
            return jax.jit(
                jax.shard_map(
                    lambda x: jax_overlap.psum(x, "b", implementation=implementation),
                    mesh=mesh,
                    in_specs=P(None, "b"),
                    out_specs=P(),
                    axis_names={"b"},
                )
            )

        placed = jax.device_put(x, jax.NamedSharding(mesh, P("a", "b")))
        before = fallbacks("automatic")
        compiled = fn(None).lower(placed).compile()
        self.assertEqual(fallbacks("automatic"), before + 1)
        hlo = compiled.as_text()
        self.assertEqual(tools.custom_calls(hlo, PSUM.target), 0)
        self.assertEqual([c for c in tools.collectives(hlo) if "all-gather" in c], [])
        np.testing.assert_array_equal(compiled(placed), x.sum(1, keepdims=True))
        with self.assertRaisesRegex(NotImplementedError, "'a'.*automatic"):
            fn("native").lower(placed)

    def test_an_automatic_axis_of_size_one_is_no_hindrance(self):
        mesh = Layout((1, 4), ("a", "b"), ("b",)).mesh
        x = tools.exact(self.seed, (4, 16), np.float32)
        fn = jax.jit(
            jax.shard_map(
                lambda x: jax_overlap.psum(x, "b"),
                mesh=mesh,
                in_specs=P("b"),
                out_specs=P(),
                axis_names={"b"},
            )
        )
        np.testing.assert_array_equal(fn(x), x.sum(0, keepdims=True))

    def test_one_rank_needs_no_call(self):
        x = tools.exact(self.seed, (1, 10), np.float32)
        for kw in ({}, {"implementation": "native"}, {"algorithm": "nvrar"}):
            hlo = self.lowered(x, **kw).compile().as_text()
            self.assertEqual(tools.custom_calls(hlo, PSUM.target), 0)
            self.assertEqual(tools.collectives(hlo), [])

    def test_the_trivial_axis_of_a_mesh(self):
        layout = Layout((1, 4), ("a", "b"), ("a",))
        x = tools.exact(self.seed, (4, 10), np.float32)
        fn = lambda x: jax_overlap.psum(x, "a")  # noqa: E731
        self.check(fn, layout, (x,), x, calls=0)

    def test_explain_tells_what_will_run_and_why(self):
        x = tools.exact(self.seed, (4, 10), np.float32)

        def fn(x):
            return (
                jax_overlap.psum(x, "x", algorithm="two_shot"),
                jax_overlap.psum(x, "x", implementation="reference"),
                jax_overlap.psum(x.astype(jnp.int16), "x"),
            )

        told = str(jax_overlap.explain(tools.stacked(fn, line(4)), x))
        for word in ("psum", "native", "two_shot", "reference", "int16"):
            self.assertIn(word, told)


TWO_PROCESSES = """
import sys, jax, numpy as np, jax_overlap, contract_tools as tools
port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
layout = tools.line(16)
x = tools.exact(5, (16, 100), np.float32)
program = jax.jit(tools.stacked(lambda x: jax_overlap.psum(x, "x"), layout))
parts = tools.fetch(program(tools.place(x, layout)))
assert len(parts) == 8, parts.keys()
for part in parts.values():
    np.testing.assert_array_equal(part, x.sum(0))
(row,) = jax_overlap.info()["lowered"]
assert row["implementation"] == "lax" and "process" in row["reason"], row
try:
    jax.jit(tools.stacked(
        lambda x: jax_overlap.psum(x, "x", implementation="native"), layout)).lower(x)
except NotImplementedError as error:
    assert "process" in str(error), error
else:
    raise AssertionError("not refused")
print("right")
"""


class TwoProcesses(absltest.TestCase):
    def test_cpu_with_several_processes_goes_to_lax(self):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        with futures.ThreadPoolExecutor(2) as pool:
            run = functools.partial(
                tools.run_child, "-c", TWO_PROCESSES, port, limit=90
            )
            children = list(pool.map(run, "01"))
        for child in children:
            self.assertFalse(child.timed_out, child.err)
            self.assertEqual(child.code, 0, child.err)
            self.assertEqual(child.out.split()[-1], "right")


if __name__ == "__main__":
    absltest.main()

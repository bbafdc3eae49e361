"""What goes wrong ends in an error that can be caught, in time, and is not lost.

Each case runs in a process of its own, as an abort or a hang would take this one.
The limit on waits is short there: LIMIT_S, and results have to come in SLACK_S more.
"""

import signal
import time

import contract_tools as tools
from absl.testing import absltest, parameterized
from op_contract import named

LIMIT_S = 1
SLACK_S = 3

PRELUDE = f"""
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import contract_tools as tools, jax_overlap
from contract_tools import line

LIMIT_S, SLACK_S = {LIMIT_S}, {SLACK_S}
layout = line(4)
x = tools.exact(0, (4, 300), np.float32)
total = x.sum(0)

def psum(x, **kw):
    return jax_overlap.psum(x, "x", **kw)

def jitted(fn, layout=layout):
    return jax.jit(tools.stacked(fn, layout, check_vma=False))

def is_one_of(ranks):
    return (lax.axis_index("x") == jnp.array(ranks)).any()

def without(ranks, call=psum):
    # Those ranks never call.
    return jitted(lambda x: lax.cond(is_one_of(ranks), lambda x: x, call, x))

def late(x, rank, seconds):
    def sleep(mine):
        time.sleep(seconds if int(mine) == rank else 0)
        return np.float32(0)
    shape = jax.ShapeDtypeStruct((), np.float32)
    return x + jax.pure_callback(sleep, shape, lax.axis_index("x"))

def error_of(program, *args):
    start = time.monotonic()
    try:
        result = jax.block_until_ready(program(*(args or (tools.place(x, layout),))))
    except jax.errors.JaxRuntimeError as error:
        waited = time.monotonic() - start
        assert waited < LIMIT_S + SLACK_S, waited
        return str(error)
    raise AssertionError(f"no error, but {{result}}")

def assert_names(text, missing, op="psum"):
    for word in (op, "'x'", f"for ranks {{missing}}", "JAX_OVERLAP_WAIT_TIMEOUT_S"):
        assert word in text, (word, text)

def assert_works():
    got = jitted(psum)(tools.place(x, layout))
    for part in tools.fetch(got).values():
        np.testing.assert_array_equal(part, total)

"""


class Child(parameterized.TestCase):
    def run_fault(self, code, *, out="", limit=60, **env):
        """Runs the code; asserts that it ends well and prints `out`."""
        env = {"JAX_OVERLAP_WAIT_TIMEOUT_S": str(LIMIT_S), **env}
        child = tools.run_child("-c", PRELUDE + code, env=env, limit=limit)
        self.assertFalse(child.timed_out, f"hangs\n{child.out}\n{child.err}")
        self.assertEqual(child.code, 0, f"exit code\n{child.out}\n{child.err}")
        self.assertEqual(child.out.strip(), out, child.err)
        self.assertNotIn("that nobody acknowledged", child.err)


class MissingRanks(Child):
    @named(**{a: (a,) for a in ("chosen", "one_shot", "two_shot", "nvrar")})
    def test_ranks_that_never_call(self, algorithm):
        self.run_fault(
            f"""
algorithm = None if {algorithm!r} == "chosen" else {algorithm!r}
for ranks in ([1], [0, 3], [0, 1, 2]):
    text = error_of(without(ranks, lambda x: psum(x, algorithm=algorithm)))
    assert_names(text, ranks)
    here = [r for r in range(4) if r not in ranks]
    assert f"ranks {{here}} of 4 waited" in text, text
    assert any(e in text for e in jax_overlap.last_errors()), text
    jax_overlap.clear_errors()
    assert jax_overlap.last_errors() == []
    assert_works()
print("right again")
""",
            out="right again",
            JAX_OVERLAP_NODE_SIZE="2",
        )

    def test_a_rank_that_comes_after_the_limit(self):
        """It gets the error too, and not a sum of what is there."""
        self.run_fault(
            """
values = []
def fn(x):
    y = psum(late(x, 2, LIMIT_S + 1))
    jax.debug.callback(lambda y: values.append(np.array(y)), y)
    return y
assert_names(error_of(jitted(fn)), [2])
time.sleep(2)
assert values == [], values
jax_overlap.clear_errors()
assert_works()
print("right again")
""",
            out="right again",
        )

    def test_a_rank_that_fails_before_it_calls(self):
        self.run_fault(
            """
def fail(rank):
    if int(rank) == 1:
        raise ZeroDivisionError("rank one is broken")
    return np.float32(0)
def fn(x):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return psum(x + jax.pure_callback(fail, shape, lax.axis_index("x")))
text = error_of(jitted(fn))
deadline = time.monotonic() + LIMIT_S + SLACK_S
while not jax_overlap.last_errors() and time.monotonic() < deadline:
    time.sleep(0.05)
assert_names(jax_overlap.last_errors()[0], [1])
jax_overlap.clear_errors()
assert_works()
print("right again")
""",
            out="right again",
        )

    def test_ranks_at_different_ops(self):
        """Other shapes, other types, or the same ops in another order."""
        self.run_fault(
            """
zero = lambda: is_one_of([0])
pairs = [
    (lambda x: psum(x), lambda x: psum(x[:10]).sum() + x),
    (lambda x: psum(x), lambda x: psum(x.astype(jnp.bfloat16)).astype(x.dtype)),
    (lambda x: psum(psum(x) + 1, algorithm="one_shot"),
     lambda x: psum(psum(x, algorithm="one_shot") + 1)),
]
for a, b in pairs:
    text = error_of(jitted(lambda x: lax.cond(is_one_of([0]), a, b, x)))
    assert "JAX_OVERLAP_WAIT_TIMEOUT_S" in text and "psum" in text, text
    time.sleep(0.3)  # both sites fail, not at the same instant
    jax_overlap.clear_errors()
    assert_works()
print("right again")
""",
            out="right again",
        )

    def test_missing_in_one_step_of_a_loop(self):
        self.run_fault(
            """
def fn(x):
    def step(carry, i):
        skip = is_one_of([3]) & (i == 7)
        return carry, lax.cond(skip, lambda x: x, psum, x * i)
    return lax.scan(step, 0, jnp.arange(10, dtype=np.float32))[1]
assert_names(error_of(jitted(fn)), [3])
jax_overlap.clear_errors()
assert_works()
print("right again")
""",
            out="right again",
            limit=15,
        )

    def test_missing_in_one_team_of_two(self):
        """The other team's sum is not to blame; the error names the ranks."""
        self.run_fault(
            """
grid = tools.Layout((2, 4), ("a", "x"), ("x",))
y = tools.place(tools.exact(1, (8, 50), np.float32), grid)
def fn(y):
    skip = (lax.axis_index("a") == 1) & (lax.axis_index("x") == 2)
    return lax.cond(skip, lambda y: y, psum, y)
assert_names(error_of(jitted(fn, grid), y), [2])
jax_overlap.clear_errors()
want = np.asarray(y).reshape(2, 4, 50).sum(1)
for p, part in tools.fetch(jitted(psum, grid)(y)).items():
    np.testing.assert_array_equal(part, want[p // 4])
print("right again")
""",
            out="right again",
        )

    def test_what_came_before_stays_right(self):
        self.run_fault(
            """
operand = tools.place(x, layout)
before = jitted(psum)(operand)
meanwhile = jitted(lambda x: psum(x) * 2)
meanwhile(operand).block_until_ready()
failing = without([1])(operand)
beside = meanwhile(operand)  # started while the other waits
text = error_of(lambda _: failing)
for result, factor in ((before, 1), (beside, 2)):
    for part in tools.fetch(result).values():
        np.testing.assert_array_equal(part, factor * total)
np.testing.assert_array_equal(np.asarray(operand), x)
jax_overlap.clear_errors()
print("right still")
""",
            out="right still",
        )


class NothingIsLost(Child):
    def test_unacknowledged_errors_stop_the_next_call(self):
        self.run_fault(
            """
first = error_of(without([1]))
kept = jax_overlap.last_errors()
assert len(kept) == 1, kept
for _ in range(2):  # until it is acknowledged
    try:
        jax.eval_shape(jitted(psum), x)
    except jax_overlap.OverlapError as error:
        assert isinstance(error, RuntimeError)
        assert kept[0] in str(error) and "clear_errors" in str(error), error
    else:
        raise AssertionError("not raised")
assert jax_overlap.last_errors() == kept
assert kept[0] in str(jax_overlap.info()["errors"])
jax_overlap.clear_errors()
assert_works()
print("right again")
""",
            out="right again",
        )

    def test_the_first_failure_is_the_one_that_is_repeated(self):
        self.run_fault(
            """
one, two = without([1]), without([2])
operand = tools.place(x, layout)
for program in (one, two):  # compiled before any error is there
    program.lower(operand).compile()
one, two = one.lower(operand).compile(), two.lower(operand).compile()
assert_names(error_of(one), [1])
assert_names(error_of(two), [2])
first, second = jax_overlap.last_errors()
assert_names(first, [1]), assert_names(second, [2])
try:
    jax.eval_shape(jitted(psum), x)
except jax_overlap.OverlapError as error:
    assert first in str(error), error
jax_overlap.clear_errors()
print("kept")
""",
            out="kept",
        )

    @named(
        result_dropped=("without([1])(operand); time.sleep(LIMIT_S + 1)", 1),
        result_seen=("error_of(without([1]))", 1),
        exit_before_the_limit=("result = without([1])(operand)", 1),
        with_an_exit_code=("error_of(without([1])); sys.exit(7)", 7),
        with_an_exception=("error_of(without([1])); raise KeyError('other')", 1),
    )
    def test_reported_at_exit(self, code, exits):
        start = time.monotonic()
        child = tools.run_child(
            "-c",
            PRELUDE + f"operand = tools.place(x, layout)\n{code}\n",
            env={"JAX_OVERLAP_WAIT_TIMEOUT_S": str(LIMIT_S)},
            limit=60,
        )
        self.assertFalse(child.timed_out, child.err)
        self.assertLess(time.monotonic() - start, LIMIT_S + 10)
        if exits == 7:
            self.assertEqual(child.code, 7, child.err)
        self.assertGreater(child.code, 0, child.err)
        self.assertIn("for ranks [1]", child.err)
        self.assertIn("JAX_OVERLAP_WAIT_TIMEOUT_S", child.err)
        self.assertIn("jax_overlap", child.err)

    def test_acknowledged_errors_are_not_reported(self):
        self.run_fault("error_of(without([1])); jax_overlap.clear_errors()")


class Exits(Child):
    @named(
        normal=("assert_works()", 0),
        work_under_way=("results = [jitted(psum)(operand) for _ in range(20)]", 0),
        sys_exit_with_work_under_way=("r = jitted(psum)(operand); sys.exit(5)", 5),
        os_exit_with_work_under_way=("r = jitted(psum)(operand); os._exit(6)", 6),
        an_exception=("assert_works(); raise KeyError('mine')", 1),
    )
    def test_exit(self, code, exits):
        start = time.monotonic()
        child = tools.run_child(
            "-c", PRELUDE + f"operand = tools.place(x, layout)\n{code}\n", limit=60
        )
        self.assertFalse(child.timed_out, child.err)
        self.assertEqual(child.code, exits, child.err)
        self.assertLess(time.monotonic() - start, 10)
        self.assertNotIn("that nobody acknowledged", child.err)

    def test_interrupt_while_waiting(self):
        """Ctrl-C at a stuck op: KeyboardInterrupt at once, not at the limit."""
        self.run_fault(
            f"""
import signal
# A shell's background jobs, and so this test in one, inherit SIGINT as ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
operand = tools.place(x, layout)
program = without([1]).lower(operand).compile()
timer = threading.Timer(1, lambda: os.kill(os.getpid(), {int(signal.SIGINT)}))
timer.start()
start = time.monotonic()
try:
    program(operand).block_until_ready()
except KeyboardInterrupt:
    assert time.monotonic() - start < 3, time.monotonic() - start
    print("interrupted")
sys.stdout.flush()
time.sleep(5)  # the call fails meanwhile
assert_names(jax_overlap.last_errors()[0], [1])
jax_overlap.clear_errors()
""",
            out="interrupted",
            JAX_OVERLAP_WAIT_TIMEOUT_S="4",
        )


class Processes(Child):
    def test_fork_after_first_use(self):
        self.run_fault(
            """
import warnings; warnings.simplefilter("ignore")
assert_works()
child = os.fork()
if child == 0:
    try:
        jax.eval_shape(jitted(psum), x)
    except RuntimeError as error:
        os._exit(0 if "spawn" in str(error) and "fork" in str(error) else 3)
    os._exit(4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
assert_works()  # the parent is none the worse
print("refused")
""",
            out="refused",
        )

    def test_a_spawned_process_works(self):
        self.run_fault(
            """
import subprocess
assert_works()
code = "import jax_overlap, jax; print(len(jax.devices()), jax_overlap.last_errors())"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                     timeout=50).stdout)
""",
            out="8 []",
        )


class Settings(Child):
    @named(
        zero=("0",), negative=("-1",), text=("soon",), nan=("nan",), infinite=("inf",)
    )
    def test_wait_timeout_has_to_be_positive(self, text):
        child = tools.run_child(
            "-c",
            "import jax_overlap",
            env={"JAX_OVERLAP_WAIT_TIMEOUT_S": text},
            limit=60,
        )
        self.assertEqual(child.code, 1)
        for word in (
            "ValueError",
            "JAX_OVERLAP_WAIT_TIMEOUT_S",
            repr(text),
            "positive",
        ):
            self.assertIn(word, child.err.splitlines()[-1])

    @named(zero=("0",), negative=("-2",), text=("two",), fraction=("1.5",))
    def test_node_size_has_to_be_a_positive_number_of_ranks(self, text):
        self.run_fault(
            """
try:
    jitted(psum).lower(x)
except ValueError as error:
    assert repr(os.environ["JAX_OVERLAP_NODE_SIZE"]) in str(error), error
    print(str(error).split()[0])
""",
            out="JAX_OVERLAP_NODE_SIZE",
            JAX_OVERLAP_NODE_SIZE=text,
        )

    def test_a_heap_that_is_too_small(self):
        """An error with the numbers and the variable; what needs less still works."""
        self.run_fault(
            """
text = error_of(jitted(lambda x: psum(x, algorithm="one_shot")))
assert "JAX_OVERLAP_HEAP_BYTES" in text and "4096" in text, text
jax_overlap.clear_errors()
assert_works()
print("refused")
""",
            out="refused",
            JAX_OVERLAP_HEAP_BYTES="4096",
        )


if __name__ == "__main__":
    absltest.main()

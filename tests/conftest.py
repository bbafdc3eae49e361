"""What holds for every test under pytest.

Ends a test that hangs, refuses skips whose reason is not listed, and fails a whole run
in which tests silently did not run. Also under pytest-xdist (-n 2), whose workers run
the tests, and whose first process, which runs none, sees all reports.
"""

import faulthandler
import os
import pathlib

import cpu_devices  # noqa: F401
import pytest

# The fewest tests that a run of the whole suite executes on a machine without a GPU.
# Raise it with the tests you add; lower it only with the tests you delete.
EXPECTED_COUNT = 2627

# A test that takes longer is ended, and every thread's stack printed; so is an import
# or an exit. A test class that needs more sets TIME_LIMIT_S.
TIME_LIMIT_S = 180

# Why a test may be skipped; the reason begins with one of these.
SKIP_REASONS = (
    "needs a GPU",
    "needs 2 GPUs",
    "needs one process",
    "needs several processes",
    "needs a test build",
    "needs nvcc",
    "needs a newer jax",
)

_ROOT = pathlib.Path(__file__).parent.parent
_executed: set[str] = set()
_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    """Starts the clock; pytest captures nothing yet, so stderr is the real one."""
    config.stash[_stderr] = os.dup(2)
    waits_for_workers = config.getoption("dist", "no") != "no"
    if not waits_for_workers or _is_worker(config):
        _end_after(TIME_LIMIT_S, config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Gives `item` its time limit, and the limit for an exit to what follows it."""
    cls = getattr(item, "cls", None)
    _end_after(getattr(cls, "TIME_LIMIT_S", TIME_LIMIT_S), item.config)
    try:
        return (yield)
    finally:
        _end_after(TIME_LIMIT_S, item.config)


def _end_after(seconds, config):
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Turns a skip for an unlisted reason into a failure."""
    return _refuse_unlisted_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a module that skips itself."""
    return _refuse_unlisted_skip((yield))


def pytest_runtest_logreport(report):
    """Counts what runs."""
    if report.when == "call" and not report.skipped:
        _executed.add(report.nodeid)


def pytest_unconfigure(config):
    """Lets a worker that is through wait for the other one."""
    if _is_worker(config):
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session):
    """Fails a run that left out tests."""
    if session.exitstatus == pytest.ExitCode.OK and _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Says that tests were left out, or when the count is to be raised."""
    if missing := _missing(config):
        terminalreporter.write_line(f"ERROR: {missing}", red=True)
    if _is_whole_suite(config) and len(_executed) > EXPECTED_COUNT:
        terminalreporter.write_line(
            f"{len(_executed)} tests ran; EXPECTED_COUNT in tests/conftest.py says "
            f"{EXPECTED_COUNT}: raise it."
        )


def _missing(config) -> str | None:
    if _is_worker(config) or not _is_whole_suite(config):
        return None
    if len(_executed) >= EXPECTED_COUNT:
        return None
    return (
        f"{len(_executed)} tests ran, {EXPECTED_COUNT} were expected "
        "(EXPECTED_COUNT in tests/conftest.py)"
    )


def _refuse_unlisted_skip(report):
    if report.skipped and (reason := _unlisted_reason(report)):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} is skipped for a reason that tests/conftest.py does not "
            f"list: {reason!r}. Make it run, or add the reason to SKIP_REASONS."
        )
    return report


def _unlisted_reason(report) -> str | None:
    if hasattr(report, "wasxfail"):
        return "expected failure"
    _file, _line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    return None if reason.startswith(SKIP_REASONS) else reason


def _is_worker(config) -> bool:
    return hasattr(config, "workerinput")


def _is_whole_suite(config) -> bool:
    chosen = {pathlib.Path(config.invocation_params.dir, arg) for arg in config.args}
    option = config.option
    narrowed = (
        option.keyword
        or option.markexpr
        or option.deselect
        or option.ignore
        or option.ignore_glob
        or option.collectonly
        or getattr(option, "lf", False)
    )
    return not narrowed and bool(chosen & {_ROOT, _ROOT / "tests"})

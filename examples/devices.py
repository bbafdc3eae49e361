"""The devices of an example: virtual ones of the CPU, GPUs, or one for each process.

    python examples/EXAMPLE.py
    JAX_PLATFORMS=cuda python examples/EXAMPLE.py
    python -m jax_overlap.testing.launch -n 4 -- python examples/EXAMPLE.py

Under launch all processes run the same program on the same global arrays, and the
first one alone writes.
"""

import argparse
import collections
import os
import re

DEVICES_FLAG = "--xla_force_host_platform_device_count"
CPU_DEVICES = 4


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def whole(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        default=argparse.SUPPRESS,
        help=f"ranks of the model (default: all; {CPU_DEVICES} where they are virtual)",
        type=positive,
        metavar="N",
    )


def set_up(args: argparse.Namespace) -> None:
    """Starts JAX on the devices that are asked for, and completes args.devices.

    Comes before everything else that imports JAX, which reads the environment then.
    """
    launched = bool(os.environ.get("JAX_OVERLAP_LAUNCH"))
    if not launched:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    count = getattr(args, "devices", None)
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        # They have to be asked for; here they are what is shown.
        os.environ.setdefault("JAX_OVERLAP_GPU_MATMULS", "1")
    elif not launched:
        count = count or CPU_DEVICES
        _make_cpu_devices(count)
    import jax

    import jax_overlap.testing

    jax_overlap.testing.initialize()
    args.devices = count or jax.device_count()
    if jax.device_count() < args.devices:
        raise SystemExit(
            f"--devices {args.devices}: JAX has only {jax.device_count()}, as "
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} and "
            f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r} say. Change them, or ask "
            f"for fewer devices."
        )
    if jax.process_count() > 1 and jax.device_count() > args.devices:
        raise SystemExit(
            f"--devices {args.devices}: there are {jax.device_count()} ranks, each a "
            f"process, and none may be left out. Ask launch for fewer, or leave out "
            f"--devices."
        )


def _make_cpu_devices(count: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICES_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICES_FLAG}={count}".strip()
    else:
        count = max(count, int(re.findall(rf"{DEVICES_FLAG}=(\d+)", flags)[-1]))
    # XLA sizes its thread pools by this; with few threads, collectives starve.
    threads = os.environ.get("NPROC", "")
    threads = int(threads) if threads.isdecimal() else 0
    os.environ["NPROC"] = str(max(threads, 2 * count))


def writes() -> bool:
    """Whether this process is the one that prints, and writes files."""
    import jax

    return jax.process_index() == 0


def say(text: str = "") -> None:
    """Prints a line, once for all processes."""
    if writes():
        print(text, flush=True)


def carried_out(plans) -> str:
    """What of jax_overlap a program calls, and how: plans of jax_overlap.explain."""
    calls = collections.Counter((plan.op, plan.implementation) for plan in plans)
    texts = [f"{n} {op} ({how})" for (op, how), n in calls.items()]
    return ", ".join(texts) or "none of jax_overlap"

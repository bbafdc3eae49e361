"""What the processes of a test tell one another: for comparing what each one has.

They run the same tests in the same order. Bytes go through JAX's coordination
service, as XLA's own collectives need a GPU for each rank.
"""

import functools
import json
import os
import pathlib

import jax

from jax_overlap import _compat

LIMIT_S = 60  # one rank may compile for longer than another


def gather(key: str, value: bytes) -> list[bytes]:
    """The value of each process, in their order; `key` is used once in a run."""
    count = jax.process_count()
    if count == 1:
        return [value]
    client = _compat.coordination_client()
    client.key_value_set_bytes(f"jax_overlap_test/{key}/{jax.process_index()}", value)
    return [
        client.blocking_key_value_get_bytes(
            f"jax_overlap_test/{key}/{process}", 1000 * LIMIT_S
        )
        for process in range(count)
    ]


def differing(key: str, digests: dict[str, str]) -> list[str]:
    """The names for which not all processes have the same digest, if they have one."""
    seen: dict[str, set[str]] = {}
    for value in gather(key, json.dumps(digests).encode()):
        for name, digest in json.loads(value).items():
            seen.setdefault(name, set()).add(digest)
    return sorted(name for name, values in seen.items() if len(values) > 1)


def added(key: str, values: dict[str, float]) -> dict[str, float]:
    """The sum of what the processes have by each name, which all have."""
    every = [json.loads(v) for v in gather(key, json.dumps(values).encode())]
    return {name: sum(value[name] for value in every) for name in values}


def write_hashes(of: str, lines: list[str]) -> None:
    """Writes "name: hash" lines for tests/gpu/compare_hashes.py, if asked to.

    To the file $JAX_OVERLAP_TEST_HASHES + rank + "." + of.
    """
    if prefix := os.environ.get("JAX_OVERLAP_TEST_HASHES"):
        path = pathlib.Path(f"{prefix}{jax.process_index()}.{of}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))


@functools.cache
def lax_runs() -> bool:
    """Whether XLA's own collectives run: NCCL refuses two ranks on one GPU of a host.

    Those of launch.py say that they are of several.
    """
    count = jax.process_count()
    if count == 1 or jax.default_backend() == "cpu" or "NCCL_HOSTID" in os.environ:
        return True
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(set(gather("gpus", gpu.encode()))) == count

"""Compares the hashes that two runs of tests/gpu have written.

    python tests/gpu/compare_hashes.py FIRST SECOND

FIRST and SECOND are what JAX_OVERLAP_TEST_HASHES was in each; the files of rank r are
FIRST + r + ".psum" and SECOND + r + ".psum", and so on. For instance, after

    launch -n 2 --env JAX_OVERLAP_TEST_HASHES=out/on. -- pytest tests/gpu -k hashes
    launch -n 2 --env JAX_OVERLAP_TEST_HASHES=out/off. \\
        --env XLA_FLAGS=--xla_gpu_enable_command_buffer= -- pytest tests/gpu -k hashes

with `python -m jax_overlap.testing.launch` for `launch`:

    python tests/gpu/compare_hashes.py out/on. out/off.
"""

import pathlib
import sys


def hashes(prefix: str) -> dict[str, str]:
    """{"rank: program": hash} of all ranks' files."""
    path = pathlib.Path(prefix)
    found = {}
    for file in sorted(path.parent.glob(f"{path.name}*")):
        rank = file.name.removeprefix(path.name).partition(".")[0]
        if rank.isdigit():
            for line in file.read_text().splitlines():
                program, _, text = line.rpartition(": ")
                found[f"rank {rank}: {program}"] = text
    return found


def main() -> int:
    """Prints what differs; returns 0 if nothing does and there is something."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    first, second = map(hashes, sys.argv[1:])
    different = [k for k in first | second if first.get(k) != second.get(k)]
    for key in different:
        print(f"{key}: {first.get(key)} != {second.get(key)}")
    print(f"{len(first)} and {len(second)} results, {len(different)} differ")
    return 1 if different or not first else 0


if __name__ == "__main__":
    sys.exit(main())

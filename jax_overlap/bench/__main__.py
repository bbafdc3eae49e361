"""`python -m jax_overlap.bench <op> [options]`."""

import argparse
import sys

from jax_overlap import _native
from jax_overlap.bench import (
    all_gather,
    all_gather_matmul,
    all_to_all,
    gpu_calls,
    harness,
    matmul_all_reduce,
    matmul_reduce_scatter,
    psum,
    psum_scatter,
)

OPS = {
    "psum": psum,
    "psum_scatter": psum_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_gather_matmul": all_gather_matmul,
    "matmul_all_reduce": matmul_all_reduce,
}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark of one op; 1 if a row has failed."""
    parser = argparse.ArgumentParser(prog="python -m jax_overlap.bench")
    commands = parser.add_subparsers(dest="op", required=True)
    for name, module in OPS.items():
        command = commands.add_parser(name, help=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    if _native.ffi is None:  # else it would be jax.lax against jax.lax
        parser.error(_native.why_missing)
    if vars(args).get("gpu"):
        gpu_calls.require_gpus()
    rows = []
    for row in OPS[args.op].run(args):
        rows.append(row)
        if args.json:  # after each, as a later one may end the program
            harness.write_json(args.json, rows)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

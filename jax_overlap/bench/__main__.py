"""`python -m jax_overlap.bench <op> [options]`."""

import argparse

from jax_overlap.bench import (
    all_gather,
    all_gather_matmul,
    all_to_all,
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


def main() -> None:
    """Runs the benchmark of one op."""
    parser = argparse.ArgumentParser(prog="python -m jax_overlap.bench")
    commands = parser.add_subparsers(dest="op", required=True)
    for name, module in OPS.items():
        command = commands.add_parser(name, help=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args()
    rows = OPS[args.op].run(args)
    if args.json:
        harness.write_json(args.json, rows)


if __name__ == "__main__":
    main()

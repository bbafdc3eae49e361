"""The command `python -m jax_overlap.info`; the function is `jax_overlap.info`.

A module of its own: `-m` warns of one that the package has imported already.
"""

import os

from jax_overlap._info import info


def _print(value: dict, indent: str = "") -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            print(f"{indent}{key}:")
            _print(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            print(f"{indent}{key}:")
            for row in item:
                print(f"{indent}  " + ", ".join(f"{k}={v}" for k, v in row.items()))
        else:
            print(f"{indent}{key}: {item}")


def main() -> None:
    """Prints `jax_overlap.info()`."""
    print(f"cpus: {os.cpu_count()}")
    _print(info())


if __name__ == "__main__":
    main()

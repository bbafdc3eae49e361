"""Shapes of matmuls, those of models among them, for benchmarks and tests."""

from __future__ import annotations

import dataclasses

# How many tokens a rank group works on at once, each a row.
DECODE = (1, 16, 64, 256)
PREFILL = (512, 2048, 8192, 16384)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """x[rows, inner] @ w[inner, cols], of all ranks together; the name says of what."""

    rows: int
    inner: int
    cols: int
    name: str = ""

    @property
    def arrays(self) -> tuple[tuple[int, int], ...]:
        """The shapes of x, w and the result."""
        m, k, n = self.rows, self.inner, self.cols
        return (m, k), (k, n), (m, n)

    @property
    def flops(self) -> int:
        """Of all ranks together."""
        return 2 * self.rows * self.inner * self.cols

    def __str__(self) -> str:
        return f"{self.rows}x{self.inner}x{self.cols}"


@dataclasses.dataclass(frozen=True)
class Block:
    """The block of a transformer, as tensor parallelism cuts it.

    Attributes:
      hidden: features of a token; all heads of the attention together have as many.
      mlp: features inside the MLP.
      gated: whether the MLP has a gate beside what goes up.
      rows: numbers of tokens to measure.
    """

    hidden: int
    mlp: int
    gated: bool = True
    rows: tuple[int, ...] = DECODE + PREFILL


MODELS = {
    "llama-8b": Block(hidden=4096, mlp=14336),  # Llama 3.1, all three
    "llama-70b": Block(hidden=8192, mlp=28672),
    "llama-405b": Block(hidden=16384, mlp=53248),
    "dit": Block(hidden=3072, mlp=12288, gated=False, rows=(4608,)),
}


def parse(text: str) -> Matmul:
    """The matmul of "8192x28672x4096", rows x inner x cols."""
    rows, inner, cols = (int(n) for n in text.split("x"))
    return Matmul(rows, inner, cols)


# Large enough to hide all communication behind, but for the last two.
LARGE = tuple(
    map(
        parse,
        (
            "8192x8192x8192",
            "8192x28672x8192",
            "4096x14336x4096",
            "16384x4096x4096",
            "2048x8192x8192",
            "512x8192x8192",
        ),
    )
)


def row_parallel(model: str, rows: tuple[int, ...] | None = None) -> list[Matmul]:
    """The matmuls of a model whose inner dimension is cut: their results are summed."""
    block = MODELS[model]
    return [
        Matmul(n, inner, block.hidden, f"{model} {name}")
        for name, inner in (
            ("attention output", block.hidden),
            ("MLP down", block.mlp),
        )
        for n in rows or block.rows
    ]


def column_parallel(model: str, rows: tuple[int, ...] | None = None) -> list[Matmul]:
    """The matmuls of a model whose columns are cut: their operands are gathered."""
    block = MODELS[model]
    name, cols = (
        ("MLP gate and up", 2 * block.mlp) if block.gated else ("MLP up", block.mlp)
    )
    return [
        Matmul(n, block.hidden, cols, f"{model} {name}") for n in rows or block.rows
    ]

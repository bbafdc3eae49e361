"""What a matmul and its communication take on GPUs: a model, to choose by.

    fused    max(matmul, transfer) + launches
    apart    matmul + start + transfer of NCCL

Both count the matmul alike, so only what is beside it decides. The constants are those
of H200s. The launches are from benchmarks/matmul_launches_gpu_h200.json, taken without
links. Of NVLink and NCCL they are what plain copies and jax.lax took between two GPUs:
390 GB/s each way by the copy engine, and for NCCL a fifth more time than that and 30 us
in a program. There matmul_reduce_scatter took 0.94-1.05 of what is predicted, and with
NCCL 0.84-1.07 (benchmarks/nvlink_h200.json); since then two ranks with bfloat16 on
Hopper have had one kernel for both products, in which tiles for the peer are under way
while the own ones are computed: the model knows nothing of that. On other GPUs matmuls
and links are slower, or faster, by about the same.
"""

from __future__ import annotations

import dataclasses
import math

_US = 1e6
_LINK_BYTES = 390e9  # a second
_NCCL_START_US, _NCCL_FACTOR = 30.0, 1.2
_MEMORY_BYTES = 4e12
_FLOAT8_FLOPS, _HALF_FLOPS, _TF32_FLOPS, _FLOPS = 1200e12, 700e12, 350e12, 50e12
_LAUNCH_US = 5.0

# Beside the product, by the number of ranks.
_SCATTER_US = 20.0  # and the sum of the slots, if there are several
_WAVE_BYTES = 8.7e6  # of tiles for peers, under way when the multiprocessors are done
_SUM_BYTES = 3.5e12
_GATHER_US = 19.0  # a product more whenever the ranks double
_ROUND_US, _ROUND_PEER_US = 10.0, 17.0  # of an all-reduce
_MOST_ROUNDS, _ROUND_ROWS = 4, 256  # as in ffi/ops/matmul_program.cc


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Microseconds of a call, fused and apart."""

    fused_us: float
    apart_us: float

    @property
    def fuses(self) -> bool:
        return self.fused_us <= self.apart_us

    def __str__(self) -> str:
        return f"predicted {self.fused_us:.0f} us, with NCCL {self.apart_us:.0f}"


def predict(op: str, xs, ws, result, transposed, ranks: int, tf32: bool) -> Prediction:
    """Of operands in the form: x [g, a, q, k], and w [g, k, n] or [g, n, k].

    Args:
      op: the public name.
      xs: the types of the x, of one rank.
      ws: those of the w; to one x there may be several.
      result: the type of the (first) result, of one rank.
      transposed: of each w, whether it is [g, n, k].
      ranks: of the team.
      tf32: whether float32 may be multiplied as TF32.
    """
    gathers = op == "all_gather_matmul"
    columns = [w.shape[1 if t else 2] for w, t in zip(ws, transposed, strict=True)]
    rows = [math.prod(x.shape[:3]) for x in xs] * (len(ws) // len(xs))
    inner = [x.shape[3] for x in xs] * (len(ws) // len(xs))
    share = ranks if gathers else 1
    flops = sum(
        2.0 * share * m * k * n for m, k, n in zip(rows, inner, columns, strict=True)
    )
    tf32 = tf32 and str(xs[0].dtype) == "float32"
    rate = _TF32_FLOPS if tf32 else _FLOPS
    rate = {1: _FLOAT8_FLOPS, 2: _HALF_FLOPS}.get(xs[0].dtype.itemsize, rate)
    read = sum(a.size * a.dtype.itemsize for a in (*xs, *ws))
    product_us = _LAUNCH_US + _US * max(flops / rate, read / _MEMORY_BYTES)

    peers = ranks - 1
    if gathers:
        sent = peers * xs[0].size * xs[0].dtype.itemsize
        launches_us = _GATHER_US * math.log2(ranks)
    else:
        whole = rows[0] * columns[0] * result.dtype.itemsize
        sent = whole * peers / ranks
        launches_us = _SCATTER_US
        if ranks > 2:
            launches_us += _US * whole * (1 + 1 / ranks) / _SUM_BYTES
        launches_us += _US * min(sent, _WAVE_BYTES) / _LINK_BYTES
    if op == "matmul_all_reduce":
        sent *= 2
        rounds = min(_MOST_ROUNDS, math.ceil(rows[0] / ranks / _ROUND_ROWS))
        launches_us = rounds * (_ROUND_US + _ROUND_PEER_US * peers)
    transfer_us = _US * sent / _LINK_BYTES
    return Prediction(
        max(product_us, transfer_us) + launches_us,
        product_us + _NCCL_START_US + _NCCL_FACTOR * transfer_us,
    )

"""What others offer for a fused matmul in JAX, beside what XLA does with its parts."""

from __future__ import annotations

import os
from functools import partial

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_overlap.bench import harness
from jax_overlap.bench.repeated import Variant

_WINDOWED = "--xla_gpu_threshold_for_windowed_einsum_mib"

HELP = {
    "xla_windowed": f"""\
xla_windowed: the product of sharded arrays under jit, of which XLA makes a collective
matmul with
  XLA_FLAGS="{_WINDOWED}=0 --xla_gpu_multi_streamed_windowed_einsum=true"
""",
    "pallas": """\
pallas: all_gather_lhs_matmul of jax.experimental.pallas.ops.gpu.collective_matmul_mgpu,
the fastest of three configurations, for all GPUs in one process
""",
}


def xla_windowed(mesh: Mesh, operands, specs: tuple[P, P, P]) -> dict[str, Variant]:
    """`x @ w` of arrays with these shardings, for XLA to partition."""
    if _WINDOWED not in os.environ.get("XLA_FLAGS", ""):
        raise RuntimeError(f"XLA_FLAGS has no {_WINDOWED}")
    constrained = lambda a, spec: lax.with_sharding_constraint(  # noqa: E731
        a, NamedSharding(mesh, spec)
    )

    def step(x, w):
        product = constrained(x, specs[0]) @ constrained(w, specs[1])
        return constrained(product, specs[2])

    return {"": Variant(step, operands, (specs[0], specs[2]))}


def pallas(mesh: Mesh, operands, specs: tuple[P, P, P]) -> dict[str, Variant]:
    """JAX's kernel for Hopper, by configuration."""
    if jax.process_count() > 1:
        raise RuntimeError(
            f"{jax.process_count()} processes, of which the kernel would need NVSHMEM "
            "in XLA and flags for it. Run it in one process, without launch"
        )
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as kernels

    rows, cols = kernels.MatmulDimension.M, kernels.MatmulDimension.N
    variants = {}
    # More steps of (256, M) do not fit the shared memory, nor do three of (256, N).
    for tile_n, dimension, steps in ((128, rows, 4), (128, cols, 4), (256, rows, 3)):
        config = kernels.TuningConfig(
            tile_m=128,
            tile_n=tile_n,
            tile_k=64,
            max_concurrent_steps=steps,
            grid_minor_dim=kernels.MatmulDimension.M,
            grid_tile_width=8,
            wg_dimension=dimension,
        )
        call = partial(
            kernels.all_gather_lhs_matmul, config=config, dtype=operands[0].dtype
        )
        # A program repeats the step, and to lower it once takes a second or two.
        step = jax.jit(harness.sharded(call, mesh, specs[:2], specs[2]))
        name = f"tile_n={tile_n}, wg_dimension={dimension.name}"
        variants[name] = Variant(step, operands, (specs[0], specs[2]))
    return variants


PEERS = {"xla_windowed": xla_windowed, "pallas": pallas}

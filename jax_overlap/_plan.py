"""What an op will do, and why: the decisions, apart from the code that acts on them.

A plan is made when an op is lowered (or by `jax_overlap.explain`, before that) from
what is known then on every rank, so that all ranks decide alike.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

from jax_overlap import _native, config
from jax_overlap.schedule import describe
from jax_overlap.team import Team

# The dtypes that native ops take.
NATIVE_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int8")

# ffi/ops/psum.cc has the same numbers.
PSUM_ALGORITHMS = {"one_shot": 0, "two_shot": 1, "nvrar": 2}

# Up to this size, of one rank's operands, an all-reduce goes through cells. On the
# CPU ranks can read each other's operands, which is faster from the start (see
# benchmarks/): cells serve the sizes where both cost next to nothing.
ONE_SHOT_MAX_BYTES = 256
# On GPUs all is sent at once while a rank sends no more than this: with P ranks its
# operands go to P - 1 others, small ones in twice their bytes, where two_shot sends
# them twice at most. Of two ranks each sends as much in either way.
GPU_ONE_SHOT_MAX_SENT_BYTES = 512 << 10

# In place of an algorithm: the call is better left to `jax.lax`.
LEFT_TO_LAX = "lax"

# The ranks that kernels for GPUs serve (ffi/core/gpu_channel.h).
_MAX_GPU_RANKS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call of an op does.

    Attributes:
      op: the public name, such as "psum".
      axes: the mesh axes.
      operands: type of each operand, such as "float32[8,128]".
      implementation: "native", "lax", or "identity" where there is nothing to do.
      algorithm: of a native call, such as "two_shot".
      ranks: the devices of a group; 0 if unknown.
      nodes: the nodes of a group.
      reason: why this implementation and this algorithm.
    """

    op: str
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    implementation: str
    algorithm: str | None
    ranks: int
    nodes: int
    reason: str

    @property
    def schedule(self) -> str:
        """Who computes, sends and adds what, in which order; empty if not native."""
        return describe(self.op, self.algorithm, self.ranks, self.nodes)

    def __str__(self) -> str:
        algorithm = f" {self.algorithm}" if self.algorithm else ""
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return (
            f"{self.op} over {self.axes} of {', '.join(self.operands)}: "
            f"{self.implementation}{algorithm}, {self.ranks} ranks{nodes} "
            f"({self.reason})" + (f": {self.schedule}" if self.schedule else "")
        )


@dataclasses.dataclass(frozen=True)
class Situation:
    """Where a call is lowered: what decides beside the operands."""

    platforms: tuple[str, ...]
    mesh_axes: frozenset
    manual_axes: frozenset
    processes: int
    gpu_code: bool = False  # the op has kernels for GPUs
    gpu_dtypes: tuple[str, ...] = ()  # which these take beside NATIVE_DTYPES
    capability: str = ""  # of the GPUs, such as "9.0", where it is known
    why_no_gpu: str = ""  # of a program for GPUs: why it cannot be native there

    @property
    def on_gpu(self) -> bool:
        """Whether the call is for NVIDIA GPUs, and for nothing else."""
        return self.platforms == ("cuda",)


def why_never_native(dtype, situation: Situation, implementation: str | None) -> str:
    """The same as `why_not_native`, whatever the team is and can do."""
    if implementation == "reference":
        return "implementation='reference'"
    taken = NATIVE_DTYPES
    if situation.on_gpu:
        taken = (*taken, *situation.gpu_dtypes)
    if str(dtype) not in taken:  # no numpy type for keys of jax.random
        return f"dtype {dtype} is not among {', '.join(taken)}"
    if situation.platforms != ("cpu",) and not (
        situation.on_gpu and situation.gpu_code
    ):
        return f"there is no native code for {', '.join(situation.platforms)} yet"
    return "" if _native.ffi is not None else _native.why_missing


def why_not_native(
    team: Team, dtype, situation: Situation, implementation: str | None
) -> str:
    """The reason for which a call has to lower to `jax.lax`; empty if it has not."""
    automatic = situation.mesh_axes - situation.manual_axes
    if reason := why_never_native(dtype, situation, implementation):
        return reason
    if situation.on_gpu:
        if situation.why_no_gpu:
            return situation.why_no_gpu
        if team.ranks > _MAX_GPU_RANKS:
            return f"{team.ranks} ranks are more than {_MAX_GPU_RANKS}"
    elif situation.processes > 1:
        return "on CPU, native ops serve one process, and this program has several"
    if automatic:
        return (
            f"mesh axes {sorted(map(str, automatic))} are automatic here, and XLA "
            "would gather the operands over them for a custom call. Make all axes "
            "manual (jax.shard_map without axis_names)"
        )
    if team.groups is None:
        return "axis_index_groups differ in size"
    return ""


def make_plan(
    op: str,
    axes,
    avals,
    team: Team,
    situation: Situation,
    implementation,
    choose,
    no_elements: bool | None = None,
) -> Plan:
    """The plan of `op` on `avals`, by the dtype of the first.

    `choose(bytes of a rank's operands)` gives the algorithm of a native call and the
    reason, or LEFT_TO_LAX and why; `no_elements` says whether there is nothing to move
    (default: no operand has an element).
    """
    operands = tuple(a.str_short() for a in avals)
    dtype = avals[0].dtype

    def plan(kind, algorithm, reason):
        return Plan(
            op, tuple(axes), operands, kind, algorithm, team.ranks, team.nodes, reason
        )

    if reason := why_not_native(team, dtype, situation, implementation):
        return plan("lax", None, reason)
    if team.ranks == 1:
        return plan("identity", None, "one rank")
    if no_elements is None:
        no_elements = all(a.size == 0 for a in avals)
    if no_elements:
        return plan("identity", None, "no elements")
    algorithm, reason = choose(sum(a.size for a in avals) * dtype.itemsize)
    if algorithm == LEFT_TO_LAX:
        return plan("lax", None, reason)
    return plan("native", algorithm, "; ".join(filter(None, (reason, team.note))))


def choose_psum_algorithm(
    nbytes: int,
    team: Team,
    situation: Situation,
    implementation: str | None,
    forced: str | None,
) -> tuple[str, str]:
    """The algorithm for `nbytes` a rank, or LEFT_TO_LAX, and the reason."""
    if not team.reaches_all and forced not in (None, "nvrar"):
        return LEFT_TO_LAX, f"algorithm={forced!r} stores to all ranks, but {team.note}"
    if forced is not None:
        return forced, f"algorithm={forced!r}"
    most = ONE_SHOT_MAX_BYTES
    if situation.on_gpu:
        limit = config.PSUM_MAX_BYTES.read()
        if nbytes > limit and implementation is None:
            return LEFT_TO_LAX, (
                f"{nbytes} bytes are more than {limit}, where NCCL is as fast "
                f"({config.PSUM_MAX_BYTES.name})"
            )
        most = GPU_ONE_SHOT_MAX_SENT_BYTES // max(1, team.ranks - 1)
    if team.nodes > 1:
        return "nvrar", f"{team.nodes} nodes of {team.node_size} ranks"
    if nbytes <= most:
        return "one_shot", f"{nbytes} bytes are at most {most}"
    if situation.on_gpu and team.ranks == 2:
        return "one_shot", "two ranks send as much at once as in two steps"
    return "two_shot", f"{nbytes} bytes are more than {most}"


class Counter:
    """Counts the plans that were lowered, for `jax_overlap.info`."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter = collections.Counter()

    def add(self, plan: Plan) -> None:
        """Counts a plan; only of a fallback does the reason make a kind of its own."""
        reason = plan.reason if plan.implementation == "lax" else ""
        with self._lock:
            self._counts[plan.op, plan.implementation, plan.algorithm, reason] += 1

    def rows(self) -> list[dict]:
        """{"op", "implementation", "algorithm", "reason", "count"}, a row a kind."""
        with self._lock:
            counts = sorted(self._counts.items(), key=str)
        names = ("op", "implementation", "algorithm", "reason")
        return [
            dict(zip(names, kind, strict=True)) | {"count": count}
            for kind, count in counts
        ]


lowered = Counter()

"""Sets up the symmetric memory of a program on GPUs.

What native ops need there is made once a process, when the first is lowered (or by
`jax_overlap.init`): a heap on each device, all of one size, that the others can write
to. Either all devices are of this process, which maps them into each other's address
space (`p2p`), or each process has one device and NVSHMEM does it (`nvshmem`). Processes
agree through JAX's coordination service, so that all decide alike: native, or
`jax.lax`, and why.

A mesh takes a part of the heap of each of its devices when a program on it first runs.
A process that is in several meshes may come to them in another order than its peers,
so the parts are at different places, and processes tell each other where.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import threading

import jax

from jax_overlap import _compat, _cuda, _native, _nvshmem, config
from jax_overlap._agreement import exchange, within_limit
from jax_overlap._agreement import why_not as first_reason

_PROBE_LIMIT_S = 10.0
# More do not make a psum faster.
_MAX_BLOCKS = 64
_ALIGN = 1 << 12

# Of the probe, by ProbeResult in ffi/core/gpu_memory.h.
_PROBE_FAULTS = {
    1: "what it wrote did not come",
    2: "what is written there reads back wrong",
}


@dataclasses.dataclass
class _World:
    """The heaps of the program, as this process knows them.

    Attributes:
      team: "p2p" or "nvshmem".
      heaps: the address of each device's heap here, by global id; 0: stores do not
        reach it.
      own: the heap of a device of this process, for places in it.
      bytes: of each heap.
      reach: the devices to which each device's stores reach, by global id.
      used: bytes of the own heaps that are taken.
      sharers: the most ranks that share a GPU.
    """

    team: str
    heaps: dict[int, int]
    own: int
    bytes: int
    reach: dict[int, frozenset]
    used: int
    sharers: int = 1


_lock = threading.RLock()
_world: _World | None = None
_reason: str | None = None  # why there is no world, once that has been decided
_absence: str | None = None  # another process has not come: there will be no other try
_agreements: collections.Counter = collections.Counter()  # by mesh
_regions: dict[str, tuple[int, int]] = {}  # by mesh: offset and bytes in the own heap


def why_not(mesh) -> str:
    """Why ops over the devices of `mesh` cannot be native; empty if they can.

    Sets up what is needed at its first call, for which it waits for the others.

    Raises:
      RuntimeError: another process did not come in time.
    """
    if _cuda.ffi is None and not _is_one_of_several():
        return _cuda.why_missing
    if (devices := _compat.mesh_devices(mesh)) is None:
        return (
            "the mesh is abstract, and the devices of a custom call have to be known "
            "when it is lowered (jax.set_mesh sets a mesh with devices)"
        )
    if any(d.platform != "gpu" for d in devices):
        return "the devices of the mesh are not GPUs of this program"
    if len(devices) == 1:
        return ""
    if reason := start():
        return reason
    assert _world is not None  # as there is no reason
    missing = [d.id for d in devices if d.id not in _world.heaps]
    if missing:
        return f"devices {missing} belong to other processes than the rest of the mesh"
    return ""


def _is_one_of_several() -> bool:
    """Whether other processes, also on GPUs, have to hear what this one cannot."""
    return jax.default_backend() == "gpu" and jax.process_count() > 1


def reach(mesh) -> list[set] | None:
    """For each position in a mesh the positions that its stores reach; None: all."""
    if _world is None:
        return None  # one device
    ids = [d.id for d in _compat.mesh_devices(mesh) or ()]
    reached = [{p for p, d in enumerate(ids) if d in _world.reach[i]} for i in ids]
    return None if all(len(r) == len(ids) for r in reached) else reached


def describe() -> dict:
    """What `jax_overlap.info` says of GPUs."""
    return {
        "loaded": _cuda.ffi is not None,
        "why_not": _cuda.why_missing or _reason or _absence or "",
        "team": None if _world is None else _world.team,
        "ranks_on_a_gpu": 1 if _world is None else _world.sharers,
        "cutlass": _cuda.ffi is not None and _cuda.ffi.cutlass,
    }


def start() -> str:
    """Sets up the heaps once; the reason if that is not possible. Collective.

    Raises:
      RuntimeError: another process did not come in time, now or before: what has been
        said to others cannot be taken back, so there is one try.
    """
    global _world, _reason, _absence
    with _lock:
        if _absence is not None:
            raise RuntimeError(f"{_absence} Start the program anew.")
        if _world is None and _reason is None:
            local = jax.local_devices(backend="gpu")
            try:
                if jax.process_count("gpu") > 1:
                    _world, _reason = _start_processes(local)
                elif not (_reason := _why_not_here()):
                    _world, _reason = _start_process(local)
            except RuntimeError as error:
                _absence = str(error)
                raise
        return _reason or ""


def _why_not_here() -> str:
    """Why this process cannot, whatever the others do; empty if it can."""
    if _cuda.ffi is None:
        return _cuda.why_missing
    built, driver = _cuda.ffi.cuda_versions()
    if driver < built:
        return (
            f"jax_overlap was built for CUDA {_dotted(built)}, and the driver is for "
            f"CUDA {_dotted(driver)} at most"
        )
    return ""


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _configure(local, sharers: int, multiprocessors: int) -> None:
    """Readies the native side; what is of GPUs is of those of all processes."""
    _cuda.ffi.start(ordinals=[d.local_hardware_id for d in local])
    _cuda.ffi.configure(
        local={d.local_hardware_id: d.id for d in local},
        make_region=_make_region,
        agree=_agree,
        wait_timeout_s=config.WAIT_TIMEOUT_S.read(),
        max_blocks=most_blocks(multiprocessors, sharers),
        cublaslt=_cuda.cublaslt_path(),
        tuning_folder=os.path.expanduser(config.TUNING_DIR.read()),
    )


def _multiprocessors(local) -> int:
    return min(d.core_count for d in local)


def most_blocks(multiprocessors: int, sharers: int) -> int:
    """Of a kernel of ours that waits.

    All must be resident, those of ranks that share a GPU together: one on each of its
    multiprocessors at least, in two programs at once.
    """
    return max(1, min(_MAX_BLOCKS, multiprocessors // 2) // sharers)


def _heap_bytes(ranks: int) -> tuple[int, int]:
    """(bytes of a heap, bytes of it that the probe uses)."""
    probe = _rounded(ranks * _cuda.ffi.probe_bytes)
    return _rounded(config.HEAP_BYTES.read(on_gpus=True)) + probe, probe


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# ------------------------------------------------------- one process, its GPUs
def _start_process(local):
    """(world, None) or (None, why)."""
    ordinals = [d.local_hardware_id for d in local]
    ids = [d.id for d in local]
    nbytes, used = _heap_bytes(len(local))
    try:
        _cuda.ffi.enable_peers(ordinals)
        heaps = [_cuda.ffi.allocate_heap(ordinal, nbytes) for ordinal in ordinals]
        _configure(local, 1, _multiprocessors(local))
        results = _cuda.ffi.probe(list(enumerate(ordinals)), heaps, _PROBE_LIMIT_S)
    except RuntimeError as error:
        return None, str(error)
    faults = [
        _fault(ids[i], ids[peer], code)
        for i, row in enumerate(results)
        for peer, code in enumerate(row)
        if code
    ]
    if faults:
        return None, _faults(faults)
    addresses = dict(zip(ids, heaps, strict=True))
    everywhere = dict.fromkeys(ids, frozenset(ids))
    return _World("p2p", addresses, heaps[0], nbytes, everywhere, used), None


def _fault(device: int, peer: int, code: int) -> str:
    return f"device {device} and device {peer}: {_PROBE_FAULTS[code]}"


def _faults(faults: list[str]) -> str:
    return (
        "GPUs say that they can write to each other's memory, but do not: "
        f"{'; '.join(faults)}. Where it is so, IOMMU or ACS is often switched on"
    )


# ------------------------------------------------- several processes, a GPU each
def _start_processes(local):
    """Agrees with the other processes, and starts NVSHMEM; returns as the former."""
    nvshmem = None
    if not (why := _why_not_here()):
        nvshmem, why = _nvshmem.load()
    if not why and len(local) != 1:
        why = (
            f"it has {len(local)} GPUs, and with several processes each has to have "
            "one (jax.distributed.initialize(local_device_ids=...))"
        )
    everybody = exchange(
        "start",
        {
            "why": why,
            "abi": _native.ABI,
            "heap": config.HEAP_BYTES.read(on_gpus=True),
            "limit": config.WAIT_TIMEOUT_S.read(),
            "node": config.NODE_SIZE.read(),
            "most": config.PSUM_MAX_BYTES.read(),
            "by_psum": config.BY_PSUM_MAX_BYTES.read(),
            "matmuls": config.GPU_MATMULS.read(),
            "nvshmem": nvshmem and list(nvshmem.runtime_version()),
            "gpu": None if why else _cuda.ffi.device_name(local[0].local_hardware_id),
            "multiprocessors": _multiprocessors(local),
        },
    )
    if why := first_reason(everybody) or _difference(everybody):
        return None, why
    assert nvshmem is not None  # as there is no reason
    gpus = [theirs["gpu"] for theirs in everybody.values()]
    sharers = max(map(gpus.count, gpus))
    me, count = jax.process_index(), jax.process_count("gpu")
    nbytes, used = _heap_bytes(count)
    (device,) = local
    own, heaps = 0, []
    _nvshmem.prepare_environment(nbytes)
    identity = _identity(nvshmem, me)

    def start_nvshmem():
        unique_id = bytes.fromhex(identity)
        nvshmem.init(me, count, device.local_hardware_id, unique_id)
        return nvshmem.allocate(nbytes)

    try:
        own = within_limit(start_nvshmem, "NVSHMEM")
        heaps = [nvshmem.peer_address(own, pe) for pe in range(count)]
        _cuda.ffi.use_put_kernels(nvshmem.put_kernels())
        least = min(theirs["multiprocessors"] for theirs in everybody.values())
        _configure(local, sharers, least)
    except RuntimeError as error:
        why = str(error)
    # All, or none.
    told = {"why": why, "device": device.id, "reach": [bool(h) for h in heaps]}
    everybody = exchange("heap", told)
    if why := first_reason(everybody):
        return None, why
    ids = {process: theirs["device"] for process, theirs in everybody.items()}
    why = _probe(me, device, heaps, ids)
    if why := first_reason(exchange("probe", {"why": why})):
        return None, why
    reached = {
        theirs["device"]: frozenset(ids[p] for p, r in enumerate(theirs["reach"]) if r)
        for theirs in everybody.values()
    }
    addresses = {ids[process]: heap for process, heap in enumerate(heaps)}
    return _World("nvshmem", addresses, own, nbytes, reached, used, sharers), None


def _identity(nvshmem, me: int) -> str:
    """What the processes of one NVSHMEM program have in common; process 0 makes it."""
    mine = {"why": "", "id": ""}
    if me == 0:
        try:
            mine["id"] = nvshmem.unique_id().hex()
        except RuntimeError as error:
            mine["why"] = str(error)
    everybody = exchange("unique_id", mine)
    if why := first_reason(everybody):
        raise RuntimeError(why)
    return everybody[0]["id"]


def _difference(everybody: dict) -> str:
    """What all processes have to have alike and have not; empty if they do."""
    for key, name in (
        ("abi", "the version of jax_overlap"),
        ("heap", config.HEAP_BYTES.name),
        ("limit", config.WAIT_TIMEOUT_S.name),
        ("node", config.NODE_SIZE.name),
        ("most", config.PSUM_MAX_BYTES.name),
        ("by_psum", config.BY_PSUM_MAX_BYTES.name),
        ("matmuls", config.GPU_MATMULS.name),
        ("nvshmem", "the version of NVSHMEM"),
    ):
        values = {process: theirs[key] for process, theirs in everybody.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            return f"{name} differs between processes: {values}"
    return ""


def _probe(me: int, device, heaps: list[int], ids: dict[int, int]) -> str:
    """Why the heaps of the others cannot be written to; empty if they can."""
    try:
        (row,) = _cuda.ffi.probe(
            [(me, device.local_hardware_id)], heaps, _PROBE_LIMIT_S
        )
    except RuntimeError as error:
        return str(error)
    faults = [_fault(device.id, ids[p], code) for p, code in enumerate(row) if code]
    return _faults(faults) if faults else ""


# ------------------------------------------------ what the native side asks for
def _make_region(devices: list[int]):
    """The part of the heaps that programs over these devices (global ids) use.

    Asked for at the first run of such a program. Half of what is left, so that there is
    room for other meshes.

    Returns:
      (addresses, places in the own heap, processes, bytes), a device each.
    """
    if reason := start():
        raise RuntimeError(reason)
    process_of = {d.id: d.process_index for d in jax.devices("gpu")}
    processes = [process_of[d] for d in devices]
    with _lock:
        world = _world
        assert world is not None  # as there is no reason
        # Taken before the others are told, and for good, as they may hear of it later.
        key = _name(devices)
        if key not in _regions:
            _regions[key] = (
                world.used,
                (world.bytes - world.used) // 2 // _ALIGN * _ALIGN,
            )
            world.used += _regions[key][1]
        offset, nbytes = _regions[key]
        offsets = dict.fromkeys(devices, offset)
        if len(set(processes)) > 1:
            told = exchange(f"region/{key}", [offset, nbytes], sorted(set(processes)))
            nbytes = min(size for _, size in told.values())
            offsets = {d: told[process_of[d]][0] for d in devices}
        bases = [world.heaps[d] and world.heaps[d] + offsets[d] for d in devices]
        symmetric = [world.own + offsets[d] for d in devices]
    return bases, symmetric, processes, nbytes


def _agree(devices: list[int], indices: list[int]) -> list[int]:
    """Those of the indices that all processes of these devices name; waits for them."""
    process_of = {d.id: d.process_index for d in jax.devices("gpu")}
    processes = sorted({process_of[d] for d in devices})
    if len(processes) == 1:
        return indices
    name = _name(devices)
    with _lock:
        _agreements[name] += 1
        topic = f"agree/{name}/{_agreements[name]}"
    told = exchange(topic, indices, processes)
    return sorted(set(indices).intersection(*told.values()))


def _name(devices: list[int]) -> str:
    return hashlib.sha256(json.dumps(devices).encode()).hexdigest()[:16]

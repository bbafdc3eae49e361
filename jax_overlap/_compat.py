"""Everything taken from JAX's private modules, and what differs between versions.

Supported: JAX 0.10.2 to 0.12. A name that moves is mended here and nowhere else.
"""

from __future__ import annotations

import re
import warnings
from importlib import metadata
from pathlib import Path

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import parallel as _parallel
from jax.extend import linear_util
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import AbstractMesh
from jaxlib import xla_client as _xla_client

OLDEST_JAXLIB = "0.10.2"
_FIRST_UNTESTED_JAX = (0, 13, 0)

jaxlib_version = metadata.version("jaxlib")
NamedAxisEffect = _core.NamedAxisEffect
check_axis_names = _parallel._check_axis_names
apply_primitive = _dispatch.apply_primitive

if jax.__version_info__ >= _FIRST_UNTESTED_JAX:
    warnings.warn(
        f"jax_overlap was tested with JAX 0.10.2 to 0.12, this is {jax.__version__}.",
        stacklevel=2,
    )


def ffi_api_version() -> tuple[int, int]:
    """The XLA FFI version of the jaxlib that runs, as (major, minor)."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(found["MAJOR"]), int(found["MINOR"])


def prepare_cpu_state_types() -> None:
    """Lets CPU handlers with a state type be registered before the backend starts.

    jaxlib replays deferred registrations when it makes the CPU client, handlers
    before types, and refuses the handlers. With the type handler in place types
    are registered at once.
    """
    xla = _xla_client._xla  # pyright: ignore[reportPrivateImportUsage]
    _xla_client.register_custom_type_handler("cpu", xla.register_custom_type)


def check_vma() -> bool:
    """Whether the trace at hand tracks varying manual axes (`check_vma=True`)."""
    return _config._check_vma.value


def set_check_vma(value: bool):
    """A context in which `check_vma()` is `value`."""
    return _config._check_vma(value)


def auto_pcast() -> bool:
    """Whether collectives mark their operands as varying where they have to be."""
    return _config.auto_pcast.value


def without_unit_axes(axes: tuple) -> tuple:
    """`axes` less those of size one, if JAX is set to drop these from types."""
    return _parallel._maybe_skip_one_sized_axes(axes)


def varying(x) -> frozenset:
    """The mesh axes over which `x` varies."""
    return jax.typeof(x).mat.varying


def unreduced(x) -> frozenset:
    """The mesh axes over which `x` is an unreduced sum."""
    return jax.typeof(x).mat.unreduced


def tangent_type(x):
    """The type of tangents of `x`."""
    return jax.typeof(x).to_tangent_aval()


def manual_mesh(ctx):
    """The mesh and the manual axes of a lowering context inside `shard_map`."""
    axis_context = ctx.module_context.axis_context
    return axis_context.mesh, axis_context.manual_axes


def mesh_devices(mesh) -> list | None:
    """The devices of a mesh, in its order; None if it is abstract."""
    return None if isinstance(mesh, AbstractMesh) else list(mesh.devices.flat)


def capability(mesh) -> str:
    """The compute capability of a mesh of GPUs, such as "9.0"; "" if not known."""
    devices = mesh_devices(mesh) or [None]
    return str(getattr(devices[0], "compute_capability", ""))


def concrete_mesh(mesh):
    """`mesh`, or the one that is set (`jax.set_mesh`) where that has no devices."""
    context = _mesh.get_concrete_mesh()
    return context if isinstance(mesh, AbstractMesh) and not context.empty else mesh


def for_export(ctx) -> bool:
    """Whether a lowering context is that of `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def lower_for_devices(primitive) -> None:
    """Has programs with `primitive` lowered anew for other devices.

    Lowered modules are otherwise shared between meshes of one shape, while the devices
    are attributes of our custom calls on GPUs.
    """
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def lowering_platform() -> str:
    """What programs are lowered for: where the default backend is "gpu", "cuda" say."""
    return _xla_bridge.canonicalize_platform(jax.default_backend())


def coordination_client():
    """The client of the coordination service of `jax.distributed`, or None."""
    return _distributed.global_state.client


def platforms(ctx) -> tuple[str, ...]:
    """The platforms that a lowering context lowers for."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def partition_id():
    """Emits the logical id of the device that runs the program, as a uint32."""
    return stablehlo.partition_id()


def trace(fn, avals) -> tuple:
    """(jaxpr, constants) of `fn`, which takes and gives flat lists, on these types."""
    info = _api_util.debug_info("jax_overlap", fn, avals, {})
    wrapped = linear_util.wrap_init(fn, debug_info=info)
    jaxpr, _, consts = _partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return jaxpr, consts


def mapped_mesh_axes() -> frozenset:
    """The Explicit mesh axes over which a dimension that is vmapped here is sharded."""
    return frozenset(_core.get_axis_env().explicit_mesh_axis_names)


def axis_env(sizes: dict):
    """A context in which these axes are bound, as inside of `jax.shard_map`."""
    return _core.extend_axis_env_nd(list(sizes.items()))


def shape_of(variable) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr."""
    return variable.aval.shape


def dtype_of(variable):
    """The dtype of a variable of a jaxpr."""
    return variable.aval.dtype


def equation_mesh(eqn):
    """The abstract mesh in whose context an equation was traced."""
    return eqn.ctx.cur_abstract_mesh


def equation_context(eqn):
    """The context that an equation was traced in: mesh, metadata and the like."""
    return eqn.ctx.manager


def context_key(eqn):
    """The same object for equations traced in the same context."""
    return eqn.ctx


def is_plain_context(eqn) -> bool:
    """Whether an equation runs where the rest of the program does (`compute_on`)."""
    return eqn.ctx.compute_type is None


def is_same_context(a, b) -> bool:
    """Whether two equations have the same mesh, metadata and place to run."""
    names = ("cur_abstract_mesh", "xla_metadata", "compute_type")
    return all(getattr(a.ctx, n) == getattr(b.ctx, n) for n in names)


def source_line(eqn) -> str:
    """The user's line that made an equation: "file.py:12:3 (function)"."""
    return _source_info.summarize(eqn.source_info)


def is_jaxpr(value) -> bool:
    """Whether `value` is a jaxpr, open or closed (JAX 0.12 has one type for both)."""
    return isinstance(value, (_core.Jaxpr, getattr(_core, "ClosedJaxpr", _core.Jaxpr)))


def open_jaxpr(jaxpr):
    """`jaxpr` without its constants, where that is another object."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def replace_equations(jaxpr, eqns):
    """`jaxpr`, open or closed, with other equations and the same everything else."""
    new = open_jaxpr(jaxpr).replace(eqns=eqns)
    return new if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)

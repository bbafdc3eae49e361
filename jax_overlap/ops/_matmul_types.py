"""The types of a fused matmul: of operands beside each other, and which are native."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

# Half types accumulate in float32 and may be left there.
_NATIVE_RESULTS = {
    "float32": ("float32",),
    "float64": ("float64",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}
# Of operands in float8, on GPUs. cuBLASLt takes rows of whole 16-byte lines, and no two
# operands in float8_e5m2.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_FLOAT8_RESULTS = ("bfloat16", "float16", "float32")
_FLOAT8_LINE = 16
_FLOAT8_CAPABILITY = (8, 9)


def promoted(*operands):
    """The operands in their common type, as in `x @ w`; all in float8 stay as they are.

    jax.lax.dot_general takes unlike types of float8, which have no common one.
    """
    operands = [jnp.asarray(a) for a in operands]
    if all(is_narrow(a.dtype) for a in operands):
        return operands
    dtype = _common_type(*operands)
    return [a.astype(dtype) for a in operands]


def _common_type(*operands):
    """The type of `x @ w`; of float8 and a wider type of floats it is the wider one."""
    wider = [a for a in operands if not is_narrow(a.dtype)]
    told = any(jnp.issubdtype(a.dtype, np.inexact) and not a.weak_type for a in wider)
    return jnp.result_type(*(wider if told else operands))


def cotangent_type(target, *operands):
    """The type in which a cotangent is computed, to be rounded to `target` then."""
    if any(map(is_narrow, (target, *(a.dtype for a in operands)))):
        return at_least_float32(operands)
    return _common_type(*operands)


def at_least_float32(operands):
    """Float32, or the type of an operand that is wider."""
    wider = [a.dtype for a in operands if not is_narrow(a.dtype)]
    return jnp.result_type(np.float32, *wider)


def is_narrow(dtype) -> bool:
    """Whether these are floats of 8 bits or fewer, which jax does not promote."""
    return jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits <= 8


def check_native(op: str, implementation, x, ws, out_dtype) -> None:
    """Refuses types that `implementation="native"` cannot serve."""
    why = why_not_types([x], ws, out_dtype) if implementation == "native" else ""
    if why:
        raise TypeError(
            f"{op}: implementation='native' does not take this: {why}. "
            "implementation=None lowers to jax.lax."
        )


def why_not_types(xs, ws, out_dtype) -> str:
    """Why these types of operands and result are native nowhere, or ""."""
    dtypes, out = {str(a.dtype) for a in (*xs, *ws)}, str(out_dtype)
    if not any(is_narrow(a.dtype) for a in (*xs, *ws)):
        (dtype,) = dtypes  # they are promoted
        if out in _NATIVE_RESULTS.get(dtype, ()):
            return ""
        return (
            f"a matmul of {dtype} with a result of {out} (native are float32, float64, "
            "and bfloat16 and float16 with a result of the same type or float32)"
        )
    if not dtypes <= {*FLOAT8} or out not in _FLOAT8_RESULTS:
        return (
            f"a matmul of {', '.join(sorted(dtypes))} with a result of {out} (of "
            f"float8 native are {' and '.join(FLOAT8)}, with preferred_element_type "
            f"{', '.join(_FLOAT8_RESULTS)})"
        )
    if dtypes == {"float8_e5m2"}:
        return "cuBLASLt has no matmul of float8_e5m2 by float8_e5m2"
    return ""


def why_not_here(xs, ws, transposed, cut, team, situation) -> str:
    """Why types that are native somewhere are not here, or ""."""
    if not is_narrow(xs[0].dtype):
        return ""
    if not situation.on_gpu:
        return "matmuls of float8 are native on GPUs only"
    if max(len({a.dtype for a in operands}) for operands in (xs, ws)) > 1:
        return "operands of one call have unlike types of float8"
    capability = tuple(int(n) for n in situation.capability.split(".") if n.isdigit())
    if capability and capability < _FLOAT8_CAPABILITY:
        return (
            f"GPUs of compute capability {situation.capability} multiply no float8 "
            f"({'.'.join(map(str, _FLOAT8_CAPABILITY))} and later do)"
        )
    inner = {x.shape[3] for x in xs}
    parts = team.ranks if cut == "cols" else 1
    cols = {
        w.shape[1 if t else 2] // parts for w, t in zip(ws, transposed, strict=True)
    }
    if any(n % _FLOAT8_LINE for n in inner | cols):
        return (
            f"of float8, what is contracted ({_listed(inner)}) and the columns "
            f"({_listed(cols)}) of a part have to be multiples of {_FLOAT8_LINE}"
        )
    return ""


def _listed(numbers) -> str:
    return ", ".join(map(str, sorted(numbers)))

"""The cast from invariant to varying whose cotangents our psum adds.

JAX's own, `jax.lax.pcast(x, axes, to="varying")`, is transposed to `jax.lax.psum`. It
is linear, so forward mode, vmap and higher derivatives work, which a `custom_vjp` would
forbid.
"""

from __future__ import annotations

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import get_abstract_mesh

from jax_overlap.ops.psum import psum

to_varying_p = Primitive("jax_overlap_pvary")
to_varying_p.def_impl(lambda x, *, axes: x)
mlir.register_lowering(to_varying_p, lambda ctx, x, *, axes: [x])
batching.defvectorized(to_varying_p)


@to_varying_p.def_abstract_eval
def _abstract_eval(x, *, axes):
    varying = x.mat.varying | set(axes)
    return x.update(
        sharding=x.sharding.update(mesh=get_abstract_mesh()),  # a literal has none
        manual_axis_type=x.mat.update(varying=varying),
    )


def _transpose(ct, x, *, axes):
    del x
    return [psum(ct, axes)]


ad.deflinear2(to_varying_p, _transpose)

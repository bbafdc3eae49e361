"""Where a tensor-parallel layer runs, and the shardings it runs with.

(a) Inside a `shard_map` (or `vmap`, `pmap`) over the layer's axis, the axis is bound:
the layer computes on the shards it is given. (b) Elsewhere the axis belongs to the
mesh set by `jax.set_mesh`: the layer opens a `shard_map` of its own, over all the
axes whose use it knows, because a custom call in a partly automatic region would be
fed by an all-gather over the automatic axes (and the ops of `jax_overlap` decline to).

Input and output of a layer have either their features cut over the axis or, in the
sequence-parallel form, the sequence: the dimension before the features.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from jax_overlap._region import Entries, entry_of, ranks
from jax_overlap._region import names as names_of
from jax_overlap.flax import _sharding
from jax_overlap.flax._local import Options, attention


def alone(axis_name: str, fn: Callable[[], jax.Array]) -> jax.Array:
    """fn() as a single rank: how `init` computes where there is no mesh yet."""
    return jax.vmap(lambda _: fn(), axis_name=axis_name)(jnp.zeros(1))[0]


@dataclasses.dataclass(frozen=True)
class Region:
    """The shard_map that a layer opens when its axis is not manual yet."""

    owner: str
    axis_name: str
    explicit: frozenset[str]  # axes of which the types of the arrays tell the sharding
    told: frozenset[str]  # axes of which only `batch_spec` can tell it
    batch_spec: P
    sequence_parallel: bool

    @classmethod
    def here(cls, owner: str, options: Options, batch_spec: P | None) -> "Region":
        _sharding.axis_size(
            owner, options.axis_name
        )  # there is a mesh, and it has the axis
        mesh = get_abstract_mesh()
        kinds = _sharding.axis_types(mesh)
        explicit = {a for a, k in kinds.items() if k == AxisType.Explicit}
        auto = {a for a, k in kinds.items() if k == AxisType.Auto}
        if batch_spec is None:
            hidden = {a for a in auto - {options.axis_name} if mesh.shape[a] > 1}
            if hidden and (
                options.collectives == "overlap" or options.sequence_parallel
            ):
                _warn_untold(owner, hidden, options.sequence_parallel)
            auto -= hidden
        region = cls(
            owner,
            options.axis_name,
            frozenset(explicit),
            frozenset(auto),
            P() if batch_spec is None else batch_spec,
            options.sequence_parallel,
        )
        region._check_batch_spec(mesh)
        return region

    def _check_batch_spec(self, mesh) -> None:
        for name in (name for entry in self.batch_spec for name in names_of(entry)):
            if name == self.axis_name:
                raise ValueError(
                    f"{self.owner}: batch_spec = {self.batch_spec} must not use the "
                    f"layer's own axis {name!r}; it is about the leading dimensions."
                )
            if name not in mesh.axis_names:
                raise ValueError(
                    f"{self.owner}: batch_spec = {self.batch_spec} uses {name!r}, "
                    f"which is not an axis of the mesh {mesh.axis_names}."
                )

    def leading(self, x: jax.Array, last: str | None) -> tuple[Any, ...]:
        """How other axes cut the dimensions of x before the last, which fits `last`."""
        if len(self.batch_spec) >= x.ndim:
            raise ValueError(
                f"{self.owner}: batch_spec = {self.batch_spec} is about the dimensions "
                f"before the last, but the input has shape {x.shape}."
            )
        told = (*self.batch_spec, *[None] * (x.ndim - len(self.batch_spec)))
        typed = self._typed(x, last)
        kept = [[n for n in names_of(e) if n in self.told] for e in told[:-1]]
        lead = tuple(entry_of([*a, *b]) for a, b in zip(typed, kept, strict=True))
        if self.sequence_parallel:
            self._check_divides(x, [*names_of(lead[-1]), self.axis_name])
        return lead

    def spec(self, lead: Sequence[Any], last: str | None) -> P:
        """The sharding of an array with these dimensions before the last."""
        if last is None and self.sequence_parallel:
            lead = *lead[:-1], entry_of([*names_of(lead[-1]), self.axis_name])
        return P(*lead, last)

    def _typed(self, x: jax.Array, last: str | None) -> Entries:
        """What the type of x says about the dimensions before the last."""
        spec = tuple(jax.typeof(x).sharding.spec)
        spec += (None,) * (x.ndim - len(spec))
        typed = [tuple(n for n in names_of(e) if n in self.explicit) for e in spec]
        *lead, features = typed
        # Its own axis comes last in the sequence, so that others cut what it gathers.
        own = (self.axis_name,)
        if self.sequence_parallel and last is None and lead[-1][-1:] == own:
            lead[-1] = lead[-1][:-1]
        # What is not cut is fine where it should be: each rank takes a slice. All else
        # would have to be gathered, which nobody should pay unasked.
        taken = any(self.axis_name in names for names in lead)
        if not taken and features in ((), names_of(last)):
            return lead
        others = [entry_of([n for n in e if n != self.axis_name]) for e in lead]
        want = self.spec(others, last)
        raise ValueError(
            f"{self.owner}: expected an input sharded as {want}, got "
            f"{P(*map(entry_of, typed))} for shape {x.shape}. Change it where you want "
            f"to pay for it: x = jax.sharding.reshard(x, {want})."
        )

    def _check_divides(self, x: jax.Array, names: Sequence[Any]) -> None:
        parts = ranks(get_abstract_mesh(), tuple(names))
        _sharding.check_sequence(self.owner, x.shape, parts, tuple(names))

    def place(self, x: jax.Array, spec: P) -> jax.Array:
        """Gives x the sharding with which it enters, where types must agree."""
        if not self.explicit:
            return x
        entries = [[n for n in names_of(e) if n in self.explicit] for e in spec]
        return jax.sharding.reshard(x, P(*map(entry_of, entries)))

    def run(self, body: Callable, args: Any, specs: Any, out_spec: P) -> jax.Array:
        """body(*args) on the shards; `specs` has one PartitionSpec for each array."""
        args = jax.tree.map(self.place, args, specs)
        names = self.explicit | self.told | {self.axis_name}
        return jax.shard_map(
            body, in_specs=specs, out_specs=out_spec, axis_names=names
        )(*args)


def _warn_untold(owner: str, axes: set[str], sequence_parallel: bool) -> None:
    # XLA's all-gather in a partly automatic region wants the rest replicated.
    gathers = ", for which XLA gathers the batch, too" if sequence_parallel else ""
    warnings.warn(
        f"{owner}: the mesh has Auto axes {sorted(axes)}, and nothing says how the "
        f"batch is sharded over them, so it uses the collectives of jax.lax{gathers}. "
        f"Pass batch_spec=, such as P({sorted(axes)[0]!r}) (or P() for a replicated "
        f"batch), or use a mesh with Explicit axes.",
        stacklevel=4,
    )


def apply_linear(
    body: Callable,
    owner: str,
    options: Options,
    batch_spec: P | None,
    x: jax.Array,
    params: tuple[jax.Array, jax.Array | None],
    specs: tuple[P, P],
    last: tuple[str | None, str | None],
    *,
    initializing: bool = False,
) -> jax.Array:
    """body(x, kernel, bias, options) on shards; `last`: how features are cut, in, out.

    Inside shard_map the arrays are the shards already.
    """
    if options.sequence_parallel:
        _sharding.check_has_sequence(owner, x)
    if (size := _sharding.bound_size(options.axis_name)) is not None:
        if options.sequence_parallel and last[1] is None:
            names = (options.axis_name,)
            _sharding.check_sequence(owner, jnp.shape(x), size, names)
        return body(x, *params, options)
    if initializing and not _sharding.known(options.axis_name):
        return alone(options.axis_name, lambda: body(x, *params, options))
    region = Region.here(owner, options, batch_spec)
    x = jnp.asarray(x)
    lead = region.leading(x, last[0])
    kept = [(p, s) for p, s in zip(params, specs, strict=True) if p is not None]
    return region.run(
        lambda x, kernel, bias=None: body(x, kernel, bias, options),
        (x, *[p for p, _ in kept]),
        (region.spec(lead, last[0]), *[s for _, s in kept]),
        region.spec(lead, last[1]),
    )


def qkv_inputs(owner: str, inputs: tuple, features: tuple = ()) -> tuple:
    """Query, key and value inputs, a missing one taken from the one before it.

    Those of nnx have their `features` fixed; those of linen take what comes.
    """
    q, k, v = inputs
    if k is None and v is not None:
        raise ValueError(
            f"{owner}: inputs_v was given without inputs_k. Pass inputs_k alone where "
            f"both are the same."
        )
    k = q if k is None else k
    v = k if v is None else v
    for x, n in zip((q, k, v), features or (), strict=bool(features)):
        _sharding.check_last(owner, x, n)
    return q, k, v


def apply_attention(
    attend: Callable[..., jax.Array],
    owner: str,
    options: Options,
    batch_spec: P | None,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array | None,
    params: Sequence[tuple[jax.Array, jax.Array | None]],
    specs: Sequence[tuple[P, P]],
    *,
    initializing: bool = False,
) -> jax.Array:
    """Attention on shards: the heads are cut, the batch stays as it is."""
    if options.sequence_parallel:
        for x in qkv:
            _sharding.check_has_sequence(owner, x)
    # An input used twice comes in once: one psum in the backward pass, not three.
    distinct = list({id(x): x for x in qkv}.values())
    which = [next(i for i, y in enumerate(distinct) if y is x) for x in qkv]

    def body(inputs, masks, params):
        masked = functools.partial(attend, mask=masks[0] if masks else None)
        return attention(inputs, which, params, masked, options)

    masks = [] if mask is None else [jnp.asarray(mask)]
    if _sharding.bound_size(options.axis_name) is not None:
        return body(distinct, masks, params)
    if initializing and not _sharding.known(options.axis_name):
        return alone(options.axis_name, lambda: body(distinct, masks, params))
    region = Region.here(owner, options, batch_spec)
    distinct = [jnp.asarray(x) for x in distinct]
    leads = [region.leading(x, None) for x in distinct]
    _check_sequence(owner, leads)
    in_specs = (
        [region.spec(lead, None) for lead in leads],
        [_mask_spec(m, leads[0], options.axis_name) for m in masks],
        [_without_bias(*both) for both in zip(params, specs, strict=True)],
    )
    return region.run(
        body, (distinct, masks, params), in_specs, region.spec(leads[0], None)
    )


def _without_bias(params: Any, specs: tuple[P, P]) -> tuple[P, P | None]:
    return specs[0], None if params[1] is None else specs[1]


def _mask_spec(mask: jax.Array, lead: tuple[Any, ...], axis_name: str) -> P:
    """The sharding of (batch..., heads, q, kv), of which any may be 1 or missing."""
    full = (*lead[:-1], axis_name, None, None)[-mask.ndim :] if mask.ndim else ()
    return P(*[None if n == 1 else e for n, e in zip(mask.shape, full, strict=True)])


def _check_sequence(owner: str, leads: Sequence[tuple[Any, ...]]) -> None:
    for lead in leads:
        if lead[-1] is not None:
            raise ValueError(
                f"{owner}: the sequence (the dimension before the features) is sharded "
                f"over {lead[-1]!r}, but every query needs all keys. Shard the batch "
                f"instead, or reshard the input."
            )

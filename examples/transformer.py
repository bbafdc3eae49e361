"""A decoder-only character transformer on tensor-parallel layers, and its training.

The model of examples/train_transformer.py, which sets up the devices first.
"""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Sequence

import devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from tqdm import tqdm

import jax_overlap
import jax_overlap.flax.nnx as tp


class Block(nnx.Module):
    """Attention, then an MLP, each added to the stream.

    Sequence parallel, each device norms and adds its part of the sequence.
    """

    def __init__(self, width: int, heads: int, parallel: dict, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = tp.TensorParallelAttention(
            heads, width, use_bias=False, rngs=rngs, **parallel
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = tp.TensorParallelMLP(width, 4 * width, rngs=rngs, **parallel)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
    """(batch, length) characters -> (batch, length, vocabulary) logits of the next."""

    def __init__(self, args, vocabulary: int, form: dict, rngs: nnx.Rngs):
        parallel = {"axis_name": "tp", **form}
        self.sequence_parallel = form.get("sequence_parallel", False)
        self.vocabulary = vocabulary
        init = nnx.initializers.normal(0.02)
        # The gradient of a lookup adds in any order on GPUs, so that the copies of the
        # devices would drift apart; that of a matmul does not.
        self.characters = nnx.Linear(
            vocabulary, args.width, use_bias=False, kernel_init=init, rngs=rngs
        )
        self.positions = nnx.Embed(
            args.window, args.width, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List(
            Block(args.width, args.heads, parallel, rngs) for _ in range(args.layers)
        )
        self.norm = nnx.LayerNorm(args.width, rngs=rngs)
        self.head = nnx.Linear(args.width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.characters(jax.nn.one_hot(tokens, self.vocabulary))
        x += self.positions(jnp.arange(tokens.shape[1]))
        if self.sequence_parallel:  # from here to the loss
            x = jax.sharding.reshard(x, P(None, "tp"))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, windows: ArrayLike):
    windows = jnp.asarray(windows)

    def loss_fn(model):
        logits = model(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, windows[:, 1:]
        ).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def next_character(model: Transformer, tokens: ArrayLike, last: ArrayLike, key):
    """Draws what follows tokens[0, last]; what is after it is padding."""
    logits = jax.sharding.reshard(model(jnp.asarray(tokens)), P())
    return jax.random.categorical(key, logits[0, last] / 0.7)


@dataclasses.dataclass
class Run:
    """What came of one training."""

    model: Transformer
    tokens_per_step: int
    losses: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)  # seconds a step


class Trainer:
    """Trains models of the same size on the same batches of the same text."""

    def __init__(self, args, text: str, forms: dict[str, dict]):
        self.args, self.forms = args, forms
        cut = [k for k in args.forms if forms[k].get("sequence_parallel")]
        if cut and args.window % args.devices:
            up = -(-args.window // args.devices) * args.devices
            raise SystemExit(
                f"--window {args.window} is not divisible by --devices {args.devices}, "
                f"over which {cut[0]} cuts it. Use {up}, or only other --forms."
            )
        self.alphabet = sorted(set(text))
        index = {character: i for i, character in enumerate(self.alphabet)}
        self.tokens = np.array([index[character] for character in text], np.int32)
        chosen = jax.devices()[: args.devices]
        self.mesh = jax.make_mesh((args.devices,), ("tp",), devices=chosen)

    def make_model(self, kind: str) -> Transformer:
        """The same initial values for all forms."""
        form = self.forms[kind]
        with jax.set_mesh(self.mesh), nnx.use_eager_sharding(False):
            rngs = nnx.Rngs(self.args.seed)
            model = Transformer(self.args, len(self.alphabet), form, rngs)
        # All processes have made the same values, and give their devices the parts.
        graph, state = nnx.split(model)
        specs = nnx.get_partition_spec(state)
        return nnx.merge(graph, jax.tree.map(self.place, state, specs))

    def place(self, value: jax.Array, spec: P) -> jax.Array:
        whole, sharding = np.asarray(value), NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    def describe(self, kind: str) -> str:
        """What of jax_overlap a forward pass calls, and how it is carried out."""
        model = self.make_model(kind)
        with jax.set_mesh(self.mesh):
            plans = jax_overlap.explain(
                lambda model, tokens: model(tokens), model, next(self.batches())[:, :-1]
            )
        return devices.carried_out(plans)

    def batches(self):
        """Random windows of the text, one character longer than the model sees."""
        random = np.random.default_rng(self.args.seed)
        length = self.args.window + 1
        for _ in range(self.args.steps):
            starts = random.integers(
                len(self.tokens) - length + 1, size=self.args.batch
            )
            yield self.tokens[starts[:, None] + np.arange(length)]

    def optimizer(self, model: Transformer) -> nnx.Optimizer:
        steps = self.args.steps
        rate = optax.warmup_cosine_decay_schedule(
            0.0, 1e-3, max(1, steps // 10), steps, 1e-4
        )
        chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))
        return nnx.Optimizer(model, chain, wrt=nnx.Param)

    def train(self, kinds: Sequence[str]) -> dict[str, Run]:
        """Trains a new model in each of these forms, on the same batches.

        They take turns, step by step: what else the machine does slows all alike.
        The progress bar shows the loss, and tokens a second.
        """
        tokens = self.args.batch * self.args.window
        runs = {kind: Run(self.make_model(kind), tokens) for kind in kinds}
        with jax.set_mesh(self.mesh):
            make = nnx.jit(self.optimizer)
            optimizers = {kind: make(run.model) for kind, run in runs.items()}
            progress = tqdm(
                self.batches(),
                desc="training, tokens/s",
                total=self.args.steps,
                disable=not devices.writes(),
            )
            for windows in progress:
                shown = {}
                for kind, run in runs.items():
                    start = time.perf_counter()
                    loss = train_step(run.model, optimizers[kind], windows)
                    # float() awaits the step: with many in flight, XLA's thread pool
                    # for the CPU runs out of threads.
                    run.losses.append(float(loss))
                    run.times.append(time.perf_counter() - start)
                    shown[kind] = f"{tokens / run.times[-1]:,.0f}"
                progress.set_postfix(loss=f"{runs[kinds[0]].losses[-1]:.3f}", **shown)
        return runs

    def through_checkpoint(
        self, model: Transformer, kind: str, out: pathlib.Path
    ) -> Transformer:
        """Saves `model` with Orbax and returns what a new model restores from it."""
        folder = (out / "checkpoint").resolve()
        if devices.writes():
            shutil.rmtree(folder, ignore_errors=True)
        multihost_utils.sync_global_devices("the old checkpoint is gone")
        restored = self.make_model(kind)
        saved = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        # Of all processes: each saves the parts that it has, and reads them.
        with jax.set_mesh(self.mesh), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, saved)
            checkpointer.wait_until_finished()
            state = nnx.state(restored, nnx.Param)
            wanted = jax.tree.map(
                ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state)
            )
            values = checkpointer.restore(folder, wanted)
            nnx.replace_by_pure_dict(state, values)
            nnx.update(restored, state)
        leaves = jax.tree.leaves(saved)
        for a, b in zip(leaves, jax.tree.leaves(values), strict=True):
            for mine, read in zip(
                a.addressable_shards, b.addressable_shards, strict=True
            ):
                np.testing.assert_array_equal(mine.data, read.data)
        devices.say(f"Saved to {folder} and restored: {len(leaves)} arrays.")
        return restored

    def sample(self, model: Transformer, count: int) -> str:
        """Lets the model write `count` characters after a line break."""
        window = self.args.window
        tokens = [self.alphabet.index("\n") if "\n" in self.alphabet else 0]
        keys = jax.random.split(jax.random.key(self.args.seed), count)
        with jax.set_mesh(self.mesh):
            for key in tqdm(keys, desc="sample", leave=False):
                seen = tokens[-window:]
                padded = np.zeros((1, window), np.int32)
                padded[0, : len(seen)] = seen
                last = np.int32(len(seen) - 1)
                tokens.append(int(next_character(model, padded, last, key)))
        return "".join(self.alphabet[token] for token in tokens[1:])

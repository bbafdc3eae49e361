"""Trains a small character transformer, tensor parallel over virtual CPU devices.

    python examples/train_transformer.py --out out/demo

Or over GPUs, or processes: examples/devices.py says how.

A decoder-only transformer in Flax nnx learns English from the documentation inside
the Python installation, so there is nothing to download. Its attention and MLP layers
are those of `jax_overlap.flax.nnx`: each of the devices holds a quarter (by default)
of the heads and of the hidden features. Three of them are trained from the same seed:

- `xla`: between the layers all devices have the same; sums are by `jax.lax.psum`.
- `all_reduce`: the same, by `jax_overlap`: matmul and sum are one operation.
- `sequence_parallel`: between the layers each device has its part of the sequence; by
  `jax_overlap.all_gather_matmul` and `jax_overlap.matmul_reduce_scatter`.

Their loss curves have to agree. The last model goes through an Orbax checkpoint and
writes some text of its own. `--forms` and `--collectives` choose other models.

Written to --out: `training.png` (loss and time a step of all runs), `losses.csv`,
and the folder `checkpoint`.
"""

import argparse
import pathlib
import re
import sys
import sysconfig
from importlib import import_module

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import devices

# The losses of the first steps may differ by this much: the sums round alike in nearly
# all elements, and training amplifies what is left.
TOLERANCE, COMPARED_STEPS = 1e-3, 100

# What the layers of a model are told.
FORMS = {
    "xla": {"collectives": "xla"},
    "all_reduce": {},
    "sequence_parallel": {"sequence_parallel": True},
    "sequence_parallel_xla": {"sequence_parallel": True, "collectives": "xla"},
}
COLLECTIVES = {
    "overlap": [f for f, told in FORMS.items() if "collectives" not in told],
    "xla": [f for f, told in FORMS.items() if "collectives" in told],
    "both": list(FORMS),
}


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small tensor-parallel character transformer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    whole = {"type": devices.positive, "metavar": "N"}
    devices.add_argument(parser)
    parser.add_argument("--steps", default=200, help="training steps", **whole)
    parser.add_argument("--layers", default=4, help="transformer blocks", **whole)
    parser.add_argument("--width", default=256, help="features of a token", **whole)
    parser.add_argument("--heads", default=8, help="attention heads", **whole)
    parser.add_argument("--batch", default=8, help="windows a step", **whole)
    parser.add_argument("--window", default=64, help="characters a window", **whole)
    parser.add_argument("--sample", default=400, help="characters to write", **whole)
    parser.add_argument("--seed", default=0, type=int, help="of weights and batches")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--forms",
        nargs="+",
        choices=tuple(FORMS),
        default=list(FORMS)[:3],
        help="models to train; the losses of the others are compared with the first's",
        metavar="FORM",
    )
    chosen.add_argument(
        "--collectives",
        choices=tuple(COLLECTIVES),
        default=argparse.SUPPRESS,
        help="all forms with ours, with those of XLA, or with both",
    )
    parser.add_argument("--text", help="a text file to learn instead", metavar="FILE")
    parser.add_argument("--out", default="out/demo", help="folder", metavar="DIR")
    args = parser.parse_args(argv)
    if "collectives" in args:
        args.forms = COLLECTIVES[args.collectives]
    return args


def python_documentation() -> tuple[str, list[str]]:
    """The reference manual that `help()` shows, and the licence; with file names."""
    texts, files = [], []
    licence = pathlib.Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if licence.exists():
        texts.append(licence.read_text(encoding="utf-8"))
        files.append(str(licence))
    try:
        manual = import_module("pydoc_data.topics")
    except ImportError:  # some distributions leave it out
        return "\n".join(texts), files
    texts.extend(manual.topics.values())
    # Tables and indentation are no prose: most of what they teach is to write spaces.
    prose = re.sub(r"(?m)^.*[|+]$\n", "", "\n".join(texts))
    return re.sub(" +", " ", prose), [*files, str(manual.__file__)]


def read_text(path: str | None, window: int) -> tuple[str, list[str]]:
    """The text to learn, and the files it comes from."""
    if path is None:
        text, files = python_documentation()
    else:
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            sys.exit(f"--text: cannot read {path}: {error.strerror}.")
        files = [path]
    if len(text) <= window:
        sys.exit(
            f"The text has {len(text)} characters ({', '.join(files) or 'no file'}), "
            f"but a window of {window} needs at least {window + 1}. Give a longer "
            f"--text, or a smaller --window."
        )
    return text, files


def compare(runs: dict, labels: dict) -> None:
    """Fails unless all runs have the losses of the first."""
    first, *others = runs
    theirs = runs[first].losses[:COMPARED_STEPS]
    for kind in others:
        ours = runs[kind].losses[:COMPARED_STEPS]
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        # Asked this way round, as a NaN compares false.
        for step, gap in enumerate(gaps):
            if not gap <= TOLERANCE:
                sys.exit(
                    f"FAILED: the losses of {labels[kind]} and {labels[first]} differ "
                    f"by {gap:.3g} in step {step} ({ours[step]:.6f} and "
                    f"{theirs[step]:.6f}); at most {TOLERANCE:g} is allowed in the "
                    f"first {COMPARED_STEPS} steps."
                )
        devices.say(
            f"The losses of {labels[kind]} and {labels[first]} agree: largest "
            f"difference {max(gaps):.2g} in the first {len(gaps)} steps (allowed: "
            f"{TOLERANCE:g})."
        )


def main(argv=None) -> None:
    args = parse_arguments(argv)
    text, files = read_text(args.text, args.window)
    devices.set_up(args)
    transformer = import_module("transformer")  # imports jax
    report = import_module("transformer_report")

    devices.say(f"Text: {len(text):,} characters from")
    for file in files:
        devices.say(f"  {file}")
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    kinds = list(dict.fromkeys(args.forms))
    trainer = transformer.Trainer(args, text, FORMS)
    for kind in kinds:
        devices.say(f"{report.LABELS[kind]}, forward: {trainer.describe(kind)}")
    runs = trainer.train(kinds)
    for kind, run in runs.items():
        devices.say(f"{report.LABELS[kind]}: {report.summary(run)}")
    if devices.writes():
        report.write(runs, out)
    compare(runs, report.LABELS)
    last = kinds[-1]
    model = trainer.through_checkpoint(runs[last].model, last, out)
    sample = trainer.sample(model, args.sample)
    devices.say(f"\nThe model writes:\n{'-' * 72}\n{sample}\n{'-' * 72}")


if __name__ == "__main__":
    main()

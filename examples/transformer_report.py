"""The picture and the table that examples/train_transformer.py writes."""

import csv
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen
import matplotlib.pyplot as plt

LABELS = {
    "xla": "jax.lax, all-reduce",
    "all_reduce": "jax_overlap, all-reduce",
    "sequence_parallel": "jax_overlap, sequence parallel",
    "sequence_parallel_xla": "jax.lax, sequence parallel",
}
COLORS = {
    "xla": "tab:orange",
    "all_reduce": "tab:blue",
    "sequence_parallel": "tab:green",
    "sequence_parallel_xla": "tab:red",
}


def step_ms(run) -> float:
    """The median time of a step; the first ones compile and warm up."""
    times = run.times[min(3, len(run.times) - 1) :]
    return 1e3 * statistics.median(times)


def summary(run) -> str:
    rate = run.tokens_per_step / step_ms(run) * 1e3
    return (
        f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, "
        f"{step_ms(run):.1f} ms a step, {rate:,.0f} tokens/s"
    )


def write(runs: dict, out: pathlib.Path) -> None:
    """Writes training.png and losses.csv."""
    with open(out / "losses.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *runs])
        losses = zip(*(run.losses for run in runs.values()), strict=True)
        table.writerows([step, *row] for step, row in enumerate(losses))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained"
    )
    _plot_losses(left, runs)
    _plot_times(right, runs)
    figure.savefig(out / "training.png", dpi=120)
    plt.close(figure)
    print(f"Wrote {out / 'training.png'} and {out / 'losses.csv'}.")


def _plot_losses(axes, runs: dict) -> None:
    # The curves lie on each other: the later are thinner, so that all are seen.
    for i, (kind, run) in enumerate(runs.items()):
        width = 1.5 * (len(runs) - i)
        axes.plot(run.losses, lw=width, color=COLORS[kind], label=LABELS[kind])
    axes.set(xlabel="step", ylabel="loss (nats a character)", title="Training loss")
    axes.legend()


def _plot_times(axes, runs: dict) -> None:
    heights = [step_ms(run) for run in runs.values()]
    bars = axes.bar(
        [LABELS[kind].replace(", ", "\n") for kind in runs],
        heights,
        color=[COLORS[kind] for kind in runs],
    )
    axes.bar_label(bars, fmt="%.0f ms")
    axes.margins(y=0.1)
    axes.set(ylabel="ms", title="Time a step (median)")

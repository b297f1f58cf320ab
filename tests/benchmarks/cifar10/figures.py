"""The figures of `convergence`."""

import numpy as np
from cifar10.methods import EPOCHS_PER_EVALUATION
from matplotlib.figure import Figure

COLUMNS = 5
BASELINE, METHOD, ABLATION = "0.55", "tab:blue", "tab:red"


def draw_curves(results, baselines, ablations):
    """Test accuracy by epoch, a panel a method, over its grey baseline; bands from the lowest to the highest seed."""
    shown = [name for name in results if baselines[name] != name] or list(results)
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(2.9 * COLUMNS, 2.5 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, name in zip(axes, shown, strict=False):
        if baselines[name] in results:
            _band(axis, results[baselines[name]], BASELINE)
        _band(axis, results[name], ABLATION if name in ablations else METHOD)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for axis in axes[max(0, len(shown) - COLUMNS) : len(shown)]:
        axis.xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel("epoch")
    figure.supylabel("test accuracy, %")
    figure.suptitle(
        "Blue: method; red: ablation; grey: its dense float32 baseline. Line: mean, band: range of the seeds"
    )
    return figure


def _band(axis, runs, colour):
    accuracies = 100 * np.array([run["accuracy"] for run in runs])
    epochs = EPOCHS_PER_EVALUATION * np.arange(1, accuracies.shape[1] + 1)
    axis.fill_between(epochs, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.25, linewidth=0)
    axis.plot(epochs, accuracies.mean(0), color=colour, linewidth=1.6)


def draw_accuracies(summary, baselines, ablations):
    """Final accuracy of each method with its standard deviation, beside its compression, over the baseline's band."""
    names = list(summary)[::-1]
    figure = Figure(figsize=(9.5, 1.4 + 0.34 * len(names)), layout="constrained")
    axis = figure.subplots()
    if "none" in summary:
        mean, deviation = (100 * summary["none"][key] for key in ("accuracy", "deviation"))
        axis.axvspan(mean - deviation, mean + deviation, color=BASELINE, alpha=0.25, linewidth=0)
        axis.axvline(mean, color=BASELINE, linewidth=1)
        axis.axvline(mean - 1, color=BASELINE, linewidth=1, linestyle=":")
    for place, name in enumerate(names):
        entry = summary[name]
        colour = ABLATION if name in ablations else BASELINE if baselines[name] == name else METHOD
        axis.errorbar(
            100 * entry["accuracy"],
            place,
            xerr=100 * entry["deviation"],
            fmt="X" if name in ablations else "o",
            color=colour,
            capsize=3,
        )
    axis.set_yticks(range(len(names)), [f"{name}  ({summary[name]['ratio']:.3g}x)" for name in names])
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set_xlabel("test accuracy, %")
    axis.set_title(
        "Mean and standard deviation over the seeds (payload's compression)\n"
        "grey: float32, its deviation, and a point below (dotted); crosses: ablations",
        fontsize=10,
    )
    axis.grid(axis="x", alpha=0.3)
    return figure

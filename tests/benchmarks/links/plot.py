"""Plots: seconds of a step over the speed of the link, and over the number of ranks."""

from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

# "Unshaped" has no speed of its own: it stands apart, at the right.
_UNSHAPED_AT = 4000
_GAP = 1.055


def plot(steps, file):
    """Draw a line for each method.

    Args:
        steps: Seconds by method and label of the speed.
        file: PNG.
    """
    figure = Figure(figsize=(10, 7))
    axes = figure.subplots()
    # Dark enough to be read as text.
    colours = [*colormaps["Dark2"].colors, *colormaps["tab10"].colors]  # type: ignore[attr-defined]
    ours = [name for name in steps if not name.startswith("Horovod")]
    ends = {}
    for name, seconds in steps.items():
        points = sorted((_position(label), value) for label, value in seconds.items())
        style: dict[str, Any] = (
            {"color": colours[ours.index(name) % len(colours)], "linewidth": 1.3}
            if name in ours
            else {"color": "black", "linestyle": "--" if name.endswith("32") else ":", "linewidth": 2, "zorder": 3}
        )
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)
        ends[name] = (points[0][1], style["color"])
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="seconds per training step")
    speeds = sorted({_position(label) for seconds in steps.values() for label in seconds})
    axes.set_xticks(speeds, ["no limit" if speed == _UNSHAPED_AT else str(speed) for speed in speeds])
    low, high = axes.get_ylim()
    marks = [mark for mark in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30) if low <= mark <= high]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    # Names stand left of the lines' ends, in their order, moved apart where they would overlap.
    places = _apart([value for value, _ in ends.values()], low, high)
    for place, (name, (value, colour)) in zip(places, ends.items(), strict=True):
        axes.annotate(
            f"{name}  {value:.1f}",
            (min(speeds), value),
            (min(speeds) * 0.86, place),
            ha="right",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "relpos": (1, 0.5),
                "shrinkA": 0,
                "shrinkB": 3,
            },
        )
    axes.set_xlim(min(speeds) * 0.36, max(speeds) * 1.15)
    axes.set_title("ResNet-50, 12 bands, batch 8 a rank, 2 ranks with one core each")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def plot_scaling(rows, file):
    """Draw seconds of a step over ranks, a panel for each link: measured as points, predicted as lines.

    Args:
        rows: `ranks`, `link`, `codec`, `measured`, `predicted` and `rule_error`; the model is fitted to 2 ranks.
        file: PNG.
    """
    links = list(dict.fromkeys(row["link"] for row in rows))
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    figure = Figure(figsize=(6 * len(links), 5))
    panels = figure.subplots(1, len(links), squeeze=False)
    for link, axes in zip(links, panels[0], strict=True):
        for codec, colour in zip(codecs, colormaps["Dark2"].colors, strict=False):  # type: ignore[attr-defined]
            chosen = [row for row in rows if row["link"] == link and row["codec"] == codec]
            ranks = [row["ranks"] for row in chosen]
            axes.plot(ranks, [row["predicted"] for row in chosen], "--", color=colour, label=f"{codec}, predicted")
            rule = [(1 + row["rule_error"]) * row["measured"] for row in chosen]
            axes.plot(ranks, rule, ":", color=colour, linewidth=0.8)
            axes.plot(ranks, [row["measured"] for row in chosen], "o", color=colour, label=f"{codec}, measured")
        axes.axvspan(1.7, 2.3, color="grey", alpha=0.15, linewidth=0)
        axes.annotate("fitted here", (2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
        axes.set(xlabel="ranks", ylabel="seconds per step", title=f"{link.removeprefix('mbit_')} Mbit/s")
        axes.set_xticks(sorted({row["ranks"] for row in rows}))
        axes.set_ylim(0, 1.12 * max(max(row["measured"], row["predicted"]) for row in rows if row["link"] == link))
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8, ncols=2)
    figure.suptitle(
        "Step time: measured (points), predicted from 2 ranks (dashed), and as long as 2 (dotted); computing is a sleep"
    )
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _position(label):
    return _UNSHAPED_AT if label == "unshaped" else int(label.removeprefix("mbit_"))


def _apart(values, low, high):
    """Heights near the values, each at least a factor from the next, within the axes."""
    gap = min(_GAP, (high / low) ** (0.95 / max(1, len(values))))
    order = sorted(range(len(values)), key=lambda i: values[i])
    heights = [values[i] for i in order]
    for _ in range(500):
        for lower in range(len(heights) - 1):
            ratio = heights[lower + 1] / heights[lower]
            if ratio < gap:
                push = (gap / ratio) ** 0.5
                heights[lower] /= push
                heights[lower + 1] *= push
    return [heights[order.index(i)] for i in range(len(values))]

"""The page of a comparison, in one file without others, its table for LaTeX, and its view in a notebook."""

import base64
import gzip
import html
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D

from pipelines.comparison import figures
from pipelines.comparison.facts import NEAR_CHANCE
from pipelines.comparison.groups import DatasetGroups, alike_troubles, best_group, default_target, word_of
from pipelines.comparison.run import SCORES, ComparedRun
from pipelines.comparison.tables import (
    csv_of,
    differing_rows,
    importance_of,
    recipe_rows,
    score_text,
    table_rows,
    target_rows,
)
from pipelines.dataset.report.figures import Colors
from pipelines.dataset.report.html import render
from pipelines.dataset.report.tables import shorten
from pipelines.machine.cell_figure import CellFigure
from pipelines.tracking.metrics import is_lower_better

if TYPE_CHECKING:
    import pandas

LATEX_MARK = b"% Groundswell, needs booktabs\n"
"""First line of the tables for LaTeX."""
_LONG = 120
_NAMED_GROUPS = 12
_COLUMNS = {
    "number": "group",
    "label": "what differs",
    "seeds": "seeds",
    "score": "best score",
    "with_diverged": "with the diverged",
    "last": "last score",
    "time": "time",
    "rate_of_images": "images/s",
    "bytes": "bytes of a rank",
    "diverged": "diverged",
}
_ON_WHITE = Colors(text="#333333", fill="#3b74c4", mark="#b3410e")


def comparison_page(
    parts: Sequence[DatasetGroups],
    runs: Sequence[ComparedRun],
    metric: str,
    targets: Sequence[float | None],
    title: str,
    notes: Sequence[str],
) -> str:
    """Return the page as HTML.

    Args:
        parts: The groups, by dataset.
        runs: All trainings.
        metric: Metric of the comparison.
        targets: Value of the metric to reach, for each part; None: there is none.
        title: Title with the experiments and files.
        notes: Notes that a reader must know before the figures; each is a sentence.
    """
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs()
    tables = {"table.csv": csv_of(table_rows(parts, metric, targets)), "table.tex": latex_of(parts)}
    dates = sorted(run.started[:10] for run in runs)
    return render(
        "comparison/page.html",
        scripts=[files("pipelines.comparison").joinpath("page.js").read_text()],
        packed=[plotly],
        plotly=_base64(gzip.compress(plotly.encode(), mtime=0)),
        tables={name: _base64(text.encode()) for name, text in tables.items()},
        title=shorten(title, _LONG),
        runs=len(runs),
        groups=sum(len(part.groups) for part in parts),
        metric=metric,
        lower_is_better=is_lower_better(metric),
        default_target=[default_target(part.groups, metric) for part in parts] == list(targets),
        first_date=dates[0] if dates else "",
        last_date=dates[-1] if dates else "",
        notes=notes,
        grey=figures.GREY,
        parts=[_part(part, metric, target, len(parts)) for part, target in zip(parts, targets, strict=True)],
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def notes_of(parts: Sequence[DatasetGroups], metric: str) -> list[str]:
    """Return the notes that a reader must know before figures of this metric; each is a sentence."""
    members = [facts for part in parts for group in part.groups for facts in group.members]
    notes = []
    for part in parts:
        of_part = [facts for group in part.groups for facts in group.members]
        known = [score for score in SCORES if any(score in facts.run.history for facts in of_part)]
        if known and not any(metric in facts.run.history for facts in of_part):
            notes.append(
                f"No training on {_name(part)} has {metric}. To compare these, choose another metric, such as "
                f"{known[0]}."
            )
    diverged = sum(facts.is_diverged for facts in members)
    others = sum(bool(facts.trouble) and not facts.is_diverged for facts in members)
    repeated = sum(len(group.members) - group.seeds for part in parts for group in part.groups)
    further = {
        f"The trainings are of {len(parts)} datasets ({', '.join(_name(part) for part in parts)}), which are shown "
        "one after the other and not averaged.": len(parts) > 1,
        f"{diverged} of {len(members)} trainings diverged: they became not finite, or ended at {NEAR_CHANCE:.0%} or "
        "more of the loss of equal probabilities. Means leave them out; the mean with them is beside it.": diverged,
        f"{others} of {len(members)} trainings have not finished. No mean includes them.": others,
        f"{repeated} of {len(members)} trainings repeat recipe and seed of another one. Means and deviations are "
        "over the seeds, and each seed counts once.": repeated,
        "No training was validated, so nothing here tells how well they do on other images.": not any(
            score in facts.run.history for score in SCORES for facts in members
        ),
    }
    return notes + [note for note, holds in further.items() if holds]


def _part(part: DatasetGroups, metric: str, target: float | None, parts: int) -> dict[str, Any]:
    styles = figures.styles_of(part.groups, metric)
    best = best_group(part.groups, metric)
    variants = figures.variants_of(part, metric)
    return {
        "name": _name(part),
        "rows": recipe_rows(part),
        "styles": styles,
        "best": None
        if best is None
        else {"number": best.number, "label": shorten(best.label, _LONG), "score": score_text(best.score)},
        "troubles": _troubles(part),
        "differing": differing_rows(part),
        "common": part.common,
        "variants": [
            {"number": place + 1, "label": shorten(variant.label, _LONG), "style": figures.variant_style(place)}
            for place, variant in enumerate(variants)
        ],
        "importance": [
            {"name": name, "word": word_of(name), "share": share} for name, share in importance_of(part).items()
        ],
        "parallel": figures.parallel(part, metric, styles),
        "over_batch": figures.over_batch(variants, metric),
        "curves": [
            chart
            for name in dict.fromkeys((metric, "train/loss"))
            for axis in (figures.SAMPLES, figures.TIME, figures.BYTES)
            if (chart := figures.curves(part, name, axis, styles, parts))
        ],
        "legend": [
            {"number": group.number, "label": shorten(group.label, _LONG), "style": styles[group.number]}
            for group in part.groups
            if styles[group.number] != figures.GREY
        ],
        "grey": figures.GREY in styles.values(),
        "target": target,
        "targets": None if target is None else target_rows(part, metric, target),
        "over_workers": figures.over_workers(part.groups, styles),
    }


def _troubles(part: DatasetGroups) -> list[str]:
    """Return a line for each reason why trainings have no score: their number, their groups and an example."""
    group_of = {facts.run.run_id: group.number for group in part.groups for facts in group.members}
    lines = []
    for same in alike_troubles([facts for group in part.groups for facts in group.members]):
        groups = [str(number) for number in sorted({group_of[facts.run.run_id] for facts in same})]
        named = ", ".join([*groups[:_NAMED_GROUPS], *["..."] * (len(groups) > _NAMED_GROUPS)])
        where, example = "groups" if len(groups) > 1 else "group", ", for example" if len(same) > 1 else ""
        text = shorten(same[0].trouble, 300)
        lines.append(f"{len(same)} of {len(group_of)} trainings ({where} {named}){example}: {text}")
    return lines


def _name(part: DatasetGroups) -> str:
    return f"{part.archive} {part.dataset[:12]}".strip() or "not recorded"


def curves_of(parts: Sequence[DatasetGroups], metric: str) -> CellFigure:
    """Plot the metric of every training by samples seen and by training time, with a row of plots per dataset."""
    figure = CellFigure(figsize=(9.0, 4.8 * len(parts)), layout="constrained")
    for area, part in zip(figure.subfigures(len(parts), squeeze=False).flat, parts, strict=True):
        styles = figures.styles_of(part.groups, metric)
        for plot, axis in zip(area.subplots(1, 2), (figures.SAMPLES, figures.TIME), strict=True):
            if chart := figures.curves(part, metric, axis, styles):
                figures.draw(plot, chart, _ON_WHITE)
            else:
                plot.set_axis_off()
                plot.text(0.5, 0.5, f"{metric} by {axis.label} is not recorded", ha="center", transform=plot.transAxes)
        named = [(group, styles[group.number]) for group in part.groups if styles[group.number] != figures.GREY]
        keys = [Line2D([], [], color=style.color, linestyle=style.stroke) for _, style in named]
        labels = [f"{group.number} {shorten(group.label, 60)}" for group, _ in named]
        area.legend(keys, labels, fontsize=7, ncols=2, loc="outside lower center")
    return figure


def latex_of(parts: Sequence[DatasetGroups]) -> str:
    r"""Return the main table of each dataset for LaTeX with `\usepackage{booktabs}`."""
    texts = [f"% {_name(part)}\n{_main_table(part).to_latex(index=False, escape=True)}" for part in parts]
    return LATEX_MARK.decode() + "\n".join(texts).replace("±", r"$\pm$")


def html_of(parts: Sequence[DatasetGroups], metric: str, notes: Sequence[str]) -> str:
    """Return notes, the recipe and score of each group, and the curves as HTML."""
    picture = io.BytesIO()
    curves_of(parts, metric).savefig(picture, format="png", dpi=90)
    image = base64.b64encode(picture.getvalue()).decode()
    texts = [f"<p>{html.escape(note)}</p>" for note in notes]
    for part in parts:
        named = f"<p>dataset {html.escape(part.archive)} {html.escape(part.dataset[:12])}</p>" if len(parts) > 1 else ""
        differing = html.escape(", ".join(map(word_of, part.named)) or "nothing but the seed")
        texts.append(f"{named}<p>what differs: {differing}</p>{_main_table(part).to_html(index=False, border=0)}")
    alt = html.escape(f"{metric} by samples and by time")
    return f'{"".join(texts)}<img alt="{alt}" src="data:image/png;base64,{image}">'


def _main_table(part: DatasetGroups) -> "pandas.DataFrame":
    import pandas

    return pandas.DataFrame(recipe_rows(part))[list(_COLUMNS)].rename(columns=_COLUMNS)

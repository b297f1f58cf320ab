"""The view of a finished training in a notebook: links, curves and a table of its epochs."""

import base64
import html
import io
from typing import TYPE_CHECKING

from pipelines.storage.folder import Location
from pipelines.tracking.store.runs import link_to
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.ranks.results import TrainingSummary

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def history_of(summary: TrainingSummary) -> "pandas.DataFrame":
    """Return the metrics of the epochs, one row per epoch, counted from 1."""
    import pandas

    epochs = pandas.RangeIndex(1, len(summary.history) + 1, name="epoch")
    return pandas.DataFrame(summary.history, index=epochs)


def curves_of(summary: TrainingSummary) -> "Figure":
    """Plot loss and scores by epoch."""
    from pipelines.training.record.plots import learning_curves

    return learning_curves(summary.history)


def html_of(run: TrackedRun, summary: TrainingSummary, folder: Location) -> str:
    """Return a training as HTML: links and paths, the curves, the table of epochs."""
    picture = io.BytesIO()
    curves_of(summary).savefig(picture, format="png", dpi=90)
    rows = {
        "MLflow run": link_to(run),
        "model": f"<code>{html.escape(summary.model_uri)}</code>",
        "averaged model": f"<code>{html.escape(summary.averaged_model_uri)}</code>"
        if summary.averaged_model_uri
        else "",
        "checkpoint": f"<code>{html.escape(summary.checkpoint)}</code>",
        "logs": f"<code>{html.escape(str(folder / 'logs'))}</code>",
        "ended": html.escape(summary.ended),
        "not recorded": html.escape(summary.not_recorded),
    }
    left = ' style="text-align: left"'  # notebooks align the cells of tables to the right
    lines = "".join(f"<tr><th{left}>{name}</th><td{left}>{value}</td></tr>" for name, value in rows.items() if value)
    image = base64.b64encode(picture.getvalue()).decode()
    table = history_of(summary).to_html(float_format="{:.4f}".format, border=0)
    return f'<table>{lines}</table><img alt="loss and scores by epoch" src="data:image/png;base64,{image}">{table}'

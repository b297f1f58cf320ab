"""What keeps a notebook's cells readable."""

import logging
import sys
import warnings
from html import escape
from typing import Any

from conf.describe import to_yaml
from conf.schema import RunConfig
from pipelines.machine.notebook import in_notebook


def quieten_libraries() -> None:
    """Keep what libraries say of themselves out of the cells of a notebook."""
    if in_notebook():
        # Of tqdm, which MLflow imports, where the widgets are not installed; bars are text then.
        warnings.filterwarnings("ignore", message="IProgress not found")
        for library in ("alembic", "mlflow.store.db"):  # how a new store gets its tables
            logging.getLogger(library).setLevel(logging.WARNING)


def show_configurations() -> None:
    """Let the cells of a notebook show a configuration as the YAML that `--config` reads."""
    if in_notebook():
        kernel: Any = sys.modules["IPython"].get_ipython()
        kernel.display_formatter.formatters["text/html"].for_type(RunConfig, html_of)


def html_of(config: RunConfig) -> str:
    """Return a configuration as a cell shows it."""
    return f"<pre>{escape(to_yaml(config))}</pre>"

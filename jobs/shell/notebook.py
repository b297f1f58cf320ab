"""Settings that keep a notebook's cells readable."""

import logging
import sys
import warnings
from typing import Any

from conf.describe import to_yaml
from conf.schema import RunConfig
from pipelines.machine.console import escape
from pipelines.machine.notebook import in_notebook


def quieten_libraries() -> None:
    """Keep messages of libraries out of the cells of a notebook."""
    if in_notebook():
        # A warning of tqdm, which MLflow imports, if the widgets are not installed; bars are then text.
        warnings.filterwarnings("ignore", message="IProgress not found")
        for library in ("alembic", "mlflow.store.db"):  # messages about the tables of a new store
            logging.getLogger(library).setLevel(logging.WARNING)


def show_configurations() -> None:
    """Make the cells of a notebook show a configuration as the YAML that `--config` reads."""
    # A script may import a kernel's package and have no shell.
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        html.for_type(RunConfig, lambda config: f"<pre>{escape(to_yaml(config))}</pre>")

"""What keeps a notebook's cells readable."""

import logging
import warnings

from pipelines.machine.notebook import in_notebook


def quieten_libraries() -> None:
    """Keep what libraries say of themselves out of the cells of a notebook."""
    if in_notebook():
        # Of tqdm, which MLflow imports, where the widgets are not installed; bars are text then.
        warnings.filterwarnings("ignore", message="IProgress not found")
        for library in ("alembic", "mlflow.store.db"):  # how a new store gets its tables
            logging.getLogger(library).setLevel(logging.WARNING)

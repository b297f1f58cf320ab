"""What the cells of a notebook show."""

import subprocess
import sys

CELL = """
import ipykernel
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import groundswell
config = groundswell.load("demo", training={"epochs": 3}, tracking={"run_name": "<x>"})
print(shell.display_formatter.format(groundswell.override(config, "training.seed=5"))[0]["text/html"])
"""


def test_a_script_that_imports_a_kernel_has_no_cells() -> None:
    code = "import ipykernel, groundswell; print(groundswell.load('demo').training.seed)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_cell_shows_a_configuration_as_yaml() -> None:
    shown = subprocess.run([sys.executable, "-c", CELL], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("<pre>")
    assert ("training:\n  epochs: 3\n" in shown, "seed: 5" in shown) == (True, True), shown
    assert "&lt;x&gt;" in shown

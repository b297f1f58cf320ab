"""The rivals' own environment, in `build/peers`: made once, with exact versions of what is compared.

It is made with pip, since some machines hold their PyTorch for CPUs in a folder that only pip is told of
(`PIP_FIND_LINKS`). The first installation brings some 2 GB. A rival that cannot be installed is told with the reason,
and is tried again by the next full run.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
FOLDER = PROJECT / "build" / "peers" / "environment"
PYTHON = FOLDER / "bin" / "python"
_MADE = FOLDER / "made.json"
PACKAGES = {
    "torch": ["torch==2.13.0", "numpy==2.1.3", "psutil==7.2.2"],
    "litdata": ["litdata==0.2.76"],
    "streaming": ["mosaicml-streaming==0.13.0"],
    "grain": ["grain==0.2.18", "array_record==0.8.6"],
    "lance": ["pylance==14.0.2"],
}
"""What pip is given for each rival, the first: what the others need, with the PyTorch that two of them depend on."""


def make() -> None:
    """Install what is missing."""
    if not PYTHON.exists():
        print(f"making the rivals' environment {FOLDER.relative_to(PROJECT)}", flush=True)
        venv.create(FOLDER, with_pip=True)
    done = _read()
    for name, packages in PACKAGES.items():
        if done.get(name) == packages:
            continue
        print(f"installing {' '.join(packages)}", flush=True)
        # With each the first ones again: no rival may bring another PyTorch.
        command = [PYTHON, "-m", "pip", "install", "--quiet", *PACKAGES["torch"], *packages]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        errors = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
        done[name] = " ".join(errors or ["pip failed"])[:300] if installed.returncode else packages
        _MADE.write_text(json.dumps(done, indent=1) + "\n")


def missing(name: str) -> str:
    """Why a rival is not installed; empty where it is."""
    done = _read().get(name)
    if done == PACKAGES[name]:
        return ""
    return done if isinstance(done, str) else "not installed: a run without --smoke makes build/peers"


def packages_folder() -> Path:
    """The folder of its packages, for processes of the project's Python, which has the same version."""
    return FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _read() -> dict[str, list[str] | str]:
    if not (_MADE.exists() and PYTHON.exists()):
        return {}
    done: dict[str, list[str] | str] = json.loads(_MADE.read_text())
    return done

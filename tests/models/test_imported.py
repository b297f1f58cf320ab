"""Objects by import path."""

from pathlib import Path

import pytest

from models.imported import import_function


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_part.py").write_text(
        "NUMBER = 3\ndef double(x): return 2 * x\nclass Maker:\n    @staticmethod\n    def triple(x): return 3 * x\n"
    )
    (tmp_path / "somebodys_broken_part.py").write_text("raise RuntimeError('no licence\\nsecond line')\n")
    (tmp_path / "somebodys_hungry_part.py").write_text("import nowhere_to_be_found\n")
    return tmp_path


@pytest.mark.parametrize(("name", "value"), [("double", 8), ("Maker.triple", 12)])
def test_functions_and_attributes_of_classes_are_found(module: Path, name: str, value: int) -> None:
    assert import_function(f"somebodys_part:{name}", "model.path")(4) == value


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:f", r"No module named 'nowhere'; install the module where driver and workers run, .* --py-files$"),
        ("somebodys_hungry_part:f", r"No module named 'nowhere_to_be_found'; install"),
        ("somebodys_broken_part:f", r"importing somebodys_broken_part raised RuntimeError: no licence$"),
        ("somebodys_part:trible", r"somebodys_part has no trible$"),
        ("somebodys_part:Maker.double", r"somebodys_part has no Maker\.double$"),
        ("somebodys_part:NUMBER", r"NUMBER cannot be called, it is of type int$"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_setting(module: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.path={path}: {message}") as caught:
        import_function(path, "model.path")
    assert "\n" not in str(caught.value)

"""OpenVINO's runtimes beside Keras: what they predict, when they are refused, and where Keras takes their place."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.shell import cli
from pipelines.dataset.format.manifest import read_manifest, write_manifest
from pipelines.dataset.read.reader import ReaderSettings
from pipelines.scoring.output import conversion, write
from pipelines.scoring.output.output import check_ours
from pipelines.scoring.output.write import Scorer
from pipelines.scoring.predict.convert import Acceptance, Reference, check_accepted, convert
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import SentModel
from pipelines.scoring.predict.processor import Runtime, used_features, why_unusable
from pipelines.scoring.source import dataset_source
from pipelines.storage.folder import Location

pytestmark = [pytest.mark.timeout(600)]
RUNTIMES: tuple[Runtime, ...] = ("keras", "bf16", "int8")
FLAGS = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\nbugs\t:\n"


def test_a_runtime_needs_instructions_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(FLAGS)
    monkeypatch.setattr("pipelines.scoring.predict.processor.find_spec", lambda name: object())
    assert (used_features("int8", info), used_features("int8", tmp_path / "absent")) == (["avx512_vnni"], [])
    lacking = "the processor has none of avx512_bf16, amx_bf16"
    assert {name: why_unusable(name, info) for name in RUNTIMES} == {"keras": None, "bf16": lacking, "int8": None}
    monkeypatch.setattr("pipelines.scoring.predict.processor.find_spec", lambda name: None)
    assert "openvino is not installed" in str(why_unusable("int8", info))


def test_a_worse_model_is_refused_with_both_figures() -> None:
    acceptance = Acceptance("int8", 0.7149, 0.7201, 1000, 256, 0.99, "1")
    with pytest.raises(ValueError, match=r"int8 is refused: macro F1 0\.7149 with int8, 0\.7201 with Keras, on 1000"):
        check_accepted(acceptance, 0.005)
    check_accepted(acceptance, 0.006)
    check_accepted(Acceptance("int8", 0.8, 0.7, 1000, 256, 0.99, "1"), 0.0)


@pytest.fixture
def refused(logged: Any, small_dataset: Path, tmp_path: Path, error_line: Callable[..., str]) -> Callable[..., str]:
    """Scores with settings with which nothing must be scored; the line that is printed."""
    for package in ("openvino", "nncf"):
        pytest.importorskip(package)
    command = ("score", "--model", logged.uri, "--input", str(small_dataset), "--output", str(tmp_path / "output"))

    def run(*settings: str) -> str:
        line = error_line(*command, settings=settings)
        assert [path for path in (tmp_path / "output").rglob("*") if path.is_file()] == []
        return line

    return run


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_a_model_that_is_worse_once_converted_scores_nothing(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        conversion, "convert", lambda *request: (b"a worse model", Acceptance("bf16", 0.7149, 0.7201, 12, 0, 0.99, "1"))
    )
    assert "bf16 is refused: macro F1 0.7149 with bf16, 0.7201 with Keras, on 12 validation samples" in refused(
        "score.runtime=bf16", "score.acceptance_samples=12"
    )


@pytest.mark.parametrize(("samples", "warned"), [(999, True), (1000, False)])
def test_a_model_that_is_accepted_on_few_samples_is_used_with_a_warning(
    samples: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        conversion, "convert", lambda *request: (b"a model", Acceptance("bf16", 0.7, 0.7, samples, 0, 1.0, "1"))
    )
    monkeypatch.setattr(conversion, "why_unusable", lambda runtime: None)
    model = ModelDescription("runs:/1/model", "m-1", "m-1", "multi_label", ("Sea",), ())
    output = Location.at(tmp_path)
    reference = Reference(Location.at(tmp_path), "0123", 256, samples, 0.005, (0.5,), ReaderSettings())
    for first in ("converting the model to bf16", "the model was converted before: macro F1 0.7000"):
        lines: list[str] = []
        conversion.converted_model(model, b"a file", "bf16", reference, output, lines.append).store(output)
        assert lines[0].startswith(first)
        assert [line for line in lines if "warning" in line] == warned * [
            "warning: the bf16 model was accepted on only 999 validation samples; on fewer than 1,000, the two figures "
            "say little about other samples"
        ]
    lines.clear()
    conversion.converted_model(
        model, b"a file", "bf16", replace(reference, acceptance_samples=2 * samples), output, lines.append
    )
    assert lines[1].startswith(f"score.acceptance_samples={2 * samples} has no effect: the predictions continue with")


def test_a_conversion_that_takes_too_long_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_ends(command: list[str], **settings: Any) -> None:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr("pipelines.scoring.predict.convert.subprocess.run", never_ends)
    with pytest.raises(RuntimeError, match=r"^score\.runtime=bf16: the conversion took more than 3600 s: lower"):
        convert("a model", b"a file", "bf16", "samples")  # type: ignore[arg-type]


@pytest.mark.spark
def test_keras_takes_the_place_of_a_runtime_that_the_machine_lacks(
    small_model: ModelDescription, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "why_unusable", lambda runtime: "the processor is old")
    output, file = Location.at(tmp_path), SimpleNamespace(value=b"never read")
    output.make("_progress")
    scorer = Scorer(SentModel(small_model, file, 4, 1), "int8", file, "x", output, (0.5,) * 19)
    part = next(iter(dataset_source(Location.at(small_dataset), ReaderSettings()).parts))
    written = scorer.write(part)
    assert written.rows == part.rows == pq.read_metadata(tmp_path / part.file).num_rows
    assert re.fullmatch(r"Keras, as on \S+ the processor is old", written.computed_by)
    output.write("predictions.json", b"{}")
    check_ours(output)


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("acceptance_samples=13", r"needs 13 validation samples .score\.acceptance_samples.*has 12"),
        ("acceptance_samples=12", r"needs 256 train samples .score\.calibration_samples.*has 32"),
        ("reference_dataset=nowhere", "nowhere is not a finished dataset"),
        ("reference_dataset=turned", "takes the bands B02, B03, B04, B08 in 'bands_10m', .*turned has B08, "),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    setting: str,
    message: str,
    refused: Callable[..., str],
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = read_manifest(small_dataset)
    first, *others = manifest.groups
    turned = replace(first, bands=first.bands[::-1])
    (tmp_path / "turned").mkdir()
    write_manifest(manifest.model_copy(update={"groups": (turned, *others)}), tmp_path / "turned")
    assert re.search(message, refused("score.runtime=int8", f"score.{setting}"))


@pytest.fixture(scope="module")
def labelled_model(log_model: Callable[..., Any], labelled: Path) -> Any:
    """A model of the labelled dataset. Eight channels of the smallest network are too few for 8 bits."""
    return log_model(labelled, "model={name: resnet, depth: 18}")


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.parametrize(
    ("runtime", "largest", "calibration"), [("bf16", 0.05, {}), ("int8", 0.2, {"score.calibration_samples": 64})]
)
def test_a_converted_model_predicts_nearly_the_same(
    runtime: Runtime,
    largest: float,
    calibration: dict[str, int],
    labelled_model: Any,
    labelled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("openvino", "nncf"):
        pytest.importorskip(package)
    if why_unusable(runtime) is not None:
        pytest.skip(f"this processor cannot run {runtime}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", labelled_model.store)
    output, expected = tmp_path / "predictions", labelled_model.expected
    line = ["score", "--model", labelled_model.uri, "--input", str(labelled), "--output", str(output)]
    settings = {"score.runtime": runtime, "score.acceptance_samples": 24, "score.max_f1_drop": 0.2, **calibration}
    line += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    assert cli.execute(line) == 0
    printed = capsys.readouterr().out
    assert f"with {runtime}, " in printed
    assert f"96 predictions by OpenVINO {runtime} with " in printed
    manifest = json.loads((output / "predictions.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["file"]).to_pylist()]
    assert sorted(row["id"] for row in rows) == sorted(expected)
    found, wanted = np.array([(row["probabilities"], expected[row["id"]]) for row in rows]).swapaxes(0, 1)
    assert 0 < np.abs(found - wanted).max() < largest
    assert ((found >= 0.5) == (wanted >= 0.5)).mean() > 0.95
    assert {name: manifest["identity"][name] for name in manifest["identity"] if "calibration" in name} == calibration
    if calibration:
        other = manifest | {"identity": manifest["identity"] | {"score.calibration_samples": 256}}
        (output / "predictions.json").write_text(json.dumps(other))
        assert cli.execute(line) == 2, "parts of two converted models would be mixed"
        assert "score.calibration_samples 256 there, 64 asked for" in capsys.readouterr().err
        (output / "predictions.json").write_text(json.dumps(manifest))
    # A lost part is scored by the model that was converted before.
    (output / manifest["parts"][0]["file"]).unlink()
    assert cli.execute(line) == 0
    assert "the model was converted before: macro F1" in capsys.readouterr().out

"""OpenVINO's runtimes beside Keras: what they predict, when they are refused, and where Keras takes their place."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs import cli
from pipelines.dataset.manifest import read_manifest, write_manifest
from pipelines.dataset.reader import ReaderSettings
from pipelines.scoring import kept, write
from pipelines.scoring.convert import Acceptance, Reference, check_accepted, convert
from pipelines.scoring.model import ModelDescription, describe
from pipelines.scoring.output import check_ours
from pipelines.scoring.processor import used_features, why_unusable
from pipelines.scoring.source import dataset_source
from pipelines.scoring.write import Scorer
from pipelines.storage import Folder
from pipelines.tracking.served import find_model, read_model_file

pytestmark = [pytest.mark.timeout(600)]
FLAGS = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\nbugs\t:\n"


def test_a_runtime_needs_instructions_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(FLAGS)
    monkeypatch.setattr("pipelines.scoring.processor.find_spec", lambda name: object())
    assert used_features("int8", info) == ["avx512_vnni"]
    assert why_unusable("int8", info) is None
    assert why_unusable("keras", info) is None
    assert why_unusable("bf16", info) == "the processor has none of avx512_bf16, amx_bf16"
    assert used_features("int8", tmp_path / "absent") == []
    monkeypatch.setattr("pipelines.scoring.processor.find_spec", lambda name: None)
    assert "openvino is not installed" in str(why_unusable("int8", info))


def test_a_worse_model_is_refused_with_both_figures() -> None:
    acceptance = Acceptance("int8", 0.7149, 0.7201, 1000, 256, 0.99, "1")
    with pytest.raises(ValueError, match=r"int8 is refused: macro F1 0\.7149 with int8, 0\.7201 with Keras, on 1000"):
        check_accepted(acceptance, 0.005)
    check_accepted(acceptance, 0.006)
    check_accepted(Acceptance("int8", 0.8, 0.7, 1000, 256, 0.99, "1"), 0.0)


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_a_model_that_is_worse_once_converted_scores_nothing(
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    worse = Acceptance("bf16", 0.7149, 0.7201, 12, 0, 0.99, "1")
    monkeypatch.setattr(kept, "convert", lambda *request: (b"a worse model", worse))
    output = tmp_path / "predictions"
    line = ["score", "--model", logged.uri, "--input", str(small_dataset), "--output", str(output)]
    for setting in ("score.runtime=bf16", "score.acceptance_samples=12"):
        line += ["--set", setting]
    assert cli.execute(line) == 2
    printed = capsys.readouterr()
    (refusal,) = printed.err.splitlines()
    assert "bf16 is refused: macro F1 0.7149 with bf16, 0.7201 with Keras, on 12 validation samples" in refusal
    assert "accepted: " not in printed.out
    assert [path for path in output.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("samples", "warned"), [(999, True), (1000, False)])
def test_a_model_that_is_accepted_on_few_samples_is_used_with_a_warning(
    samples: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceptance = Acceptance("bf16", 0.7, 0.7, samples, 0, 1.0, "1")
    monkeypatch.setattr(kept, "convert", lambda *request: (b"a model", acceptance))
    monkeypatch.setattr(kept, "why_unusable", lambda runtime: None)
    model = ModelDescription("runs:/1/model", "m-1", "m-1", "multi_label", ("Sea",), ())
    output = Folder.at(tmp_path)
    reference = Reference(Folder.at(tmp_path), "0123", 256, samples, 0.005, (0.5,), ReaderSettings())
    for first in ("converting the model to bf16", "the model was converted before: macro F1 0.7000"):
        lines: list[str] = []
        found = kept.converted_model(model, b"a file", "bf16", reference, output, lines.append)
        assert found is not None
        found.keep(output)
        assert lines[0].startswith(first)
        assert [line for line in lines if "warning" in line] == warned * [
            "warning: the bf16 model was accepted on only 999 validation samples; on fewer than 1,000, the two figures "
            "say little about other samples"
        ]
    lines.clear()
    more = replace(reference, acceptance_samples=2 * samples)
    kept.converted_model(model, b"a file", "bf16", more, output, lines.append)
    assert lines[1].startswith(f"score.acceptance_samples={2 * samples} has no effect: the predictions continue with")


def test_a_conversion_that_takes_too_long_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_ends(command: list[str], **settings: Any) -> None:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr("pipelines.scoring.convert.subprocess.run", never_ends)
    with pytest.raises(RuntimeError, match=r"^score\.runtime=bf16: the conversion took more than 3600 s: lower"):
        convert("a model", b"a file", "bf16", "samples")  # type: ignore[arg-type]


class _File:
    def __init__(self, value: bytes) -> None:
        self.value = value


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_keras_takes_the_place_of_a_runtime_that_the_machine_lacks(
    logged: Any, small_dataset: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "why_unusable", lambda runtime: "the processor is old")
    served = find_model(logged.uri)
    output = Folder.at(tmp_path)
    output.make("_progress")
    scorer = Scorer(
        describe(served), _File(read_model_file(served)), "int8", _File(b"never read"), "x", output, 4, (0.5,) * 19, 1
    )
    part = next(iter(dataset_source(Folder.at(small_dataset), ReaderSettings()).parts))
    written = scorer.write(part)
    assert written.rows == part.rows
    assert written.computed_by.startswith("Keras, as on ")
    assert written.computed_by.endswith(" the processor is old")
    for row in pq.read_table(tmp_path / part.file).to_pylist():
        np.testing.assert_allclose(row["probabilities"], expected[row["id"]], atol=1e-5)
    output.write("predictions.json", b"{}")
    check_ours(output)


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["score.acceptance_samples=13"], r"needs 13 validation samples .score\.acceptance_samples.*has 12"),
        (["score.acceptance_samples=12"], r"needs 256 train samples .score\.calibration_samples.*has 32"),
        (["score.reference_dataset=nowhere"], "nowhere is not a finished dataset"),
        (["score.reference_dataset=turned"], "takes the bands B02, B03, B04, B08 in 'bands_10m', .*turned has B08, "),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    settings: list[str],
    message: str,
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    monkeypatch.chdir(tmp_path)
    manifest = read_manifest(small_dataset)
    first, *others = manifest.groups
    turned = replace(first, bands=first.bands[::-1])
    (tmp_path / "turned").mkdir()
    write_manifest(manifest.model_copy(update={"groups": (turned, *others)}), tmp_path / "turned")
    line = ["--model", logged.uri, "--input", str(small_dataset), "--output", str(tmp_path / "out")]
    for setting in ("score.runtime=int8", *settings):
        line += ["--set", setting]
    assert cli.execute(["score", *line]) == 2

    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def labelled_model(
    log_model: Callable[..., Any], plain_predictions: Callable[..., dict[str, Any]], labelled: Path
) -> tuple[Any, dict[str, Any]]:
    """A model of the labelled dataset, and what Keras alone predicts with it, by id."""
    model = log_model(labelled)
    return model, plain_predictions(model.file, labelled)


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.parametrize(("runtime", "largest"), [("bf16", 0.05), ("int8", 0.2)])
def test_a_converted_model_predicts_nearly_the_same(
    runtime: str,
    largest: float,
    labelled_model: tuple[Any, dict[str, Any]],
    labelled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    if why_unusable(runtime) is not None:  # type: ignore[arg-type]
        pytest.skip(f"this processor cannot run {runtime}")
    model, expected = labelled_model
    monkeypatch.setenv("MLFLOW_TRACKING_URI", model.store)
    output = tmp_path / "predictions"
    line = ["score", "--model", model.uri, "--input", str(labelled), "--output", str(output)]
    for setting in (f"score.runtime={runtime}", "score.acceptance_samples=24", "score.max_f1_drop=0.2"):
        line += ["--set", setting]
    if runtime == "int8":
        line += ["--set", "score.calibration_samples=64"]
    assert cli.execute(line) == 0
    printed = capsys.readouterr().out
    assert f"with {runtime}, " in printed
    assert f"96 predictions by OpenVINO {runtime} with " in printed
    manifest = json.loads((output / "predictions.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["file"]).to_pylist()]
    assert sorted(row["id"] for row in rows) == sorted(expected)
    found = np.array([row["probabilities"] for row in rows])
    wanted = np.array([expected[row["id"]] for row in rows])
    assert 0 < np.abs(found - wanted).max() < largest
    assert ((found >= 0.5) == (wanted >= 0.5)).mean() > 0.95
    assert manifest["identity"].get("score.calibration_samples") == (64 if runtime == "int8" else None)
    if runtime == "int8":
        other = manifest | {"identity": manifest["identity"] | {"score.calibration_samples": 256}}
        (output / "predictions.json").write_text(json.dumps(other))
        assert cli.execute(line) == 2, "parts of two converted models would be mixed"
        assert "score.calibration_samples 256 there, 64 asked for" in capsys.readouterr().err
        (output / "predictions.json").write_text(json.dumps(manifest))
    # A lost part is scored by the model that was converted before.
    (output / manifest["parts"][0]["file"]).unlink()
    assert cli.execute(line) == 0
    assert "the model was converted before: macro F1" in capsys.readouterr().out

"""What a person sees of a job where there is no terminal."""

import pytest

from jobs.shell.display import SamplesDisplay, TrainingDisplay
from pipelines.dataset.prepare.spark_job import PrepareProgress
from pipelines.training.ranks.events import Compiling, EpochTrained, SavingModel, StepTrained, TrackingNews


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch):
    monkeypatch.setattr(
        "jobs.shell.display.interactive", lambda: False
    )  # another test may have imported a notebook's kernel


def test_lines_of_a_run(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("jobs.shell.display.time.monotonic", lambda: clock[0])
    display, metrics = TrainingDisplay(), {"train/loss": 0.25, "val/f1_micro": 0.5, "speed/images_per_second": 12.0}
    for seconds, event in (
        (0, Compiling()),
        (0, StepTrained(epoch=1, epochs=2, step=1, steps=16, loss=0.5, images_per_second=10.0)),
        (15, StepTrained(epoch=1, epochs=2, step=2, steps=16, loss=0.25, images_per_second=12.0)),
        (15, EpochTrained(epoch=1, epochs=2, metrics=metrics, where="a step takes 9 ms", is_last=False)),
        (15, SavingModel()),
    ):
        clock[0] = 100.0 + seconds
        display(event)
    assert capsys.readouterr().out.splitlines() == [
        "compiling the training step, which takes a minute or two with some codecs",
        "epoch 1/2, step 2/16: loss 0.2500, 12.0 images/s",
        "epoch 1/2: loss 0.2500, F1 micro 0.5000, 12.0 images/s",
        "  a step takes 9 ms",
        "saving the model",
    ]


def test_the_rate_of_preparation_counts_what_this_run_wrote(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("jobs.shell.display.time.monotonic", lambda: clock[0])
    display = SamplesDisplay()
    clock[0] = 120.0
    display(PrepareProgress(done=5040, total=9000, rejected=3, found=5000))
    assert capsys.readouterr().out == "5040/9000 samples, 2/s, 3 rejected\n"


def test_an_outage_of_mlflow_is_told_once_and_its_end_once(capsys):
    display, away = TrainingDisplay(), TrackingNews(news="away", reason="connection refused")
    display(away)
    display.tracking("away", "connection refused")  # the driver's own writes
    display(TrackingNews(news="back", reason=""))
    display.tracking("back", "")
    # Then rank 0 dies, and the next attempt's reaches the server.
    for event in (away, Compiling(), TrackingNews(news="refused", reason="the run is deleted")):
        display(event)
    away_line = "MLflow does not answer; training continues, and what it records is kept on disk (connection refused)"
    assert [line for line in capsys.readouterr().out.splitlines() if "MLflow" in line] == [
        away_line,
        "MLflow answers again and gets what was kept",
        away_line,
        "MLflow refuses a write for good: the run is deleted",
    ]

"""Groups, scores, speed and tables, from runs of a real store."""

import csv
import io
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient

from pipelines.comparison.facts import chosen_metric, facts_of, peak_rate, warmup_text
from pipelines.comparison.figures import GREY, colors_of, variants_of
from pipelines.comparison.groups import baseline_of, best_group, default_target, parts_of
from pipelines.comparison.run import CURVE_GROUPS, CURVES, SEED, ComparedRun, compared_run, kept_settings
from pipelines.comparison.saved import read_runs, save_runs
from pipelines.comparison.tables import efficiency, runs_csv, speedup, table_csv, target_rows
from pipelines.tracking import runs as store_runs
from pipelines.tracking.recorded import recorded_trainings

Fabricate = Callable[..., str]


def read(experiment: str, *, children: bool = False, filter_text: str = "") -> list[ComparedRun]:
    found = recorded_trainings(experiment, filter_text, children=children, groups=CURVE_GROUPS, metrics=CURVES)
    return [compared_run(run, experiment) for run in found]


def test_a_run_is_read_with_its_settings_and_its_costs(fabricate: Fabricate) -> None:
    run_id = fabricate("read", images_per_second=16.0, payload_bytes=500.0, name="mine")
    (run,) = read("read")
    assert (run.run_id, run.name, run.source, run.status) == (run_id, "mine", "read", "FINISHED")
    # 4 steps of 8 samples an epoch, at 16 images/s: 2 s; 500 bytes a step.
    assert run.history["epoch"] == [1, 2, 3]
    assert run.history["step"] == [4, 8, 12]
    assert run.history["seconds"] == [2, 4, 6]
    assert run.history["payload_bytes"] == [2000, 4000, 6000]
    assert run.history["val/top_1"] == [0.2, 0.5, 0.6]
    assert run.settings["optimizer.name"] == "lars"
    assert not [key for key in run.settings if key.startswith(("tracking.", "reader.", "dataset.path"))]
    facts = facts_of(run, "val/top_1")
    assert (facts.best, facts.best_epoch, facts.last, facts.images_per_second) == (0.6, 3, 0.6, 16)
    assert (facts.seconds, facts.payload_bytes, facts.workers, facts.global_batch_size) == (6, 6000, 2, 8)
    assert facts.seconds_per_step == 0.5
    # 8.0 for 256 images, and the batch is 8.
    assert peak_rate(run) == 0.25
    assert warmup_text(run) == "gradual, 1 epoch"


def test_an_epoch_that_was_resumed_after_its_last_step_takes_the_usual_time(fabricate: Fabricate) -> None:
    fabricate("no steps left", images_per_second=[16.0, 0.0, 16.0])
    (run,) = read("no steps left")
    assert run.history["seconds"] == [2, 4, 6]
    assert facts_of(run, "val/top_1").seconds_per_step == 0.5
    fabricate("no rates", images_per_second=[0.0] * 3)
    (run,) = read("no rates")
    assert run.history["seconds"] == [None] * 3


def test_seeds_are_one_group_with_mean_and_deviation(fabricate: Fabricate) -> None:
    for seed, best in enumerate((0.5, 0.6, 0.9)):
        fabricate("seeds", f"training.seed={seed}", f"training.output=out-{seed}", scores=(0.1, best, best - 0.2))
    fabricate("seeds", "optimizer=sgd", scores=(0.1, 0.4, 0.7))
    (part,) = parts_of(read("seeds"), "val/top_1")
    lars, sgd = part.groups
    assert (lars.label, sgd.label) == ("lars", "sgd")
    assert lars.score is not None
    assert lars.score.mean == pytest.approx(statistics.fmean((0.5, 0.6, 0.9)))
    assert lars.score.deviation == pytest.approx(statistics.stdev((0.5, 0.6, 0.9)))
    assert sgd.score is not None
    assert sgd.score.deviation is None
    assert best_group(part.groups, "val/top_1") is sgd
    assert "optimizer.trust_coefficient" in part.differing, "SGD has none"
    assert SEED not in part.differing
    assert "model.depth" not in part.differing, "what is the same is left out"


def test_a_run_that_changed_is_a_group_of_its_own(fabricate: Fabricate, module_mlflow_store: str) -> None:
    rate = "optimizer.learning_rate_per_256"
    run_ids = [fabricate("changed", f"training.seed={seed}", f"{rate}=4.0") for seed in range(3)]
    client = MlflowClient(module_mlflow_store)
    client.set_tag(run_ids[0], f"changed.{rate}", "0.5 from step 8")
    client.set_tag(run_ids[0], "changed.schedule.decay.power", "2.0 from step 8")
    client.set_tag(run_ids[0], "changed.evaluate.report", "a.html from step 8")
    client.set_tag(run_ids[1], f"changed.{rate}", "4.0 from step 8")  # and so it was before
    (part,) = parts_of(read("changed"), "val/top_1")
    assert part.differing == (rate, "schedule.decay.power")
    groups = {group.settings[rate]: [facts.run.run_id for facts in group.members] for group in part.groups}
    assert groups == {"4.0": run_ids[1:], "4.0, 0.5 from step 8": run_ids[:1]}
    assert "rate per 256 4.0, 0.5 from step 8" in [group.label for group in part.groups]


def test_a_setting_that_an_earlier_version_did_not_have_is_no_difference(fabricate: Fabricate) -> None:
    crop = "input.augmentation=pad_crop"
    for seed in range(2):
        fabricate("versions", f"training.seed={seed}", crop)
    fabricate("versions", "training.seed=2", "input.augmentation={name: pad_crop, cutout: 8}")
    fabricate("versions", "training.seed=3", "input.augmentation=flips")
    fabricate("versions", "training.seed=4", crop, "optimizer=sgd")
    new = read("versions")
    gone = ("input.augmentation.cutout", "optimizer.momentum", "training.label_smoothing")
    for earlier in (0, 2, 4):
        runs = []
        for number, run in enumerate(sorted(new, key=lambda run: run.settings[SEED])):
            settings = {key: value for key, value in run.settings.items() if number != earlier or key not in gone}
            runs.append(run.model_copy(update={"settings": settings}))
        (part,) = parts_of(runs, "val/top_1")
        # Where the run with a square of 8 pixels does not tell it, it is taken for one without.
        sizes = [1, 1, 3] if earlier == 2 else [1, 1, 1, 2]
        assert sorted(len(group.members) for group in part.groups) == sizes
        assert "training.label_smoothing" not in part.differing
        cutout = [group.settings.get("input.augmentation.cutout") for group in part.groups]
        assert cutout.count(None) == 1, "flips have none"
        assert cutout.count("0") == 2


def test_readers_that_give_another_order_are_kept_apart(fabricate: Fabricate) -> None:
    fabricate("readers", "training.seed=0")
    fabricate("readers", "training.seed=1", "reader.name=petastorm", "reader.verify=never")
    fabricate("readers", "training.seed=2", "reader.threads=3")
    (part,) = parts_of(read("readers"), "val/top_1")
    assert part.differing == ("reader.name",)
    assert {group.settings["reader.name"]: group.seeds for group in part.groups} == {"groundswell": 2, "petastorm": 1}
    told = {"reader.name": "groundswell", "reader.cache_limit_gib": "100.0", "reader.threads": "2"}
    assert kept_settings(told) == {}, "files of earlier versions do not have them"
    assert kept_settings({"reader.cache_limit_gib": "1.0"}) == {"reader.cache_limit_gib": "1.0"}


def test_a_run_that_has_replaced_a_section_is_compared(fabricate: Fabricate, module_mlflow_store: str) -> None:
    first, _ = (fabricate("sections", f"training.seed={seed}") for seed in range(2))
    client = MlflowClient(module_mlflow_store)
    client.set_tag(first, "changed.training.class_weights", "balanced from step 8, not set from step 16")
    client.set_tag(first, "changed.training.class_weights.Forest", "2.0 from step 16")
    (part,) = parts_of(read("sections"), "val/top_1")
    assert part.differing == ("training.class_weights", "training.class_weights.Forest")


def test_diverged_and_unfinished_runs_are_marked_and_not_averaged(fabricate: Fabricate) -> None:
    fabricate("marks", "training.seed=0", scores=(0.5, 0.6, 0.7))
    fabricate("marks", "training.seed=1", scores=(0.1,), losses=(2.0,), status="FAILED", diverged="nan at step 5")
    fabricate("marks", "training.seed=2", scores=(0.1, 0.1, 0.1), losses=(2.0, 2.5, 2.6))
    fabricate("marks", "training.seed=3", scores=(0.9, 0.9), losses=(2.0, 1.0), status=None)
    (part,) = parts_of(read("marks"), "val/top_1")
    (group,) = (group for group in part.groups if len(group.members) > 1)
    assert group.score is not None
    assert (group.score.mean, group.score.count, group.diverged) == (0.7, 1, 1)
    troubles = [facts.trouble for facts in (each for other in part.groups for each in other.members)]
    assert "diverged: nan at step 5" in troubles
    assert "diverged: the training loss ended above its first epoch's, 2.6 > 2" in troubles
    assert "running" in troubles
    resumed = group.members[0].run.model_copy(update={"diverged": "nan at step 5"})
    assert not facts_of(resumed, "val/top_1").trouble, "it was continued, with another rate, and finished"


def test_a_fine_tuning_whose_loss_ends_a_little_higher_keeps_its_score(fabricate: Fabricate) -> None:
    source = "warm_start.source=runs:/0123456789abcdef0123456789abcdef/model"
    fabricate("tuned", source, scores=(0.8, 0.9), losses=(0.3, 0.3001))
    fabricate("tuned", source, "training.seed=1", losses=(0.3, 0.4), status="FAILED", diverged="nan at step 5")
    (part,) = parts_of(read("tuned"), "val/top_1")
    (group,) = part.groups
    assert group.score is not None
    assert (group.score.mean, group.score.count, group.diverged) == (0.9, 1, 1)


def test_datasets_are_kept_apart(fabricate: Fabricate) -> None:
    for dataset in (1, 2):
        fabricate("datasets", dataset=dataset)
    parts = parts_of(read("datasets"), "val/top_1")
    assert [len(part.groups) for part in parts] == [1, 1]
    assert parts[0].dataset != parts[1].dataset


def test_speedup_is_against_the_fewest_workers(fabricate: Fabricate) -> None:
    for workers, speed in ((1, 50.0), (2, 90.0), (4, 120.0)):
        fabricate("speed", f"launch.num_workers={workers}", "model.batch_norm_ranks=1", images_per_second=speed)
    (part,) = parts_of(read("speed"), "val/top_1")
    baseline = baseline_of(part, part.groups[2])
    assert baseline is not None
    assert baseline.first.workers == 1
    assert [speedup(group, baseline) for group in part.groups] == pytest.approx([1.0, 1.8, 2.4], rel=1e-3)
    assert efficiency(part.groups[0], baseline) is None
    assert [efficiency(group, baseline) for group in part.groups[1:]] == pytest.approx([0.9, 0.6], rel=1e-3)
    fabricate("speed", "model.depth=34", images_per_second=25.0)
    (part,) = parts_of(read("speed"), "val/top_1")
    assert [baseline_of(part, group) is group for group in part.groups].count(True) == 2, "of each network"


def test_time_to_a_target_is_that_of_the_first_epoch_at_it(fabricate: Fabricate) -> None:
    fabricate("target", "training.seed=0", scores=(0.5, 0.6, 0.7), images_per_second=32.0)
    fabricate("target", "training.seed=1", scores=(0.1, 0.2, 0.3), images_per_second=32.0)
    fabricate("target", "optimizer=sgd", scores=(0.1, 0.2, 0.3))
    (part,) = parts_of(read("target"), "val/top_1")
    rows = target_rows(part, "val/top_1", 0.6)
    # The second epoch ends after 8 steps of 8 samples at 32 images/s.
    assert (rows[0]["label"], rows[0]["seconds"], rows[0]["steps"], rows[0]["samples"]) == ("lars", 2.0, "8", "64")
    assert (rows[0]["of"], rows[1]["reached"]) == ("1 of 2", False)
    assert default_target(part.groups, "val/top_1") == pytest.approx(0.95 * 0.5)
    (by_loss,) = parts_of(read("target"), "val/loss")
    assert default_target(by_loss.groups, "val/loss") == pytest.approx(1.05 * 1.1 * 0.5, rel=1e-2)
    best = SimpleNamespace(score=SimpleNamespace(mean=-0.2))
    assert default_target([best], "val/own") == pytest.approx(-0.21), "below the best, as every target"  # type: ignore[list-item]


def test_over_the_batch_size_the_best_rate_counts(fabricate: Fabricate) -> None:
    for batch in (8, 16):
        for rate, best in ((1.0, 0.3), (2.0, 0.8)):
            settings = [f"training.global_batch_size={batch}", f"optimizer={{name: lars, learning_rate: {rate}}}"]
            fabricate("batches", *settings, scores=(0.1, 0.2, best))
    settings = ["training.global_batch_size=32", "optimizer={name: lars, learning_rate: 9.0}"]
    fabricate("batches", *settings, status="FAILED", diverged="nan")
    (part,) = parts_of(read("batches"), "val/top_1")
    (variant,) = variants_of(part, "val/top_1")
    assert [(size, spread.mean) for size, spread in variant.points] == [(8, 0.8), (16, 0.8)]
    assert variant.diverged == (32,)


def test_the_best_groups_have_colours(fabricate: Fabricate) -> None:
    for number in range(10):
        fabricate("colours", f"optimizer.learning_rate_per_256={1 + number}", scores=(0.1, 0.1, number / 10))
    (part,) = parts_of(read("colours"), "val/top_1")
    colors = colors_of(part.groups, "val/top_1")
    assert [colors[group.number] == GREY for group in part.groups] == [True, True, *[False] * 8]
    assert len({color for color in colors.values() if color != GREY}) == 8


def test_the_metric_is_the_first_that_is_recorded(fabricate: Fabricate) -> None:
    fabricate("metric")
    runs = read("metric")
    assert chosen_metric(runs, None) == "val/top_1"
    assert chosen_metric(runs, "val/loss") == "val/loss"
    with pytest.raises(ValueError, match=r"--metric val/x: no training has it, expected one of train/loss, val/loss"):
        chosen_metric(runs, "val/x")
    (part,) = parts_of(runs, "val/loss")
    assert part.groups[0].score is not None
    assert part.groups[0].score.mean == pytest.approx(0.55)


def test_a_server_is_asked_for_few_runs_at_a_time(fabricate: Fabricate, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [fabricate("pages", f"training.seed={seed}", status=None) for seed in range(5)]
    monkeypatch.setattr(store_runs, "_RUNS_OF_A_PAGE", 2)
    asked: list[int] = []
    search = MlflowClient.search_runs

    def counted(*arguments: Any, max_results: int, **more: Any) -> Any:
        asked.append(max_results)
        return search(*arguments, max_results=max_results, **more)

    monkeypatch.setattr(MlflowClient, "search_runs", counted)
    assert sorted(run.run_id for run in read("pages")) == sorted(made)
    assert sorted(run.run_id for run in store_runs.unfinished_runs("pages")) == sorted(made)
    assert asked == [2] * 6


def test_tables_as_csv(fabricate: Fabricate) -> None:
    for seed in (0, 1):
        fabricate("csv", f"training.seed={seed}", name="=HYPERLINK()", images_per_second=16.0)
    parts = parts_of(read("csv"), "val/top_1")
    (row,) = csv.DictReader(io.StringIO(table_csv(parts, "val/top_1", [0.5])))
    assert (row["seeds"], row["val/top_1 best"], row["val/top_1 best deviation"]) == ("2", "0.6", "0.0")
    assert (row["training seconds"], row["epochs to target"]) == ("6.0", "2.0")
    assert row["training seconds to target"] == "4.0"
    rows = list(csv.DictReader(io.StringIO(runs_csv(parts, "val/top_1"))))
    assert [each["seed"] for each in rows] == ["0", "1"]
    assert rows[0]["name"] == "'=HYPERLINK()", "no spreadsheet computes it"
    assert rows[0]["setting optimizer.name"] == "lars"


def test_a_training_that_failed_early_does_not_say_how_long_the_others_took(fabricate: Fabricate) -> None:
    fabricate("early", "training.seed=0", "training.epochs=3", losses=(2.0,), scores=(0.2,), status="FAILED")
    fabricate("early", "training.seed=1")
    parts = parts_of(read("early"), "val/top_1")
    (row,) = csv.DictReader(io.StringIO(table_csv(parts, "val/top_1", [0.5])))
    assert (row["seeds in the mean"], row["epochs"], row["steps"]) == ("1", "3", "12")


def test_saved_runs_are_the_same_elsewhere(fabricate: Fabricate, tmp_path: Path) -> None:
    fabricate("saved", scores=(0.1, float("nan"), 0.3))
    runs = read("saved")
    save_runs(runs, tmp_path / "runs.json")
    back = read_runs(tmp_path / "runs.json")
    assert [run.source for run in back] == ["runs.json: saved"]
    assert [run.model_copy(update={"source": "saved"}) for run in back] == runs
    assert back[0].history["val/top_1"] == [0.1, None, 0.3]


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x95pickle",
        b"[]",
        b"{}",
        b'{"format_version": 2, "runs": []}',
        b'{"format_version": 1, "runs": [{"run_id": "1"}]}',
        b'{"format_version": 1, "runs": [{"run_id": "1", "name": "", "source": "", "status": "", "started": "", '
        b'"settings": {}, "metrics": {}, "history": {"epoch": [1], "step": []}}]}',
    ],
)
def test_another_kind_of_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "runs.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"runs\.json is no file of `groundswell compare --save`: ") as error:
        read_runs(tmp_path / "runs.json")
    assert "\n" not in str(error.value)


def test_a_thinned_history_keeps_the_end_and_the_best(fabricate: Fabricate) -> None:
    scores = [0.01 * (1 + number % 5) for number in range(100)]
    scores[41] = 0.9
    losses = [2.0 - 0.01 * number for number in range(100)]
    losses[70] = 0.1  # the lowest of validation too
    fabricate("thin", scores=scores, losses=losses)
    (recorded,) = recorded_trainings("thin", "", children=False, groups=CURVE_GROUPS, metrics=CURVES)
    run = compared_run(recorded, "thin", epochs_kept=10)
    assert run.history["epoch"] == [1, 2, 3, 4, 5, 10, 20, 30, 40, 42, 50, 60, 70, 71, 80, 90, 100]
    facts = facts_of(run, "val/top_1")
    assert (facts.best, facts.best_epoch, facts.epochs) == (0.9, 42, 100)
    assert len(run.model_dump_json()) < 6000, "small enough to be committed"


def test_a_thinned_history_without_validation_tells_as_much_of_the_loss(fabricate: Fabricate) -> None:
    losses = [2.3, 2.1, *[2.2 + 0.001 * (number % 7) for number in range(98)]]
    losses[33] = 2.0
    fabricate("bare", losses=losses)
    (recorded,) = recorded_trainings("bare", "", children=False, groups=CURVE_GROUPS, metrics=CURVES)
    recorded = replace(recorded, curves={"train/loss": recorded.curves["train/loss"]})
    run = compared_run(recorded, "bare", epochs_kept=10)
    assert run.history["epoch"] == [1, 10, 20, 30, 34, 40, 50, 60, 70, 80, 90, 100]
    facts = facts_of(run, "train/loss")
    assert (facts.best, facts.best_epoch, facts.trouble) == (2.0, 34, ""), "it ended below its first epoch's"

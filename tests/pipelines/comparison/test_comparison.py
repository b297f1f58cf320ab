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
from pipelines.comparison.figures import GREY, STYLES, styles_of, variants_of
from pipelines.comparison.groups import (
    DatasetGroups,
    Group,
    Spread,
    baseline_of,
    best_group,
    default_target,
    named_keys,
    parts_of,
)
from pipelines.comparison.run import (
    CURVE_GROUPS,
    CURVES,
    SEED,
    ComparedRun,
    compared_run,
    decisive_settings,
    read_runs,
    save_runs,
)
from pipelines.comparison.tables import csv_of, efficiency, runs_csv, speedup, table_rows, target_rows
from pipelines.tracking.store import queries
from pipelines.tracking.store.recorded import RecordedRun, recorded_trainings

Fabricate = Callable[..., str]

TRUST = "optimizer.trust_coefficient"


def read(experiment: str) -> list[ComparedRun]:
    return [compared_run(run, experiment) for run in recorded(experiment)]


def recorded(experiment: str) -> list[RecordedRun]:
    return recorded_trainings(experiment, "", children=False, groups=CURVE_GROUPS, metrics=CURVES)


def part_of(experiment: str, metric: str = "val/top_1") -> DatasetGroups:
    (part,) = parts_of(read(experiment), metric)
    return part


def score_of(group: Group) -> Spread:
    assert group.score is not None
    return group.score


def test_a_run_is_read_with_its_settings_and_its_costs(fabricate: Fabricate) -> None:
    run_id = fabricate("read", images_per_second=16.0, payload_bytes=500.0, name="mine")
    (run,) = read("read")
    assert (run.run_id, run.name, run.source, run.status) == (run_id, "mine", "read", "FINISHED")
    # 4 steps of 8 samples an epoch, at 16 images/s: 2 s; 500 bytes a step.
    assert (run.history, run.settings["optimizer.name"]) == (
        run.history
        | {
            "epoch": [1, 2, 3],
            "step": [4, 8, 12],
            "seconds": [2, 4, 6],
            "payload_bytes": [2000, 4000, 6000],
            "val/top_1": [0.2, 0.5, 0.6],
        },
        "lars",
    )
    assert not [key for key in run.settings if key.startswith(("tracking.", "reader.", "dataset.path"))]
    facts = facts_of(run, "val/top_1")
    assert (facts.best, facts.best_epoch, facts.last, facts.images_per_second) == (0.6, 3, 0.6, 16)
    assert (facts.seconds, facts.payload_bytes, facts.workers, facts.global_batch_size) == (6, 6000, 2, 8)
    # 8.0 for 256 images, and the batch is 8.
    assert (facts.seconds_per_step, peak_rate(run), warmup_text(run)) == (0.5, 0.25, "gradual, 1 epoch")


def test_an_epoch_that_was_resumed_after_its_last_step_takes_the_usual_time(fabricate: Fabricate) -> None:
    for name, rates in {"resumed": [16.0, 0.0, 16.0], "without rates": [0.0] * 3}.items():
        fabricate("resumed", images_per_second=rates, name=name)
    runs = {run.name: run for run in read("resumed")}
    assert {name: run.history["seconds"] for name, run in runs.items()} == {
        "resumed": [2, 4, 6],
        "without rates": [None] * 3,
    }
    assert facts_of(runs["resumed"], "val/top_1").seconds_per_step == 0.5


def test_seeds_are_one_group_with_mean_and_deviation(fabricate: Fabricate) -> None:
    for seed, best in enumerate((0.5, 0.6, 0.9)):
        fabricate("seeds", f"training.seed={seed}", f"training.output=out-{seed}", scores=(0.1, best, best - 0.2))
    fabricate("seeds", "optimizer=sgd", scores=(0.1, 0.4, 0.7))
    part = part_of("seeds")
    lars, sgd = part.groups
    assert (lars.label, sgd.label) == ("lars, rate per 256 8", "sgd, rate per 256 0.1"), "every setting that differs"
    assert best_group(part.groups, "val/top_1") == sgd
    assert (score_of(lars).mean, score_of(lars).deviation) == pytest.approx(
        (statistics.fmean((0.5, 0.6, 0.9)), statistics.stdev((0.5, 0.6, 0.9)))
    )
    assert score_of(sgd).deviation is None
    assert "optimizer.trust_coefficient" in part.differing, "SGD has none"
    assert not {SEED, "model.depth"} & {*part.differing}, "what is the same is left out"


def test_a_run_that_changed_is_a_group_of_its_own(fabricate: Fabricate, module_mlflow_store: str) -> None:
    rate, client = "optimizer.learning_rate_per_256", MlflowClient(module_mlflow_store)
    run_ids = [fabricate("changed", f"training.seed={seed}", f"{rate}=4.0") for seed in range(3)]
    for number, setting, later in (
        (0, rate, "0.5"),
        (0, "schedule.decay.power", "2.0"),
        (0, "evaluate.report", "a.html"),
        (1, rate, "4.0"),  # and so it was before
    ):
        client.set_tag(run_ids[number], f"changed.{setting}", f"{later} from step 8")
    part = part_of("changed")
    assert part.differing == (rate, "schedule.decay.power")
    assert {group.settings[rate]: [facts.run.run_id for facts in group.members] for group in part.groups} == {
        "4.0": run_ids[1:],
        "4.0, 0.5 from step 8": run_ids[:1],
    }
    assert part.groups[1].label.startswith("rate per 256 4.0, 0.5 from step 8, decay power ")


def test_a_setting_that_only_other_runs_tell_is_no_difference(fabricate: Fabricate) -> None:
    crop = "input.augmentation=pad_crop"
    for seed, settings in enumerate(
        (
            [crop],
            [crop],
            ["input.augmentation={name: pad_crop, cutout: 8}"],
            ["input.augmentation=flips"],
            [crop, "optimizer=sgd"],
        )
    ):
        fabricate("versions", f"training.seed={seed}", *settings)
    new = sorted(read("versions"), key=lambda run: run.settings[SEED])
    gone = ("input.augmentation.cutout", "optimizer.momentum", "training.label_smoothing")
    for earlier in (0, 2, 4):
        kept = {key: value for key, value in new[earlier].settings.items() if key not in gone}
        older = new[earlier].model_copy(update={"settings": kept})
        (part,) = parts_of([older if run is new[earlier] else run for run in new], "val/top_1")
        # Where the run with a square of 8 pixels does not tell it, it is taken for one without.
        assert sorted(len(group.members) for group in part.groups) == [1, 1, 3] if earlier == 2 else [1, 1, 1, 2]
        assert "training.label_smoothing" not in part.differing
        cutout = [group.settings.get("input.augmentation.cutout") for group in part.groups]
        assert (cutout.count(None), cutout.count("0")) == (1, 2), "flips have none"


def test_a_setting_that_follows_from_the_optimizer_is_named_where_only_it_tells_groups_apart() -> None:
    sgd, lars, trusting = {"optimizer.name": "sgd"}, {"optimizer.name": "lars"}, {"optimizer.name": "lars", TRUST: "1"}
    assert named_keys([sgd, trusting], ["optimizer.name", TRUST]) == ["optimizer.name"]
    assert named_keys([sgd, lars, trusting], ["optimizer.name", TRUST]) == ["optimizer.name", TRUST]


def test_readers_that_give_another_order_are_kept_apart(fabricate: Fabricate) -> None:
    for seed, settings in enumerate(([], ["reader.name=petastorm", "reader.verify=never"], ["reader.threads=3"])):
        fabricate("readers", f"training.seed={seed}", *settings)
    part = part_of("readers")
    assert (part.differing, {group.settings["reader.name"]: group.seeds for group in part.groups}) == (
        ("reader.name",),
        {"groundswell": 2, "petastorm": 1},
    )
    told = {"reader.name": "groundswell", "reader.cache_limit_gib": "100.0", "reader.threads": "2"}
    assert decisive_settings(told) == {}, "they are the defaults"
    assert decisive_settings({"reader.cache_limit_gib": "1.0"}) == {"reader.cache_limit_gib": "1.0"}


def test_a_run_that_has_replaced_a_section_is_compared(fabricate: Fabricate, module_mlflow_store: str) -> None:
    first, _ = (fabricate("sections", f"training.seed={seed}") for seed in range(2))
    for key, later in {"": "balanced from step 8, not set from step 16", ".Forest": "2.0 from step 16"}.items():
        MlflowClient(module_mlflow_store).set_tag(first, f"changed.training.class_weights{key}", later)
    assert part_of("sections").differing == ("training.class_weights", "training.class_weights.Forest")


def test_diverged_and_unfinished_runs_are_marked_and_not_averaged(fabricate: Fabricate) -> None:
    for seed, more in enumerate(
        (
            {"scores": (0.5, 0.6, 0.7)},
            {"scores": (0.5, 0.6, 0.9), "losses": (0.3, 0.2, 0.4)},  # above its first epoch's, as a fine-tuning may
            {"scores": (0.1,), "losses": (2.0,), "status": "FAILED", "diverged": "nan at step 5"},
            {"scores": (0.1, 0.1, 0.1), "losses": (0.7, 0.6, 0.69)},  # ln 2 = 0.6931 for several labels
            {"scores": (0.9, 0.9), "losses": (0.6, 0.5), "status": None},
        )
    ):
        fabricate("marks", f"training.seed={seed}", **more)
    part = part_of("marks")
    (group,) = (group for group in part.groups if len(group.members) > 1)
    together: Any = group.score_with_diverged
    assert (score_of(group).mean, together.mean) == pytest.approx((0.8, (0.7 + 0.9 + 0.1) / 3))
    assert (score_of(group).count, together.count, group.diverged) == (2, 3, 1)
    assert {facts.trouble for other in part.groups for facts in other.members} == {
        "",
        "diverged: nan at step 5",
        "diverged: the last training loss is at chance level, 0.69 of 0.6931",
        "running",
    }
    first = group.members[0].run
    resumed = first.model_copy(update={"diverged": "nan at step 5"})
    assert not facts_of(resumed, "val/top_1").trouble, "it was continued, with another rate, and finished"
    lost = first.model_copy(update={"history": {**first.history, "train/loss": [2.0, 1.0, None]}})
    assert facts_of(lost, "val/top_1").trouble == "diverged: the last training loss is not finite"
    fabricate("weighted", "training.class_weights=balanced", losses=(0.7, 0.6, 0.8))
    assert [run.chance_loss for run in read("weighted")] == [None], "weights scale the loss"


def test_speedup_is_against_the_fewest_workers(fabricate: Fabricate) -> None:
    for workers, speed in ((1, 50.0), (2, 90.0), (4, 120.0)):
        fabricate("speed", f"launch.num_workers={workers}", "model.batch_norm_ranks=1", images_per_second=speed)
    part = part_of("speed")
    baseline: Any = baseline_of(part, part.groups[2])
    assert (
        baseline.first.workers,
        [speedup(group, baseline) for group in part.groups],
        [efficiency(group, baseline) for group in part.groups],
    ) == (1, [_near(value) for value in (1.0, 1.8, 2.4)], [None, _near(0.9), _near(0.6)])
    fabricate("speed", "model.depth=34", images_per_second=25.0)
    part = part_of("speed")
    assert [baseline_of(part, group) is group for group in part.groups].count(True) == 2, "of each network"


def _near(value: float) -> Any:
    return pytest.approx(value, rel=1e-3)


def test_time_to_a_target_is_that_of_the_first_epoch_at_it(fabricate: Fabricate) -> None:
    fabricate("target", "training.seed=0", scores=(0.5, 0.6, 0.7), images_per_second=32.0)
    for setting, speed in (("training.seed=1", 32.0), ("optimizer=sgd", 100.0)):
        fabricate("target", setting, scores=(0.1, 0.2, 0.3), images_per_second=speed)
    part = part_of("target")
    first, second = target_rows(part, "val/top_1", 0.6)
    # The second epoch ends after 8 steps of 8 samples at 32 images/s.
    assert first == first | {
        "label": "lars, rate per 256 8",
        "seconds": 2.0,
        "steps": "8",
        "samples": "64",
        "of": "1 of 2",
    }
    assert second["reached"] is False
    best: Any = SimpleNamespace(score=SimpleNamespace(mean=-0.2))
    for groups, metric, target in (
        (part.groups, "val/top_1", 0.95 * 0.5),
        (part_of("target", "val/loss").groups, "val/loss", 0.578),  # 1.05 * 1.1 * 0.5
        ([best], "val/own", -0.21),  # below the best, as every target
    ):
        assert default_target(groups, metric) == pytest.approx(target, rel=1e-6)


def test_over_the_batch_size_the_best_rate_counts(fabricate: Fabricate) -> None:
    for batch, rate, best in ((8, 1.0, 0.3), (8, 2.0, 0.8), (16, 1.0, 0.3), (16, 2.0, 0.8), (32, 9.0, None)):
        settings = [f"training.global_batch_size={batch}", f"optimizer={{name: lars, learning_rate: {rate}}}"]
        ended = {"status": "FAILED", "diverged": "nan"} if best is None else {"scores": (0.1, 0.2, best)}
        fabricate("batches", *settings, **ended)
    (variant,) = variants_of(part_of("batches"), "val/top_1")
    assert ([(size, spread.mean) for size, spread in variant.points], variant.diverged) == (
        [(8, 0.8), (16, 0.8)],
        (32,),
    )


def test_the_best_groups_have_styles_of_their_own(fabricate: Fabricate) -> None:
    for number in range(26):
        fabricate("colours", f"optimizer.learning_rate_per_256={1 + number}", scores=(0.0, 0.0, number / 26))
    groups = part_of("colours").groups
    styles = styles_of(groups, "val/top_1")
    assert [styles[group.number] for group in groups] == [GREY, GREY, *STYLES]
    assert len(set(STYLES)) == 24, "each pair of colour and stroke occurs once"


def test_the_metric_is_the_first_that_is_recorded(fabricate: Fabricate) -> None:
    fabricate("metric")
    runs = read("metric")
    assert [chosen_metric(runs, chosen) for chosen in (None, "val/loss")] == ["val/top_1", "val/loss"]
    with pytest.raises(ValueError, match=r"--metric val/x: no training has it, expected one of train/loss, val/loss"):
        chosen_metric(runs, "val/x")
    assert score_of(part_of("metric", "val/loss").groups[0]).mean == pytest.approx(0.55)


def test_a_server_is_asked_for_few_runs_at_a_time(fabricate: Fabricate, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {fabricate("pages", f"training.seed={seed}", status=None) for seed in range(5)}
    monkeypatch.setattr(queries, "RUNS_OF_A_PAGE", 2)
    asked, search = [], MlflowClient.search_runs

    def counted(*arguments: Any, max_results: int, **more: Any) -> Any:
        asked.append(max_results)
        return search(*arguments, max_results=max_results, **more)

    monkeypatch.setattr(MlflowClient, "search_runs", counted)
    assert [{run.run_id for run in runs} for runs in (read("pages"), queries.unfinished_runs("pages"))] == [made] * 2
    assert asked == [2] * 6


def test_tables_as_csv(fabricate: Fabricate) -> None:
    for seed in (0, 1):
        fabricate("csv", f"training.seed={seed}", name="=HYPERLINK()", images_per_second=16.0)
    parts = parts_of(read("csv"), "val/top_1")
    (row,) = csv.DictReader(io.StringIO(csv_of(table_rows(parts, "val/top_1", [0.5]))))
    assert row == row | {
        "seeds": "2",
        "val/top_1 best": "0.6",
        "val/top_1 best deviation": "0.0",
        "training seconds": "6.0",
        "epochs to target": "2.0",
        "training seconds to target": "4.0",
    }
    rows = list(csv.DictReader(io.StringIO(runs_csv(parts, "val/top_1"))))
    assert [each["seed"] for each in rows] == ["0", "1"]
    # A quote in front: no spreadsheet computes it.
    assert rows[0] == rows[0] | {"name": "'=HYPERLINK()", "setting optimizer.name": "lars"}


def test_a_training_that_failed_early_does_not_say_how_long_the_others_took(fabricate: Fabricate) -> None:
    fabricate("early", "training.seed=0", "training.epochs=3", losses=(2.0,), scores=(0.2,), status="FAILED")
    fabricate("early", "training.seed=1")
    (row,) = csv.DictReader(io.StringIO(csv_of(table_rows([part_of("early")], "val/top_1", [0.5]))))
    assert row == row | {"seeds in the mean": "1", "epochs": "3", "steps": "12"}


def test_saved_runs_are_the_same_elsewhere(fabricate: Fabricate, tmp_path: Path) -> None:
    fabricate("saved", scores=(0.1, float("nan"), 0.3))
    runs = read("saved")
    save_runs(runs, tmp_path / "runs.json")
    back = read_runs(tmp_path / "runs.json")
    assert (back, back[0].history["val/top_1"]) == (
        [run.model_copy(update={"source": "runs.json: saved"}) for run in runs],
        [0.1, None, 0.3],
    )


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
    scores = [0.9 if number == 41 else 0.01 * (1 + number % 5) for number in range(100)]
    losses = [0.1 if number == 70 else 2.0 - 0.01 * number for number in range(100)]  # the lowest of validation too
    fabricate("thin", scores=scores, losses=losses)
    run = compared_run(*recorded("thin"), "thin", history_rows=10)
    assert run.history["epoch"] == [1, 2, 3, 4, 5, 10, 20, 30, 40, 42, 50, 60, 70, 71, 80, 90, 100]
    facts = facts_of(run, "val/top_1")
    assert (facts.best, facts.best_epoch, facts.epochs) == (0.9, 42, 100)
    assert len(run.model_dump_json()) < 6000, "small enough to be committed"


def test_a_thinned_history_without_validation_tells_as_much_of_the_loss(fabricate: Fabricate) -> None:
    losses = [0.6, 0.5, *[0.4 if number == 31 else 0.44 + 0.001 * (number % 7) for number in range(98)]]
    fabricate("bare", losses=losses)
    (found,) = recorded("bare")
    run = compared_run(replace(found, curves={"train/loss": found.curves["train/loss"]}), "bare", history_rows=10)
    assert run.history["epoch"] == [1, 10, 20, 30, 34, 40, 50, 60, 70, 80, 90, 100]
    facts = facts_of(run, "train/loss")
    assert (facts.best, facts.best_epoch, facts.trouble) == (0.4, 34, "")

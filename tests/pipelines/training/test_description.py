import json

import pytest
from mlflow import MlflowClient

from conf.load import load
from pipelines.dataset.manifest import Manifest, Shard, Split
from pipelines.sample import ImageGroup
from pipelines.tracking.runs import start_run
from pipelines.training.description import dataset_facts, describe_run, parameters_of, run_name

MANIFEST = Manifest(
    archive="eurosat_rgb",
    task="single_label",
    class_names=("water", "land"),
    groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
    splits={"train": Split(shards=(Shard(file="train/a.parquet", row_groups=(3, 4), size=1),), class_counts=(3, 4))},
    statistics={},
    settings={"seed": 7},
    source_fingerprint="abc",
)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "r18-lars-g8-2w"),
        (["exchange.codec=onebit", "training.accumulation_steps=64"], "r18-lars-g512-onebit-2w"),
        (["training.precision=bfloat16", "optimizer=sgd"], "r18-sgd-g8-bf16-2w"),
        (["model={name: resnet_cifar, depth: 20}"], "cifar20-lars-g8-2w"),
        (["model={name: resnet9}"], "resnet9-lars-g8-2w"),
        (["model={name: airbench}"], "airbench-lars-g8-2w"),
        (["model={name: import, path: 'keras.applications:MobileNet'}"], "mobilenet-lars-g8-2w"),
    ],
)  # fmt: skip
def test_the_name_says_what_differs(settings: list[str], name: str) -> None:
    assert run_name(load("smoke", settings)) == name


def test_only_settings_with_an_effect_are_parameters() -> None:
    plain = parameters_of(load("smoke"), MANIFEST)
    for key in (
        "launch.allow_fewer_workers",  # no retries
        "exchange.warmup_steps",  # no codec
        "training.ema",
        "training.metrics",
        "warm_start.source",
        "tracking.experiment",
        "training.output",
    ):
        assert key not in plain
    assert plain["archive.kind"] == "eurosat_rgb"
    assert "None" not in plain.values()
    chosen = ["exchange.codec=topk", "training.ema=0.9", "training.global_batch_size=16"]
    with_effect = parameters_of(load("smoke", chosen), MANIFEST)
    assert (with_effect["training.ema"], with_effect["exchange.warmup_steps"]) == ("0.9", "0")
    assert "training.accumulation_steps" not in with_effect
    assert with_effect["micro_batches_per_step"] == "2"


def test_names_that_are_no_keys_of_mlflow_are_in_the_value(mlflow_store: str) -> None:
    chosen = [
        'warm_start={source: "runs:/0123/model", rate_factors: {"stage*": 0.1, head: 2.0}}',
        'training.class_weights={"water, inland": 2.0, land: 1.0}',
    ]
    parameters = parameters_of(load("smoke", chosen), MANIFEST)
    assert json.loads(parameters["warm_start.rate_factors"]) == {"stage*": 0.1, "head": 2.0}
    assert json.loads(parameters["training.class_weights"]) == {"water, inland": 2.0, "land": 1.0}
    run = start_run("keys", "name", parameters, {})
    assert MlflowClient(run.uri).get_run(run.run_id).data.params.keys() == parameters.keys()


def test_a_run_that_the_store_does_not_take_is_not_left_as_running(mlflow_store: str) -> None:
    with pytest.raises(ValueError, match="a\\*b"):
        start_run("keys", "name", {"a*b": 1}, {})
    client = MlflowClient(mlflow_store)
    (run,) = client.search_runs([client.get_experiment_by_name("keys").experiment_id])
    assert run.info.status == "FAILED"


def test_secrets_of_urls_are_in_no_run(mlflow_store: str) -> None:
    run = start_run("keys", "evaluate", {"dataset": "https://token:x@host/dataset?sig=abc"}, {})
    (value,) = MlflowClient(run.uri).get_run(run.run_id).data.params.values()
    assert not any(secret in value for secret in ("token", "abc"))
    assert "host/dataset" in value


def test_secrets_of_urls_are_no_parameters() -> None:
    chosen = ["warm_start.source=https://user:se/cr@et@host/model?sig=abc", "dataset.path=s3://bucket/x?token=abc"]
    parameters = parameters_of(load("smoke", chosen), MANIFEST)
    assert parameters["warm_start.source"] == "https://***@host/model?sig=***"
    assert parameters["dataset.path"] == "s3://bucket/x?token=***"


def test_recipes_leave_the_experiment_to_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the notebook")
    recipe = load("goyal_resnet50", ["dataset.path=/data"])
    assert describe_run(recipe, MANIFEST, {}).experiment == "of the notebook"
    assert describe_run(load("smoke"), MANIFEST, {}).experiment == "smoke"


def test_a_run_says_what_it_trains() -> None:
    made = describe_run(load("smoke", ["tracking.run_name=mine"]), MANIFEST, {"more": "1"})
    assert (made.experiment, made.name) == ("smoke", "mine")
    assert made.tags == {
        "mlflow.note.content": "r18 trained with lars on eurosat_rgb: 7 training samples, 2 classes (single-label), 2 "
        "epochs, global batch 8 on 2 workers, float32, gradients uncompressed.",
        "mlflow.source.name": "groundswell train",
        "mlflow.source.type": "JOB",
        "dataset_fingerprint": MANIFEST.fingerprint,
        "archive": "eurosat_rgb",
        "model": "r18",
        "optimizer": "lars",
        "codec": "none",
        "global_batch": "8",
        "workers": "2",
        "precision": "float32",
        "more": "1",
    }


def test_the_dataset_is_as_mlflow_reads_it() -> None:
    from mlflow.data.schema import TensorDatasetSchema

    facts = dataset_facts("https://user:secret@host/data", MANIFEST)
    assert (facts.name, facts.digest) == ("eurosat_rgb", MANIFEST.fingerprint[:36])
    assert json.loads(facts.source) == {"uri": "https://***@host/data"}
    assert json.loads(facts.profile) == {"num_rows": 7, "rows_train": 7, "classes": 2, "task": "single_label"}
    (column,) = TensorDatasetSchema.from_dict(json.loads(facts.schema)).features.inputs
    assert (column.name, column.shape, column.type.name) == ("rgb", (-1, 32, 32, 3), "uint8")

import json
import re

import pytest
from mlflow import MlflowClient
from mlflow.data.schema import TensorDatasetSchema

from conf.load import load
from pipelines.tracking.store.runs import start_run
from pipelines.training.setup.description import dataset_facts, describe_run, parameters_of
from tests.pipelines.training.manifests import rgb_manifest

MANIFEST = rgb_manifest(splits={"train": (3, 4)}, archive="eurosat_rgb", settings={"seed": 7})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "r18-lars-g8-2w-2e-s0"),
        (["exchange.codec=onebit", "training.accumulation_steps=64"], "r18-lars-g512-onebit-2w-2e-s0"),
        (["training.precision=bfloat16", "optimizer=sgd"], "r18-sgd-g8-bf16-2w-2e-s0"),
        (["model={name: resnet_cifar, depth: 20}"], "cifar20-lars-g8-2w-2e-s0"),
        (["model={name: resnet9}"], "resnet9-lars-g8-2w-2e-s0"),
        (["model={name: airbench}"], "airbench-lars-g8-2w-2e-s0"),
        (["training.epochs=3", "training.seed=7"], "r18-lars-g8-2w-3e-s7"),
        (["model={name: import, path: 'keras.applications:MobileNet'}"], "mobilenet-lars-g8-2w-2e-s0"),
    ],
)  # fmt: skip
def test_the_name_says_what_differs(settings: list[str], name: str) -> None:
    decays = ([*settings, f"optimizer.weight_decay={decay}"] for decay in (0.1, 0.2))
    names = [str(describe_run(load("smoke", each), MANIFEST, {}).name) for each in decays]
    assert all(re.fullmatch(f"{name}-[0-9a-f]{{6}}", each) for each in names)
    assert names[0] != names[1], "they differ wherever settings do"


def test_only_settings_with_an_effect_are_parameters() -> None:
    plain = parameters_of(load("smoke"), MANIFEST)
    assert not plain.keys() & {
        "launch.allow_fewer_workers",  # no retries
        "exchange.warmup_steps",  # no codec
        "training.ema",
        "training.metrics",
        "warm_start.source",
        "tracking.experiment",
        "training.output",
    }
    assert (plain["archive.kind"], "None" in plain.values()) == ("eurosat_rgb", False)
    with_effect = parameters_of(
        load("smoke", ["exchange.codec=topk", "training.ema=0.9", "training.global_batch_size=16"]), MANIFEST
    )
    found = {"training.ema": "0.9", "exchange.warmup_steps": "0", "micro_batches_per_step": "2"}
    assert (with_effect, "training.accumulation_steps" in with_effect) == (with_effect | found, False), with_effect


def test_names_that_are_no_keys_of_mlflow_are_in_the_value(client: MlflowClient) -> None:
    chosen = [
        'warm_start={source: "runs:/0123/model", rate_factors: {"stage*": 0.1, head: 2.0}}',
        'training.class_weights={"water, inland": 2.0, land: 1.0}',
    ]
    parameters = parameters_of(load("smoke", chosen), MANIFEST)
    assert (json.loads(parameters["warm_start.rate_factors"]), json.loads(parameters["training.class_weights"])) == (
        {"stage*": 0.1, "head": 2.0},
        {"water, inland": 2.0, "land": 1.0},
    )
    assert client.get_run(start_run("keys", "name", parameters, {}).run_id).data.params.keys() == parameters.keys()


def test_a_run_that_the_store_does_not_take_is_not_left_as_running(client: MlflowClient) -> None:
    with pytest.raises(ValueError, match="a\\*b"):
        start_run("refused", "name", {"a*b": 1}, {})
    (run,) = client.search_runs([client.get_experiment_by_name("refused").experiment_id])
    assert run.info.status == "FAILED"


def test_secrets_of_urls_are_in_no_run(client: MlflowClient) -> None:
    run = start_run("keys", "evaluate", {"dataset": "https://token:x@host/dataset?sig=abc"}, {})
    assert client.get_run(run.run_id).data.params == {"dataset": "https://***@host/dataset?sig=***"}
    chosen = ["warm_start.source=https://user:se/cr@et@host/model?sig=abc", "dataset.path=s3://bucket/x?token=abc"]
    parameters = parameters_of(load("smoke", chosen), MANIFEST)
    assert parameters == parameters | {
        "warm_start.source": "https://***@host/model?sig=***",
        "dataset.path": "s3://bucket/x?token=***",
    }


def test_recipes_leave_the_experiment_to_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the notebook")
    configs = (load("goyal_resnet50", ["dataset.path=/data"]), load("smoke"))
    assert [describe_run(config, MANIFEST, {}).experiment for config in configs] == ["of the notebook", "smoke"]


def test_a_run_says_what_it_trains() -> None:
    made = describe_run(load("smoke", ["tracking.run_name=mine"]), MANIFEST, {"more": "1"})
    assert (made.experiment, made.name, made.tags) == (
        "smoke",
        "mine",
        {
            "mlflow.note.content": "r18 trained with lars on eurosat_rgb: 7 training samples, 2 classes (single-label)"
            ", 2 epochs, global batch 8 on 2 workers, float32, gradients uncompressed.",
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
        },
    )


def test_the_dataset_is_as_mlflow_reads_it() -> None:
    facts = dataset_facts("https://user:secret@host/data", MANIFEST)
    source, profile = json.loads(facts.source), json.loads(facts.profile)
    assert (facts.name, facts.digest, source, profile) == (
        "eurosat_rgb",
        MANIFEST.fingerprint[:36],
        {"uri": "https://***@host/data"},
        {"num_rows": 7, "rows_train": 7, "classes": 2, "task": "single_label"},
    )
    (column,) = TensorDatasetSchema.from_dict(json.loads(facts.schema)).features.inputs
    assert (column.name, column.shape, column.type.name) == ("rgb", (-1, 32, 32, 3), "uint8")

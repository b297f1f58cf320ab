"""The description of a new run: its name, the settings that have an effect, its tags and its dataset."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from conf.effect import RULES
from conf.schema import RunConfig
from conf.sections.networks import ModelConfig, ResNetCifarConfig, ResNetConfig
from conf.sections.training import TrainingConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.locations import redacted
from pipelines.tracking.journal.local_run import DESCRIPTION_TAG, DatasetFacts, Description
from pipelines.tracking.models.model_metadata import ModelMetadata, SplitSamples
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.training.driver.identity import NAMED_DIGITS, training_digest
from pipelines.training.setup.bands import seen_bands, used_groups

_NO_SETTINGS_OF_A_TRAINING = (
    "tracking.",
    "training.output",
    "training.resume_run",
    "training.trace_steps",
    "training.tensorflow_profiler",
)
_DIGEST_CHARACTERS = 36  # what MLflow takes
_KEY = re.compile(r"[\w\-.: /]+", re.ASCII)  # what MLflow takes


def describe_run(config: RunConfig, manifest: Manifest, tags: Mapping[str, str]) -> Description:
    """Return the description of a new run of a training.

    Args:
        config: The whole configuration.
        manifest: Manifest of the dataset.
        tags: Further tags.
    """
    own = tags_of(config, manifest)
    return Description(
        chosen_experiment(config.tracking.experiment, offline=config.tracking.offline),
        config.tracking.run_name or run_name(own, config.training, training_digest(config, manifest.fingerprint)),
        parameters_of(config, manifest),
        {DESCRIPTION_TAG: _sentence(own, config.training.epochs, manifest), **own, **tags},
        dataset_facts(config.dataset.path, manifest),
    )


def run_name(tags: Mapping[str, str], training: TrainingConfig, digest: str) -> str:
    """Return a name that differs wherever the settings or the dataset do, with those that differ most between runs.

    An example is `r50-lars-g512-onebit-4w-90e-s1-5f3a9c`: network, optimizer, global batch, codec, workers, epochs,
    seed, and the beginning of the digest. Codec none and precision float32 are left out.

    Args:
        tags: Tags of the run, see `tags_of`.
        training: The section.
        digest: Digest of all that determines the result.
    """
    codec, precision = tags["codec"], tags["precision"]
    parts = [
        tags["model"],
        tags["optimizer"],
        f"g{tags['global_batch']}",
        *([codec] if codec != "none" else []),
        *([precision.replace("float", "f")] if precision != TrainingConfig.default("precision") else []),
        f"{tags['workers']}w",
        f"{training.epochs}e",
        f"s{training.seed}",
        digest[:NAMED_DIGITS],
    ]
    return "-".join(parts)


def settings_of(config: RunConfig, manifest: Manifest) -> dict[str, str]:
    """Return the effective settings of a training by key; the archive is the dataset's, not the configuration's.

    Secrets in URLs are left out.
    """
    flat = {
        **_flat(config.model_dump(mode="json", exclude={"archive", "prepare", "probe"})),
        **{f"prepare.{name}": value for name, value in manifest.settings.items()},
        "archive.kind": manifest.archive,
        "archive.source_fingerprint": manifest.source_fingerprint,
        "global_batch_size": config.global_batch_size,
        "micro_batches_per_step": config.accumulation_steps(config.launch.num_workers),
        "dataset_fingerprint": manifest.fingerprint,
    }
    return {key: redacted(str(value)) for key, value in flat.items()}


def parameters_of(config: RunConfig, manifest: Manifest) -> dict[str, str]:
    """Return the settings of `settings_of` that have an effect; settings that are idle, null or empty are left out.

    The artifact `config.yaml` has all settings.
    """
    idle = {rule.key for rule in RULES if rule.is_idle(config)}
    if config.training.global_batch_size is not None:
        idle.add("training.accumulation_steps")  # follows from the global batch
    return {
        key: value
        for key, value in settings_of(config, manifest).items()
        if key not in idle and value not in ("None", "[]", "{}") and not key.startswith(_NO_SETTINGS_OF_A_TRAINING)
    }


def dataset_facts(path: str, manifest: Manifest) -> DatasetFacts:
    """Return the facts about a dataset for MLflow: name, digest, location, columns and counts."""
    columns = [
        {"name": group.name, "type": "tensor", "tensor-spec": {"dtype": group.dtype, "shape": [-1, *group.shape]}}
        for group in manifest.groups
    ]
    counts = {f"rows_{name}": split.rows for name, split in manifest.splits.items()}
    return DatasetFacts(
        name=manifest.archive,
        digest=manifest.fingerprint[:_DIGEST_CHARACTERS],
        source=json.dumps({"uri": redacted(path)}),
        schema=json.dumps({"mlflow_tensorspec": {"features": json.dumps(columns), "targets": None}}),
        profile=json.dumps(
            {"num_rows": sum(counts.values()), **counts, "classes": len(manifest.class_names), "task": manifest.task}
        ),
    )


def metadata_of_model(manifest: Manifest, bands: Sequence[str] | None, network: ModelConfig) -> ModelMetadata:
    """Return the metadata that is logged with each model of a training.

    Args:
        manifest: Manifest of its dataset.
        bands: `input.bands`.
        network: The model's section.
    """
    return ModelMetadata(
        class_names=manifest.class_names,
        task=manifest.task,
        groups={group.name: group.bands for group in used_groups(manifest.groups, bands)},
        bands=tuple(seen_bands(manifest.groups, bands)),
        archive=manifest.archive,
        dataset_fingerprint=manifest.fingerprint,
        source_fingerprint=manifest.source_fingerprint,
        samples={name: SplitSamples(split.rows, tuple(split.class_counts)) for name, split in manifest.splits.items()},
        network=network.model_dump(),
    )


def tags_of(config: RunConfig, manifest: Manifest) -> dict[str, str]:
    """Return the tags that help to find a run; a resumed run with other settings gets the new ones."""
    return {
        "mlflow.source.name": "groundswell train",
        "mlflow.source.type": "JOB",
        "dataset_fingerprint": manifest.fingerprint,
        "archive": manifest.archive,
        "model": _network(config.model),
        "optimizer": config.optimizer.name,
        "codec": config.exchange.codec.name,
        "global_batch": str(config.global_batch_size),
        "workers": str(config.launch.num_workers),
        "precision": config.training.precision,
    }


def _sentence(tags: Mapping[str, str], epochs: int, manifest: Manifest) -> str:
    """Return a sentence that describes a run to readers of its page; for `tags` see `tags_of`."""
    rows = manifest.splits[TRAINING_SPLIT].rows if TRAINING_SPLIT in manifest.splits else 0
    codec = tags["codec"]
    return (
        f"{tags['model']} trained with {tags['optimizer']} on {manifest.archive}: {rows} training samples, "
        f"{len(manifest.class_names)} classes ({manifest.task.replace('_', '-')}), {epochs} epochs, global "
        f"batch {tags['global_batch']} on {tags['workers']} workers, {tags['precision']}, "
        f"{'gradients uncompressed' if codec == 'none' else f'gradients compressed by {codec}'}."
    )


def _network(model: ModelConfig) -> str:
    """Return the short name of the network: `r50` for ResNet-50, `cifar20` for CIFAR, or the function's name."""
    match model:
        case ResNetConfig(depth=depth):
            return f"r{depth}"
        case ResNetCifarConfig(depth=depth):
            return f"cifar{depth}"
        case other:
            return str(other.arguments().get("path", other.name)).rpartition(":")[2].lower()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Mapping):
            flat[f"{prefix}{key}"] = value
        elif all(_KEY.fullmatch(name) for name in value):
            flat |= _flat(value, f"{prefix}{key}.")
        else:  # names of classes, or patterns of layers
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat

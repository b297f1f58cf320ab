import ast
from collections.abc import Callable, Collection, Mapping
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from conf.schema import RunConfig
from conf.sections.archives import ArchiveConfig
from conf.sections.augmentations import AugmentationConfig
from conf.sections.codecs import CodecConfig, ExchangeConfig
from conf.sections.modes import ModeConfig
from conf.sections.networks import ModelConfig
from conf.sections.optimizers import OptimizerBase, OptimizerConfig
from conf.sections.section import NamedSection, member_names
from models.compression.codecs.none import NoneCodec
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from models.layers.augmentation import AugmentedModel
from models.layers.table import AUGMENTATIONS
from models.losses import classification_loss
from models.networks.table import NETWORKS
from models.optimizers.layerwise import variables_with_roles
from models.optimizers.table import OPTIMIZERS
from pipelines.archives.table import ARCHIVES
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.modes.delayed import Delayed
from pipelines.training.modes.local import LocalUpdates
from pipelines.training.modes.parameter_server import ParameterServer
from pipelines.training.modes.table import MODES
from pipelines.training.setup.recipe import make_exchange, make_mode, make_model, make_optimizer

# What makes a choice valid: settings without a default, and the other half of a pair.
NEEDS = {
    "threshold": ["exchange.codec={name: threshold, tau: 0.5}"],
    "dgc": ["exchange.codec=dgc", "optimizer={name: sgd, momentum: 0.0, nesterov: false}"],
    "onebit_adam": [
        "exchange.codec=onebit_adam",
        "exchange.warmup_steps=5",
        "optimizer={name: onebit_adam, warmup_steps: 5}",
    ],
}
TABLES: dict[str, Mapping[str, Any]] = {
    "codecs": CODECS,
    "optimizers": OPTIMIZERS,
    "networks": NETWORKS,
    "augmentations": AUGMENTATIONS,
    "modes": MODES,
    "archives": ARCHIVES,
}


NEEDED_BY_AUGMENTATION = {"pad_crop": {"padding": 4, "fill": "reflect", "mirror": True, "cutout": 0}}


@pytest.fixture
def dense_model() -> keras.Model:
    """A kernel, a bias, a gain and a shift, in this order."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])


@pytest.mark.parametrize("augmentation", sorted(set(member_names(AugmentationConfig)) - {"import"}))
def test_the_model_augments_as_configured(augmentation: str, manifest: Manifest) -> None:
    model = make_model(load("smoke", [f"input.augmentation={augmentation}"]), manifest)
    found = model.augmentation if isinstance(model, AugmentedModel) else None
    assert type(found) is type(AUGMENTATIONS[augmentation](**NEEDED_BY_AUGMENTATION.get(augmentation, {})))
    assert getattr(found, "kind", augmentation) == augmentation


def test_the_augmentations_settings_reach_it(manifest: Manifest) -> None:
    settings = {"padding": 3, "fill": "zero", "mirror": False, "cutout": 5}
    text = ", ".join(f"{key}: {str(value).lower()}" for key, value in settings.items())
    model: Any = make_model(load("smoke", [f"input.augmentation={{name: pad_crop, {text}}}"]), manifest)
    assert {key: model.augmentation.get_config()[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("chosen", "blocks", "last"),
    [
        ("{name: resnet, depth: 18, width_factor: 0.5}", 8, "logits"),
        ("{name: resnet_cifar, depth: 32, width_factor: 2.0, preactivation: true}", 15, "last_relu"),
    ],
)
def test_the_networks_settings_reach_it(chosen: str, blocks: int, last: str, manifest: Manifest) -> None:
    model = make_model(load("smoke", [f"model={chosen}"]), manifest)
    assert (
        model.get_layer("stem_conv").filters,
        len([layer for layer in model.layers if layer.name.endswith("_add")]),
    ) == (32, blocks)
    assert model.get_layer(last)


@pytest.mark.parametrize("roles", [[], ["gain", "shift"], ["kernel"]])
@pytest.mark.parametrize("name", member_names(OptimizerConfig))
def test_weight_decay_leaves_the_excluded_roles_out(name: str, roles: list[str], dense_model: keras.Model) -> None:
    # Without a gradient, an optimizer moves a variable by its weight decay alone, and only if it is not 0.
    settings: dict[str, dict[str, Any]] = {
        "onebit_adam": {"warmup_steps": 1},
        "sgd": {"momentum": 0.0},
        "lars": {"momentum": 0.0, "nesterov": False},
        "adamw": {"beta_1": 0.9},
        "adagrad": {"epsilon": 0.000001},
        # The ratio of an update of decay alone would be 1 / decay.
        "lamb": {"unadapted_roles": ["kernel", "bias", "gain", "shift"]},
    }
    optimizer = make_optimizer(
        optimizer_of(name, weight_decay=0.1, excluded_roles=roles, **settings[name]), dense_model
    )
    optimizer.learning_rate = 0.5
    variables = dense_model.trainable_variables
    for variable in variables:
        variable.assign(np.full(variable.shape, 2.0))
    optimizer.apply([tf.zeros(variable.shape) for variable in variables], variables)
    left_out = {id(variable) for variable in variables_with_roles(dense_model, roles)}
    for variable in variables:
        # w = w - rate * decay * w, 2 - 0.5 * 0.1 * 2; LARS has the ratio 1 where the gradient is 0.
        expected = 2.0 if id(variable) in left_out else 1.9
        np.testing.assert_allclose(variable, expected, rtol=1e-6, err_msg=variable.path)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", member_names(OptimizerConfig))
def test_the_optimizers_settings_reach_it(name: str, decay: float, dense_model: keras.Model) -> None:
    chosen: dict[str, dict[str, Any]] = {
        "lars": {
            "momentum": 0.8,
            "nesterov": False,
            "trust_coefficient": 0.02,
            "variant": "tensorflow_models",
            "epsilon": 1e-9,
        },
        "lamb": {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5},
        "adamw": {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5},
        "adagrad": {"initial_accumulator_value": 0.5, "epsilon": 1e-5},
        "sgd": {"momentum": 0.7, "nesterov": False},
        "onebit_adam": {"beta_1": 0.8, "beta_2": 0.99, "warmup_steps": 3},
    }
    optimizer = make_optimizer(optimizer_of(name, weight_decay=decay, **chosen[name]), dense_model)
    built = optimizer.get_config()
    assert (
        built | {"weight_decay": built["weight_decay"] or 0.0},
        float(optimizer.learning_rate),
        optimizer.built,
    ) == (built | chosen[name] | {"weight_decay": decay}, 0.0, True)


def optimizer_of(name: str, **settings: Any) -> OptimizerConfig:
    """The section of an optimizer with settings, in a configuration that is valid."""
    text = ", ".join(f"{key}: {str(value).lower()}" for key, value in {"name": name, **settings}.items())
    pair = ["exchange.codec=onebit_adam", f"exchange.warmup_steps={settings.get('warmup_steps')}"]
    return load("smoke", [f"optimizer={{{text}}}", *(pair if name == "onebit_adam" else [])]).optimizer


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(
    ("settings", "excluded", "unadapted"),
    [
        ({}, ["bias", "gamma", "beta"], ["bias", "gamma", "beta"]),
        ({"excluded_roles": ["bias"]}, ["bias"], ["bias"]),
        ({"excluded_roles": ["bias"], "unadapted_roles": ["gain", "shift"]}, ["bias"], ["gamma", "beta"]),
        ({"unadapted_roles": []}, ["bias", "gamma", "beta"], []),
    ],
)
def test_decay_and_ratio_have_lists_of_their_own(
    name: str, settings: dict[str, Any], excluded: list[str], unadapted: list[str], dense_model: keras.Model
) -> None:
    built: Any = make_optimizer(optimizer_of(name, **settings), dense_model)
    assert [[path.split("/")[-1] for path in paths] for paths in (built.excluded, built.unadapted)] == [
        excluded,
        unadapted,
    ]


def test_every_entry_of_a_table_has_a_class_of_settings() -> None:
    # A mode by import path says itself where it is.
    assert {table: (*entries, *(["import"] if table == "modes" else [])) for table, entries in TABLES.items()} == {
        "codecs": member_names(CodecConfig),
        "optimizers": member_names(OptimizerConfig),
        "networks": member_names(ModelConfig),
        "augmentations": member_names(AugmentationConfig),
        "modes": member_names(ModeConfig),
        "archives": member_names(ArchiveConfig, "kind"),
    }


@pytest.mark.parametrize("name", member_names(CodecConfig))
def test_every_codec_is_made_from_the_configurations_defaults(name: str, one_rank: Any) -> None:
    assert make_exchange(load("smoke", NEEDS.get(name, [f"exchange.codec={name}"])), one_rank).codec.name == name


@pytest.mark.parametrize(
    "constructor",
    [
        GradientExchange,
        # Archives can be opened without a configuration, with its defaults.
        *(entry for table in TABLES if table not in ("archives", "modes") for entry in TABLES[table].values()),
        *(LocalUpdates, Delayed, ParameterServer),
    ],
)
def test_defaults_are_stated_in_the_configuration_only(constructor: Callable[..., Any]) -> None:
    parameters = signature(constructor).parameters.items()
    with_default = {name for name, parameter in parameters if parameter.default is not Parameter.empty}
    assert with_default <= {"jit_compile"}  # which is no key of the exchange


def test_settings_reach_the_exchange(one_rank: Any) -> None:
    codec = "{name: topk, density: 0.02, density_schedule: [{before_step: 7, density: 0.5}]}"
    settings = ["dense_below=9", "bucket_mib=2.5", "warmup_steps=3", "rescale_residual=false"]
    overrides = [f"exchange.codec={codec}", *[f"exchange.{setting}" for setting in settings], "training.seed=11"]
    exchange: Any = make_exchange(load("smoke", overrides), one_rank)
    assert exchange.codec.compressor.density.values == (0.5, 0.02)
    found = (exchange.dense_below, exchange.bucket_mib, exchange.warmup_steps, exchange.rescale_residual, exchange.seed)
    assert found == (9, 2.5, 3, False, 11)
    # The momentum of a pair is stated once.
    overrides = [*NEEDS["onebit_adam"][:2], "optimizer={name: onebit_adam, warmup_steps: 5, beta_1: 0.7}"]
    pair: Any = make_exchange(load("smoke", overrides), one_rank).codec
    assert pair.memory.beta_1 == 0.7


# A codec, an optimizer and a network as a file of their own would have them, and their settings.


class HalvingCodec(NoneCodec):
    name = "halving"

    def __init__(self, *, factor: float) -> None:
        self.factor = factor

    def after_dense(self, mean: tf.Tensor, memory: dict[str, Any], *, warming_up: tf.Tensor) -> Any:
        return mean * self.factor, memory


class HalvingConfig(NamedSection):
    name: Literal["halving"] = "halving"
    factor: float = 0.5


def plain_descent(*, excluded: Collection[keras.Variable], weight_decay: float, clip: float) -> Any:
    return keras.optimizers.SGD(0.0, clipvalue=clip)


class PlainDescentConfig(OptimizerBase):
    name: Literal["plain_descent"] = "plain_descent"
    clip: float = 100.0


def linear(images: keras.KerasTensor, *, classes: int, bias: bool, dtype: str) -> keras.KerasTensor:
    return keras.layers.Dense(classes, use_bias=bias, dtype=dtype)(keras.layers.Flatten()(images))


class LinearConfig(NamedSection):
    name: Literal["linear"] = "linear"
    bias: bool = False


def test_a_new_codec_optimizer_and_network_are_a_line_in_a_table(
    manifest: Manifest, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODECS, "halving", HalvingCodec)
    monkeypatch.setitem(OPTIMIZERS, "plain_descent", plain_descent)
    monkeypatch.setitem(NETWORKS, "linear", linear)
    base = load("smoke")
    # As pydantic would from unions with one more member.
    config = RunConfig.model_construct(
        **{
            **dict(base),
            "model": LinearConfig(),
            "optimizer": PlainDescentConfig(),
            "exchange": ExchangeConfig.model_construct(**{**dict(base.exchange), "codec": HalvingConfig()}),
        }
    )
    model = make_model(config, manifest)
    mode = make_mode(config, model, classification_loss("single_label"), one_rank, steps_per_epoch=1)
    mode.optimizer.learning_rate = 1.0
    (kernel,) = model.trainable_variables
    kernel.assign(tf.zeros(kernel.shape))
    images = tf.ones((2, 32, 32, 3), tf.uint8)  # the mean: normalised to 0, but for one pixel
    images = tf.tensor_scatter_nd_update(images, [[0, 0, 0, 0], [1, 0, 0, 0]], tf.constant([3, 3], tf.uint8))
    mode.step({"rgb": images}, tf.constant([[1.0, 0.0], [1.0, 0.0]]))
    # The pixel is 2 and the probabilities are 1/2: the gradient is 2 * (-1/2, 1/2), half of which is applied.
    np.testing.assert_allclose(kernel[0], [0.5, -0.5], rtol=1e-6)
    assert np.count_nonzero(kernel) == 2


@cache
def strings_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("table", TABLES)
def test_a_name_is_mentioned_in_its_table_and_its_settings_only(table: str, project: Path) -> None:
    places = {
        "codecs": "models/compression/codecs",
        "optimizers": "models/optimizers",
        "networks": "models/networks",
        "augmentations": "models/layers",
        "modes": "pipelines/training/modes",
        "archives": "pipelines/archives",
    }
    # What two halves of a method, or a method with its own momentum, must be told about each other.
    pairs = {"conf/schema.py", "conf/sections/modes.py", "models/compression/exchange/compatibility.py"}
    # The C++ kernels say which codecs have some; the report shows two datasets beside their published figures, and
    # reads an image folder's name as a word.
    pairs |= {"models/compression/kernels/__init__.py", "pipelines/dataset/report/published_statistics.py"}
    # Test-time augmentation has symmetries that are called as the augmentations that draw from them.
    pairs |= {"conf/sections/score.py", "pipelines/scoring/predict/symmetries.py"}
    shipped = [path for folder in ("jobs", "pipelines", "models", "conf") for path in (project / folder).rglob("*.py")]
    mentions = {path.relative_to(project).as_posix(): strings_of(path) for path in shipped}
    # "none" is also no augmentation; the pair has both; "import" is in several tables; "local" is a Spark master too,
    # "bf16" a runtime of scoring, and "threshold" a column of evaluation.
    for name in set(TABLES[table]) - {"none", "onebit_adam", "import", "local", "bf16", "threshold"}:
        found = {path for path, strings in mentions.items() if name in strings}
        own = {path for path in found if path.startswith(places[table])} | {f"conf/sections/{table}.py"}
        assert found - own - pairs == set(), name
        assert f"{places[table]}/table.py" in found
        # Its file may say its name, as the table and the settings do.
        assert len(own) <= 3, (name, own)

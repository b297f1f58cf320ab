import pytest

from conf.codecs import CODEC_NAMES
from conf.load import load
from models.compression.codecs.table import CODECS
from models.layers.augmentation import AugmentedModel
from pipelines.dataset.manifest import BandStatistics, Manifest
from pipelines.sample import ImageGroup
from pipelines.training.recipe import make_exchange, make_model, make_schedule

RECIPE = "bigearthnet_v2_resnet50"


def test_the_recipe_is_goyals() -> None:
    # 0.1 * k * n / 256 with n = 32 images on k = 8 workers; 5 epochs of warm-up; /10 at 30, 60, 80 of 90.
    schedule = make_schedule(load(RECIPE), steps_per_epoch=10)
    assert schedule(49) == pytest.approx(0.1 * 8 * 32 / 256)
    assert schedule(0) == pytest.approx(0.1 / 50)
    assert schedule(24) == pytest.approx(0.1 * 25 / 50)
    for epoch, factor in ((29, 1), (30, 0.1), (59, 0.1), (60, 0.01), (79, 0.01), (80, 0.001), (89, 0.001)):
        assert schedule(epoch * 10 + 9) == pytest.approx(0.1 * factor), epoch
    assert schedule(299) == pytest.approx(0.1)
    assert schedule(300) == pytest.approx(0.01)


def test_a_shorter_run_has_its_milestones_in_proportion() -> None:
    schedule = make_schedule(load(RECIPE, ["training.epochs=9"]), steps_per_epoch=100)
    assert schedule(500) == schedule(599) == pytest.approx(0.01)
    assert schedule(600) == pytest.approx(0.001)
    assert schedule(800) == pytest.approx(0.0001)


def test_a_longer_run_keeps_them_where_they_are() -> None:
    schedule = make_schedule(load(RECIPE, ["training.epochs=180"]), steps_per_epoch=10)
    assert schedule(299) == pytest.approx(0.1)
    assert schedule(300) == pytest.approx(0.01)


def test_the_peak_follows_the_number_of_workers() -> None:
    schedule = make_schedule(load(RECIPE, ["launch.num_workers=64"]), steps_per_epoch=10)
    assert schedule(100) == pytest.approx(0.8)


@pytest.mark.parametrize("augmentation", ["none", "flips", "dihedral"])
def test_the_model_augments_as_configured(augmentation: str) -> None:
    manifest = Manifest(
        archive="image_folder",
        task="single_label",
        class_names=("water", "land"),
        groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
        splits={},
        statistics={"rgb": BandStatistics(mean=(1.0,) * 3, std=(1.0,) * 3)},
        settings={},
        source_fingerprint="abc",
    )
    model = make_model(load("smoke", [f"model.augmentation={augmentation}"]), manifest)
    assert (model.augmentation.kind if isinstance(model, AugmentedModel) else "none") == augmentation


class OneRank:
    rank, size = 0, 1


def test_every_codec_has_a_section() -> None:
    assert set(CODEC_NAMES) == set(CODECS)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_the_defaults_of_the_configuration_are_those_of_the_codecs(name: str) -> None:
    overrides = [f"exchange.codec={'{name: threshold, tau: 0.5}' if name == 'threshold' else name}"]
    if name == "dgc":
        overrides += ["optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.nesterov=false"]
    if name == "onebit_adam":
        overrides += ["optimizer.name=onebit_adam", "optimizer.warmup_steps=5", "exchange.warmup_steps=5"]
    codec = make_exchange(load("smoke", overrides), OneRank()).codec
    assert _settings(codec) == _settings(CODECS[name](**({"tau": 0.5} if name == "threshold" else {})))


def _settings(value: object) -> object:
    if hasattr(value, "__dict__") and type(value).__module__.startswith("models."):
        return type(value).__name__, {key: _settings(inner) for key, inner in vars(value).items()}
    return value


def test_settings_reach_the_exchange() -> None:
    codec = "{name: topk, density: 0.02, stages: [{before_step: 7, density: 0.5}]}"
    settings = ["dense_below=9", "bucket_mib=2.5", "warmup_steps=3", "rescale_residual=false"]
    overrides = [f"exchange.codec={codec}", *[f"exchange.{setting}" for setting in settings], "training.seed=11"]
    exchange = make_exchange(load("smoke", overrides), OneRank())
    assert exchange.codec.quantiser.density.values == (0.5, 0.02)
    assert (exchange.dense_below, exchange.bucket_mib, exchange.warmup_steps) == (9, 2.5, 3)
    assert (exchange.rescale_residual, exchange.seed) == (False, 11)

"""Networks cut into stages: where, and that the stages together are the network."""

from typing import Any

import keras
import numpy as np
import pytest

from models.layers.preprocessing import InputGroup
from models.networks.model import build_model, with_probabilities
from models.networks.stages import cut, parts_of_flops

GROUPS = [
    InputGroup("fine", (24, 24, 2), "uint16", (1000.0,) * 2, (500.0,) * 2),
    InputGroup("coarse", (12, 12, 1), "uint16", (1000.0,), (500.0,)),
]
RESIDUAL = {"width_factor": 0.25, "dropout": 0.0, "stochastic_depth": 0.0, "zero_init_residual": True}


def model_of(network: str, **settings: Any) -> keras.Model:
    return build_model(
        GROUPS, network=network, classes=3, upsampling="nearest", augmentation=None, **{**RESIDUAL, **settings}
    )


@pytest.fixture(scope="module")
def resnet() -> keras.Model:
    keras.utils.set_random_seed(0)
    return model_of("resnet", depth=18)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_cut_after_blocks_and_are_the_network_together(resnet: keras.Model, stages: int) -> None:
    random = np.random.default_rng(0)
    found = cut(resnet, stages)
    assert all(stage.last_layer.endswith(("_relu", "stem_pool")) for stage in found[:-1])
    images = {group.name: random.integers(0, 3000, (4, *group.shape), dtype=np.uint16) for group in GROUPS}
    passed: Any = images
    for stage in found:
        passed = stage(passed)
    np.testing.assert_array_equal(passed, resnet(images, training=True))
    parts = [id(variable) for stage in found for variable in stage.network.variables]
    assert sorted(parts) == sorted(id(variable) for variable in resnet.variables), "each weight is in one stage"


def test_a_network_that_was_cut_is_saved_as_before(resnet: keras.Model, tmp_path: Any) -> None:
    cut(resnet, 3)
    served = with_probabilities(resnet, "multi_label")
    served.save(tmp_path / "model.keras")
    images = {group.name: np.full((2, *group.shape), 900, np.uint16) for group in GROUPS}
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(images), served(images))


def chain(*widths: int) -> keras.Model:
    inputs = features = keras.Input((4,), name="fine")
    for number, width in enumerate(widths):
        features = keras.layers.Dense(width, name=f"dense{number}")(features)
    return keras.Model({"fine": inputs}, features, name="chain")


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    # Multiplications: 4 * 8, 8 * 8, 8 * 8, 8 * 2 = 32, 64, 64, 16: the largest stage has at least 80 of 2, 64 of 3.
    assert [stage.last_layer for stage in cut(chain(8, 8, 8, 2), 2)] == ["dense1", "dense3"]
    assert parts_of_flops(cut(chain(8, 8, 8, 2), 2)) == [96 / 176, 80 / 176]
    assert max(parts_of_flops(cut(chain(8, 8, 8, 2), 3))) == 80 / 176
    assert max(parts_of_flops(cut(chain(8, 8, 8, 2), 4))) == 64 / 176


def test_the_smallest_tensor_is_sent_and_of_equal_ones_the_last() -> None:
    inputs = keras.Input((8, 8, 2), name="fine")
    features = keras.layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    features = keras.layers.MaxPooling2D(2, name="pool")(features)
    features = keras.layers.ReLU(name="relu")(features)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.UpSampling2D(name="larger")(features)))
    first, second = cut(keras.Model({"fine": inputs}, outputs), 2)
    assert first.last_layer == "relu"
    assert first.border.shape == (None, 4, 4, 4)
    assert second.is_last


def test_a_layer_is_in_one_stage_with_all_its_calls() -> None:
    inputs = keras.Input((4,), name="fine")
    shared = keras.layers.Dense(4)
    features = keras.layers.Dense(4)(shared(keras.layers.Dense(4, name="before")(inputs)))
    model = keras.Model({"fine": inputs}, keras.layers.Dense(2)(shared(features)))
    # After the first call of the shared layer the stages would be more equal, but both would train that layer.
    assert cut(model, 2)[0].last_layer == "before"


def test_what_cannot_be_cut_is_refused() -> None:
    inputs = keras.Input((4,), name="fine")
    sides = [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)]
    parallel = keras.Model({"fine": inputs}, keras.layers.Add()(sides), name="parallel")
    with pytest.raises(ValueError, match="parallel can be cut at 0 places where one tensor is all that goes on, and 2"):
        cut(parallel, 2)
    with pytest.raises(ValueError, match=r"can be cut at 1 places .* 3 stages need 2"):
        cut(chain(4, 2), 3)


def test_layers_that_draw_from_a_state_of_their_own_are_refused() -> None:
    inputs = keras.Input((4,), name="fine")
    features = keras.layers.Dropout(0.5)(keras.layers.Dense(4)(inputs))
    model = keras.Model({"fine": inputs}, keras.layers.Dense(2)(features), name="drawing")
    with pytest.raises(ValueError, match="drawing cannot be trained in stages, which compute a forward pass twice"):
        cut(model, 2)


def test_a_counter_is_no_random_state() -> None:
    inputs = keras.Input((4,), name="fine")
    normalised = keras.layers.Normalization()(inputs)
    model = keras.Model({"fine": inputs}, keras.layers.Dense(2)(keras.layers.Dense(4)(normalised)))
    assert len(cut(model, 2)) == 2


def test_a_stage_has_something_to_train() -> None:
    first = chain(8, 8, 8, 2)
    for name in ("dense0", "dense1"):
        first.get_layer(name).trainable = False
    assert [stage.last_layer for stage in cut(first, 2)] == ["dense2", "dense3"]
    last = chain(8, 8, 8, 2)
    for name in ("dense2", "dense3"):
        last.get_layer(name).trainable = False
    with pytest.raises(ValueError, match="chain_stage2 has nothing to train"):
        cut(last, 2)

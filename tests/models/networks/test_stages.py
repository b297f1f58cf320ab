"""Networks cut into stages: where, and that the stages together are the network."""

from typing import Any

import keras
import numpy as np
import pytest

from models.networks.model import with_probabilities
from models.networks.stages import cut, parts_of_flops
from tests.models.built import group_of, model_of, random_images

GROUPS = [group_of("fine", (24, 24, 2), mean=1000, std=500), group_of("coarse", (12, 12, 1), mean=1000, std=500)]


@pytest.fixture(scope="module")
def resnet() -> keras.Model:
    return model_of("resnet", GROUPS)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_cut_after_blocks_and_are_the_network_together(resnet: keras.Model, stages: int) -> None:
    found, images = cut(resnet, stages), random_images(GROUPS, 4, 3000)
    assert all(stage.last_layer.endswith(("_relu", "stem_pool")) for stage in found[:-1])
    passed: Any = images
    for stage in found:
        passed = stage(passed)
    np.testing.assert_array_equal(passed, resnet(images, training=True))
    assert sorted(id(variable) for stage in found for variable in stage.network.variables) == sorted(
        id(variable) for variable in resnet.variables
    ), "each weight is in one stage"


def test_a_network_that_was_cut_is_saved_as_before(resnet: keras.Model, tmp_path: Any) -> None:
    cut(resnet, 3)
    served = with_probabilities(resnet, "multi_label")
    served.save(tmp_path / "model.keras")
    images = random_images(GROUPS)
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(images), served(images))


def chain(*layers: Any, name: str = "chain") -> keras.Model:
    """Layers one after the other; a number is a dense layer of that width."""
    inputs = features = keras.Input((4,), name="fine")
    for number, layer in enumerate(layers):
        features = (keras.layers.Dense(layer, name=f"dense{number}") if isinstance(layer, int) else layer)(features)
    return keras.Model({"fine": inputs}, features, name=name)


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    # Multiplications: 4 * 8, 8 * 8, 8 * 8, 8 * 2 = 32, 64, 64, 16: the largest stage has at least 80 of 2, 64 of 3.
    stages = {number: cut(chain(8, 8, 8, 2), number) for number in (2, 3, 4)}
    assert [stage.last_layer for stage in stages[2]] == ["dense1", "dense3"]
    parts = {number: parts_of_flops(found) for number, found in stages.items()}
    assert (parts[2], max(parts[3]), max(parts[4])) == ([96 / 176, 80 / 176], 80 / 176, 64 / 176)


def test_the_smallest_tensor_is_sent_and_of_equal_ones_the_last() -> None:
    inputs = keras.Input((8, 8, 2), name="fine")
    features = keras.layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    features = keras.layers.MaxPooling2D(2, name="pool")(features)
    features = keras.layers.ReLU(name="relu")(features)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.UpSampling2D(name="larger")(features)))
    first, second = cut(keras.Model({"fine": inputs}, outputs), 2)
    assert (first.last_layer, first.border.shape, second.is_last) == ("relu", (None, 4, 4, 4), True)


def test_a_layer_is_in_one_stage_with_all_its_calls() -> None:
    shared = keras.layers.Dense(4)
    # After the first call of the shared layer the stages would be more equal, but both would train that layer.
    assert cut(chain(4, shared, 4, shared, 2), 2)[0].last_layer == "dense0"


def test_what_cannot_be_cut_is_refused() -> None:
    inputs = keras.Input((4,), name="fine")
    sides = [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)]
    parallel = keras.Model({"fine": inputs}, keras.layers.Add()(sides), name="parallel")
    with pytest.raises(ValueError, match="parallel can be cut at 0 places where only one tensor crosses, and 2"):
        cut(parallel, 2)
    with pytest.raises(ValueError, match=r"can be cut at 1 places .* 3 stages need 2"):
        cut(chain(4, 2), 3)


def test_layers_that_draw_from_a_state_of_their_own_are_refused_and_a_counter_is_none() -> None:
    with pytest.raises(ValueError, match="drawing cannot be trained in stages, which compute a forward pass twice"):
        cut(chain(4, keras.layers.Dropout(0.5), 2, name="drawing"), 2)
    assert len(cut(chain(keras.layers.Normalization(), 4, 2), 2)) == 2


def test_a_stage_has_something_to_train() -> None:
    first, last = chain(8, 8, 8, 2), chain(8, 8, 8, 2)
    for number in (0, 1):
        first.get_layer(f"dense{number}").trainable = last.get_layer(f"dense{number + 2}").trainable = False
    assert [stage.last_layer for stage in cut(first, 2)] == ["dense2", "dense3"]
    with pytest.raises(ValueError, match="chain_stage2 has nothing to train"):
        cut(last, 2)

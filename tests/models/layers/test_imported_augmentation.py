"""Augmentations by import path."""

import json
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.imported import ImportedAugmentation

MODULE = """
import tensorflow as tf

def brighter(images, seeds, *, by):
    shift = tf.cast(by * (seeds % 2), tf.uint8)[:, None, None, None]
    return {name: group + shift for name, group in images.items()}

def to_float(images, seeds): return {name: tf.cast(group, tf.float32) for name, group in images.items()}
def smaller(images, seeds): return {name: group[:, 1:] for name, group in images.items()}
def fewer(images, seeds): return {}
def nothing(images, seeds): pass
def broken(images, seeds): return images["other"]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_augmentation.py").write_text(MODULE)


def augmentation(function, **settings):
    return ImportedAugmentation(f"somebodys_augmentation:{function}", settings)


IMAGES = {"rgb": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)}
SEEDS = np.array([4, 7], np.int32)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_function_sees_stored_images_and_seeds_in_training_only(compiled):
    layer = augmentation("brighter", by=5)
    call = tf.function(layer) if compiled else layer
    expected = IMAGES["rgb"] + np.array([0, 5], np.uint8)[:, None, None, None]
    np.testing.assert_array_equal(call(IMAGES, SEEDS, training=True)["rgb"], expected)
    np.testing.assert_array_equal(call(IMAGES)["rgb"], IMAGES["rgb"])
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        layer(IMAGES, training=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("to_float", r"returned \{'rgb': 'float32 \(2, 2, 3\)'\}, expected \{'rgb': 'uint8 \(2, 2, 3\)'\}$"),
        ("smaller", r"returned \{'rgb': 'uint8 \(1, 2, 3\)'\}, expected"),
        ("fewer", r"returned \{\}, expected"),
        ("nothing", r"returned a NoneType, expected"),
        ("broken", r"raised KeyError: 'other'$"),
        ("brighter", r"raised TypeError: brighter\(\) missing 1 required keyword-only argument: 'by'$"),
    ],
)
def test_what_does_not_fit_is_one_line(function, message):
    with pytest.raises(ValueError, match=rf"^input\.augmentation\.path=somebodys_augmentation:{function}: .*{message}"):
        augmentation(function).call(IMAGES, SEEDS, training=True)


def test_a_models_file_imports_nothing(tmp_path):
    """Keras makes every registered class that a file names, also in its safe mode."""
    inputs = keras.Input((4,))
    keras.Model(inputs, keras.layers.Dense(1)(inputs)).save(tmp_path / "plain.keras")
    (tmp_path / "imported_by_a_file.py").touch()
    layer = {"path": "imported_by_a_file:x", "settings": {}, "name": "x"}
    kind = {"module": "models.layers.imported", "class_name": "ImportedAugmentation", "config": layer}
    with zipfile.ZipFile(tmp_path / "plain.keras") as plain, zipfile.ZipFile(tmp_path / "evil.keras", "w") as evil:
        files = {name: plain.read(name) for name in plain.namelist()}
        config = json.loads(files["config.json"])
        dense = config["config"]["layers"][-1]["config"]
        dense["kernel_initializer"] = {**kind, "registered_name": "groundswell>ImportedAugmentation"}
        for name, content in {**files, "config.json": json.dumps(config)}.items():
            evil.writestr(name, content)
    with pytest.raises((TypeError, ValueError)):
        keras.models.load_model(tmp_path / "evil.keras")
    with pytest.raises(ValueError, match="never from a file"):
        ImportedAugmentation.from_config(layer)
    assert "imported_by_a_file" not in sys.modules

"""Which trust coefficient makes 0.1 per 256 images learn with LARS: accuracy on handwritten digits after 300 steps.

Only the product of rate and trust coefficient counts for kernels. The published pair is 0.001 and a rate that the
square-root law of MLPerf's rows puts at 2.9 for 256 images. `sedona_resnet50` states a rate of 0.1 and no coefficient.
Each pair trains a small convolutional network at batch 256, with the warm-up and the decay of that recipe, from three
seeds. The data are the 1,797 digits that come with scikit-learn, every fifth of which is held back.

`--smoke` takes 5 steps of two pairs.
"""

import json
import statistics

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from conf.load import load
from models.losses import classification_loss
from pipelines.training.setup.rates import make_schedule
from pipelines.training.setup.recipe import make_optimizer
from tests.benchmarks.parts.command import is_smoke

BATCH_SIZE, EPOCHS, SEEDS = 256, 60, (0, 1, 2)
PAIRS = ((0.1, 0.001), (0.1, 0.003), (0.1, 0.01), (0.1, 0.03), (0.1, 0.1), (2.9, 0.001))
"""Learning rate per 256 images, and trust coefficient."""


def digits():
    """Images in [0, 1] and one-hot targets: for training, and held back."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    targets = np.eye(10, dtype=np.float32)[labels]
    held_back = np.arange(len(images)) % 5 == 0
    return (images[~held_back], targets[~held_back]), (images[held_back], targets[held_back])


def network():
    """Two convolutions with batch norm, 6,000 parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def accuracy(rate, trust, seed, *, most_steps):
    """Percent of the digits held back that are recognised after training."""
    keras.utils.set_random_seed(seed)
    (images, targets), (other_images, other_targets) = digits()
    settings = [f"optimizer.learning_rate_per_256={rate}", f"optimizer.trust_coefficient={trust}"]
    settings += [f"training.epochs={EPOCHS}", f"training.batch_size_per_worker={BATCH_SIZE}", "launch.num_workers=1"]
    config = load("sedona_resnet50", settings)
    steps = len(images) // BATCH_SIZE
    schedule = make_schedule(config, steps)
    model = network()
    optimizer = make_optimizer(config.optimizer, model)
    loss = classification_loss("single_label")

    @tf.function
    def step(batch, expected):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(expected, model(batch, training=True)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, [variable.value for variable in variables]), variables)

    for number in range(min(most_steps, steps * EPOCHS)):
        if number % steps == 0:
            order = np.random.default_rng([seed, number]).permutation(len(images))
        chosen = order[number % steps * BATCH_SIZE :][:BATCH_SIZE]
        optimizer.learning_rate = schedule(number)
        step(images[chosen], targets[chosen])
    return 100 * float((np.argmax(model(other_images, training=False), -1) == np.argmax(other_targets, -1)).mean())


def main():
    """Train every pair from every seed, and print the table."""
    smoke = is_smoke(__doc__, "5 steps of two pairs, one seed")
    found = {}
    for rate, trust in PAIRS[:2] if smoke else PAIRS:
        values = [
            accuracy(rate, trust, seed, most_steps=5 if smoke else 10**9) for seed in (SEEDS[:1] if smoke else SEEDS)
        ]
        found[f"{rate} {trust}"] = round(statistics.mean(values), 1)
        print(f"rate {rate}, trust coefficient {trust}: {', '.join(f'{value:.1f}' for value in values)} %", flush=True)
    print(json.dumps({"accuracy": found}))


if __name__ == "__main__":
    main()

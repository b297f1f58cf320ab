"""One rank of the trainings on CIFAR-10 over a link; see `modes`.

Its first argument is JSON with the file of the images, and where this rank is. Each line of its input is a method and a
seed; the answer is what `cifar10.rank.train` gives.
"""

import numpy as np
from cifar10.methods import METHODS
from links.rank import joined

from tests.benchmarks.parts.answers import answer


def prepare(settings):
    """The function that trains as each line says."""
    collective = joined(settings)
    from cifar10.rank import train_and_forget  # it imports TensorFlow, which the rendezvous does not need

    with np.load(settings["images"]) as arrays:
        data = dict(arrays)
    return lambda asked: train_and_forget(METHODS[asked["method"]], asked["seed"], data, collective)


if __name__ == "__main__":
    answer(prepare)

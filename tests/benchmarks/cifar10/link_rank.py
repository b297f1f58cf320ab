"""One rank of the trainings on CIFAR-10 over a link; see `modes`.

Its first argument is JSON with the file of the images, and where this rank is. Each line of its input is a method and a
seed; the answer is what `cifar10.rank.train` gives.
"""

import gc
import json
import os
import sys

import numpy as np
from links.rank import join, serve_rendezvous


def main(settings):
    # Whatever libraries print must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if settings["rank"] == 0:
        serve_rendezvous(settings["address"], settings["size"])
    join(settings["rendezvous"])
    # After the rendezvous, which needs neither; each takes seconds to import.
    import keras
    from cifar10.methods import METHODS
    from cifar10.rank import train

    from pipelines.training.collective import HorovodCollective

    collective = HorovodCollective()
    with np.load(settings["images"]) as arrays:
        data = dict(arrays)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        result = train(METHODS[asked["method"]], asked["seed"], data, collective)
        keras.backend.clear_session()
        gc.collect()
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

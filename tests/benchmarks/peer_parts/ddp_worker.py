"""A worker under torchrun that trains a ResNet-50, keeps a checkpoint of every step, and is killed at one step, once.

    torchrun ... ddp_worker.py '{"folder": ..., "steps": 10, "death": 8, "batch_size": 8, "side": 120}'

It is written as PyTorch's page on fault tolerance has it: what it finds in its checkpoint is where it continues. Rank 0
writes the checkpoint, and the time at which each step has ended. Rank 1 kills itself, and the time of the file `death`
says when.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resnet import ResNet50, random_batch
from torch.nn.parallel import DistributedDataParallel


def main(settings):
    """Train to the last step."""
    folder = Path(settings["folder"])
    checkpoint, mark = folder / "checkpoint.pt", folder / "death"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = ResNet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first = 0
    if checkpoint.exists():
        found = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["steps"]
    replica = DistributedDataParallel(model)
    loss = torch.nn.BCEWithLogitsLoss()
    images, targets = random_batch(rank, settings["batch_size"], settings["side"])
    for step in range(first, settings["steps"]):
        if rank == 1 and step == settings["death"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss(replica(images), targets).backward()
        optimizer.step()
        if rank == 0:
            with (folder / "ends.jsonl").open("a") as ends:
                ends.write(json.dumps({"step": step, "restarts": restarts, "ended": time.time()}) + "\n")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

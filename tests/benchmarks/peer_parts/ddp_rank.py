"""One rank of a ResNet-50 under PyTorch's DistributedDataParallel on Gloo: the peer of a whole step of `links/rank.py`.

It takes ready float images, where ours takes stored integers. Input: a line `{"steps": 3}`; output: a line with the
wall seconds of each step and the bytes that the interface sent during them. `{"parameters": true}` asks for their
number.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resnet import ResNet50, random_batch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

# At the end: a script there has the name of a module of Python's own.
sys.path.append(str(Path(__file__).parents[1]))

from links.torch_ranks import join, register_powersgd, sent_bytes
from parts.answers import answer  # type: ignore[import-not-found]


def bf16_on_gloo(state, bucket):
    """The bf16 hook: DDP refuses it on Gloo by its name, although Gloo sums bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def hooked(model: torch.nn.Module, hook: str) -> DistributedDataParallel:
    """The model with one of its hooks; float32 is DDP as it comes."""
    if hook == "float32":
        return DistributedDataParallel(model)
    if hook in ("fp16", "bf16"):
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook if hook == "fp16" else bf16_on_gloo)
        return replica
    # One bucket: with several the hook's later collectives start when their bucket's first has ended, which need not
    # be in the same order on all ranks, and then both wait for ever.
    replica = DistributedDataParallel(model, bucket_cap_mb=1024)
    register_powersgd(replica, 4)
    return replica


def prepare(settings):
    """The function that answers each line."""
    join(settings)
    model = ResNet50()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    replica = hooked(model, settings["hook"])
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    loss = torch.nn.BCEWithLogitsLoss()
    images, targets = random_batch(settings["rank"], settings["batch_size"], settings["side"])

    def step():
        optimizer.zero_grad()
        value = loss(replica(images), targets)
        value.backward()
        optimizer.step()
        if not torch.isfinite(value):
            raise RuntimeError(f"the loss became {value}")

    return lambda asked: {"parameters": parameters} if "parameters" in asked else measure(step, asked["steps"])


def measure(step, steps):
    """Ranks begin each step together, and what they say for that is not counted."""
    seconds, sent = [], 0
    for _ in range(steps):
        dist.barrier()
        before, started = sent_bytes(), time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        sent += sent_bytes() - before
    dist.barrier()
    return {"seconds": seconds, "sent_bytes": sent}


if __name__ == "__main__":
    answer(prepare)

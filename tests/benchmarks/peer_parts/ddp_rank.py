"""One rank of a ResNet-50 under PyTorch's DistributedDataParallel on Gloo: the peer of a whole step of `links/rank.py`.

It takes ready float images, where ours takes stored integers. Input: a line `{"steps": 3}`; output: a line with the
wall seconds of each step and the bytes that the interface sent during them. `{"parameters": true}` asks for their
number.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resnet import ResNet50, random_batch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


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
    # Two steps dense at least, or the hook refuses; its own default is 1000.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return replica


def main(settings):
    """Join, build, answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{settings['rendezvous']}:29401",
        rank=settings["rank"],
        world_size=settings["size"],
    )
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

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"parameters": parameters} if "parameters" in asked else measure(step, asked["steps"])
        print(json.dumps(answer), file=answers, flush=True)


def measure(step, steps):
    """Ranks begin each step together, and what they say for that is not counted."""
    seconds, sent = [], 0
    for _ in range(steps):
        dist.barrier()
        before, started = int(_SENT.read_text()), time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        sent += int(_SENT.read_text()) - before
    dist.barrier()
    return {"seconds": seconds, "sent_bytes": sent}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""One rank of PyTorch's DistributedDataParallel with its PowerSGD hook: the peer of `rank.py`'s exchange alone.

Parameters have the shapes of a ResNet-50's, in PyTorch's order of axes; the backward pass hands over gradients that are
there already, so that a step is the exchange and DDP's own copies, no more.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class HandOver(torch.autograd.Function):
    """A number whose gradients are those given."""

    @staticmethod
    def forward(ctx, gradients, *parameters):
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return (None, *ctx.gradients)


class Model(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        # A kernel (height, width, in, out) of ours is (out, in, height, width) there, which the hook flattens to the
        # transpose of our matrix.
        torch_shapes = [shape if len(shape) < 2 else [shape[-1], *shape[-2::-1]] for shape in shapes]
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in torch_shapes)

    def forward(self, gradients):
        return HandOver.apply(gradients, *self.weights)


def main(settings):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    method = settings["method"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{settings['rendezvous']}:29401",
        rank=settings["rank"],
        world_size=settings["size"],
    )
    # One bucket, as ours has here: with several the hook's later collectives start when their bucket's first has ended,
    # which need not be in the same order on all ranks, and then both wait for ever.
    model = DistributedDataParallel(Model(method["shapes"]), gradient_as_bucket_view=False, bucket_cap_mb=1024)
    if method["rank"]:
        # Two steps dense at least, or the hook refuses; its own default is 1000.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=method["rank"], start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    generator = torch.Generator().manual_seed(settings["rank"])
    gradients = [torch.randn(weight.shape, generator=generator) for weight in model.module.weights]

    def step():
        for weight in model.module.weights:
            weight.grad = None
        model(gradients).backward()

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(step, json.loads(line)["steps"])), file=answers, flush=True)


def measure(step, steps):
    seconds = []
    dist.barrier()
    sent_before = int(_SENT.read_text())
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    return {"seconds": seconds, "sent_bytes": int(_SENT.read_text()) - sent_before}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

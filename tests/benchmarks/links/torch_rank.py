"""One rank of PyTorch's DistributedDataParallel with its PowerSGD hook: the peer of `rank.py`'s exchange alone.

Parameters have the shapes of a ResNet-50's, in PyTorch's order of axes; the backward pass hands over gradients that are
there already, so that a step is the exchange and DDP's own copies, no more.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

# At the end: a script there has the name of a module of Python's own.
sys.path.append(str(Path(__file__).parents[1]))

from links.torch_ranks import join, register_powersgd, sent_bytes
from parts.answers import answer  # type: ignore[import-not-found]


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


def prepare(settings):
    """The function that answers each line."""
    join(settings)
    method = settings["method"]
    # One bucket, as ours has here: with several the hook's later collectives start when their bucket's first has ended,
    # which need not be in the same order on all ranks, and then both wait for ever.
    model = DistributedDataParallel(Model(method["shapes"]), gradient_as_bucket_view=False, bucket_cap_mb=1024)
    if method["rank"]:
        register_powersgd(model, method["rank"])
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    generator = torch.Generator().manual_seed(settings["rank"])
    gradients = [torch.randn(weight.shape, generator=generator) for weight in model.module.weights]

    def step():
        for weight in model.module.weights:
            weight.grad = None
        model(gradients).backward()

    return lambda asked: measure(step, asked["steps"])


def measure(step, steps):
    seconds = []
    dist.barrier()
    sent_before = sent_bytes()
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    return {"seconds": seconds, "sent_bytes": sent_bytes() - sent_before}


if __name__ == "__main__":
    answer(prepare)

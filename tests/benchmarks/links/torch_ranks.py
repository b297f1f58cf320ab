"""What ranks of PyTorch have in common."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def join(settings):
    """Join the other ranks, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{settings['rendezvous']}:29401",
        rank=settings["rank"],
        world_size=settings["size"],
    )


def register_powersgd(model: DistributedDataParallel, rank: int) -> None:
    """Compress with the PowerSGD hook. Two steps at least are dense, or it refuses; its own default is 1000."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def sent_bytes() -> int:
    """Bytes that the interface has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

"""Which rank runs in which barrier task, and the variables that tell Horovod."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The position of one rank among all ranks, on its host, and among the hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """The variables that Horovod's Gloo controller reads before `hvd.init()`."""
        return {
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }


def place(hosts: Sequence[str]) -> list[Placement]:
    """Give each barrier task a rank, contiguous per host, hosts in order of appearance.

    Args:
        hosts: Host of each task, by partition id.

    Returns:
        The placement of each task, by partition id; task 0 always gets rank 0.
    """
    local_sizes = Counter(hosts)
    names = list(local_sizes)
    first_rank = {name: sum(local_sizes[earlier] for earlier in names[:number]) for number, name in enumerate(names)}
    placements = []
    seen: Counter[str] = Counter()
    for host in hosts:
        local_rank = seen[host]
        seen[host] += 1
        # A host takes part in the cross communicator of a local rank only where it has that many ranks.
        peers = [name for name in names if local_sizes[name] > local_rank]
        placements.append(
            Placement(
                host=host,
                rank=first_rank[host] + local_rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=local_sizes[host],
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
        )
    return placements


def devices_of_hosts(placements: Sequence[Placement], devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the variable, by host, with which its ranks see each other's GPUs, the own one at the local rank.

    Args:
        placements: Placement of each task.
        devices: `CUDA_VISIBLE_DEVICES` of each task. A host on which a rank has none or several is left out.
    """
    of_host: dict[str, list[str]] = {}
    for placement, device in sorted(zip(placements, devices, strict=True), key=lambda pair: pair[0].rank):
        of_host.setdefault(placement.host, []).append(device)
    return {
        host: {"CUDA_VISIBLE_DEVICES": ",".join(found)}
        for host, found in of_host.items()
        if not any(device in ("", "-1") or "," in device for device in found)
    }


def visible_devices(addresses: Sequence[str], already_visible: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of a worker, from Spark's GPU addresses.

    Where the executor may see some GPUs only, a number is a position among those, as Spark's own distributor has it,
    and anything else (a UUID) must be one of them.
    """
    if not already_visible:
        return ",".join(addresses)
    seen = already_visible.split(",")
    try:
        return ",".join(seen[int(address)] if address.isdigit() else seen[seen.index(address)] for address in addresses)
    except (ValueError, IndexError):
        raise RuntimeError(
            f"Spark assigned GPU {','.join(addresses)} but the executor's CUDA_VISIBLE_DEVICES is {already_visible}: "
            "let one of them go (spark.worker.resource.gpu.discoveryScript or the variable)"
        ) from None

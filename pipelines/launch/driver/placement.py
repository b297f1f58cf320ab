"""The placement of ranks in barrier tasks, and the environment variables that pass it to Horovod."""

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
        """Return the variables that Horovod's Gloo controller reads before `hvd.init()`."""
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
    """Assign a rank to each barrier task, contiguous per host, with hosts in order of appearance.

    Args:
        hosts: Host of each task, by partition id.

    Returns:
        The placement of each task, by partition id; task 0 always gets rank 0.
    """
    local_sizes = Counter(hosts)
    names = list(local_sizes)
    first_rank = {name: sum(local_sizes[earlier] for earlier in names[:number]) for number, name in enumerate(names)}
    placements = []
    for task, host in enumerate(hosts):
        local_rank = hosts[:task].count(host)
        # A host takes part in the cross communicator of a local rank only if it has that local rank.
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
    """Return, by host, the variable that shows its ranks the GPUs of all of them, in the order of local ranks.

    Args:
        placements: Placement of each task.
        devices: `CUDA_VISIBLE_DEVICES` of each task. A host is left out if one of its ranks has no GPU or several.
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
    """Return `CUDA_VISIBLE_DEVICES` of a worker, from Spark's GPU addresses.

    If the executor sees only some GPUs, a number is a position among those, as in Spark's own distributor. Any other
    address (a UUID) must be one of them.
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

"""The link half of `peers`: whole steps of a ResNet-50 over a slow link, and the time after a worker was killed."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from links import measure as links
from links.network import Hosts, missing
from links.ring import Ring
from peer_parts import environment

from tests.benchmarks.parts.figures import head, row
from tests.patience import patient

PARTS = Path(__file__).parent
SPEEDS = (100, 1000)
BUCKET_MIB = 8.0
"""Ours, the configuration's default; DDP has its own, 25 MiB."""
BATCH_SIZE, SIDE = 8, 120
PEERS = {
    "PyTorch DDP, float32": "float32",
    "PyTorch DDP, fp16 hook": "fp16",
    "PyTorch DDP, bf16 hook": "bf16",
    "PyTorch DDP, PowerSGD hook, rank 4": "powersgd",
}
OURS: dict[str, dict[str, Any]] = {
    "ours, none": {"codec": "none", "parameters": {}},
    "ours, fp16": {"codec": "fp16", "parameters": {}},
    "ours, bf16": {"codec": "bf16", "parameters": {}},
    "ours, powersgd, rank 4": {"codec": "powersgd", "parameters": {"rank": 4}},
}
RATIOS = {
    "float32": ("PyTorch DDP, float32", "ours, none"),
    "fp16": ("PyTorch DDP, fp16 hook", "ours, fp16"),
    "bf16": ("PyTorch DDP, bf16 hook", "ours, bf16"),
    "powersgd": ("PyTorch DDP, PowerSGD hook, rank 4", "ours, powersgd, rank 4"),
}
"""Seconds of the first over seconds of the second."""
STEPS, DEATH, ROUNDS, OUR_ROUNDS = 11, 8, 3, 2
SMOKE_STEPS, SMOKE_DEATH, SMOKE_SIDE = 4, 2, 32
RESTARTS = 3
_RECOVERY_SECONDS = 180


def torch_environment() -> dict[str, str]:
    """For a process with PyTorch: of the folder that `GROUNDSWELL_TORCH` names, or of the rivals' environment.

    Raises:
        RuntimeError: There is no PyTorch.
    """
    folder = os.environ.get(links.TORCH)
    if not folder:
        if reason := environment.missing("torch"):
            raise RuntimeError(f"PyTorch is {reason}")
        folder = str(environment.packages_folder())
    return {"PYTHONPATH": folder}


def steps_of_the_peer(hook: str) -> dict[str, Any]:
    """Steps of DDP at each speed, and its number of parameters."""
    settings = {"hook": hook, "batch_size": BATCH_SIZE, "side": SIDE}
    found: dict[str, Any] = {}
    with Hosts(2) as hosts, Ring(hosts, settings, PARTS / "ddp_rank.py", torch_environment()) as ring:
        found["parameters"] = ring.ask(parameters=True)[0]["parameters"]
        ring.ask(steps=links.WARMUP_STEPS)
        for mbit in SPEEDS:
            hosts.shape(mbit)
            found[links.label(mbit)] = links.timed_steps(ring)
    return found


def steps_of_ours(name: str) -> dict[str, Any]:
    """Steps of ours at each speed, and its number of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        return dict(links.steps_at_every_speed(name, OURS[name], SPEEDS, file, BUCKET_MIB))


def over_links(reasons: dict[str, str]) -> dict[str, Any]:
    """Seconds and bytes of a step by contestant and speed, and the parameters of both networks."""
    found: dict[str, Any] = {"steps": {}, "parameters": {}}
    for name in (*PEERS, *OURS):
        try:
            results = steps_of_the_peer(PEERS[name]) if name in PEERS else steps_of_ours(name)
        except RuntimeError as error:
            reasons[name] = str(error)[-500:]
            print(f"{name}: {reasons[name]}", flush=True)
            continue
        if "parameters" in results:
            found["parameters"]["PyTorch"] = results.pop("parameters")
        if name == "ours, none":  # float32 of every parameter, and nothing else
            found["parameters"]["ours"] = round(results[links.label(SPEEDS[0])]["payload_bytes_per_step"] / 4)
        found["steps"][name] = {
            speed: {
                "seconds_per_step": round(result["seconds_per_step"], 4),
                "sent_bytes_per_step": round(result["sent_bytes_per_step"]),
            }
            for speed, result in results.items()
        }
        print(f"{name:36} {found['steps'][name]}", flush=True)
    print(f"parameters: {found['parameters']}", flush=True)
    return found


def peers_recovery(*, smoke: bool) -> tuple[float, float]:
    """Seconds from a worker's death to the end of the next step under torchrun, and of an undisturbed step.

    The agent restarts both workers, which continue from their checkpoint of the last step. All of it runs in a network
    namespace that has loopback only: PyTorch opens its ports on all interfaces.
    """
    steps, death, side = (SMOKE_STEPS, SMOKE_DEATH, SMOKE_SIDE) if smoke else (STEPS, DEATH, SIDE)
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryFile("w+") as log:
        settings = {"folder": temporary, "steps": steps, "death": death, "batch_size": BATCH_SIZE, "side": side}
        command = [
            *("unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "bash"),
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(f"--max-restarts={RESTARTS}", "--local-addr=127.0.0.1", str(PARTS / "ddp_worker.py")),
            json.dumps(settings),
        ]
        variables = {
            **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "-1"},
            # Otherwise a restarted worker may find the other's address of before in the agent's store, and fails.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **torch_environment()},
            cwd=temporary,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=patient(_RECOVERY_SECONDS))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process)
        if code != 0:
            log.seek(0)
            what = "failed" if code else f"did not end in {_RECOVERY_SECONDS} s"
            raise RuntimeError(f"torchrun {what}: {log.read()[-2000:]}")
        died = Path(temporary, "death").stat().st_mtime
        ends = [json.loads(line) for line in Path(temporary, "ends.jsonl").read_text().splitlines()]
    before = [end["ended"] for end in ends if not end["restarts"]]
    steps_before = [later - earlier for earlier, later in itertools.pairwise(before)]
    after = next(end["ended"] for end in ends if end["restarts"])
    return after - died, statistics.median(steps_before) if steps_before else 0.0


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers, which are in its session but not in its group."""
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(each.pid) == process.pid:
                each.kill()
    process.wait()


def recoveries(reasons: dict[str, str], *, smoke: bool) -> dict[str, Any]:
    """Seconds from the death of a worker to the end of the next step: the peer's, and ours as `modes` measures them."""
    found: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    for _ in range(1 if smoke else ROUNDS):
        try:
            after, step = peers_recovery(smoke=smoke)
        except RuntimeError as error:
            reasons["torchrun"] = str(error)
            print(f"torchrun: {error}", flush=True)
            continue
        found.setdefault("torchrun", []).append(after)
        steps.setdefault("torchrun", []).append(step)
        print(f"torchrun  {after:6.2f} s to the next step, {step:.2f} s a step before", flush=True)
    if not smoke:  # `modes` has a smoke run of its own
        import cloudpickle
        import modes

        cloudpickle.register_pickle_by_value(modes)
        modes.ROUNDS = OUR_ROUNDS
        seconds, before = modes.recoveries(smoke=False)
        found |= {f"ours, {recover}": values for recover, values in seconds.items()}
        steps |= {f"ours, {recover}": values for recover, values in before.items()}

    def medians(values: dict[str, list[float]]) -> dict[str, float | None]:
        return {
            name: round(statistics.median(values[name]), 2) if name in values else None
            for name in ("torchrun", "ours, in_place", "ours, restart")
        }

    return {
        "seconds_to_the_next_step": medians(found),
        "seconds_of_a_step_before": medians(steps),
    }


def measure(*, smoke: bool) -> dict[str, Any]:
    """All figures of the link half; prints its tables."""
    reasons: dict[str, str] = {}
    result: dict[str, Any] = {"steps": {}, "parameters": {}, "recovery": None}
    if reason := missing():
        reasons["links"] = reason
        print(f"link half: skipped, {reason}", flush=True)
    else:
        if smoke:
            reasons["links"] = "a smoke run"
        else:
            result |= over_links(reasons)
        result["recovery"] = recoveries(reasons, smoke=smoke)
    steps = result["steps"]
    ratios: dict[str, Any] = {
        name: {
            speed: round(steps[peer][speed]["seconds_per_step"] / steps[ours][speed]["seconds_per_step"], 3)
            for speed in map(links.label, SPEEDS)
        }
        if peer in steps and ours in steps
        else None
        for name, (peer, ours) in RATIOS.items()
    }
    print(table(result), flush=True)
    return {
        "link_steps": {name: steps.get(name) for name in (*PEERS, *OURS)},
        "link_ratio_peer_to_ours": ratios,
        "parameters": result["parameters"],
        "recovery": result["recovery"],
        "link_reasons": reasons,
    }


def table(result: dict[str, Any]) -> str:
    """Seconds and bytes by contestant, then the recoveries."""
    lines = [head(["two ranks", *(f"{mbit} Mbit/s, {what}" for mbit in SPEEDS for what in ("s a step", "MB sent"))])]
    for name, speeds in result["steps"].items():
        steps = [speeds[links.label(mbit)] for mbit in SPEEDS]
        cells = [(f"{step['seconds_per_step']:.3f}", f"{step['sent_bytes_per_step'] / 1e6:.2f}") for step in steps]
        lines.append(row([name, *chain(*cells)]))
    if result["recovery"]:
        lines += ["", head(["killed worker", "s to the end of the next step", "s of a step before"])]
        after, before = result["recovery"]["seconds_to_the_next_step"], result["recovery"]["seconds_of_a_step_before"]
        lines += [row([name, after[name], before[name]]) for name in after]
    return "\n".join(lines)

"""Rules that keep the images reproducible and safe. No Docker engine is needed: the files themselves are read."""

import itertools
import json
import re
import subprocess
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES, SCRIPTS = sorted(DOCKER.glob("*.Dockerfile")), sorted(DOCKER.rglob("*.sh"))
COMPOSE = DOCKER / "compose.yaml"

Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    """Every instruction as (upper-case name, value), comments left out and continued lines joined."""
    parser = DockerfileParser(fileobj=BytesIO(dockerfile.read_bytes()))
    return [(i["instruction"], i["value"]) for i in parser.structure if i["instruction"] != "COMMENT"]


def stages(dockerfile: Path) -> list[list[Instruction]]:
    """The instructions of one stage after the other, each from its FROM on."""
    found = instructions(dockerfile)
    starts = [number for number, (name, _) in enumerate(found) if name == "FROM"]
    return [found[start:end] for start, end in itertools.pairwise([*starts, len(found)])]


def is_pinned(image: str) -> bool:
    """Whether the image names a digest, or a tag with at least a major and a minor version."""
    return "@sha256:" in image or re.search(r":v?\d+\.\d+[^/]*$", image) is not None


def locked_versions(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(COMPOSE.read_text())


def test_the_files_are_found() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "gpu.Dockerfile", "mlflow.Dockerfile"]
    assert DOCKER / "horovod" / "install.sh" in SCRIPTS


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        ("python", False),
        ("python:latest", False),
        ("python:3", False),
        ("host:5000/python", False),
        ("python:3.11.11-slim-bookworm", True),
        ("nvidia/cuda:12.9.1-devel-ubuntu22.04", True),
        ("python@sha256:0123", True),
    ],
)
def test_pinned_means_a_version_or_a_digest(image: str, pinned: bool) -> None:
    assert is_pinned(image) == pinned


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_instructions_keep_the_rules(self, dockerfile: Path) -> None:
        aliases: set[str] = set()
        for stage in stages(dockerfile):
            image, _, alias = re.sub(r"\s+as\s+", " AS ", stage[0][1], flags=re.IGNORECASE).partition(" AS ")
            assert image in aliases or is_pinned(image), f"{image} can change under the same name"
            aliases.add(alias)
            shells = ""
            for name, value in stage:
                match name:
                    case "ADD":
                        pytest.fail("COPY copies and never downloads")
                    case "COPY":
                        sources = re.findall(r"--from=(\S+)", value)
                        assert all(source in aliases or is_pinned(source) for source in sources), value
                    case "SHELL":
                        shells = value
                    case "ENTRYPOINT" | "CMD":
                        assert value.startswith("["), "a string runs under a shell"
                    case "RUN":
                        self.check_run(value, fails_in_pipes="pipefail" in shells)

    def check_run(self, value: str, *, fails_in_pipes: bool) -> None:
        """Packages come from lists that do not stay, or from locks with hashes; a failing pipe fails the build."""
        if "apt-get" in value:
            assert "apt-get update" in value
            assert value.count("apt-get install") == value.count("--no-install-recommends") == 1
            assert value.index("apt-get install") < value.index("rm -rf /var/lib/apt/lists/*")
        for command in value.split("&&"):
            locked = "--require-hashes" in command or "--no-deps /tmp/wheel/" in command
            assert locked or not re.search(r"\bpip install\b", command)
        assert fails_in_pipes or not re.search(r"(?<!\|)\|(?!\|)", value), f"set SHELL with pipefail before: {value}"

    def test_does_not_end_as_root(self, dockerfile: Path) -> None:
        *_, final = stages(dockerfile)
        users = [value for name, value in final if name == "USER"]
        assert users, "the last stage needs a USER"
        assert re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]), "by number, so that Kubernetes can check it"

    def test_working_folders_are_absolute(self, dockerfile: Path) -> None:
        assert {value[0] for name, value in instructions(dockerfile) if name == "WORKDIR"} == {"/"}

    def test_copied_paths_pass_the_ignore_file(self, dockerfile: Path) -> None:
        lines = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines()
        rules = [line for line in lines if line and not line.startswith("#")]
        assert rules[0] == "*"
        allowed = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
        for name, value in instructions(dockerfile):
            for source in value.split()[:-1] if name == "COPY" and "--from=" not in value else ():
                inside = any(f"{source}/".startswith(f"{path}/") for path in allowed)
                assert inside, f"{source} is left out of the build context"


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_horovod_is_built_by_the_one_script(variant: str) -> None:
    runs = [value for name, value in instructions(DOCKER / f"{variant}.Dockerfile") if name == "RUN"]
    assert any(f"docker/horovod/install.sh /opt/groundswell {variant}" in value for value in runs)


def test_cpu_and_gpu_images_have_the_same_base_and_environment() -> None:
    (*_, cpu), (*_, gpu) = (stages(DOCKER / f"{variant}.Dockerfile") for variant in ("cpu", "gpu"))
    assert cpu[0] == gpu[0]
    of_cpu, of_gpu = (
        {setting for name, value in stage if name == "ENV" for setting in value.split()} for stage in (cpu, gpu)
    )
    assert {setting for setting in of_gpu if not setting.startswith("NVIDIA_")} == of_cpu


@pytest.mark.parametrize("variant", ["cpu", "gpu", "mlflow"])
def test_labels_are_the_versions_that_are_installed(variant: str) -> None:
    lock = {"cpu": "../requirements.lock", "gpu": "horovod/requirements-gpu.lock", "mlflow": "mlflow/requirements.lock"}
    locked = locked_versions(DOCKER / lock[variant])
    locked["tensorflow"] = locked.get("tensorflow") or locked.get("tensorflow-cpu", "")
    *_, last = stages(DOCKER / f"{variant}.Dockerfile")
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(value for name, value in last if name == "LABEL")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = {"title": f"groundswell-{variant}", "version": project["version"], "licenses": project["license"]}
    assert {name: labels.pop(f"org.opencontainers.image.{name}") for name in described} == described
    assert f"python:{labels.pop('groundswell.python')}-slim" in last[0][1]
    if variant != "mlflow":
        assert f"openjdk-{labels.pop('groundswell.java')}-jre-headless" in " ".join(
            value for name, value in last if name == "RUN"
        )
        assert {"groundswell.tensorflow", "groundswell.horovod", "groundswell.pyspark"} < labels.keys()
    assert labels == {name: locked[name.removeprefix("groundswell.")] for name in labels}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(DOCKER)))
def test_scripts_parse_and_are_strict(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.match(r"#!/usr/bin/env bash\n(?s:.*)\nset -euo pipefail\n", script.read_text())


def test_gpus_are_listed_as_spark_reads_them(tmp_path: Path) -> None:
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    nvidia_smi.chmod(0o755)
    found = subprocess.run(
        ["bash", str(DOCKER / "spark" / "discover-gpus.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == {"name": "gpu", "addresses": ["0", "1"]}


def test_mlflow_gets_the_password_by_environment_only(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("p@ss:w/rd%\n")

    def start(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "MLFLOW_DATABASE_PASSWORD_FILE": str(secret)}
        script = DOCKER / "mlflow" / "entrypoint.sh"
        return subprocess.run(["bash", str(script), *command], env=environment, capture_output=True, text=True)

    assert start("printenv", "PGPASSWORD").stdout == "p@ss:w/rd%\n"
    secret.unlink()
    refused = start("true")
    assert (refused.returncode, f"{secret} is missing" in refused.stderr) == (1, True), refused.stderr


def test_compose_services_are_pinned_have_a_limit_of_memory_and_publish_on_this_machine_only(
    compose: dict[str, Any],
) -> None:
    assert any("ports" in service for service in compose["services"].values())
    for name, service in compose["services"].items():
        assert is_pinned(service["image"]), f"service {name}: {service['image']}"
        assert re.search(r"\d+g\b", str(service.get("mem_limit", ""))), f"service {name}"
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), f"service {name}"


def test_compose_holds_no_password(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|TOKEN|KEY", key):
                assert key.endswith("_FILE"), f"{key} holds its value"
                assert str(value).startswith("/run/secrets/")
    assert not re.search(r"://[^/\s@]+:[^/\s@]+@", COMPOSE.read_text()), "an address with a password"
    assert {Path(secret["file"]).parts[0] + "/" for secret in compose["secrets"].values()} <= {
        *(DOCKER / ".gitignore").read_text().split()
    }


def test_compose_waits_only_for_services_with_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait == {"condition": "service_healthy"}
            built_from = services[name].get("build", {}).get("dockerfile")
            in_image = built_from and "HEALTHCHECK" in {i for i, _ in instructions(ROOT / built_from)}
            assert "healthcheck" in services[name] or in_image


def test_event_logs_are_written_where_the_history_server_reads(compose: dict[str, Any]) -> None:
    services, folder = compose["services"], "file:/data/artifacts/spark-events"
    assert f"spark.history.fs.logDirectory={folder} " in services["history"]["environment"]["SPARK_HISTORY_OPTS"]
    assert f"--conf=spark.eventLog.dir={folder}" in services["submit"]["entrypoint"]
    assert folder.removeprefix("file:") in services["history"]["command"][-1], "it is made before a job needs it"
    assert "history" in services["submit"]["depends_on"]


def test_spark_containers_have_one_address(compose: dict[str, Any]) -> None:
    """Gloo binds to what the host name resolves to: a second network would make that a matter of luck."""
    assert [
        compose["services"][name]["networks"] for name in ("master", "worker-1", "worker-2", "submit", "history")
    ] == [["cluster"]] * 5


def test_horovod_recipes_of_cpu_and_gpu_agree() -> None:
    cpu = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    gpu = tomllib.loads((DOCKER / "horovod" / "gpu.toml").read_text())
    assert (gpu["dependency-metadata"], gpu["extra-build-dependencies"]["horovod"]) == (
        cpu["dependency-metadata"],
        [name.replace("tensorflow-cpu", "tensorflow") for name in cpu["extra-build-dependencies"]["horovod"]],
    )
    variables = gpu["extra-build-variables"]["horovod"]
    assert cpu["extra-build-variables"]["horovod"].items() <= variables.items()
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"


@pytest.mark.parametrize("lock", ["horovod/requirements-gpu.lock", "mlflow/requirements.lock"])
def test_locks_agree_on_shared_packages(lock: str) -> None:
    cpu, other = locked_versions(ROOT / "requirements.lock"), locked_versions(DOCKER / lock)
    shared = cpu.keys() & other.keys()
    assert len(shared) > 50
    assert {name: other[name] for name in shared} == {name: cpu[name] for name in shared}


def test_gpu_lock_has_one_tensorflow_and_no_development_tools() -> None:
    cpu = locked_versions(ROOT / "requirements.lock")
    gpu = locked_versions(DOCKER / "horovod" / "requirements-gpu.lock")
    assert (gpu["tensorflow"], "nvidia-nccl-cu12" in gpu) == (cpu["tensorflow-cpu"], True), gpu
    assert not {"tensorflow-cpu", "pytest", "mypy"} & gpu.keys()


def test_what_builds_a_package_is_in_a_lock() -> None:
    """uv compares it with the lock's hashes only where the lock has a version of it."""
    recipe = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked = locked_versions(ROOT / "requirements.lock") | locked_versions(DOCKER / "horovod/requirements-build.lock")
    asked = recipe["build-system"]["requires"] + recipe["tool"]["uv"]["extra-build-dependencies"]["horovod"]
    assert all(locked[need.name] in need.specifier for need in map(Requirement, asked))


@pytest.mark.parametrize("lock", sorted(DOCKER.rglob("*.lock")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_locks_are_hashed_and_name_no_server(lock: Path) -> None:
    assert "://" not in lock.read_text()
    entries = re.split(r"^(?=[a-z0-9])", lock.read_text(), flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)

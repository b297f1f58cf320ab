"""Rules that keep the images reproducible and safe. No Docker engine is needed: the files themselves are read."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
SCRIPTS = sorted(DOCKER.rglob("*.sh"))
COMPOSE = DOCKER / "compose.yaml"

Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    """Every instruction as (upper-case name, value), comments left out and continued lines joined."""
    parser = DockerfileParser(fileobj=BytesIO(dockerfile.read_bytes()))
    return [(i["instruction"], i["value"]) for i in parser.structure if i["instruction"] != "COMMENT"]


def stages(dockerfile: Path) -> Iterator[list[Instruction]]:
    """The instructions of one stage after the other, each from its FROM on."""
    stage: list[Instruction] = []
    for name, value in instructions(dockerfile):
        if name == "FROM" and stage:
            yield stage
            stage = []
        stage.append((name, value))
    yield stage


def is_pinned(image: str) -> bool:
    """Whether the image names a digest, or a tag with at least a major and a minor version."""
    return "@sha256:" in image or re.search(r":v?\d+\.\d+[^/]*$", image) is not None


def locked_versions(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(loaded, dict)
    return loaded


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
    def test_bases_are_pinned(self, dockerfile: Path) -> None:
        names: set[str] = set()
        for stage in stages(dockerfile):
            name, value = stage[0]
            assert name == "FROM"
            image, _, alias = re.sub(r"\s+as\s+", " AS ", value, flags=re.IGNORECASE).partition(" AS ")
            assert image in names or is_pinned(image), f"{image} can change under the same name"
            names.add(alias)

    def test_copies_from_known_stages_or_pinned_images(self, dockerfile: Path) -> None:
        aliases = {value.rpartition(" AS ")[2] for name, value in instructions(dockerfile) if name == "FROM"}
        for name, value in instructions(dockerfile):
            source = re.search(r"--from=(\S+)", value)
            if name == "COPY" and source:
                assert source[1] in aliases or is_pinned(source[1])

    def test_copies_and_never_adds(self, dockerfile: Path) -> None:
        assert "ADD" not in {name for name, _ in instructions(dockerfile)}

    def test_apt_takes_what_is_asked_and_leaves_no_lists(self, dockerfile: Path) -> None:
        for name, value in instructions(dockerfile):
            if name == "RUN" and "apt-get" in value:
                assert "apt-get update" in value
                assert value.count("apt-get install") == value.count("--no-install-recommends") == 1
                assert value.index("apt-get install") < value.index("rm -rf /var/lib/apt/lists/*")

    def test_installs_from_locks_with_hashes(self, dockerfile: Path) -> None:
        for name, value in instructions(dockerfile):
            for command in value.split("&&") if name == "RUN" else ():
                if re.search(r"\bpip install\b", command):
                    assert "--require-hashes" in command or "--no-deps /tmp/wheel/" in command

    def test_a_failing_pipe_fails_the_build(self, dockerfile: Path) -> None:
        for stage in stages(dockerfile):
            pipefail = False
            for name, value in stage:
                pipefail = pipefail or (name == "SHELL" and "pipefail" in value)
                piped = re.search(r"(?<!\|)\|(?!\|)", value)
                assert not (name == "RUN" and piped) or pipefail, f"set SHELL with pipefail before: {value}"

    def test_does_not_end_as_root(self, dockerfile: Path) -> None:
        *_, final = stages(dockerfile)
        users = [value for name, value in final if name == "USER"]
        assert users, "the last stage needs a USER"
        assert re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]), "by number, so that Kubernetes can check it"

    def test_working_folders_are_absolute(self, dockerfile: Path) -> None:
        folders = [value for name, value in instructions(dockerfile) if name == "WORKDIR"]
        assert folders
        assert all(folder.startswith("/") for folder in folders)

    def test_commands_are_lists(self, dockerfile: Path) -> None:
        for name, value in instructions(dockerfile):
            assert name not in {"ENTRYPOINT", "CMD"} or value.startswith("["), "a string runs under a shell"

    def test_copied_paths_pass_the_ignore_file(self, dockerfile: Path) -> None:
        lines = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines()
        rules = [line for line in lines if line and not line.startswith("#")]
        assert rules[0] == "*"
        allowed = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
        for name, value in instructions(dockerfile):
            if name == "COPY" and "--from=" not in value:
                for source in value.split()[:-1]:
                    inside = [path for path in allowed if source == path or source.startswith(f"{path}/")]
                    assert inside, f"{source} is left out of the build context"


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_horovod_is_built_by_the_one_script(variant: str) -> None:
    runs = [value for name, value in instructions(DOCKER / f"{variant}.Dockerfile") if name == "RUN"]
    assert any(f"docker/horovod/install.sh /opt/groundswell {variant}" in value for value in runs)


def test_cpu_and_gpu_images_have_the_same_base_and_environment() -> None:
    def final(variant: str) -> list[Instruction]:
        *_, last = stages(DOCKER / f"{variant}.Dockerfile")
        return last

    def environment(variant: str) -> set[str]:
        return {setting for name, value in final(variant) if name == "ENV" for setting in value.split()}

    assert final("cpu")[0] == final("gpu")[0]
    gpu_only = {setting for setting in environment("gpu") if setting.startswith("NVIDIA_")}
    assert environment("gpu") - gpu_only == environment("cpu")


@pytest.mark.parametrize("variant", ["cpu", "gpu", "mlflow"])
def test_labels_are_the_versions_that_are_installed(variant: str) -> None:
    lock = {"cpu": "../requirements.lock", "gpu": "horovod/requirements-gpu.lock", "mlflow": "mlflow/requirements.lock"}
    locked = locked_versions(DOCKER / lock[variant])
    locked["tensorflow"] = locked.get("tensorflow") or locked.get("tensorflow-cpu", "")
    *_, last = stages(DOCKER / f"{variant}.Dockerfile")
    text = " ".join(value for name, value in last if name == "LABEL")
    labels = dict(re.findall(r'([\w.]+)="([^"]*)"', text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels.pop("org.opencontainers.image.title") == f"groundswell-{variant}"
    assert labels.pop("org.opencontainers.image.version") == project["version"]
    assert labels.pop("org.opencontainers.image.licenses") == project["license"]
    assert f"python:{labels.pop('groundswell.python')}-slim" in last[0][1]
    if variant != "mlflow":
        run = " ".join(value for name, value in last if name == "RUN")
        assert f"openjdk-{labels.pop('groundswell.java')}-jre-headless" in run
        assert {"groundswell.tensorflow", "groundswell.horovod", "groundswell.pyspark"} < labels.keys()
    assert labels == {name: locked[name.removeprefix("groundswell.")] for name in labels}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(DOCKER)))
def test_scripts_parse_and_are_strict(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()


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
    entrypoint = ["bash", str(DOCKER / "mlflow" / "entrypoint.sh")]
    environment = {"PATH": "/usr/bin:/bin", "MLFLOW_DATABASE_PASSWORD_FILE": str(secret)}
    shown = subprocess.run(
        [*entrypoint, "printenv", "PGPASSWORD"], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "p@ss:w/rd%\n"

    secret.unlink()
    refused = subprocess.run([*entrypoint, "true"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"{secret} is missing" in refused.stderr


def test_compose_images_are_pinned(compose: dict[str, Any]) -> None:
    assert compose["services"]
    for name, service in compose["services"].items():
        assert is_pinned(service["image"]), f"service {name}: {service['image']}"


def test_compose_publishes_on_this_machine_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(str(port).startswith("127.0.0.1:") for port in ports)


def test_compose_holds_no_password(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert isinstance(service.get("environment", {}), dict)
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|TOKEN|KEY", key):
                assert key.endswith("_FILE"), f"{key} holds its value"
                assert str(value).startswith("/run/secrets/")
    assert not re.search(r"://[^/\s@]+:[^/\s@]+@", COMPOSE.read_text()), "an address with a password"
    for secret in compose["secrets"].values():
        ignored = (DOCKER / ".gitignore").read_text().split()
        assert Path(secret["file"]).parts[0] + "/" in ignored


def test_compose_waits_only_for_services_with_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait == {"condition": "service_healthy"}
            built_from = services[name].get("build", {}).get("dockerfile")
            in_image = built_from and "HEALTHCHECK" in {i for i, _ in instructions(ROOT / built_from)}
            assert "healthcheck" in services[name] or in_image


def test_every_container_has_a_limit_of_memory(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.search(r"\d+g\b", str(service.get("mem_limit", ""))), f"service {name}"


def test_event_logs_are_written_where_the_history_server_reads(compose: dict[str, Any]) -> None:
    services = compose["services"]
    folder = "file:/data/artifacts/spark-events"
    assert f"spark.history.fs.logDirectory={folder} " in services["history"]["environment"]["SPARK_HISTORY_OPTS"]
    assert f"--conf=spark.eventLog.dir={folder}" in services["submit"]["entrypoint"]
    assert folder.removeprefix("file:") in services["history"]["command"][-1], "it is made before a job needs it"
    assert "history" in services["submit"]["depends_on"]


def test_spark_containers_have_one_address(compose: dict[str, Any]) -> None:
    """Gloo binds to what the host name resolves to: a second network would make that a matter of luck."""
    for name in ("master", "worker-1", "worker-2", "submit", "history"):
        assert compose["services"][name]["networks"] == ["cluster"]


def test_horovod_recipes_of_cpu_and_gpu_agree() -> None:
    cpu = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    gpu = tomllib.loads((DOCKER / "horovod" / "gpu.toml").read_text())
    assert gpu["dependency-metadata"] == cpu["dependency-metadata"]
    tensorflow = [name.replace("tensorflow-cpu", "tensorflow") for name in cpu["extra-build-dependencies"]["horovod"]]
    assert gpu["extra-build-dependencies"]["horovod"] == tensorflow
    variables = gpu["extra-build-variables"]["horovod"]
    assert cpu["extra-build-variables"]["horovod"].items() <= variables.items()
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"


@pytest.mark.parametrize("lock", ["horovod/requirements-gpu.lock", "mlflow/requirements.lock"])
def test_locks_agree_on_shared_packages(lock: str) -> None:
    cpu = locked_versions(ROOT / "requirements.lock")
    other = locked_versions(DOCKER / lock)
    shared = cpu.keys() & other.keys()
    assert len(shared) > 50
    assert {name: other[name] for name in shared} == {name: cpu[name] for name in shared}


def test_gpu_lock_has_one_tensorflow_and_no_development_tools() -> None:
    cpu = locked_versions(ROOT / "requirements.lock")
    gpu = locked_versions(DOCKER / "horovod" / "requirements-gpu.lock")
    assert gpu["tensorflow"] == cpu["tensorflow-cpu"]
    assert "nvidia-nccl-cu12" in gpu
    assert not {"tensorflow-cpu", "pytest", "mypy"} & gpu.keys()


@pytest.mark.parametrize("lock", sorted(DOCKER.rglob("*.lock")), ids=lambda path: path.parent.name)
def test_locks_are_hashed_and_name_no_server(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)

"""The manifests of docker/kubernetes against the schemas of Kubernetes and of the Spark operator: without a cluster."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.sections.launch import LaunchConfig
from tests.patience import patient, wait_until

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
KUBERNETES = "1.31"
Document = dict[str, Any]


def documents() -> Iterator[tuple[str, Document]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}: {document['kind']}", document


PLAIN = [(name, document) for name, document in documents() if document["kind"] != "SparkApplication"]


@pytest.fixture(scope="module")
def validator(shared_data: Path) -> Any:
    """The operator's schema, in which an unknown field is a mistake too."""
    definition = yaml.safe_load((shared_data / "schemas" / "sparkapplication.crd.yaml").read_text())
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1beta2")
    schema = version["schema"]["openAPIV3Schema"]
    for part in mappings(schema):
        if part.get("x-kubernetes-int-or-string"):
            for key in ("type", "anyOf", "pattern"):
                part.pop(key, None)
        open_ended = "additionalProperties" in part or part.get("x-kubernetes-preserve-unknown-fields")
        if part.get("type") == "object" and "properties" in part and not open_ended:
            part["additionalProperties"] = False
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft4Validator(schema)


def mistakes(validator: Any, document: Document) -> list[str]:
    return ["/".join(map(str, error.absolute_path)) + ": " + error.message for error in validator.iter_errors(document)]


def mappings(document: Any) -> Iterator[Document]:
    """The document itself and all mappings in it."""
    if isinstance(document, dict):
        yield document
        document = list(document.values())
    for each in document if isinstance(document, list) else ():
        yield from mappings(each)


@pytest.fixture(scope="module")
def application() -> Document:
    (found,) = (document for _, document in documents() if document["kind"] == "SparkApplication")
    return found


def test_the_application_fits_the_operators_schema(application: Document, validator: Any) -> None:
    assert mistakes(validator, application) == []


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("spec/restartPolicy/type", "never", "'never' is not one of"),
        ("spec/sparkVersion", None, "'sparkVersion' is a required property"),
        ("spec/dynamicAlocation", {"enabled": False}, "'dynamicAlocation' was unexpected"),
        ("spec/executor/instances", "4", "'4' is not of type 'integer'"),
        ("spec/executor/volumeMount", [], "'volumeMount' was unexpected"),
        ("spec/executor/volumeMounts/0/mountPath", None, "'mountPath' is a required property"),
        ("spec/driver/env/2/valueFrom/secretKeyRef/key", None, "'key' is a required property"),
        ("spec/driver/envFrom", "groundswell-s3", "is not of type 'array'"),
        ("spec/volumes/1/emptyDir/medum", "Memory", "'medum' was unexpected"),
        ("spec/sparkConf/spark.task.cpus", 8, "8 is not of type 'string'"),
        ("spec/executor/gpu", {"name": "nvidia.com/gpu"}, "'quantity' is a required property"),
    ],
)
def test_mistakes_in_the_application_are_found(
    application: Document, validator: Any, changed: Callable[..., Document], path: str, value: Any, found: str
) -> None:
    (mistake,) = mistakes(validator, changed(application, path, value))
    assert found in mistake


def plain_mistake(document: Document) -> str:
    """The first mistake by Kubernetes' own schema of that kind; empty where there is none."""
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("document", [each for _, each in PLAIN], ids=[name for name, _ in PLAIN])
def test_plain_manifests_fit_kubernetes(document: Document) -> None:
    assert plain_mistake(document) == ""


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec/replica", 1),
        ("Deployment", "spec/selector", None),
        ("Deployment", "spec/template/spec/containers/0/ports/0/containerPort", "5000"),
        ("Deployment", "spec/template/spec/containers/0/readinessProb", {}),
        ("Service", "spec/ports/0/port", None),
        ("PersistentVolumeClaim", "spec/accessModes", "ReadWriteMany"),
        ("Pod", "spec/containers/0/volumeMounts/0/mountPath", None),
        ("Pod", "spec/restartPolicy", ["Never"]),
        ("RoleBinding", "roleRef", None),
        ("Role", "rules/0/verbs", None),
        ("Role", "rules/0/resources", "pods"),
        ("ServiceAccount", "automountServiceAccountTokens", False),
        ("Namespace", "spec", {"finalizer": []}),
    ],
)
def test_mistakes_in_plain_manifests_are_found(
    changed: Callable[..., Document], kind: str, path: str, value: Any
) -> None:
    assert plain_mistake(changed(next(each for _, each in PLAIN if each["kind"] == kind), path, value)) != ""


def test_every_executor_has_one_rank_and_the_command_is_one_of_ours(application: Document) -> None:
    from jobs.shell.command import read_config
    from jobs.shell.verbs import parser_of

    spec = application["spec"]
    config = read_config(parser_of("train").parse(spec["arguments"]))
    conf, executor = spec["sparkConf"], spec["executor"]
    assert (executor["instances"], executor["cores"], int(conf["spark.task.resource.gpu.amount"])) == (
        config.launch.num_workers,
        int(conf["spark.task.cpus"]),
        config.launch.gpus_per_worker,
    )
    assert (spec["restartPolicy"], spec["dynamicAllocation"]) == ({"type": "Never"}, {"enabled": False})
    assert config.launch.retries > 0
    assert "/dev/shm" in [mount["mountPath"] for mount in executor["volumeMounts"]]
    assert config.dataset.path.startswith("/data/")


def test_secrets_are_references() -> None:
    for name, document in documents():
        for variable in [each for part in mappings(document) for each in part.get("env", [])]:
            if re.search(r"KEY|SECRET|TOKEN|PASSWORD$", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"], f"{name}: {variable['name']} holds its value"
    assert not any(re.search(r"://[^/\s@]+:[^/\s@]+@", path.read_text()) for path in FOLDER.iterdir())


def test_a_driver_cannot_read_the_password_of_the_database_and_executors_have_no_rights() -> None:
    holders = {each["metadata"]["namespace"] for _, each in PLAIN if "'secretName': 'mlflow-database'" in str(each)}
    roles = [each for _, each in PLAIN if each["kind"] == "RoleBinding"]
    assert (holders, [each["metadata"]["namespace"] for each in roles]) == ({"groundswell-mlflow"}, ["groundswell"])
    executor = yaml.safe_load((FOLDER / "executor-template.yaml").read_text())["spec"]
    assert executor["automountServiceAccountToken"] is False
    assert executor["serviceAccountName"] not in [subject["name"] for role in roles for subject in role["subjects"]]


def test_containers_have_a_read_only_root_and_a_folder_for_temporary_files() -> None:
    for name, document in documents():
        for part in mappings(document):
            if "capabilities" in part.get("securityContext", {}):
                assert part["securityContext"]["readOnlyRootFilesystem"], name
                assert "/tmp" in [mount["mountPath"] for mount in part["volumeMounts"]], name


def test_the_plain_submission_asks_for_what_the_application_asks_for(application: Document) -> None:
    spec = application["spec"]
    command = (FOLDER / "README.md").read_text().split("\nspark-submit ")[1].split("```")[0]
    options, arguments = command.split(spec["mainApplicationFile"])
    settings = dict(re.findall(r"--conf (\S+?)=(\S+)", options))
    asked = {
        **spec["sparkConf"],
        "spark.executor.instances": str(spec["executor"]["instances"]),
        "spark.dynamicAllocation.enabled": str(spec["dynamicAllocation"]["enabled"]).lower(),
        "spark.kubernetes.container.image": spec["image"],
    }
    for role in ("driver", "executor"):
        asked |= {f"spark.{role}.{name}": str(spec[role][name]) for name in ("cores", "memory", "memoryOverhead")}
        assert Path(settings[f"spark.kubernetes.{role}.podTemplateFile"]).name == f"{role}-template.yaml"
    assert asked.items() <= settings.items()
    assert arguments.replace("\\\n", " ").split() == spec["arguments"]


@pytest.mark.parametrize("role", ["driver", "executor"])
def test_a_template_makes_the_pod_that_the_application_makes(application: Document, role: str) -> None:
    spec, asked = application["spec"], application["spec"][role]
    pod = yaml.safe_load((FOLDER / f"{role}-template.yaml").read_text())["spec"]
    (container,) = pod["containers"]
    shared = ("env", "volumeMounts", "securityContext")
    assert ([container[name] for name in shared], pod["securityContext"]) == (
        [asked[name] for name in shared],
        asked["podSecurityContext"],
    )
    assert {each["name"]: each for each in pod["volumes"]} == {
        each["name"]: each
        for each in spec["volumes"]
        if each["name"] in {mount["name"] for mount in asked["volumeMounts"]}
    }
    asked = {**asked, "serviceAccountName": asked.get("serviceAccount"), "restartPolicy": spec["restartPolicy"]["type"]}
    same = ("nodeSelector", "tolerations", "serviceAccountName", "restartPolicy", "terminationGracePeriodSeconds")
    assert [pod.get(name) for name in same] == [asked.get(name) for name in same]
    assert pod["terminationGracePeriodSeconds"] > LaunchConfig.default("stop_grace_seconds")


def run_entrypoint(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What it would run, one word after the other; tini and Java are shell scripts that print their arguments."""
    for name in ("tini", "bin/java", "bin/spark-submit"):
        script = folder / name
        script.parent.mkdir(exist_ok=True)
        script.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        script.chmod(0o755)
    done = subprocess.run(
        ["bash", str(FOLDER.parent / "spark" / "entrypoint.sh"), *arguments],
        env={"PATH": f"{folder}:/usr/bin:/bin", "JAVA_HOME": str(folder), "SPARK_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_entrypoint_starts_a_driver(tmp_path: Path) -> None:
    words = run_entrypoint(tmp_path, "driver", "--class", "x", "a b", SPARK_DRIVER_BIND_ADDRESS="10.0.0.7")
    assert words[:4] == ["-s", "--", str(FOLDER.parent / "spark" / "pass-sigterm.sh"), f"{tmp_path}/bin/spark-submit"]
    assert "spark.driver.bindAddress=10.0.0.7" in words
    assert words[-5:] == ["--deploy-mode", "client", "--class", "x", "a b"]


def test_sigterm_reaches_the_program_and_not_the_jvm(tmp_path: Path) -> None:
    """The JVM is a shell script that starts a program and ends as that does; a second child stands for a daemon."""
    (tmp_path / "program.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.5)\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('started').touch()\n"
        f"time.sleep({patient(60)})\n"
    )
    (tmp_path / "submit").write_text(
        "#!/bin/bash\n"
        "trap 'touch stopped; exit 143' TERM\n"
        "bash -c 'trap \"touch daemon-stopped\" TERM; while true; do sleep 0.1; done' pyspark.daemon & daemon=$!\n"
        f"{sys.executable} program.py & wait $!; code=$?; kill -KILL $daemon; exit $code\n"
    )
    (tmp_path / "submit").chmod(0o755)
    process = subprocess.Popen(["bash", str(FOLDER.parent / "spark" / "pass-sigterm.sh"), "./submit"], cwd=tmp_path)
    wait_until((tmp_path / "started").exists)
    process.terminate()
    assert (process.wait(patient(60)), sorted(path.name for path in tmp_path.iterdir())) == (
        130,
        ["program.py", "saved", "started", "submit"],
    )


@pytest.mark.parametrize("code", [0, 3])
def test_the_code_of_the_program_is_that_of_the_pod(tmp_path: Path, code: int) -> None:
    script = FOLDER.parent / "spark" / "pass-sigterm.sh"
    assert subprocess.run(["bash", str(script), "bash", "-c", f"exit {code}"]).returncode == code


def test_decommissioning_waits_for_the_executor(tmp_path: Path) -> None:
    """In a pod the executor is the only Java; here a namespace of processes stands for the pod."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system has no namespaces of processes for its users")
    java = tmp_path / "java"
    shutil.copy(shutil.which("bash") or "", java)
    (tmp_path / "executor.sh").write_text(
        "trap 'sleep 1; touch decommissioned; exit 0' PWR\ntouch started\nwhile true; do sleep 0.1; done\n"
    )
    pod = f"{java} executor.sh & until [ -e started ]; do sleep 0.1; done; bash {FOLDER.parent}/spark/decom.sh"
    done = subprocess.run([*unshare, "bash", "-c", f"{pod}; ls"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["decommissioned", "executor.sh", "java", "started"], done.stderr


def test_the_entrypoint_starts_an_executor(tmp_path: Path) -> None:
    names = "DRIVER_URL EXECUTOR_ID EXECUTOR_CORES APPLICATION_ID EXECUTOR_POD_IP RESOURCE_PROFILE_ID EXECUTOR_POD_NAME"
    values = {f"SPARK_{name}": name.lower() for name in names.split()}
    options = {f"SPARK_JAVA_OPT_{number}": f"-Doption={number}" for number in range(11)}
    words = run_entrypoint(
        tmp_path, "executor", SPARK_EXECUTOR_MEMORY="2g", SPARK_CONF_DIR="/opt/spark/conf", **values, **options
    )
    assert (words[2:14], words[14:18]) == (
        [f"{tmp_path}/bin/java", *(f"-Doption={number}" for number in range(11))],
        ["-Xms2g", "-Xmx2g", "-cp", f"/opt/spark/conf:{tmp_path}/jars/*"],
    )
    assert words[18].endswith("k8s.KubernetesExecutorBackend")
    assert dict(zip(words[19::2], words[20::2], strict=True)) == {
        "--driver-url": "driver_url",
        "--executor-id": "executor_id",
        "--cores": "executor_cores",
        "--app-id": "application_id",
        "--hostname": "executor_pod_ip",
        "--resourceProfileId": "resource_profile_id",
        "--podName": "executor_pod_name",
    }


def test_the_entrypoint_runs_any_other_command(tmp_path: Path) -> None:
    assert run_entrypoint(tmp_path, "groundswell", "--help") == ["--", "groundswell", "--help"]

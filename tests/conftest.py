"""What all tests share: the sample data, one Spark session, one small prepared dataset."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import cloudpickle
import numpy as np
import pyspark
import pytest
from pyspark.sql import SparkSession

from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE, ForkServer
from pipelines.launch.rank.process import rank_environment
from tests.patience import patient, wait_until

PROJECT = Path(__file__).parent.parent
pytest_plugins = ["tests.browser", "tests.patience", "tests.failure_report"]
_CALL = """
import pickle, sys
function, args = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(function(*args), open(sys.argv[2], "wb"))
"""


_FORKED = (
    *("tensorflow", "keras", "horovod.tensorflow", "horovod.tensorflow.keras", "pipelines.training.worker"),
    *("mlflow.keras", "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store"),
)
_fork_server: ForkServer | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Start the interpreter that ranks are forked from, one for all processes of tests; it imports when it is asked."""
    global _fork_server
    if not hasattr(config, "workerinput"):  # processes of xdist are told by the environment
        _fork_server = ForkServer(_FORKED, {**os.environ, **rank_environment(1), "CUDA_VISIBLE_DEVICES": "-1"})
        os.environ[FORK_SERVER_VARIABLE] = _fork_server.address


def pytest_unconfigure() -> None:
    if _fork_server is not None:
        _fork_server.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only long tests are asked for, do not import files without any: importing all takes half a minute."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and config.option.markexpr.startswith("long ") and "mark.long" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file whose tests take longest comes first, so that no process ends long after the other one."""
    items.sort(key=lambda item: item.path.name != "test_benchmarks.py")


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are new interpreters, as users have them, and no forks."""
    monkeypatch.delenv(FORK_SERVER_VARIABLE)


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="session")
def eurosat_manifest() -> Callable[..., Any]:
    """Gives the manifest of a dataset of which tests of records need no more; `seed` makes it another dataset."""
    from tests.pipelines.training.manifests import rgb_manifest

    return lambda seed=7: rgb_manifest(archive="eurosat_rgb", settings={"seed": seed}, statistics={})


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real sample patches, which are not part of the project."""
    folder = PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no sample data at {folder}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def s3_environment() -> dict[str, str]:
    """Where the tests' object store will listen, and keys for it; Spark's processes inherit this at their start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(environment)
    return environment


def answers(url: str) -> bool:
    """Whether a server of HTTP is there."""
    try:
        urlopen(url, timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def s3(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server on loopback, in a process of its own; the URL of a bucket."""
    import fsspec

    port, log = s3_environment["AWS_ENDPOINT_URL"].rpartition(":")[2], tmp_path_factory.mktemp("s3") / "log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as server:
        try:
            wait_until(lambda: answers(f"{s3_environment['AWS_ENDPOINT_URL']}/moto-api/") or server.poll() is not None)
            assert server.poll() is None, log.read_text()
            fsspec.filesystem("s3").mkdir("tests")
            yield "s3://tests"
        finally:
            server.kill()


@pytest.fixture
def s3_folder(s3: str) -> str:
    """A URL under which nothing is yet."""
    return f"{s3}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session", autouse=True)
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spark's folder as links: executors of a `local-cluster` write to `work` in it, and not into the environment."""
    home = tmp_path_factory.mktemp("spark")
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    os.environ["SPARK_HOME"] = str(home)
    return home


@pytest.fixture(scope="session")
def spark(s3_environment: dict[str, str], spark_home: Path) -> Iterator[SparkSession]:
    """One local session for the whole test run, with two slots."""
    from jobs.shell.session import spark_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with spark_session("groundswell tests", "local[2]") as session:
        yield session


@pytest.fixture(scope="session")
def in_fresh_process(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Callable[..., Any]:
    """Calls a function in a new Python, where a Spark session of its own can be; returns its value."""

    def call(function: Callable[..., Any], *args: Any, timeout: float = 280) -> Any:
        folder = tmp_path_factory.mktemp("process")
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            (folder / "call").write_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])
        paths = [str(project), os.environ.get("PYTHONPATH", "")]
        (folder / "tmp").mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYSPARK_PYTHON": sys.executable,
            "TMPDIR": str(folder / "tmp"),
        }
        command = [sys.executable, "-c", _CALL, str(folder / "call"), str(folder / "value")]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patient(timeout), cwd=folder
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return pickle.loads((folder / "value").read_bytes())

    return call


@pytest.fixture(scope="session")
def small_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated BigEarthNet v2.0 archive of 32 + 12 + 12 patches."""
    from pipelines.archives.synthetic.files import generate_bigearthnet_v2

    root = tmp_path_factory.mktemp("archive") / "BigEarthNet"
    generate_bigearthnet_v2(root, train=32, validation=12, test=12, seed=7)
    return root


@pytest.fixture(scope="session")
def small_dataset(spark: SparkSession, small_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small archive, prepared with small row groups, so that there are several."""
    from pipelines.archives.table import open_archive
    from pipelines.dataset.prepare.writer import prepare_dataset

    path = tmp_path_factory.mktemp("dataset") / "small"
    archive = open_archive("bigearthnet_v2", root=str(small_archive))
    prepare_dataset(spark, archive, path, row_group_mib=1, row_groups_per_shard=2, seed=3)
    return path


@pytest.fixture(scope="session")
def edit_manifest() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """Changes the values of a `dataset.json` as its writer would have written them, with a fitting digest."""
    from pipelines.dataset.format.manifest import FILE_NAME, Manifest, write_manifest

    def edit(dataset: Path, change: Callable[[dict[str, Any]], None]) -> None:
        values = json.loads((dataset / FILE_NAME).read_text())
        del values["digest"]
        change(values)
        write_manifest(Manifest.model_validate_json(json.dumps(values)), dataset)

    return edit


@pytest.fixture(scope="session")
def small_network() -> str:
    """The setting that chooses the smallest network, where it does not matter what is trained."""
    return "model={name: resnet_cifar, depth: 2, width_factor: 0.5}"


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Makes an empty store as a copy of the first one, whose tables take MLflow a second; gives its URI."""
    template = tmp_path_factory.mktemp("stores") / "mlflow.db"

    def make(file: Path) -> str:
        if not template.exists():
            from mlflow import MlflowClient

            MlflowClient(f"sqlite:///{template}").search_experiments()
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(template, file)
        return f"sqlite:///{file}"

    return make


@pytest.fixture
def mlflow_store(tmp_path: Path, new_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store of its own."""
    uri = new_store(tmp_path / "mlruns" / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture(scope="module")
def store_of_module(tmp_path_factory: pytest.TempPathFactory, new_store: Callable[[Path], str]) -> str:
    """A store for all tests of a module."""
    return new_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture
def module_mlflow_store(store_of_module: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of this module, in use."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_of_module)
    return store_of_module


@pytest.fixture(scope="session")
def changed() -> Callable[[Any, str, Any], Any]:
    """Copies a document of mappings and lists with another value at `a/b/0/c`, or without it where that is None."""

    def change(document: Any, path: str, value: Any) -> Any:
        copy = json.loads(json.dumps(document))  # YAML's aliases are one object
        *folders, last = [int(name) if name.isdecimal() else name for name in path.split("/")]
        place: Any = copy
        for name in folders:
            place = place[name]
        if value is None:
            del place[last]
        else:
            place[last] = value
        return copy

    return change


@pytest.fixture
def artifact_text(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], str]:
    """Reads an artifact of a run from a store, whichever store MLflow uses in this process otherwise."""
    from mlflow import MlflowClient

    def read(store: str, run_id: str, name: str) -> str:
        return Path(
            MlflowClient(store).download_artifacts(run_id, name, str(tmp_path_factory.mktemp("artifacts")))
        ).read_text()

    return read


@pytest.fixture(scope="session")
def scaling_measurements() -> Callable[..., dict[str, Any]]:
    """Makes the content of a file for `groundswell estimate`, as a known model would have been measured.

    A step takes 0.1 s and 0.05 s for each image. An allreduce takes 5 ms, 1 ms for each hop, and its bytes at 90 % of
    the link. An alltoall and an allgather send theirs at 60 %. A codec `small` sends a hundredth, and takes 0.08 s.
    """

    def make(ranks: tuple[int, ...] = (2,), noise: float = 0.0) -> dict[str, Any]:
        random = np.random.default_rng(0)

        def repeats(seconds: float) -> list[float]:
            return (seconds * (1 + noise * random.standard_normal(5))).tolist()

        reached = {"allreduce": 0.9, "alltoall": 0.6, "allgather": 0.6}
        hops = {"allreduce": 2, "alltoall": 1, "allgather": 1}
        links = {"mbit_100": 12.5e6, "mbit_1000": 125e6, "unshaped": None}
        return {
            "format_version": 1,
            "machine": "made",
            "measured": "2026-11-23",
            "model": "a network",
            "compute": [{"batch_size": b, "seconds": repeats(0.1 + 0.05 * b)} for b in (4, 8, 16)],
            "straggler_deviation": 0.02,
            "gradients": [{"bytes": 6_000_000, "ready": ready} for ready in (0.4, 0.5, 0.7, 0.8, 0.95)],
            "links": [
                {"name": name, "bytes_per_second": speed, "latency_seconds": [0.001]} for name, speed in links.items()
            ],
            "collectives": [
                {
                    "link": link,
                    "collective": collective,
                    "ranks": n,
                    "bytes": size,
                    "seconds": repeats(
                        0.005
                        + hops[collective] * (n - 1) * 0.001
                        + hops[collective] * (n - 1) / n * size / (reached[collective] * (speed or 1e9))
                    ),
                }
                for link, speed in links.items()
                for collective in reached
                for n in ranks
                for size in (8_000, 1_000_000, 8_000_000)
            ],
            "codecs": [
                {
                    "name": "none",
                    "messages": [],
                    "dense_bytes": 30_000_000,
                    "encode_seconds": [0.0],
                    "decode_seconds": [0.0],
                },
                {
                    "name": "small",
                    "messages": [
                        {"collective": "alltoall", "bytes": 300_000},
                        {"collective": "allgather", "bytes": 300_000},
                    ],
                    "dense_bytes": 10_000,
                    "encode_seconds": [0.06],
                    "decode_seconds": [0.02],
                },
            ],
        }

    return make


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with one line on standard error; gives the line."""
    from jobs.shell import cli

    def run(*command: str, settings: Iterable[str] = (), code: int = 2) -> str:
        capsys.readouterr()
        assert cli.execute([*command, *(part for each in settings for part in ("--set", each))]) == code
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run

"""A head that is fitted on real ranks is scikit-learn's on all samples, bit for bit the same on every rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from conf.sections.probe import CoCoAConfig, LBFGSConfig, SolverConfig
from pipelines.probing.features import SCHEMA, FeatureFile, Features
from pipelines.scoring.output.write import as_lists
from pipelines.storage.folder import Location
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(280)]

TRAIN, VALIDATION, PENALTIES = 300, 120, [1e-2, 1e-1, 1.0]
EXACT = LBFGSConfig(tolerance=3e-8)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Features, of which some are constant, and classes."""
    loaded = load_digits()
    return loaded.data.astype(np.float32), loaded.target


@pytest.fixture(scope="module")
def write_features(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Features]:
    """Writes features as an extraction does, in files and row groups of several sizes."""

    def write(features: np.ndarray, targets: np.ndarray, splits: dict[str, list[int]]) -> Features:
        folder, files, start = tmp_path_factory.mktemp("features"), [], 0
        for split, sizes in splits.items():
            for number, rows in enumerate(sizes):
                own = slice(start, start + rows)
                columns = {
                    "id": [str(row) for row in range(start, start + rows)],
                    "features": as_lists(features[own], SCHEMA.field("features").type),
                    "probabilities": as_lists(targets[own].astype(np.float32), SCHEMA.field("probabilities").type),
                    "targets": as_lists(targets[own], SCHEMA.field("targets").type),
                }
                file = folder / f"{split}-part-{number:05d}.parquet"
                pq.write_table(pa.table(columns, schema=SCHEMA), file, row_group_size=50)
                files.append(FeatureFile(file.name, split, rows, file.stat().st_size))
                start += rows
        return Features(Location.at(folder), tuple(files))

    return write


Job = tuple[Features, Any, SolverConfig, list[float]]


@pytest.fixture(scope="module")
def jobs(digits: Any, write_features: Callable[..., Features]) -> dict[str, Job]:
    features, classes = digits
    one = np.eye(10, dtype=np.uint8)[classes]
    several = np.c_[one[:, :4], one[:, ::2].sum(axis=1), 0 * one[:, 0]].astype(
        np.uint8
    )  # the last one has no positives
    splits = {"train": [130, 1, 169], "validation": [VALIDATION]}
    single, multi = write_features(features, one, splits), write_features(features, several, splits)
    scarce = write_features(features, one[:, :2] + one[:, 2:4], {"train": [1], "validation": [1]})
    return {
        "single": (single, "single_label", EXACT, PENALTIES),
        "multi": (multi, "multi_label", EXACT, PENALTIES),
        "cocoa": (single, "single_label", CoCoAConfig(tolerance=1e-2), [0.5]),
        "scarce": (scarce, "multi_label", LBFGSConfig(), [1.0]),
    }


def fit_all(jobs: dict[str, Job]) -> dict[str, Any]:
    """Fit every head as one rank of a job."""
    from pipelines.probing.worker import fit_head
    from pipelines.training.ranks.collective import HorovodCollective

    collective = HorovodCollective()
    return {name: fit_head(*job, collective) for name, job in jobs.items()}


@pytest.fixture(scope="module", params=[1, 2])
def fitted(request: pytest.FixtureRequest, jobs: dict[str, Job]) -> list[dict[str, Any]]:
    """The heads of each rank, by name."""
    return on_ring(request.param, fit_all, jobs)


def test_every_rank_ends_with_the_same_bits(fitted: list[dict[str, Any]]) -> None:
    for name, first in fitted[0].items():
        for other in fitted[1:]:
            assert other[name].tried == first.tried
            for array in ("weights", "intercepts", "mean", "scale"):
                np.testing.assert_array_equal(getattr(other[name].head, array), getattr(first.head, array))


@pytest.mark.parametrize("task", ["single", "multi"])
def test_it_is_scikit_learns_regression_with_the_penalty_that_validation_chooses(
    fitted: list[dict[str, Any]], jobs: dict[str, Job], digits: Any, task: str
) -> None:
    found, features = fitted[0][task], digits[0].astype(np.float64)
    targets = np.concatenate([jobs[task][0].array(split, "targets") for split in ("train", "validation")])
    scaler = StandardScaler().fit(features[:TRAIN])
    np.testing.assert_allclose(found.head.mean, scaler.mean_, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.head.scale, scaler.scale_, rtol=1e-12)
    assert (found.head.scale == 1).any(), "a constant feature"
    standard = scaler.transform(features)

    def regression(l2: float, labels: np.ndarray) -> Any:
        return LogisticRegression(C=1 / (l2 * TRAIN), tol=1e-9, max_iter=20_000).fit(standard[:TRAIN], labels[:TRAIN])

    assert [each.l2 for each in found.tried] == [1.0, 1e-1, 1e-2]
    assert all(each.converged for each in found.tried)
    validation = slice(TRAIN, TRAIN + VALIDATION)
    if task == "single":
        classes = targets.argmax(axis=1)
        fits = {l2: regression(l2, classes) for l2 in PENALTIES}
        scores = {l2: fit.score(standard[validation], classes[validation]) for l2, fit in fits.items()}
        assert {each.l2: each.score for each in found.tried} == pytest.approx(scores)
        assert scores[found.chosen.l2] == max(scores.values())
        expected = fits[found.chosen.l2].predict_proba(standard)
    else:
        columns = [regression(found.chosen.l2, labels).predict_proba(standard)[:, 1] for labels in targets.T[:-1]]
        expected = np.stack([*columns, np.zeros(len(standard))], axis=1)
        assert found.chosen.score == max(each.score for each in found.tried)
    rows = slice(TRAIN + VALIDATION)
    np.testing.assert_allclose(found.head.probabilities(digits[0][rows]), expected[rows], atol=2e-5)


def test_support_vectors_end_at_the_gap(fitted: list[dict[str, Any]], digits: Any) -> None:
    found = fitted[0]["cocoa"]
    assert found.chosen.converged
    assert 0 <= found.chosen.residual <= 1e-2
    predicted = found.head.probabilities(digits[0][TRAIN : TRAIN + VALIDATION]).argmax(axis=1)
    assert np.mean(predicted == digits[1][TRAIN : TRAIN + VALIDATION]) == pytest.approx(found.chosen.score)
    assert found.chosen.score > 0.8


def test_a_rank_may_have_no_sample(fitted: list[dict[str, Any]]) -> None:
    head = fitted[0]["scarce"].head
    assert np.isfinite(head.weights).all()
    np.testing.assert_array_equal(head.scale, 1)  # of one sample, every feature is constant

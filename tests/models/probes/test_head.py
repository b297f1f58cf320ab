"""A head as it is kept, and the standardisation of its features over ranks, beside scikit-learn's."""

import io

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from models.probes.head import LinearHead, standardisation

RANDOM = np.random.default_rng(3)
FEATURES = (5 + 3 * RANDOM.standard_normal((20, 4))).astype(np.float32)
WEIGHTS = RANDOM.standard_normal((5, 3))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_its_probabilities_are_those_of_the_solution_on_standardised_features(link):
    standard = standardisation(FEATURES, lambda values: values)
    found = LinearHead.of(WEIGHTS, standard, link).probabilities(FEATURES)
    scores = standard.design(FEATURES) @ WEIGHTS
    expected = (
        np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True) if link == "softmax" else 1 / (1 + np.exp(-scores))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_its_file_needs_no_pickle():
    head = LinearHead.of(WEIGHTS, standardisation(FEATURES, lambda values: values), "softmax")
    content = head.to_npz(class_names=np.array(["water", "land", "Seen und Fl\u00fcsse"]))
    np.testing.assert_array_equal(LinearHead.from_npz(content).probabilities(FEATURES), head.probabilities(FEATURES))
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        assert (file["class_names"].tolist()[2], file["weights"].dtype) == ("Seen und Fl\u00fcsse", np.float64)


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_the_standardisation_is_that_of_all_samples(on_ranks, part_of, ranks):
    random = np.random.default_rng(1)
    features = (random.standard_normal((30, 6)) * [1, 1e3, 1e-3, 1, 1, 1] + [0, 1e5, 7, 0, 0, -3]).astype(np.float32)
    features[:, 3], features[:, 4] = 0.1, 0.0  # constant, of which the mean of 30 is rounded
    expected = StandardScaler().fit(features.astype(np.float64))

    def measured(rank, total):
        own = features[part_of(rank, ranks, 30)]
        return (found := standardisation(own, total)), found.design(own)

    results = on_ranks(ranks, measured)
    for found, _ in results:
        np.testing.assert_equal(vars(found), vars(results[0][0]))
        np.testing.assert_allclose(found.mean, expected.mean_, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.scale, expected.scale_, rtol=1e-9)
        assert [*found.scale[3:5], found.rows] == [1, 1, 30]
    design = np.concatenate([each for _, each in results])
    np.testing.assert_allclose(design[:, :-1], expected.transform(features.astype(np.float64)), atol=1e-9)
    np.testing.assert_array_equal(design[:, -1], 1)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        standardisation(np.zeros((0, 3), np.float32), lambda values: values)

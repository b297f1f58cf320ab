"""A head as it is kept."""

import io

import numpy as np
import pytest

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

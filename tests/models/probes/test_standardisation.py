"""Standardisation over ranks, beside scikit-learn's."""

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from models.probes.head import standardisation


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_it_is_that_of_all_samples(on_ranks, part_of, ranks):
    random = np.random.default_rng(1)
    features = (random.standard_normal((30, 6)) * [1, 1e3, 1e-3, 1, 1, 1] + [0, 1e5, 7, 0, 0, -3]).astype(np.float32)
    features[:, 3], features[:, 4] = 0.1, 0.0  # constant, of which the mean of 30 is rounded
    expected = StandardScaler().fit(features.astype(np.float64))

    def measured(rank, total):
        own = features[part_of(rank, ranks, 30)]
        return (found := standardisation(own, total)), found.design(own)

    results = on_ranks(ranks, measured)
    for found, _ in results:
        np.testing.assert_array_equal(found.mean, results[0][0].mean)
        np.testing.assert_array_equal(found.scale, results[0][0].scale)
        np.testing.assert_allclose(found.mean, expected.mean_, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.scale, expected.scale_, rtol=1e-9)
        np.testing.assert_array_equal(found.scale[3:5], 1)
        assert found.rows == 30
    design = np.concatenate([each for _, each in results])
    np.testing.assert_allclose(design[:, :-1], expected.transform(features.astype(np.float64)), atol=1e-9)
    np.testing.assert_array_equal(design[:, -1], 1)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        standardisation(np.zeros((0, 3), np.float32), lambda values: values)

"""A linear head on frozen features, and its file."""

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from models.probes.agreement import Array
from models.probes.standardisation import Standardisation

Link = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class LinearHead:
    """A dense layer on standardised features.

    scores = (features - mean) / scale @ weights + intercepts
    """

    weights: Array
    """`(features, classes)`."""
    intercepts: Array
    """`(classes,)`."""
    mean: Array
    """`(features,)`."""
    scale: Array
    """`(features,)`."""
    link: Link
    """Function from scores to probabilities; after the hinge loss only the order of its results is meaningful."""

    @classmethod
    def of(cls, solution: Array, standardisation: Standardisation, link: Link) -> "LinearHead":
        """Make the head of a solution `(features + 1, classes)`."""
        return cls(solution[:-1], solution[-1], standardisation.mean, standardisation.scale, link)

    def probabilities(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Return the probabilities of all classes, `(rows, classes)`, of features `(rows, features)`."""
        scores = (features - self.mean) / self.scale @ self.weights + self.intercepts
        found = softmax(scores, axis=1) if self.link == "softmax" else expit(scores)
        return np.asarray(found, np.float32)

    def to_npz(self, **more: Any) -> bytes:
        """Return the arrays as a `.npz` file, which needs no pickle; `more` are further arrays of numbers or text."""
        file = io.BytesIO()
        np.savez(
            file,
            weights=self.weights,
            intercepts=self.intercepts,
            mean=self.mean,
            scale=self.scale,
            link=np.array(self.link),
            **more,
        )
        return file.getvalue()

    @classmethod
    def from_npz(cls, content: bytes) -> "LinearHead":
        """Read a file of `to_npz`."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            link: Link = "softmax" if str(file["link"]) == "softmax" else "sigmoid"
            return cls(file["weights"], file["intercepts"], file["mean"], file["scale"], link)

"""One optimizer's gradients, averaged or added over the ranks by Horovod's grouped operations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from pipelines.launch.keras_door.keras_3 import native


@dataclass(frozen=True)
class Reduction:
    """The reduction of all ranks' gradients; the fields are arguments of Horovod's `DistributedOptimizer`."""

    name: str
    """Name of the operations."""
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    predivide_factor: float
    op: Any
    """`hvd.Average` or `hvd.Sum`."""
    groups: int | Sequence[Sequence[Any]] | None
    """Number of groups, or the variables of each group; None: one group."""
    process_set: Any
    scale_local_gradients: bool
    """Whether gradients that stay local are divided by the number of ranks."""
    local: set[Any] = field(default_factory=set)
    """References to variables whose gradients stay local."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; None and gradients that stay local keep their positions."""
        reduced = [
            tf.convert_to_tensor(gradient)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient in gradients
        ]
        if not self.process_set.included() or self.process_set.size() == 1:
            return reduced
        references = [native(variable).ref() for variable in variables]
        sent = [n for n, gradient in enumerate(reduced) if gradient is not None and references[n] not in self.local]
        predivide = self.predivide_factor if self.op == hvd.Average else 1.0
        for number, positions in enumerate(self._groups(sent, references, reduced)):
            values = hvd.grouped_allreduce(
                [reduced[position] for position in positions],
                device_dense=self.device_dense,
                device_sparse=self.device_sparse,
                compression=self.compression,
                op=self.op,
                prescale_factor=1 / predivide,
                postscale_factor=predivide,
                process_set=self.process_set,
                name=f"{self.name}_Allreduce_{number}",
            )
            for position, value in zip(positions, values, strict=True):
                reduced[position] = value
        if self.scale_local_gradients:
            for position in set(range(len(reduced))) - set(sent):
                reduced[position] = _divided(reduced[position], self.process_set.size())
        return reduced

    def _groups(self, sent: list[int], references: list[Any], gradients: list[Any]) -> list[list[int]]:
        """Return positions by group, in the same order on every rank; one operation takes only one type."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, position in enumerate(sent):
            # Horovod mixes up the tensors of a group if a sparse one is not its first.
            gradient = gradients[position]
            alone = position if isinstance(gradient, tf.IndexedSlices) else None
            groups[self._group(place, len(sent), references[position]), gradient.dtype, alone].append(position)
        return list(groups.values())

    def _group(self, place: int, count: int, reference: Any) -> Any:
        if self.groups is None:
            return 0
        if isinstance(self.groups, int):
            return place * self.groups // count
        holders = (n for n, group in enumerate(self.groups) if reference in [native(each).ref() for each in group])
        return next(holders, reference)  # a variable that no group holds is a separate group


def _divided(gradient: Any, divisor: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / divisor

"""A network that is cut into consecutive stages: a single tensor passes from each stage to the next."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from models.layers.augmentation import AugmentedModel
from models.layers.drop import sample_seeds
from models.networks.model import inputs_of
from models.networks.operations import forward_flops, layer_flops


@dataclass(frozen=True)
class Stage:
    """Some consecutive layers of a model, shared with the model, as training calls them."""

    network: keras.Model
    """Network from the model's inputs or the previous cut's tensor to the next cut's tensor or the logits."""
    augmentation: keras.layers.Layer | None
    """Augmentation before the first stage in training; None: no augmentation."""
    is_first: bool
    is_last: bool
    last_layer: str
    """Name of the layer after which the next stage begins."""

    def __call__(self, inputs: Any, seeds: Any = None) -> Any:
        """Compute the stage as in training.

        Args:
            inputs: Image groups by name for the first stage; `(batch, *border)` for the others.
            seeds: Seeds of the samples, int32 `(batch,)`; None: the model does not use seeds.
        """
        if self.is_first:
            inputs = inputs_of(self.network, inputs)
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, seeds, training=True)
        with sample_seeds(seeds):
            return self.network(inputs, training=True)

    @property
    def border(self) -> keras.KerasTensor:
        """The tensor at the cut after this stage, `(None, ...)`; the logits of the last one."""
        return self.network.outputs[0]


def cut(model: keras.Model, stages: int) -> list[Stage]:
    """Cut a model into stages whose forward passes take about the same time.

    A place for a cut is a tensor through which every path from the inputs to the logits goes. In a residual network it
    is the end of a block, after addition and activation. The chosen cuts make the largest stage smallest, by the
    operations of `forward_flops`. Of places with equal operations before them, the one with the smallest tensor is
    taken, and of these the last. Other costs are not counted: normalisation, activations and upsampling of large images
    make a first stage slower than this estimate.

    Args:
        model: A functional model, or an `AugmentedModel` with one.
        stages: Number of stages, at least 2.

    Raises:
        ValueError: The model has too few places, a stage would have nothing to train, or a layer draws random numbers
            from its own state. A second forward pass of the same samples would draw other numbers.
    """
    network, augmentation = (model.network, model.augmentation) if isinstance(model, AugmentedModel) else (model, None)
    drawn = [each.path for each in network.non_trainable_variables if each.path.endswith("seed_generator_state")]
    if drawn:
        raise ValueError(
            f"{network.name} cannot be trained in stages, which compute a forward pass twice: {drawn[0]} is a state "
            "from which a layer draws other numbers each time"
        )
    cuts = _cuts(network)
    chosen = _best(list(cuts), forward_flops(network), stages, network.name)
    ends = [network.input, *(cuts[flops] for flops in chosen), network.output]
    found = [
        Stage(
            keras.Model(first, last, name=f"{network.name}_stage{number}"),
            augmentation if number == 1 else None,
            is_first=number == 1,
            is_last=number == stages,
            last_layer=last._keras_history.operation.name,
        )
        for number, (first, last) in enumerate(itertools.pairwise(ends), start=1)
    ]
    for stage in found:
        if not stage.network.trainable_variables:
            raise ValueError(f"{stage.network.name} has nothing to train: freeze fewer layers, or take fewer stages")
    return found


def parts_of_flops(stages: Sequence[Stage]) -> list[float]:
    """Return the part of each stage in the operations of all of them."""
    each = [forward_flops(stage.network) for stage in stages]
    return [flops / sum(each) for flops in each]


def _best(cuts: Sequence[int], flops: int, stages: int, name: str) -> Sequence[int]:
    """Return the cuts whose largest stage is the smallest; a cut is the number of operations before it."""
    if len(cuts) < stages - 1:
        raise ValueError(
            f"{name} can be cut at {len(cuts)} places where only one tensor crosses, and {stages} stages need "
            f"{stages - 1}: take a network of blocks that follow each other, or fewer stages"
        )

    def largest(chosen: Sequence[int]) -> int:
        return max(after - before for before, after in itertools.pairwise([0, *chosen, flops]))

    return min(itertools.combinations(cuts, stages - 1), key=largest)


def _cuts(network: keras.Model) -> dict[int, keras.KerasTensor]:
    """Return one tensor for each number of operations before it, in the order of the network."""
    # Of tensors with equal operations, the last one in this order counts: the smallest, and of these the last.
    by_size = sorted(_all_cuts(network), key=lambda cut: -math.prod(cut[1].shape[1:]))
    best = dict(by_size)
    return {flops: best[flops] for flops in sorted(best)}


def _all_cuts(network: keras.Model) -> Iterator[tuple[int, keras.KerasTensor]]:
    """Return every tensor with trainable, computing layers before and after it, in the order of the network.

    A tensor passes alone from one stage to the next. Before it is the number of operations of all earlier layers.
    """
    # Keras has no public list of a model's calls. The calls are sorted by depth, each after its inputs.
    depths = sorted(network._nodes_by_depth, reverse=True)
    calls = [call for depth in depths for call in network._nodes_by_depth[depth] if not call.is_input]
    uses = {id(tensor): number for number, call in enumerate(calls) for tensor in call.input_tensors}
    uses |= {id(tensor): len(calls) for tensor in network.outputs}
    last_calls = {id(call.operation): number for number, call in enumerate(calls)}
    waiting = {id(tensor) for tensor in network.inputs}
    flops, shared_until, total, learns = 0, 0, forward_flops(network), False
    for number, call in enumerate(calls):
        waiting = {each for each in waiting | {id(tensor) for tensor in call.outputs} if uses.get(each, -1) > number}
        # A layer that is called on both sides of a cut would have its weights in two stages.
        shared_until = max(shared_until, last_calls[id(call.operation)])
        flops += layer_flops(call.operation) if last_calls[id(call.operation)] == number else 0
        learns = learns or bool(getattr(call.operation, "trainable_variables", ()))
        is_border = len(call.outputs) == 1 and waiting == {id(call.outputs[0])} and shared_until == number
        if is_border and learns and 0 < flops < total:
            yield flops, call.outputs[0]

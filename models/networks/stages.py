"""A network cut into stages, which follow each other: one tensor is all that goes from each of them to the next."""

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
    """Some consecutive layers of a model, which they share with it, as training calls them."""

    network: keras.Model
    """From the model's inputs, or the tensor at the cut before, to the tensor at the cut after, or the logits."""
    augmentation: keras.layers.Layer | None
    """What comes before the first stage in training; None: nothing."""
    is_first: bool
    is_last: bool
    last_layer: str
    """Name of the layer after which the next stage begins."""

    def __call__(self, inputs: Any, seeds: Any = None) -> Any:
        """Compute the stage as in training.

        Args:
            inputs: Image groups by name for the first stage; `(batch, *border)` for the others.
            seeds: Those of the samples, int32 `(batch,)`; None: the model draws nothing from seeds.
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


@dataclass(frozen=True)
class _Cut:
    """A place where only one tensor crosses."""

    tensor: keras.KerasTensor
    flops: int
    """Operations of all layers before it."""

    @property
    def elements(self) -> int:
        """Numbers of one sample in the tensor."""
        return math.prod(self.tensor.shape[1:])


def cut(model: keras.Model, stages: int) -> list[Stage]:
    """Cut a model into stages whose forward passes take about the same time.

    A place for a cut is a tensor through which every path from the inputs to the logits goes: in a residual network the
    end of a block, after its addition and activation. Of all ways to cut, that is taken whose largest stage is the
    smallest, by the operations of `forward_flops`; of places with equal operations before them the one with the
    smallest tensor, and of these the last. What else layers cost is not counted: normalisation, activations and
    upsampling of large images make a first stage slower than this says.

    Args:
        model: A functional model, or one of them in an `AugmentedModel`.
        stages: Number of stages, at least 2.

    Raises:
        ValueError: The model has too few places, a stage would have nothing to train, or a layer draws random numbers
            from a state of its own, so that a second forward pass of the same samples would draw others.
    """
    augmented = isinstance(model, AugmentedModel)
    network, augmentation = (model.network, model.augmentation) if augmented else (model, None)
    drawn = [each.path for each in network.non_trainable_variables if each.path.endswith("seed_generator_state")]
    if drawn:
        raise ValueError(
            f"{network.name} cannot be trained in stages, which compute a forward pass twice: {drawn[0]} is a state "
            "from which a layer draws other numbers each time"
        )
    cuts = _best(_cuts(network), forward_flops(network), stages, network.name)
    ends = [network.input, *(each.tensor for each in cuts), network.output]
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


def _best(cuts: Sequence[_Cut], flops: int, stages: int, name: str) -> Sequence[_Cut]:
    """The cuts whose largest stage is the smallest."""
    if len(cuts) < stages - 1:
        raise ValueError(
            f"{name} can be cut at {len(cuts)} places where only one tensor crosses, and {stages} stages need "
            f"{stages - 1}: take a network of blocks that follow each other, or fewer stages"
        )

    def largest(chosen: Sequence[_Cut]) -> int:
        ends = [0, *(each.flops for each in chosen), flops]
        return max(after - before for before, after in itertools.pairwise(ends))

    return min(itertools.combinations(cuts, stages - 1), key=largest)


def _cuts(network: keras.Model) -> list[_Cut]:
    """One place for each number of operations before it, in the order of the network."""
    best: dict[int, _Cut] = {}
    for each in _all_cuts(network):
        if each.flops not in best or each.elements <= best[each.flops].elements:
            best[each.flops] = each
    return list(best.values())


def _all_cuts(network: keras.Model) -> Iterator[_Cut]:
    """Every place with layers that compute and learn before and after it, in the order of the network."""
    # Keras has no public list of a model's calls. They are sorted by depth: what a call needs comes before it.
    depths = sorted(network._nodes_by_depth, reverse=True)
    calls = [call for depth in depths for call in network._nodes_by_depth[depth] if not call.is_input]
    uses = {id(tensor): number for number, call in enumerate(calls) for tensor in call.input_tensors}
    uses |= {id(tensor): len(calls) for tensor in network.outputs}
    last_calls = {id(call.operation): number for number, call in enumerate(calls)}
    waiting = {id(tensor) for tensor in network.inputs}
    flops, shared_until, total, learns = 0, 0, forward_flops(network), False
    for number, call in enumerate(calls):
        waiting = {each for each in waiting | {id(tensor) for tensor in call.outputs} if uses.get(each, -1) > number}
        # A layer that is called on both sides would have its weights in two stages.
        shared_until = max(shared_until, last_calls[id(call.operation)])
        flops += layer_flops(call.operation) if last_calls[id(call.operation)] == number else 0
        learns = learns or bool(getattr(call.operation, "trainable_variables", ()))
        is_border = len(call.outputs) == 1 and waiting == {id(call.outputs[0])} and shared_until == number
        if is_border and learns and 0 < flops < total:
            yield _Cut(call.outputs[0], flops)

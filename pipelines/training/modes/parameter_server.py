"""A parameter server inside the ranks: workers fetch weights and push gradients, and need not wait for each other."""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from models.compression.codec import Codec
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.pushes import PushCodec
from pipelines.launch.wire.transport import SECRET_BYTES
from pipelines.training.modes.optimizer_state import moments_of, state_of
from pipelines.training.modes.shard import NO_STOP, Gradients, ShardClient, ShardServer, Synchrony
from pipelines.training.ranks.collective import HorovodCollective, gather_json, own_address
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.mode import CopyOptimizer
from pipelines.training.step.step import make_apply

Messages = list[tuple[tf.Tensor, ...]]
"""The pushed arrays of each trainable variable; see `PushCodec`."""


class ParameterServer:
    """Every rank serves a shard of the weights from threads, and trains as a worker of all shards.

        worker, in every step t:    fetch the weights w;  g = gradient of its own batch at w;  push g
        shard, for every push:      w = optimizer's update of w by g, at the rate of the schedule over N

    `synchrony` says who waits for whom:

    * `async`: nobody waits. Other workers may have changed the weights many times since the worker's fetch.
    * `ssp`: a worker waits if it is more than `bound` steps ahead of the slowest one.
    * `backup`: all workers wait for the first N - b gradients of each step. Their mean is applied as in `Synchronous`.
      Later gradients are dropped, and their workers skip steps that are complete.

    With `async` a worker may fetch and push every few steps (Downpour). Between two fetches it updates its own weights
    with its gradients, and it pushes their sum. The first `synchronous_steps` steps run in lock step, because late
    gradients do most harm at the start. `staleness_aware` lowers the rate of a push that is later than N - 1 updates.
    The usual rate is divided by N because N workers make N updates instead of one synchronous update.

    The optimizer is the configured one, and its state is at the shards. DistBelief found Adagrad best there. Delay acts
    like additional momentum, so use less momentum. A variable belongs to one shard, and the shards have about the same
    size. Each worker has its own batch-norm statistics, as in all modes. At the end of an epoch and before every
    checkpoint, all workers wait until everything has been pushed. Then every rank gets the weights and the optimizer's
    state of all shards. So validation and checkpoints see one model, in the layout of `Synchronous`.

    Equivalences: `backup` without backup workers is `Synchronous`, except for the order of sums. `async` with one
    worker equals one process bit for bit. With several workers, results of `async` and `ssp` depend on timing and are
    not reproducible.

    When it pays: if some worker is slow now and then, as on a shared machine. A worker that is always slow delays `ssp`
    after `bound` steps. It delays every mode at the end of an epoch, because all workers have the same number of
    samples. Steps per second relative to lock step were measured with one of three workers 5 times slower. If it is
    always the same worker: 1.11 (`ssp`, bound 3), 2.73 (`async`) and 3.73 (`backup`, 1 of 3). If it is another worker
    in every step: 1.85, 1.86 and 1.54 (`make bench NAME=relaxed`). When not: on equal machines, where lock step takes
    the same time and is reproducible. Accuracy: README.md of this folder. Each rank sends and receives as many bytes as
    for an allreduce of (push + weights) / 2. Only the push can be compressed (`none`, `onebit`, `topk`).

    Memory of a rank: 4 bytes per parameter for the weights that it computes with, and 4/N for those of its shard. The
    optimizer's state is held once completely, for checkpoints, and 1/N of it at the shard.

    Source: Dean et al. 2012, "Large scale distributed deep networks" (Downpour, Adagrad, warm start); Chilimbi et al.
    2014 (Project Adam); Ho et al. 2013 (SSP); Chen et al. 2016, "Revisiting distributed synchronous SGD" (backup
    workers); Zhang et al. 2016, "Staleness-aware async-SGD".
    Differs: a worker does fetch, gradient and push one after another; Downpour overlaps them. The staleness-aware rate
    is not lowered for the usual N - 1 updates, because the rate is already divided by N.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        exchange: GradientExchange,
        stop: StopAgreement | None,
        *,
        copy_optimizer: CopyOptimizer,
        codec: Codec,
        synchrony: str,
        bound: int,
        backup_workers: int,
        fetch_every: int,
        push_every: int,
        staleness_aware: bool,
        synchronous_steps: int,
    ) -> None:
        """Serve this rank's shard and connect to all shards; all ranks call this together.

        Args:
            model: The model that this worker computes with.
            optimizer: Its optimizer, already built; it only holds the state for checkpoints.
            exchange: Provides the ranks and the rule which gradients are sent in float32.
            stop: The agreement that a stop is reported to; None: training cannot be asked to stop.
            copy_optimizer: Makes the optimizer of this rank's shard.
            codec: Compresses pushes.
            synchrony: "async", "ssp" or "backup".
            bound: See `Synchrony`.
            backup_workers: See `Synchrony`.
            fetch_every: Number of a worker's steps per fetch.
            push_every: Number of a worker's steps per push.
            staleness_aware: See `Synchrony`.
            synchronous_steps: See `Synchrony`.
        """
        assert isinstance(exchange.collective, HorovodCollective)
        self._collective, self._exchange, self._stop = exchange.collective, exchange, stop
        self._optimizer, self._weights = optimizer, list(model.trainable_variables)
        exchange.build(self._weights)  # only for its state in checkpoints, which never changes
        rank, workers = self._collective.rank, self._collective.size
        self.rule = Synchrony(
            synchrony,  # type: ignore[arg-type]
            workers,
            bound=bound,
            backup_workers=backup_workers,
            staleness_aware=staleness_aware,
            synchronous_steps=synchronous_steps,
            push_every=push_every,
        )
        self._fetch_every, self._push_every = fetch_every, push_every
        self.moves_own_weights = fetch_every > 1
        """Whether the worker updates its own weights with its gradients until the next fetch."""
        self.accrues = push_every > 1
        """Whether a push contains the gradients of several steps."""
        shapes = [tuple(variable.shape) for variable in self._weights]
        self._shards = divide(shapes, workers)
        self._codec = PushCodec(
            codec,
            [variable.path for variable in self._weights],
            shapes,
            rank=rank,
            dense_below=exchange.dense_below,
            seed=exchange.seed,
        )
        self.own: Sequence[keras.Variable] = self._codec.state
        self.between: Sequence[tf.Variable] = ()
        self.own_shard = OwnShard(self._of(rank), self._weights, optimizer, copy_optimizer)
        # The ranks share a secret over the ring that only they have joined.
        secret = bytes.fromhex(gather_json(secrets.token_hex(SECRET_BYTES), self._collective)[0])
        self._shard = ShardServer(
            own_address(),
            secret,
            self.rule,
            decode=self._unpack,
            update=self.own_shard.update,
            read=self.own_shard.read,
            largest_push=self._codec.largest_bytes(self._shards[rank]),
        )
        self.steps_done = self._accrued = 0
        """Number of steps that this worker has done or skipped."""
        self._fetched_at: int | None = None
        self._is_begun = self._is_open = False
        self._load = tf.function(self._assign, autograph=False)
        self.figures = PushFigures()
        addresses = gather_json([own_address(), self._shard.port], self._collective)
        self._client = ShardClient(
            [(host, port) for host, port in addresses],
            secret,
            rank,
            [4 * sum(math.prod(shapes[index]) for index in indexes) for indexes in self._shards],
        )
        self._client.fetch(0)  # every shard knows this worker before any shard starts
        self.begin(0)

    def begin(self, step: int) -> None:
        """Copy the weights and the state of all ranks after `step` steps to the shards; see `Mode`."""
        self.own_shard.take_over()
        self._shard.begin(step)
        self.steps_done, self._accrued, self._fetched_at = step, 0, None
        self._collective.sum(np.zeros(1))  # no worker fetches from a shard that has not started

    def block(self, step: int) -> int:
        """Return `step` from the stop step on that the first shard names, otherwise -1; see `Mode`."""
        stop_at = self._client.stop_at
        return step if stop_at != NO_STOP and step >= stop_at else -1

    def begin_batch(self) -> bool:
        """Fetch the weights before the first batch of a step if a fetch is due; return whether the step is open."""
        if self._is_begun:
            return self._is_open
        began = time.perf_counter()
        self.figures = PushFigures()
        if self.rule.is_fetch_due(self.steps_done, self._fetched_at, self._fetch_every):
            weights = self._client.fetch(self.steps_done)
            self._load(*[tf.constant(np.frombuffer(each, np.float32)) for each in weights])
            self._fetched_at = self.steps_done
            self.figures.fetched = sum(each.nbytes for each in weights)
        self._is_begun = True
        self._is_open = not self.rule.is_lock_step(self.steps_done) or self._client.steps <= self.steps_done
        self.figures.wire_seconds += time.perf_counter() - began
        return self._is_open

    @property
    def is_push_due(self) -> bool:
        """Whether the gradients of this step are pushed at its end."""
        return self.rule.is_lock_step(self.steps_done) or self._accrued + 1 >= self._push_every

    @property
    def is_dense(self) -> bool:
        """Whether the next push is in float32."""
        return self.steps_done < self._exchange.warmup_steps

    def own_rate(self) -> float:
        """Return the learning rate for the worker's own weights until it fetches those of the shards."""
        locked = self.rule.is_lock_step(self.steps_done)
        return 0.0 if locked else self.rule.rate(float(self._optimizer.learning_rate), 0)

    def encode(self, gradients: Sequence[tf.Tensor], step: tf.Tensor, rate: tf.Tensor, *, dense: bool) -> Messages:
        """Return the encoded push of these gradients; part of a graph."""
        return self._codec.encode(gradients, step, rate if self._exchange.rescale_residual else None, dense=dense)

    def residual_norm(self) -> tf.Tensor:
        """Return the norm of the residual; part of a graph."""
        return self._codec.residual_norm()

    def end_step(self, messages: Messages | None) -> None:
        """Push the result of `encode` after the last batch of a step; None: nothing is pushed yet."""
        self._is_begun = False
        if self._is_open:
            self._accrued += 1
        if messages is not None:
            self._push(messages, self.steps_done + 1 - self._accrued)
        self.steps_done += 1
        if self._stop is not None and self._client.stop_at != NO_STOP:
            self._stop.hear()

    def come_together(self, encode_rest: Callable[[], Messages]) -> None:
        """Push the rest, wait for all workers, and copy weights and state of all shards; all ranks together.

        Args:
            encode_rest: Encodes the accrued gradients of the worker.
        """
        if self._accrued:
            self._push(encode_rest(), self.steps_done - self._accrued)
        self._collective.sum(np.zeros(1))  # now all pushes are applied, because each worker waits for the reply
        self.own_shard.give_back()
        for owner in range(self._collective.size):
            mine = self._of(owner)
            state = state_of(mine, self._weights, self._optimizer)
            self._collective.broadcast([variable.value for variable in [*mine, *state]], root=owner)
        self._collective.broadcast([self._optimizer.iterations.value])
        self._fetched_at = None

    def take_counts(self) -> dict[str, float]:
        """Return the metrics of this rank's shard since the last call; a shard receives pushes of every worker."""
        counts = self._shard.take_counts()
        pushes = max(counts.pushes, 1)
        return {
            "exchange/staleness": counts.staleness / pushes,
            "exchange/staleness_max": float(counts.most_stale),
            "exchange/dropped_share": counts.dropped / pushes,
            "exchange/step_gap_max": float(counts.largest_gap),
        }

    def reset(self) -> None:
        """Discard the unfinished step."""
        self._is_begun = False

    def close(self) -> None:
        """Close all connections if the process will train something else; all ranks call this together.

        Workers that still take steps do not wait for this worker.
        """
        self._client.close()
        self._collective.sum(np.zeros(1))
        self._shard.close()

    @property
    def updates(self) -> int:
        """Number of updates of this rank's shard since `begin`."""
        return self._shard.updates

    def _of(self, shard: int) -> list[keras.Variable]:
        return [self._weights[index] for index in self._shards[shard]]

    def _unpack(self, pushed: memoryview, dense: bool) -> Gradients:
        return self._codec.unpack(self._shards[self._collective.rank], pushed, dense=dense)

    def _push(self, messages: Messages, first: int) -> None:
        began, dense = time.perf_counter(), self.is_dense
        arrays = [[each.numpy() for each in message] for message in messages]
        ready = time.perf_counter()
        parts = [
            [part for index in indexes for part in self._codec.pack(index, arrays[index], dense=dense)]
            for indexes in self._shards
        ]
        asked = self._stop is not None and self._stop.is_announced
        rate = float(self._optimizer.learning_rate)
        self._client.push(first, parts, rate, covers=self._accrued, is_dense=dense, asked=asked)
        self._accrued = 0
        self.figures.pushed = sum(part.nbytes for of_shard in parts for part in of_shard)
        self.figures.encode_seconds += ready - began
        self.figures.wire_seconds += time.perf_counter() - ready

    def _assign(self, *flats: tf.Tensor) -> None:
        """Set the weights of this worker to those of each shard; part of a graph."""
        for number, flat in enumerate(flats):
            variables = self._of(number)
            parts = tf.split(flat, [math.prod(each.shape) for each in variables]) if variables else []
            for variable, part in zip(variables, parts, strict=True):
                variable.assign(tf.reshape(part, variable.shape))


@dataclass
class PushFigures:
    """The bytes that one step of a worker sent and received, and the time that this took."""

    fetched: int = 0
    """Bytes of weights."""
    pushed: int = 0
    """Bytes of gradients."""
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    """Seconds of sending and receiving, including the wait for other workers."""


class OwnShard:
    """The weights of this rank's shard, and the optimizer that changes them."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
        copy_optimizer: CopyOptimizer,
    ) -> None:
        """Copy the weights and the optimizer's state.

        Args:
            variables: Variables of the shard, which are some of `trained`; none if there are more ranks than variables.
            trained: All trainable variables of the model.
            optimizer: The optimizer of all variables.
            copy_optimizer: Makes the optimizer of the copies.
        """
        self._copies = [
            # Keras would not copy a TensorFlow variable.
            keras.Variable(tf.identity(variable.value), trainable=True, name=f"shard_{number}")
            for number, variable in enumerate(variables)
        ]
        self._pairs = list(zip(self._copies, variables, strict=True))
        if not self._copies:
            return
        for copy, variable in self._pairs:
            copy.constraint = variable.constraint
        self.optimizer, factors = copy_optimizer({id(variable): copy for copy, variable in self._pairs})
        state = list(zip(moments_of(self.optimizer), state_of(variables, trained, optimizer), strict=True))
        assert all(own.shape == whole.shape for own, whole in state)
        self._pairs += [*state, (self.optimizer.iterations, optimizer.iterations)]
        apply = make_apply(self.optimizer, self._copies, rate_factors=factors)
        self._update = tf.function(lambda *gradients: apply(list(gradients)), autograph=False)
        self._read = tf.function(
            lambda: tf.concat([tf.reshape(copy.value, [-1]) for copy in self._copies], 0), autograph=False
        )

    def update(self, gradients: Gradients, rate: float) -> None:
        """Update the weights with gradients at a learning rate."""
        if self._copies:
            self.optimizer.learning_rate = rate
            self._update(*map(tf.constant, gradients))

    def read(self) -> bytes:
        """Return all weights as bytes."""
        return self._read().numpy().tobytes() if self._copies else b""

    def take_over(self) -> None:
        """Copy weights and state from the model and its optimizer."""
        for own, whole in self._pairs:
            own.assign(whole.value)

    def give_back(self) -> None:
        """Copy this shard's weights and state back to the model and its optimizer."""
        for own, whole in self._pairs:
            whole.assign(own.value)


def divide(shapes: Sequence[tuple[int, ...]], shards: int) -> list[list[int]]:
    """Divide tensors among shards of about the same size: the largest tensor first, each to the smallest shard.

    Args:
        shapes: One shape for each tensor.
        shards: Number of shards.

    Returns:
        The positions of each shard's tensors, in order; the first shard has the largest tensor.
    """
    sizes, found = [0] * shards, [[] for _ in range(shards)]  # type: tuple[list[int], list[list[int]]]
    for index in sorted(range(len(shapes)), key=lambda each: -math.prod(shapes[each])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += math.prod(shapes[index])
        found[smallest].append(index)
    return [sorted(indexes) for indexes in found]

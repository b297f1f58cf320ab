"""Averaging of gradients over ranks with a codec, its state and a collective."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from models.compression.arithmetic.graph import (
    GRADIENTS_NOT_FINITE,
    Marks,
    all_finite,
    check_finite,
    checked_means,
    means_finite,
    now,
)
from models.compression.arithmetic.randomness import make_key
from models.compression.codec import Codec, Context, Memory, Message, Shape
from models.compression.exchange.figures import ExchangeFigures, TimedPart
from models.compression.exchange.wire import Collective, StateVariable, make_buckets, traced_payload, transfer


def check_present(gradients: Sequence[tf.Tensor | None]) -> None:
    """Refuse missing gradients.

    Raises:
        ValueError: a gradient is None; the message has the positions of all such gradients.
    """
    missing = [index for index, gradient in enumerate(gradients) if gradient is None]
    if missing:
        raise ValueError(f"gradients {missing} are None: every rank must pass a tensor for every variable")


class GradientExchange:
    """Averages gradients over the ranks of a collective; the gradients are sent as messages of a codec.

    Tensors of rank 0 or 1, small tensors and those that the codec does not accept are sent dense, in float32. They have
    few bytes, and gains and biases are the most sensitive. Dense and compressed tensors form buckets from the last
    layer to the first. A bucket can thus be sent while the backward pass still computes earlier layers.

    Args:
        codec: One of `models.compression.codecs.table`.
        collective: The operations of all ranks together.
        dense_below: Tensors with fewer elements are sent dense.
        bucket_mib: Largest size of a bucket, in MiB of float32; a larger gradient is a separate bucket. None: one
            bucket has all gradients.
        warmup_steps: Number of first steps in which everything is sent dense.
        rescale_residual: Whether a change of the learning rate multiplies residuals by the old rate over the new one.
            Updates that were left out then keep their size. `exchange` then needs the learning rate.
        seed: Seed of all random numbers.
        jit_compile: Whether XLA compiles encoding and decoding, where the codec allows it.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        codec: Codec,
        collective: Collective,
        *,
        dense_below: int,
        bucket_mib: float | None,
        warmup_steps: int,
        rescale_residual: bool,
        seed: int,
        jit_compile: bool = True,
    ) -> None:
        """Store the pieces and the settings."""
        if bucket_mib is not None and bucket_mib <= 0:
            raise ValueError(f"bucket_mib must be positive or None, got {bucket_mib}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        self.codec, self.collective, self.dense_below, self.bucket_mib = codec, collective, dense_below, bucket_mib
        self.warmup_steps, self.rescale_residual, self.seed = warmup_steps, rescale_residual, seed
        self.jit_compile = jit_compile and codec.compiled
        self.all_finite = tf.function(all_finite, jit_compile=True, autograph=False) if jit_compile else all_finite
        self.state: list[StateVariable] = []
        self.marks: Marks | None = None
        """Recorder of the times of each bucket, as the phases `encode`, `wire` and `decode`; None: no record. It is set
        before the graph of a step is made."""
        self._built_for: list[Shape] | None = None

    def build(self, tensors: Sequence[Any]) -> None:
        """Create the state for gradients of these shapes; otherwise the first `exchange` creates it.

        Args:
            tensors: One per gradient, in order: tensors, or variables, whose paths name the state.

        Raises:
            ValueError: the exchange was built for other shapes.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._built_for is not None:
            if shapes != self._built_for:
                raise ValueError(f"the exchange was built for shapes {self._built_for}, got {shapes}")
            return
        self._shapes = self._built_for = shapes
        self.names = [getattr(tensor, "path", None) or f"gradient_{i}" for i, tensor in enumerate(tensors)]
        with tf.init_scope():
            self._step = tf.Variable(0, dtype=tf.int32, trainable=False, name="step")
            self._learning_rate = tf.Variable(0.0, trainable=False, name="learning_rate")
            self._payload_bytes = tf.Variable(0, dtype=tf.int64, trainable=False, name="payload_bytes")
            self._seconds = tf.Variable(tf.zeros(len(TimedPart), tf.float64), trainable=False, name="seconds")
            self._memories = [self._create_memory(index, shape) for index, shape in enumerate(shapes)]
        compressed = [index for index, shape in enumerate(shapes) if self._is_compressed(shape)]
        self._buckets = self._make_buckets(compressed)
        self.dense_buckets = self._make_dense_buckets([i for i in range(len(shapes)) if i not in compressed])
        self._phases = {
            (bucket, number): self._phase(bucket, number)
            for bucket in range(len(self._buckets))
            for number in range(len(self.codec.collectives) + 1)
        }

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that a checkpoint must contain per rank; model, codec and number of ranks decide their order.

        `models.compression.exchange.resize` handles a change of the number of ranks.
        """
        return [*self.clock.values(), *[entry.variable for entry in self.state]]

    @property
    def clock(self) -> dict[str, tf.Variable]:
        """The number of exchanges and the learning rate of the last one that compressed, equal on every rank."""
        return {"step": self._step, "learning_rate": self._learning_rate}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def exchange(self, gradients: Sequence[tf.Tensor], learning_rate: Any = None) -> list[tf.Tensor]:
        """Return the means over ranks, with the order, shapes and dtypes of `gradients`.

        Raises:
            ValueError: a gradient that is None, or shapes that differ from those of the last call.
            tf.errors.InvalidArgumentError: a gradient that is not finite, on this rank; the message says
            `GRADIENTS_NOT_FINITE` and names rank and tensor. Or a mean that is not finite, although all gradients are,
            because a number exceeded the codec's range. All ranks raise this together, and the message says
            `MEANS_NOT_FINITE`.
        """
        check_present(gradients)
        self.build(gradients)
        values = self._clip([tf.cast(gradient, tf.float32) for gradient in gradients])
        rate = None if learning_rate is None else tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)
        scale = self._residual_scale(rate)
        self._seconds.assign(tf.zeros(len(TimedPart), tf.float64))
        if self.warmup_steps and self.codec.collectives:
            means = tf.cond(
                self._step < self.warmup_steps,
                lambda: self._exchange_all_dense(values),
                lambda: self._exchange_compressed(values, scale, rate),
            )
        else:
            means = self._exchange_compressed(values, scale, rate)
        # Every rank has the same means, so each rank can check them by itself.
        means = checked_means(means, means_finite(means), self.names, self.codec.name, self._step.read_value())
        self._step.assign_add(1)
        return [tf.cast(mean, gradient.dtype) for mean, gradient in zip(means, gradients, strict=True)]

    def begin_figures(self, payload_bytes: int) -> None:
        """Begin the figures of an exchange by another class, which adds its times with `count`."""
        self._seconds.assign(tf.zeros(len(TimedPart), tf.float64))
        self._payload_bytes.assign(payload_bytes)

    def add_payload(self, payload_bytes: int) -> None:
        """Add the bytes that are sent later in the step."""
        self._payload_bytes.assign_add(payload_bytes)

    def take_figures(self, other: "GradientExchange | None") -> None:
        """Make `metrics` report the figures of `other`, for the same tensors; None: nothing was sent in this step."""
        self._payload_bytes.assign(0 if other is None else other._payload_bytes)
        self._seconds.assign(tf.zeros(len(TimedPart), tf.float64) if other is None else other._seconds)

    def metrics(self) -> ExchangeFigures:
        """Return the figures of the last exchange on this rank."""
        return ExchangeFigures(*self.measure().numpy().tolist())

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def measure(self) -> tf.Tensor:
        """Return the values of `metrics`, float64 `(6,)` in their order; do not wait for the exchange."""
        payload = tf.cast(self._payload_bytes, tf.float64)
        dense = 4.0 * sum(math.prod(shape) for shape in self._shapes)
        ratio = tf.where(payload > 0, dense / payload, math.nan)
        residuals = [entry.variable for entry in self.state if entry.name.split("/")[0].endswith("residual")]
        norm = tf.cast(tf.linalg.global_norm(residuals), tf.float64) if residuals else tf.constant(0.0, tf.float64)
        encode, wire, decode = tf.unstack(self._seconds.read_value())
        return tf.stack(ExchangeFigures(payload, ratio, norm, encode, wire, decode))

    def payload_bytes(self, gradients: Sequence[Any]) -> int:
        """Return the payload of one exchange after the warm-up, in bytes; see `metrics`.

        Only shapes are read, so tensors, variables and `tf.TensorSpec` are accepted. If a codec's messages depend on
        the data, the result is the payload of the last exchange.

        Raises:
            ValueError: a gradient that is None.
        """
        check_present(gradients)
        shapes = [tuple(gradient.shape) for gradient in gradients]
        compressed = [shape for shape in shapes if self._is_compressed(shape)]
        dense = 4 * (sum(map(math.prod, shapes)) - sum(map(math.prod, compressed)))
        # Traced, not run: this takes no memory for the messages.
        payloads = {
            shape: payload
            for shape in sorted(set(compressed))
            if (payload := traced_payload(self.codec, shape, self.collective)) is not None
        }
        if len(payloads) < len(set(compressed)):
            return int(self._payload_bytes) if self._built_for is not None else dense
        return dense + sum(payloads[shape] for shape in compressed)

    def _is_compressed(self, shape: Shape) -> bool:
        large = len(shape) > 1 and math.prod(shape) >= self.dense_below
        return large and len(self.codec.collectives) > 0 and self.codec.accepts(shape)

    def _create_memory(self, index: int, shape: Shape) -> dict[str, tf.Variable]:
        memory = {}
        specs = self.codec.state_specs(shape, self.collective.size, dense=not self._is_compressed(shape))
        for name, spec in specs.items():
            full_name = f"{name}/{self.names[index]}"
            value = spec.initial(spec.shape, make_key(self.seed, 0, index)) if spec.initial else tf.zeros(spec.shape)
            memory[name] = tf.Variable(value, trainable=False, name=full_name)
            self.state.append(StateVariable(full_name, spec, shape, memory[name]))
        return memory

    def _make_buckets(self, indexes: Sequence[int]) -> list[list[int]]:
        return make_buckets(indexes, [math.prod(shape) for shape in self._shapes], self.bucket_mib)

    def _make_dense_buckets(self, indexes: Sequence[int]) -> list[list[int]]:
        # Gradients keep their order within a bucket: a single bucket then equals Horovod's grouped allreduce in every
        # digit.
        return [sorted(bucket) for bucket in self._make_buckets(indexes)]

    def _clip(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.codec.local_clip_norm is None:
            return gradients
        # Like `tf.clip_by_global_norm`, but a norm that is not finite changes nothing: NaN in all tensors would hide
        # its origin.
        limit, norm = self.codec.local_clip_norm / math.sqrt(self.collective.size), tf.linalg.global_norm(gradients)
        factor = tf.where(tf.math.is_finite(norm), limit * tf.minimum(1.0 / norm, 1.0 / limit), 1.0)
        return [gradient * factor for gradient in gradients]

    def _residual_scale(self, rate: tf.Tensor | None) -> tf.Tensor:
        if rate is None or not self.rescale_residual:
            return tf.constant(1.0)
        # The first step has no earlier rate, and a rate of 0 changed nothing.
        return tf.where((self._learning_rate > 0) & (rate > 0), self._learning_rate / rate, 1.0)

    def _exchange_all_dense(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        means, sent = self._exchange_dense(self._make_dense_buckets(range(len(gradients))), gradients, joined=False)
        self._payload_bytes.assign(sent)
        return [means[index] for index in range(len(gradients))]

    def _exchange_compressed(
        self, gradients: list[tf.Tensor], scale: tf.Tensor, rate: tf.Tensor | None
    ) -> list[tf.Tensor]:
        means: dict[int, tf.Tensor] = {}
        payload = tf.constant(0, tf.int64)
        for bucket in range(len(self._buckets)):
            values, sent = self._exchange_bucket(bucket, gradients, scale)
            payload += sent
            means |= dict(zip(self._buckets[bucket], values, strict=True))
        # With compressed tensors, gains and biases are sent as one tensor. A ResNet-50 has a hundred of them, and
        # Horovod would send their names to all ranks, 5 KB per step. If everything is dense they stay separate:
        # joining would copy the network, and every digit must equal that of Horovod's own allreduce.
        dense, sent = self._exchange_dense(self.dense_buckets, gradients, joined=bool(self._buckets))
        self._payload_bytes.assign(payload + sent)
        if rate is not None:  # the rate of the residuals, which a dense exchange does not change
            self._learning_rate.assign(rate)
        means |= dense
        return [means[index] for index in range(len(gradients))]

    def _exchange_dense(
        self, buckets: list[list[int]], gradients: list[tf.Tensor], *, joined: bool
    ) -> tuple[dict[int, tf.Tensor], int]:
        means: dict[int, tf.Tensor] = {}
        warming_up = self._step < self.warmup_steps
        # One factor after the sum, as in Horovod: dividing first would change last digits.
        factor = tf.constant(1.0 / self.collective.size)
        for number, indexes in enumerate(buckets):
            values = [gradients[index] for index in indexes]
            started = now(values)
            with tf.control_dependencies([self.check_own(self.all_finite(values), indexes)]):
                sums = self._sum(values, f"gradients_dense{number}", joined=joined)
            self.count(TimedPart.WIRE, started, now(sums), f"dense bucket {number}", indexes)
            for index, total in zip(indexes, sums, strict=True):
                mean = total * factor if self.collective.size > 1 else total
                means[index], memory = self.codec.after_dense(mean, self._read(index), warming_up=warming_up)
                self._write(index, memory)
        return means, 4 * sum(gradients[index].shape.num_elements() for indexes in buckets for index in indexes)

    def _sum(self, values: list[tf.Tensor], name: str, *, joined: bool) -> list[tf.Tensor]:
        if not joined:
            return self.collective.allreduce([tf.identity(value) for value in values], name)
        (total,) = self.collective.allreduce([tf.concat([tf.reshape(value, [-1]) for value in values], 0)], name)
        sums = tf.split(total, [value.shape.num_elements() for value in values])
        return [tf.reshape(each, value.shape) for each, value in zip(sums, values, strict=True)]

    def _exchange_bucket(
        self, bucket: int, gradients: list[tf.Tensor], scale: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        indexes = self._buckets[bucket]
        values: list[Message] = [gradients[index] for index in indexes]
        stored = memories = [self._read(index) for index in indexes]
        payload = tf.constant(0, tf.int64)
        ready = now(values)
        for number in range(len(self.codec.collectives) + 1):
            # Each part starts with its clock: uncompiled operations would start with their first input.
            with tf.control_dependencies([ready]):
                step = self._step.read_value()
                values = tf.nest.map_structure(tf.identity, values, expand_composites=True)
            values, memories, finite = self._phases[bucket, number](values, memories, step, scale)
            encoded = now(values)
            part = TimedPart.ENCODE if number == 0 else TimedPart.DECODE
            self.count(part, ready, encoded, f"bucket {bucket}, part {number}", indexes)
            if number == len(self.codec.collectives):
                break
            checked = [self.check_own(finite, indexes)] if number == 0 else []
            with tf.control_dependencies([encoded, *checked]):
                messages = tf.nest.map_structure(tf.identity, values, expand_composites=True)
            values, sent = transfer(
                self.codec.collectives[number],
                messages,
                self.collective,
                f"gradients_bucket{bucket}_collective{number}",
            )
            payload += tf.cast(sent, tf.int64)
            ready = now(values)
            self.count(
                TimedPart.WIRE, encoded, ready, f"bucket {bucket}, {self.codec.collectives[number]} {number}", indexes
            )
        for index, memory, before in zip(indexes, memories, stored, strict=True):
            self._write(index, {name: value for name, value in memory.items() if value is not before.get(name)})
        return list(values), payload

    def _phase(self, bucket: int, number: int) -> Callable[..., Any]:

        def run(values: Any, memories: Any, step: Any, scale: Any) -> Any:
            finite = self.all_finite(values) if number == 0 and not self.codec.checks_finite else None
            messages, changes, checked = [], [], []
            for index, value, memory in zip(self._buckets[bucket], values, memories, strict=True):
                context = Context(
                    shape=self._shapes[index],
                    rank=self.collective.rank,
                    size=self.collective.size,
                    step=step,
                    seed=self.seed,
                    tensor=index,
                    residual_scale=scale,
                )
                message, after = self.codec.phase(number, value, dict(memory), context)
                messages.append(message)
                if "finite" in after:
                    checked.append(after.pop("finite"))
                # XLA's code would copy tensors that it only passes on: None stands for no change.
                changes.append({name: None if new is memory.get(name) else new for name, new in after.items()})
            return messages, changes, tf.stack(checked) if finite is None and checked else finite

        compiled = tf.function(run, jit_compile=True, autograph=False) if self.jit_compile else run

        def phase(values: Any, memories: Any, step: Any, scale: Any) -> Any:
            messages, changes, finite = compiled(values, memories, step, scale)
            after = [
                {name: memory[name] if new is None else new for name, new in change.items()}
                for memory, change in zip(memories, changes, strict=True)
            ]
            return messages, after, finite

        return phase

    def _read(self, index: int) -> Memory:
        return {name: variable.read_value() for name, variable in self._memories[index].items()}

    def _write(self, index: int, memory: Memory) -> None:
        for name, value in memory.items():
            if name in self._memories[index]:
                self._memories[index][name].assign(value)

    def check_own(self, finite: tf.Tensor, indexes: Sequence[int]) -> tf.Tensor:
        """Return `finite` if the gradients at these positions are finite; else raise on this rank, see `exchange`."""
        return check_finite(
            finite,
            [self.names[index] for index in indexes],
            f"rank {self.collective.rank}: {GRADIENTS_NOT_FINITE}, from optimizer step",
            self._step.read_value(),
        )

    def count(self, part: TimedPart, start: tf.Tensor, end: tf.Tensor, name: str, indexes: Sequence[int]) -> None:
        """Add the time of one part for the gradients at these positions to the figures."""
        self._seconds.assign_add(tf.one_hot(part, len(TimedPart), dtype=tf.float64) * (end - start))
        if self.marks is not None:
            self.marks.add(part.name.lower(), name, start, end, [self.names[index] for index in indexes])

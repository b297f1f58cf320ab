"""No compression: 4 bytes per element."""

from models.compression.codec import Codec, CollectiveName, Context, Memory, Message


class NoneCodec(Codec):
    """Every tensor is sent dense, one grouped allreduce per bucket: bit for bit the result of Horovod's own."""

    name = "none"
    collectives: tuple[CollectiveName, ...] = ()

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Return the gradient unchanged."""
        return value, memory

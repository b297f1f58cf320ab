"""No compression: 4 bytes an element."""

from models.compression.codec import CollectiveName, Context, Memory, Message, Shape, Slot
from models.compression.schemes.linear import LinearCodec


class NoneCodec(LinearCodec):
    """Every tensor travels dense, a bucket in one grouped allreduce: bit for bit what Horovod's own gives."""

    name = "none"
    collectives: tuple[CollectiveName, ...] = ()

    def slots(self, shape: Shape, size: int, *, dense: bool) -> dict[str, Slot]:
        """None."""
        return {}

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """The gradient."""
        return value, memory

"""All codecs by name; a new one is a file in this folder and a line here."""

from collections.abc import Callable

from models.compression.codec import Codec
from models.compression.fp16 import Fp16Codec
from models.compression.none import NoneCodec

CODECS: dict[str, Callable[[], Codec]] = {
    "none": NoneCodec,
    "fp16": Fp16Codec,
}

"""All codecs by name; a new one is a file in this folder and a line here."""

from collections.abc import Callable

from models.compression.adaptive import adaptive
from models.compression.bf16 import bf16
from models.compression.codec import Codec
from models.compression.dgc import dgc
from models.compression.fp16 import fp16
from models.compression.none import NoneCodec
from models.compression.norm_sparsifier import norm_sparsifier
from models.compression.onebit import onebit
from models.compression.onebit_adam import onebit_adam
from models.compression.powersgd import PowerSGD
from models.compression.qsgd import qsgd
from models.compression.randomk import RandomK
from models.compression.scaled_sign import scaled_sign
from models.compression.threshold import threshold
from models.compression.topk import topk

CODECS: dict[str, Callable[..., Codec]] = {
    "none": NoneCodec,
    "fp16": fp16,
    "bf16": bf16,
    "onebit": onebit,
    "scaled_sign": scaled_sign,
    "qsgd": qsgd,
    "norm_sparsifier": norm_sparsifier,
    "threshold": threshold,
    "adaptive": adaptive,
    "topk": topk,
    "dgc": dgc,
    "randomk": RandomK,
    "powersgd": PowerSGD,
    "onebit_adam": onebit_adam,
}

"""All codecs by name.

A new codec is one file in this folder and one line in the table below. To be configurable it also has a class of
settings, with a line in the union, in `conf/sections/codecs.py`.
"""

from collections.abc import Callable

from models.compression.codec import Codec
from models.compression.codecs.adaptive import adaptive
from models.compression.codecs.bf16 import bf16
from models.compression.codecs.dgc import dgc
from models.compression.codecs.fp16 import fp16
from models.compression.codecs.none import NoneCodec
from models.compression.codecs.norm_sparsifier import norm_sparsifier
from models.compression.codecs.onebit import onebit
from models.compression.codecs.onebit_adam import onebit_adam
from models.compression.codecs.powersgd import PowerSGD
from models.compression.codecs.qsgd import qsgd
from models.compression.codecs.randomk import RandomK
from models.compression.codecs.scaled_sign import scaled_sign
from models.compression.codecs.threshold import threshold
from models.compression.codecs.topk import topk

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
"""Constructors that take the settings of the codec as keyword arguments, all of them required."""

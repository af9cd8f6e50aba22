"""The replacement forwards, one file a site."""

from .base import Patched, patched_class, stock_class
from .causal_lm import FastGenerate
from .decoder_layer import FusedDecoderLayer
from .linear import Int8Linear
from .mlp import FusedMLP
from .norm import FusedRMSNorm

__all__ = [
    "FastGenerate",
    "FusedDecoderLayer",
    "FusedMLP",
    "FusedRMSNorm",
    "Int8Linear",
    "Patched",
    "patched_class",
    "stock_class",
]

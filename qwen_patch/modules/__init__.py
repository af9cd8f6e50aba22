"""The replacement forwards, one file a site."""

from .base import Patched, patched_class, stock_class
from .decoder_layer import FusedDecoderLayer
from .mlp import FusedMLP
from .norm import FusedRMSNorm

__all__ = ["FusedDecoderLayer", "FusedMLP", "FusedRMSNorm", "Patched", "patched_class", "stock_class"]

"""int8: the format, which linears it is for, how a model gets it and gives it back, and how Transformers saves it."""

from __future__ import annotations

from .format import GROUP, dequantize, quantize

__all__ = ["GROUP", "dequantize", "quantize"]

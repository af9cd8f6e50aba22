"""The int8 format of linear weights."""

from __future__ import annotations

from .format import GROUP, dequantize, quantize

__all__ = ["GROUP", "dequantize", "quantize"]

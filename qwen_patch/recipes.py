"""DATA: what each `fusion` and each `quantize` replaces. An ablation is one line here."""

from __future__ import annotations

from .families import DECODER_LAYER, LINEAR, LM_HEAD, MLP, RMS_NORM
from .modules import FusedDecoderLayer, FusedMLP, FusedRMSNorm, Int8Linear, Patched

RECIPES: dict[str, dict[str, type[Patched]]] = {
    "none": {},
    "mlp": {MLP: FusedMLP},
    "rms": {RMS_NORM: FusedRMSNorm, DECODER_LAYER: FusedDecoderLayer},
    "both": {RMS_NORM: FusedRMSNorm, DECODER_LAYER: FusedDecoderLayer, MLP: FusedMLP},
}
QUANTIZED: dict[str, dict[str, type[Int8Linear]]] = {"int8": {LINEAR: Int8Linear, LM_HEAD: Int8Linear}}

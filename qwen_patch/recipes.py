"""DATA: what each `fusion` replaces. An ablation is one line here."""

from __future__ import annotations

from .families import DECODER_LAYER, MLP, RMS_NORM
from .modules import FusedDecoderLayer, FusedMLP, FusedRMSNorm, Patched

RECIPES: dict[str, dict[str, type[Patched]]] = {
    "none": {},
    "mlp": {MLP: FusedMLP},
    "rms": {RMS_NORM: FusedRMSNorm, DECODER_LAYER: FusedDecoderLayer},
    "both": {RMS_NORM: FusedRMSNorm, DECODER_LAYER: FusedDecoderLayer, MLP: FusedMLP},
}

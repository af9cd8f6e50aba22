"""How Transformers loads and saves int8 models: `from_pretrained(..., quantization_config=QwenPatchInt8Config())`.

Importing qwen_patch registers it. Where it is not imported, Transformers warns about the unknown method and goes on
with plain linears; then the codes' three dimensions fit none of them, and loading fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..families import LINEAR, LM_HEAD
from ..modules.linear import ACTIVATIONS, Int8Linear, as_stored
from ..plan import find_family
from .format import GROUP, quantize
from .linears import WIDE, find_linears

METHOD = "qwen_patch_int8"
HEAD_WEIGHT = "lm_head.weight"
VERSION = 1  # of what is in a checkpoint: see Int8Linear and format.py


@register_quantization_config(METHOD)
class QwenPatchInt8Config(QuantizationConfigMixin):
    """int8 linears: symmetric, one float32 scale for each row and 64 values along K.

    activations: "auto", "w8a16" (weights only) or "w8a8" (activations quantized too). lm_head: whether the head is int8
    too, as an untied copy where it is tied to the embedding. modules_to_not_convert: linears to leave alone, by their
    names, by the ends of these ("down_proj") or by what they are in ("model.layers.0").
    Raises ValueError for settings, or the settings of a checkpoint, that this version does not know.
    """

    def __init__(
        self,
        activations: str = "auto",
        lm_head: bool = False,
        modules_to_not_convert: list[str] | None = None,
        version: int = VERSION,
        group_size: int = GROUP,
        **unknown: Any,
    ) -> None:
        if unknown.pop("quant_method", METHOD) != METHOD:
            raise ValueError(f"not the settings of {METHOD}")
        if (version, group_size) != (VERSION, GROUP):
            raise ValueError(
                f"the checkpoint is of {METHOD} version {version}, groups of {group_size}: this qwen_patch reads "
                f"version {VERSION}, groups of {GROUP}; quantize it again, or use the qwen_patch that wrote it"
            )
        if unknown:
            raise ValueError(f"{METHOD} has no setting {', '.join(unknown)}")
        if activations not in ACTIVATIONS:
            raise ValueError(f"unknown activations {activations!r}: supported are {', '.join(ACTIVATIONS)}")
        self.quant_method = METHOD
        self.activations, self.lm_head = activations, lm_head
        self.modules_to_not_convert = list(modules_to_not_convert or [])
        self.version, self.group_size = version, group_size
        self._on_linear: Callable[[int, int], None] | None = None  # (done, of how many), as they are quantized

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}


@register_quantizer(METHOD)
class QwenPatchInt8Quantizer(HfQuantizer):
    """Reads an int8 checkpoint straight into int8 linears, or quantizes a 16-bit one weight by weight as it is read."""

    requires_calibration = False
    quantization_config: QwenPatchInt8Config

    def __init__(self, quantization_config: QwenPatchInt8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.names: list[str] = []
        self.failures: list[str] = []
        self.done = 0  # linears quantized on the way

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters over it

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == WIDE and not self.pre_quantized:
            raise ValueError(
                "int8 is for bfloat16 and float16 models, and this one is float32: pass dtype=torch.bfloat16"
            )
        return dtype

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        config = self.quantization_config
        head_now = config.lm_head and not self._head_is_tied(model)
        found = find_linears(model, find_family(model), head_now, loaded=False)
        asked = config.modules_to_not_convert
        left = {f.name for f in found if any(_names(entry, f.name) for entry in asked)}
        unknown = [e for e in asked if e != LM_HEAD and not any(_names(e, f.name) for f in found)]
        if unknown and not self.pre_quantized:
            raise ValueError(f"modules_to_not_convert has {unknown[0]}, and no linear of the model is that or in it")
        chosen = [f for f in found if f.reason is None and f.name not in left]
        if not chosen:
            raise ValueError(f"nothing to quantize: {'; '.join(sorted({f.reason or 'asked for' for f in found}))}")
        if not self.pre_quantized:  # as a patch does: what is left alone stays so at the next load
            config.modules_to_not_convert += [
                f.name for f in found if f.site == LINEAR and f.reason and f.name not in left
            ]
        self.names = [f.name for f in chosen]
        for name, _, linear, _ in chosen:
            bias = linear.bias is not None
            dtype = linear.weight.dtype
            made = Int8Linear(linear.in_features, linear.out_features, bias, config.activations, "meta", dtype)
            if not self.pre_quantized:  # the dtype that the weight is read in, before it is quantized
                made.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"))
            model.set_submodule(name, made)
        if self.pre_quantized:
            check_checkpoint(model, self.names, checkpoint_files)

    @staticmethod
    def _head_is_tied(model: PreTrainedModel) -> bool:
        return HEAD_WEIGHT in model.all_tied_weights_keys

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        name, _, tensor = param_name.rpartition(".")
        return tensor == "weight" and isinstance(model.get_submodule(name), Int8Linear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        return 1 if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        if self.pre_quantized:
            return
        if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            raise ValueError("a model that goes to disk can't be quantized on the way: use `qwen-patch quantize` first")
        missing = [name for name in self.names if model.get_submodule(name).weight.dtype != torch.int8]
        if problems := self.failures or [f"{name}: the checkpoint has no weight for it" for name in missing]:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ValueError(f"the model can't be quantized: {problems[0]}{more}")
        if self.quantization_config.lm_head and self._head_is_tied(model):
            if hasattr(model.lm_head, "_hf_hook"):
                raise ValueError("a tied head that accelerate moves can't become int8: use `qwen-patch quantize` first")
            model.lm_head = Int8Linear.from_linear(model.lm_head, self.quantization_config.activations)
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop(HEAD_WEIGHT)
            self.done += 1
        self.pre_quantized = True


class _Quantize(ConversionOps):
    """A weight on its way from the checkpoint to the model. What is wrong with it is told when all are loaded: here
    Transformers would turn it into a report."""

    def __init__(self, quantizer: QwenPatchInt8Quantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, torch.Tensor]:
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        name = full_layer_name.removesuffix(".weight")
        try:
            values, scales = quantize(weight)
        except ValueError as error:
            self.quantizer.failures.append(f"{name}: {error}")
            return input_dict
        self.quantizer.done += 1
        if (step := self.quantizer.quantization_config._on_linear) is not None:
            step(self.quantizer.done, len(self.quantizer.names))
        return {full_layer_name: as_stored(values), f"{name}.scales": scales}


def check_checkpoint(model: PreTrainedModel, names: list[str], files: list[str] | None) -> None:
    """Compares the headers of safetensors files with the int8 linears `names` of the skeleton `model`, before anything
    is read into it. Raises ValueError about the first thing that is missing, of another shape or not whole."""
    found: dict[str, tuple[str, list[int]]] = {}
    for file in map(Path, files or []):
        if file.suffix != ".safetensors":
            raise ValueError(f"{file.name} is not a safetensors file, and {METHOD} is read from those only")
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118
                    part = reader.get_slice(key)
                    found[key] = (part.get_dtype(), part.get_shape())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file.name} is not whole ({error}): write or fetch the checkpoint again") from error
    stored = {_tail(key): value for key, value in found.items()}
    for name in names:
        module = model.get_submodule(name)
        for tensor, dtype, shape in (("weight", "I8", module.weight.shape), ("scales", "F32", module.scales.shape)):
            has = stored.get(_tail(f"{name}.{tensor}"))
            if has is None:
                raise ValueError(f"the checkpoint has no {name}.{tensor}: write or fetch it again")
            if has != (dtype, list(shape)):
                raise ValueError(f"the checkpoint's {name}.{tensor} is {has[0]} {has[1]}, not {dtype} {list(shape)}")


def _names(entry: str, name: str) -> bool:
    """Whether an entry of modules_to_not_convert means that linear. A checkpoint's entries may be those of the model
    with its head, where the names are those of the model without."""
    return any(
        f".{name}.".startswith(f".{entry}.") or f".{name}.".endswith(f".{entry}.")
        for entry, name in ((entry, name), (_tail(entry), _tail(name)))
    )


def _tail(key: str) -> str:
    """A key from its decoder layer on: what comes before differs between a model with a head, without, and a VL one's
    checkpoint."""
    return key[max(0, key.rfind("layers.")) :]

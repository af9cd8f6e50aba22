"""Which linears of a model int8 is for, and why each of the others is left alone. Reads a model, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..families import DECODER_LAYER, LINEAR, LM_HEAD, Family
from ..modules import Int8Linear, stock_class

RECORD = "_qwen_patch_int8"  # in the __dict__ of a model that a patch has quantized
WIDE = torch.float32  # refused for the whole model: int8 is measured against 16 bits
DTYPES = (torch.bfloat16, torch.float16, WIDE)


class Found(NamedTuple):
    """One linear, or what stands in the place of one. Without a reason, int8 is for it."""

    name: str
    site: str
    module: nn.Module
    reason: str | None


def find_linears(model: nn.Module, family: Family, lm_head: bool = False, loaded: bool = True) -> list[Found]:
    """Every linear of `model`, in its order. `loaded=False` is for a skeleton on the meta device, to be loaded."""
    shared = _owners(model)
    return [
        Found(name, site, module, reason or _why_not(name, site, module, lm_head, loaded, shared))
        for name, site, module, reason in _places(model, family)
    ]


def _places(model: nn.Module, family: Family) -> Iterator[Found]:
    """The places of linears in decoder layers, the head, and any other linear, with the reason that it is one."""
    classes = family.site_classes()
    expected: dict[str, str] = {}
    for name, module in model.named_modules():
        cls = stock_class(module)
        if classes.get((cls.__module__, cls.__name__)) == DECODER_LAYER:
            expected |= {f"{name}.{path}": LINEAR for path in family.linears}
        if name.rpartition(".")[2] == family.head:
            expected[name] = LM_HEAD
        inside = any(name.startswith(f"{place}.") for place in _parents(name) if place in expected)
        if name in expected:
            yield Found(name, expected[name], module, None)
        elif family.experts is not None and cls.__name__ == family.experts:
            yield Found(name, LINEAR, module, f"it is a block of experts ({cls.__name__}), which runs as stock")
        elif isinstance(module, nn.Linear) and not inside:
            yield Found(name, LINEAR, module, "it is not a linear of the text model's decoder layers")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Of each parameter, by id, the modules that hold it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def _why_not(
    name: str, site: str, module: nn.Module, lm_head: bool, loaded: bool, owners: dict[int, list[str]]
) -> str | None:
    if site == LM_HEAD and not lm_head:
        return "the head stays as it is (lm_head=True quantizes it, as an untied copy where it is tied)"
    if isinstance(getattr(module, "base_layer", module), Int8Linear):
        return None  # planned as if it were stock
    if hasattr(module, "base_layer"):
        return "it has adapters: quantize first, and add them then"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__module__}.{type(module).__name__}, not a plain nn.Linear"
    if hasattr(module, "_hf_hook"):
        return "accelerate moves its weights: quantize while loading, with quantization_config=QwenPatchInt8Config()"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    if "forward" in module.__dict__:
        return "its forward has been replaced on the instance"
    weight = module.weight
    if loaded and weight.device.type == "meta":
        return "its weight is on the meta device: load the model's weights first"
    if type(weight.data) is not torch.Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if module.in_features % 8:
        return f"K is {module.in_features}, not a multiple of 8"
    others = [owner for owner in owners[id(weight)] if owner != name]
    return f"its weight is {others[0]}'s too" if others and site == LINEAR else None

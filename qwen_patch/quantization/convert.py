"""Gives a model its int8 linears, one at a time, and takes them away again. The patcher calls it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modules import Int8Linear
from .linears import RECORD
from .quantizer import QwenPatchInt8Config, QwenPatchInt8Quantizer

NOT_KEPT = "the linears are int8 and their originals were not kept (keep_original=True keeps them)"


class Absent:
    """The value of an attribute that was not there. A class, so that it is itself in a copy too."""


@dataclass
class Record:
    """What a patch changed in the model whose __dict__ it is in, without a reference to that model, whose memory would
    then be there until Python looks for cycles. `originals` is None where they are not kept, else they are on their
    devices where `in_place`, or in the host's memory."""

    names: tuple[str, ...]
    dtype: torch.dtype  # of the model
    in_place: bool
    originals: dict[str, nn.Linear] | None
    attributes: list[tuple[bool, str, Any]] = field(default_factory=list)  # of the config or not, name, value before
    tied: dict[str, str] = field(default_factory=dict)  # of the head that has become an untied copy


def record_of(model: nn.Module) -> tuple[nn.Module, Record] | None:
    """(the module whose linears they are, what was changed), of `model` or a model inside it."""
    return next(((m, m.__dict__[RECORD]) for m in model.modules() if RECORD in m.__dict__), None)


def make_int8(
    model: nn.Module, names: Iterable[str], config: QwenPatchInt8Config, backend: str, keep: bool | str
) -> None:
    """Makes `names` the int8 linears of `model`. Raises ValueError, with the model as it was, where that can't be.

    One linear at a time; what it was goes to the host's memory, until `forget`, so that a GPU never holds more than one
    linear in both forms; or, with keep="device", it stays where it is. A failure in the middle is undone bit for bit.
    """
    names, in_place = tuple(names), keep == "device"
    if (found := record_of(model)) is not None:
        owner, record = found
        prefix = next(name for name, module in model.named_modules() if module is owner)
        same = record.names == tuple(name.removeprefix(f"{prefix}.") for name in names)
        same = same and (not keep or record.in_place == in_place)
        if same and not any(_is_back(owner, record, name) for name in record.names):
            _set_mode(owner, record.names, config, backend)
            return
        give_back(model)
    record = Record(names, _pretrained(model)[1].dtype, in_place, {})
    try:
        for name in names:
            linear = model.get_submodule(name)
            try:
                made = Int8Linear.from_linear(linear)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            record.originals[name] = linear
            model.set_submodule(name, made)
            if not in_place and not _is_shared(model, linear):
                linear.to("cpu")
        _declare(model, record, config)
        _set_mode(model, names, config, backend)
    except BaseException:
        _put_back(model, record)
        raise
    model.__dict__[RECORD] = record


def forget(model: nn.Module) -> None:
    """Lets the originals go: the memory is free, and there is no way back."""
    if (found := record_of(model)) is not None:
        found[1].originals = None


def kept(model: nn.Module) -> bool | str | None:
    """How the originals are kept, in the words of `keep_original`; None where no patch has changed the linears."""
    if (found := record_of(model)) is None:
        return None
    record = found[1]
    return False if record.originals is None else "device" if record.in_place else True


def kept_bytes(model: nn.Module, device: torch.device) -> int:
    """Of the originals, what lies on `device` for them alone: so not the embedding that a head was tied to."""
    found, held = record_of(model), {id(p) for p in model.parameters()}
    originals = (found and found[1].originals) or {}
    parameters = (p for linear in originals.values() for p in linear.parameters())
    return sum(p.nbytes for p in parameters if p.device == device and id(p) not in held)


def why_not_back(model: nn.Module) -> str | None:
    """Why the linears can't be given back; None where they can, or where no patch has changed them."""
    found = record_of(model)
    if found is None:
        return None
    owner, record = found
    if record.originals is None:
        return f"{NOT_KEPT}: load the model again"
    for name in record.names:
        if not (_is_back(owner, record, name) or isinstance(owner.get_submodule(name), Int8Linear)):
            return f"{name} has adapters over its int8 weights: unload them first"
    return None


def _is_back(model: nn.Module, record: Record, name: str) -> bool:
    """Whether an undo that did not come to its end has put this original back."""
    return record.originals is not None and model.get_submodule(name) is record.originals[name]


def give_back(model: nn.Module) -> None:
    """Puts the originals back, where the int8 ones are now, in the dtype that the model has now. Raises ValueError
    where they are gone. One that was interrupted goes on where it was."""
    if (reason := why_not_back(model)) is not None:
        raise ValueError(reason)
    if (found := record_of(model)) is not None:
        owner, record = found
        _put_back(owner, record)
        del owner.__dict__[RECORD]


def _put_back(model: nn.Module, record: Record) -> None:
    _, pretrained = _pretrained(model)
    for name, linear in record.originals.items():
        current = model.get_submodule(name)
        if not _is_shared(model, linear):
            linear.to(current.weight.device, None if pretrained.dtype == record.dtype else pretrained.dtype)
        model.set_submodule(name, linear.train(current.training))
    for of_config, name, before in reversed(record.attributes):
        owner = pretrained.config if of_config else pretrained
        if before is Absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    pretrained.all_tied_weights_keys.update(record.tied)


def _is_shared(model: nn.Module, linear: nn.Linear) -> bool:
    """Whether other modules hold this weight too, so that it must stay where it is."""
    holders = (m._parameters.get("weight") for m in model.modules() if m is not linear)
    return any(weight is linear.weight for weight in holders)


def _set_mode(model: nn.Module, names: Iterable[str], config: QwenPatchInt8Config, backend: str) -> None:
    _, pretrained = _pretrained(model)
    pretrained.config.quantization_config.activations = config.activations
    for name in names:
        module = model.get_submodule(name)
        module = getattr(module, "base_layer", module)  # adapters over it
        module.activations, module.backend = config.activations, backend


def _pretrained(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """The model of Transformers in `model`, which may be a wrapper, and its name there."""
    return next((name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel))


def _declare(model: nn.Module, record: Record, config: QwenPatchInt8Config) -> None:
    """Tells Transformers, as its own loading does, so that `save_pretrained` writes what `from_pretrained` reads."""
    prefix, pretrained = _pretrained(model)
    config.modules_to_not_convert = [name.removeprefix(f"{prefix}.") for name in config.modules_to_not_convert]

    def change(name: str, value: Any, of_config: bool = False) -> None:
        owner = pretrained.config if of_config else pretrained
        record.attributes.append((of_config, name, owner.__dict__.get(name, Absent)))
        setattr(owner, name, value)

    change("hf_quantizer", QwenPatchInt8Quantizer(config, pre_quantized=True))
    change("is_quantized", True)
    change("quantization_method", config.quant_method)
    change("quantization_config", config, of_config=True)
    tied = pretrained.all_tied_weights_keys
    converted = {name.removeprefix(f"{prefix}.") for name in record.names}
    heads = {key: source for key, source in tied.items() if key.removesuffix(".weight") in converted}
    if heads:
        change("tie_word_embeddings", False, of_config=True)
        record.tied = heads
        for key in heads:
            tied.pop(key)

"""Apply a plan, and undo it: the only place that writes to a model, with quantization/convert.py for its linears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from .families import LINEAR
from .modules import FastGenerate, Patched, patched_class
from .modules.decoder_layer import NEXT_NORM
from .plan import PatchError, Plan, make_plan
from .quantization import convert
from .quantization.quantizer import QwenPatchInt8Config
from .recipes import QUANTIZED, RECIPES

PLAN = "_qwen_patch_plan"
Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model,
    *,
    fusion: str = "both",
    backend: str = "auto",
    generation: str = "auto",
    quantize: str | None = None,
    activations: str = "auto",
    lm_head: bool = False,
    keep_original: bool | str = False,
) -> Model:
    """Makes `model` faster at inference, with the same answers, in place; returns the same object.

    fusion: "both" (norms, residual adds and MLP), or one of the ablations "rms", "mlp", "none".
    backend: "auto" (the kernels of the device that a tensor is on), "cuda" or "cpu" (these, or an error), or
    "reference" (the stock expressions in PyTorch, for comparison).
    generation: "auto" (`generate` through the decode runtime, where the call allows it: `explain` tells) or
    "stock" (Transformers' own loop over the fused modules, as in every ablation).
    quantize: "int8" makes the linears of a bfloat16 or float16 model int8: about half the memory, and answers that are
    close to the same rather than the same (`validate_qwen --quantize int8` measures it). `activations` then is "auto",
    "w8a16" (weights only) or "w8a8" (activations quantized on the way too); `lm_head` quantizes the head too, as an
    untied copy where it is tied to the embedding; `keep_original` keeps the 16-bit linears in the host's memory, or
    with "device" where they are, which makes the undo fast, and without it there is no undo. `save_pretrained` then
    writes an int8 checkpoint.

    Only this instance changes. Without int8, parameters, state_dict, hooks and what the model returns stay what they
    were; `explain` tells what was replaced and what not. Patching again with the same arguments does nothing, with
    others it re-plans. Raises PatchError, with the model as it was, where nothing can be done.
    """
    outer, model = model, _subject_of(model)
    plan = make_plan(model, fusion, backend, generation, quantize, activations, lm_head)
    if keep_original not in (False, True, "device"):
        raise PatchError(f"unknown keep_original {keep_original!r}: supported are False, True, device")
    if plan.quantize is None and (reason := convert.why_not_back(model)) is not None:
        raise PatchError(f"{reason}, or keep the linears with quantize='int8'")
    if keep_original and convert.kept(model) is False:
        raise PatchError(f"{convert.NOT_KEPT}: keep_original=True comes too late")
    if current_plan(model) == plan and convert.kept(model) in (None, keep_original):
        return outer
    try:
        _quantize(model, plan, keep_original)
    except ValueError as error:
        raise PatchError(str(error)) from error
    _undo_fusion(model)
    try:
        fused = [d for d in plan.replaced if d.site in RECIPES[fusion]]
        for decision in fused:
            _replace(model, decision.name, RECIPES[fusion][decision.site], plan.backend)
        for decision in fused:
            if decision.next_norm:
                next_layer = model.get_submodule(decision.next_layer) if decision.next_layer else None
                wired = (model.get_submodule(decision.next_norm), next_layer)
                model.get_submodule(decision.name).__dict__[NEXT_NORM] = wired
        if plan.generation.replacement:
            _replace(model, plan.generation.name, FastGenerate, plan.backend)
        model.__dict__[PLAN] = plan
    except BaseException:
        _undo_fusion(model)
        if convert.why_not_back(model) is None:
            convert.give_back(model)
        raise
    if not keep_original:
        convert.forget(model)
    return outer


def unpatch_model(model: Model) -> Model:
    """Gives the stock model back, bit for bit; returns the same object. A model that is not patched stays as it is.

    Works on whatever holds patched modules: the model, a copy of it, a PEFT model around it. Raises PatchError, with
    the model as it was, where a patch has made its linears int8 and their originals were not kept.
    """
    if (reason := convert.why_not_back(model)) is not None:
        raise PatchError(reason)
    for name, module in model.named_modules():
        if isinstance(module, Patched) and "replacement" not in type(module).__dict__:
            raise PatchError(f"{name} has become a {type(module).__name__} since the patch: undo that first")
    _undo_fusion(model)
    convert.give_back(model)
    return model


def release(model: Model) -> Model:
    """Frees what `generate` keeps between calls: keys and values, CUDA graphs. The next call makes new ones.

    Returns the same object. unpatch_model frees them too, and so does moving or casting the model.
    """
    for module in model.modules():
        if isinstance(module, FastGenerate):
            module.release()
    return model


def _quantize(model: nn.Module, plan: Plan, keep: bool | str) -> None:
    if plan.quantize is None:
        convert.give_back(model)
        return
    sites = QUANTIZED[plan.quantize]
    left = [d.name for d in plan.decisions if d.site == LINEAR and d.reason is not None]
    config = QwenPatchInt8Config(plan.activations, plan.lm_head, left)
    names = [d.name for d in plan.replaced if d.site in sites]
    convert.make_int8(model, names, config, plan.backend, keep)


def _undo_fusion(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Patched):
            for key in module.wiring:
                module.__dict__.pop(key, None)
            _set_class(module, module.stock)
        module.__dict__.pop(PLAN, None)


def _subject_of(model: nn.Module) -> nn.Module:
    """The model of Transformers in a wrapper, PEFT's or somebody's own: a patch is the same from outside and inside."""

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        if isinstance(module, PreTrainedModel):
            yield module
        else:
            for child in module.children():
                yield from outermost(child)

    found = list(outermost(model))
    return found[0] if len(found) == 1 else model


def current_plan(model: nn.Module) -> Plan | None:
    """The plan that `model`, or a model inside it, was patched with; None where modules have been exchanged since."""
    found = next(((m, m.__dict__[PLAN]) for m in model.modules() if PLAN in m.__dict__), None)
    return found[1] if found is not None and _is_applied(*found) else None


def _is_applied(model: nn.Module, plan: Plan) -> bool:
    modules = dict(model.named_modules())
    return all(isinstance(modules.get(d.name), Patched) for d in plan.replaced if d.site in RECIPES[plan.fusion])


def explain(model: nn.Module) -> Plan:
    """What was replaced in a patched model, what was not, and why; for a stock model, what `patch_model` would do."""
    plan = current_plan(model) or make_plan(_subject_of(model))
    reasons = {m.last_reason for m in model.modules() if isinstance(m, FastGenerate) and m.last_reason}
    calls = tuple(f"the last generate ran Transformers' own loop: {reason}" for reason in sorted(reasons))
    return replace(plan, notes=plan.notes + calls)


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """`with patched(model, fusion="mlp"):` the model is patched inside, and afterwards what it was before.

    Takes what `patch_model` takes. With quantize="int8" the originals are kept, for the way back.
    """
    before, kept = current_plan(model), convert.kept(model)
    if options.get("quantize") is not None:
        options = {"keep_original": True if kept is None else kept, **options}
    patch_model(model, **options)
    try:
        yield model
    finally:
        if before is None:
            unpatch_model(model)
        else:
            patch_model(model, **before.options, keep_original=kept or False)


def _replace(model: nn.Module, name: str, replacement: type[Patched], backend: str) -> None:
    module = model.get_submodule(name)
    _set_class(module, patched_class(replacement, type(module), backend))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Changes a module's class. accelerate's hooks keep the bound forward that they wrap: it must follow the class."""
    hooked = module.__dict__.get("_old_forward")
    follows = getattr(hooked, "__func__", None) is type(module).forward
    module.__class__ = cls
    if follows:
        module.__dict__["_old_forward"] = cls.forward.__get__(module)

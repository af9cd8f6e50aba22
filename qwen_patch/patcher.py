"""Apply a plan, and undo it: the only place that writes to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from torch import nn

from .modules import FastGenerate, Patched, patched_class
from .modules.decoder_layer import NEXT_NORM
from .plan import Plan, make_plan
from .recipes import RECIPES

PLAN = "_qwen_patch_plan"
Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, *, fusion: str = "both", backend: str = "auto", generation: str = "auto") -> Model:
    """Makes `model` faster at inference, with the same answers, in place; returns the same object.

    fusion: "both" (norms, residual adds and MLP), or one of the ablations "rms", "mlp", "none".
    backend: "auto" (the kernels of the device that a tensor is on), "cuda" or "cpu" (these, or an error), or
    "reference" (the stock expressions in PyTorch, for comparison).
    generation: "auto" (`generate` through the decode runtime, on CUDA, where the call allows it: `explain` tells) or
    "stock" (Transformers' own loop over the fused modules, as in every ablation).

    Only this instance changes. Parameters, state_dict, hooks and what the model returns stay what they were; `explain`
    tells what was replaced and what not. Patching again with the same arguments does nothing, with others it re-plans.
    Raises PatchError, with the model as it was, where nothing can be done.
    """
    plan = make_plan(model, fusion, backend, generation)
    if current_plan(model) == plan:
        return model
    unpatch_model(model)
    try:
        for decision in plan.replaced:
            _replace(model, decision.name, RECIPES[fusion][decision.site], plan.backend)
        for decision in plan.replaced:
            if decision.next_norm:
                next_layer = model.get_submodule(decision.next_layer) if decision.next_layer else None
                wired = (model.get_submodule(decision.next_norm), next_layer)
                model.get_submodule(decision.name).__dict__[NEXT_NORM] = wired
        if plan.generation.replacement:
            _replace(model, plan.generation.name, FastGenerate, plan.backend)
        model.__dict__[PLAN] = plan
    except BaseException:
        unpatch_model(model)
        raise
    return model


def unpatch_model(model: Model) -> Model:
    """Gives the stock model back, bit for bit; returns the same object. A model that is not patched stays as it is.

    Works on whatever holds patched modules: the model, a copy of it, a PEFT model around it.
    """
    for module in model.modules():
        if isinstance(module, Patched):
            for key in module.wiring:
                module.__dict__.pop(key, None)
            _set_class(module, module.stock)
        module.__dict__.pop(PLAN, None)
    return model


def current_plan(model: nn.Module) -> Plan | None:
    """The plan that `model`, or a model inside it, was patched with."""
    return next((m.__dict__[PLAN] for m in model.modules() if PLAN in m.__dict__), None)


def explain(model: nn.Module) -> Plan:
    """What was replaced in a patched model, what was not, and why; for a stock model, what `patch_model` would do."""
    plan = current_plan(model) or make_plan(model)
    reasons = {m.last_reason for m in model.modules() if isinstance(m, FastGenerate) and m.last_reason}
    calls = tuple(f"the last generate ran Transformers' own loop: {reason}" for reason in sorted(reasons))
    return replace(plan, notes=plan.notes + calls)


@contextmanager
def patched(model: Model, *, fusion: str = "both", backend: str = "auto", generation: str = "auto") -> Iterator[Model]:
    """`with patched(model, fusion="mlp"):` the model is patched inside, and afterwards what it was before."""
    before = current_plan(model)
    patch_model(model, fusion=fusion, backend=backend, generation=generation)
    try:
        yield model
    finally:
        unpatch_model(model)
        if before is not None:
            patch_model(model, fusion=before.fusion, backend=before.backend, generation=before.asked_generation)


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

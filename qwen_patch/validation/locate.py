"""Where two runs part: the first module, in the order of execution, whose output differs by more than rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..families import DECODER_LAYER
from ..plan import Plan
from .collect import Batch, positions

# A difference of more than this many eps of the largest value, for each root of the sites so far, is not rounding.
ROUNDING = 8


@torch.no_grad()
def outputs_of_sites(model: PreTrainedModel, plan: Plan, batch: Batch) -> dict[str, torch.Tensor]:
    """name -> output of each replaced norm and MLP and of each attention, in the order in which they ran.

    Decoder layers themselves are not hooked: a hook on a layer makes it leave out the fusion across its border.
    """
    names = {d.name for d in plan.replaced if d.site != DECODER_LAYER}
    names |= {f"{d.name}.self_attn" for d in plan.decisions if d.site == DECODER_LAYER}
    recorded: dict[str, torch.Tensor] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            recorded[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(record(name)) for name in names if name in modules]
    try:
        model(batch.ids, attention_mask=batch.mask, position_ids=positions(batch.mask), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return recorded


def first_difference(stock: dict[str, torch.Tensor], patched: dict[str, torch.Tensor]) -> str | None:
    """One line about the first site that differs, or None."""
    for sites, (name, expected) in enumerate(stock.items(), start=1):
        found = patched.get(name)
        if found is None:
            return f"{name}: it did not run in the patched model"
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{name}: {list(found.shape)} {found.dtype} in place of {list(expected.shape)} {expected.dtype}"
        error, scale = (found.float() - expected.float()).abs().max().item(), expected.float().abs().max().item()
        if not error <= ROUNDING * sites**0.5 * torch.finfo(expected.dtype).eps * scale:
            return f"{name}: differs by {error:.3g}, where its largest value is {scale:.3g}"
    return None

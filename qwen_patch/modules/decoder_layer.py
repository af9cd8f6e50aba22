"""The decoder layer's residual graph: each residual add runs in one kernel with the norm that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from .base import Patched
from .norm import add_before

# (the norm that reads this layer's output, the layer that calls it, or None for the final norm). A tuple, not a
# submodule, which would add state_dict keys.
NEXT_NORM = "_qwen_patch_next_norm"


class FusedDecoderLayer(Patched):
    """The stock forward with both residual adds fused into the norm that follows, the second across the layer's border.

    The layer still returns the full sum, so that hidden states, caches and hooks see what they see in the stock model.
    The fusion across the border is left out where hooks on this layer's output or the next layer's input might edit
    the sum in between, and for inference tensors, which don't tell that anybody else has.
    """

    wiring = (NEXT_NORM,)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes what the stock layer takes, by name. The names differ between versions of Transformers (past_key_values
        became cache), and all of them go on to the attention."""
        if not isinstance(self, Patched):
            return type(self).forward(self, hidden_states, *args, **kwargs)
        if args or self.training or torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        kwargs.setdefault("attention_mask", None)  # the attention has no default for it
        modules = self._modules
        residual = hidden_states
        hidden_states, _ = modules["self_attn"](hidden_states=modules["input_layernorm"](hidden_states), **kwargs)
        norm = modules["post_attention_layernorm"]
        residual = add_before(norm, hidden_states, residual)
        hidden_states = modules["mlp"](norm(residual))

        next_norm, next_layer = self.__dict__.get(NEXT_NORM, (None, None))
        if next_norm is None or residual.is_inference() or _may_be_edited(self, next_layer):
            return residual + hidden_states
        return add_before(next_norm, hidden_states, residual)


def _may_be_edited(layer: nn.Module, next_layer: nn.Module | None) -> bool:
    """Whether hooks other than Transformers' own output recorders see the sum between the two layers."""
    if nn_module._global_forward_hooks or (next_layer is not None and next_layer._forward_pre_hooks):
        return True
    hooks = layer._forward_hooks
    return bool(hooks) and any(
        getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks.values()
    )

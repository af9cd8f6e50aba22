"""Small random models of every family, and inputs for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from qwen_patch.loading import BUNDLED

# model_type -> what differs from SHAPE, in the text tower where there is another one.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "llama": {},
    "mistral": {"sliding_window": None},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
TOKENS: dict[str, int] = {"image": 124, "video": 125, "vision_start": 126, "vision_end": 127}
# The vision towers: what differs from VISION_SHAPE.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 16},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
}
VISION_SHAPE: dict[str, int] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": SHAPE["hidden_size"],
}
VISION_PIXELS = 3 * 2 * 4 * 4  # of one patch: channels, frames, height, width


def small_config(family: str, **config: Any) -> PretrainedConfig:
    """Three layers of 64 with grouped queries."""
    shape = SHAPE | FAMILIES[family] | config
    if family not in VISION:
        return AutoConfig.for_model(family, **shape)
    attention = {key: shape.pop(key) for key in ("attn_implementation",) if key in shape}
    tokens = {f"{name}_token_id": number for name, number in TOKENS.items()}
    vision = VISION_SHAPE | VISION[family]
    return AutoConfig.for_model(family, text_config=shape, vision_config=vision, **tokens, **attention)


def small_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **config: Any) -> PreTrainedModel:
    """A `small_config` with norm weights that are not all one; the same weights at every call."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
    attention = {key: config.pop(key) for key in ("attn_implementation",) if key in config}
    model = auto.from_config(small_config(family, **config), dtype=torch.float32, **attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.3)
    return model.to(device=device, dtype=dtype).eval()


def token_ids(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(1)).to(device)


def answers(model: torch.nn.Module, ids: torch.Tensor, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(ids, **kwargs)


# The bundled ones, and the real one where its folder is given.
TRAINED = [*BUNDLED, *filter(None, [os.environ.get("QWEN_PATCH_REAL_MODEL")])]


def assert_parts_only_at_ties(
    model: PreTrainedModel,
    truth: Callable[[], PreTrainedModel],
    mask: torch.Tensor | None,
    expected: Iterable[torch.Tensor],
    found: Iterable[torch.Tensor],
) -> None:
    """Where two greedy answers part, the float32 model's margin between the two tokens lies within what rounding does
    to the two: twice the largest difference between its logits and the stock model's in its own dtype.

    `truth` brings the float32 model, where one is needed; `mask` is the prompts', padded on the left.
    """
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        if torch.equal(a, b):
            continue
        where = int((a != b).nonzero()[0])
        text = a[None, int((mask[row] == 0).sum()) if mask is not None else 0 : where]
        exact, stock = answers(truth(), text).logits[0, -1], answers(model, text).logits[0, -1].float()
        margin = (exact[a[where]] - exact[b[where]]).abs()
        assert margin <= 2 * (exact - stock).abs().max(), f"row {row} parts at {where} without a tie"

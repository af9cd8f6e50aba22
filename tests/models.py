"""Small random models of every family, and inputs for them."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def small_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **config) -> PreTrainedModel:
    """Three layers of 64, grouped queries, norm weights that are not all one; the same weights at every call."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[family]
    shape = {
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
    model = model_class(config_class(**(shape | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model.to(device=device, dtype=dtype).eval()


def token_ids(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(1)).to(device)

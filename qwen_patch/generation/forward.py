"""The decoder written out over the fused ops: whole prompts, and single tokens where `decode_step` can't take them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from ..modules.linear import Int8Linear, side_by_side
from ..ops import add_rms_norm, rms_norm, rope_kv_write, silu_and_mul, silu_mul


@torch.no_grad()
def forward(
    decoder: nn.Module,
    head: nn.Module,
    tokens: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [B, V] of token last[b] of each row b of tokens [B, T], whose first one is at position first[b].

    decoder: the model without its head. cache [L, 2, B, kv_heads, capacity, D] takes the
    keys and values of all tokens, cos and sin [positions, D] turn them. Without a mask the rows are whole prompts, from
    position 0 on; what pads them stands on the right, where causal attention does not see it. With a mask [B, 1, 1,
    capacity], to be added to the scores of the cache's slots, they are single tokens. Nothing here waits for the GPU,
    so that a graph can hold it. Rounds where the stock model does, and sums in other orders.
    """
    layers, eps = decoder.layers, decoder.norm.variance_epsilon
    residual = embedding(tokens, decoder.embed_tokens.weight)
    x = rms_norm(residual, layers[0].input_layernorm.weight, eps)
    for number, layer in enumerate(layers):
        x = _attend(layer.self_attn, x, first, cache[number, 0], cache[number, 1], cos, sin, eps, mask)
        if number + 1 == len(layers):  # from here on no token needs another
            row = torch.arange(len(tokens), device=tokens.device)
            x, residual = x[row, last], residual[row, last]
        x = _linear(layer.self_attn.o_proj, x)
        x, residual = add_rms_norm(x, residual, layer.post_attention_layernorm.weight, eps)
        gate_up = layer.mlp.gate_proj, layer.mlp.up_proj
        packed = side_by_side(gate_up, x)
        x = silu_mul(*(_linear(module, x) for module in gate_up)) if packed is None else silu_and_mul(packed)
        x = _linear(layer.mlp.down_proj, x)
        norm = decoder.norm if number + 1 == len(layers) else layers[number + 1].input_layernorm
        x, residual = add_rms_norm(x, residual, norm.weight, eps)
    return _linear(head, x)


def mask_of(lengths: torch.Tensor, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    """For single tokens at the positions lengths [B]: each sees the slots up to its own."""
    unseen = torch.arange(capacity, device=lengths.device) > lengths[:, None]
    return torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, -torch.inf)[:, None, None]


def _linear(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.forward(x) if type(module) is Int8Linear else linear(x, module.weight, module.bias)


def _attend(
    attention: nn.Module,
    x: torch.Tensor,
    first: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """What o_proj takes: [B, T, heads * D]."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    packed = side_by_side(projections, x)
    if packed is None:
        q, k, v = (_linear(module, x) for module in projections)
    else:
        q, k, v = packed.split([module.out_features for module in projections], dim=-1)
    norms = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    rotated = rope_kv_write(q, k, v, *norms, eps, cos, sin, first, keys, values)
    tokens, scale = q.shape[1], attention.scaling
    if mask is None:
        q, keys, values = rotated.transpose(1, 2), keys[:, :, :tokens], values[:, :, :tokens]
        out = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)
    # The query heads that share keys stand as that many tokens. With enable_gqa and a mask, the kernels of torch would
    # leave it to its slow path, which copies the keys and values for each of them.
    q = rotated.view(len(q), keys.shape[1], -1, rotated.shape[-1])
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(len(q), 1, -1)

"""The decoder written out over the ops, against the stock model: whole prompts, then tokens one by one."""

from __future__ import annotations

import pytest
import torch
from models import answers, small_model
from transformers import PreTrainedModel

from qwen_patch.generation.forward import forward, mask_of

LENGTHS = (1, 7, 30, 19)
CAPACITY, STEPS = 64, 4


def logits_of(model: PreTrainedModel, ids: torch.Tensor, width: int) -> torch.Tensor:
    """[1 + STEPS, B, V]: those after each row's prompt, the rows padded on the right to `width`, and after each of the
    tokens that follow it in ids."""
    decoder, config, (head, rows) = model.model, model.config, (model.lm_head, len(LENGTHS))
    dtype, device = head.weight.dtype, head.weight.device
    cos, sin = decoder.rotary_emb(
        torch.empty(1, dtype=dtype, device=device), torch.arange(CAPACITY, device=device)[None]
    )
    shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, CAPACITY, config.head_dim)
    cache = torch.zeros(shape, dtype=dtype, device=device)
    lengths = torch.tensor(LENGTHS, device=device)
    prompts = torch.where(torch.arange(width, device=device) < lengths[:, None], ids[:, :width], 5)
    zeros = torch.zeros_like(lengths)
    with torch.no_grad():
        found = [forward(decoder, head, prompts, zeros, lengths - 1, cache, cos[0], sin[0])]
        for _ in range(STEPS):
            tokens, mask = ids.gather(1, lengths[:, None]), mask_of(lengths, CAPACITY, dtype)
            found.append(forward(decoder, head, tokens, lengths, zeros, cache, cos[0], sin[0], mask))
            lengths = lengths + 1
    return torch.stack(found)


def stock_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    rows = [answers(model, ids[b : b + 1, : n + STEPS]).logits[0, n - 1 :] for b, n in enumerate(LENGTHS)]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("width", [30, 48])
def test_float32(family, width, device):
    """The same sums in other orders: a few eps of the largest logit, a layer."""
    model = small_model(family, torch.float32, device.type)
    ids = torch.randint(0, 128, (len(LENGTHS), CAPACITY), device=device)
    found, expected = logits_of(model, ids, width), stock_logits(model, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * 2**-23 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_16_bits(family, dtype, device):
    """The error against the float32 model exceeds the stock model's own by at most a tenth, over several inputs."""
    model, truth = small_model(family, dtype, device.type), small_model(family, torch.float32, device.type)
    truth.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    errors = torch.zeros(2)
    for _ in range(8):
        ids = torch.randint(0, 128, (len(LENGTHS), CAPACITY), device=device)
        exact = stock_logits(truth, ids)
        for i, found in enumerate((logits_of(model, ids, 32), stock_logits(model, ids))):
            errors[i] += (found.float() - exact).square().sum().cpu()
    assert 0 < errors[0].sqrt() <= 1.1 * errors[1].sqrt()

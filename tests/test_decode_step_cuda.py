"""decode_step on CUDA: a step's logits against the stock forward, in 16 bits and over int8, after long contexts."""

from __future__ import annotations

import pytest
import torch
from models import small_model
from transformers import LogitsProcessorList, PreTrainedModel

from qwen_patch.generation.captured import CapturedSession
from qwen_patch.modules import Int8Linear
from qwen_patch.quantization.format import dequantize

pytestmark = pytest.mark.cuda

SHAPES = {
    "qwen2, 7 heads a group": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 64}),
    "qwen3, 128": ("qwen3", {"hidden_size": 1024, "num_attention_heads": 4, "head_dim": 128}),
    "qwen3, 4 heads a group": ("qwen3", {"hidden_size": 2080, "num_attention_heads": 8, "head_dim": 128}),
    "llama, long MLP": ("llama", {"hidden_size": 512, "intermediate_size": 12320, "head_dim": 128}),
    "llama, one head a group": ("llama", {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 96}),
}


def to_int8(model: PreTrainedModel, truth: PreTrainedModel, head: bool) -> None:
    """Makes the linears of `model` int8, and those of `truth` what the codes and scales stand for."""
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, torch.nn.Linear) and (head or name != "lm_head"):
            made = Int8Linear.from_linear(linear)
            model.set_submodule(name, made)
            truth.get_submodule(name).weight.data = dequantize(made.values, made.scales)


CHUNK = 2048


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[B, V] after ids [B, T], by the stock forward; in pieces, for in float32 it keeps all scores of a layer."""
    cache = None
    for piece in ids.split(CHUNK, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    return output.logits[:, -1].float()


def errors_of_a_step(
    family: str, sizes: dict[str, int], dtype: torch.dtype, rows: int, length: int, inputs: int, int8: str = ""
) -> tuple[float, float]:
    """Of the logits after `length` tokens, over random inputs: the kernel's and the stock model's, each against the
    stock model in float32, as the root of the sum of squares. int8: "layers", or "all" for the head too."""
    sizes = {"intermediate_size": 1536, "vocab_size": 1000, "initializer_range": 0.05} | sizes
    sizes["max_position_embeddings"] = length + 1
    model = small_model(family, dtype, "cuda", **sizes)
    truth = small_model(family, torch.float32, "cuda", **sizes)
    truth.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    if int8:
        to_int8(model, truth, head=int8 == "all")
    decoded = CapturedSession(model, rows, 1 << (length + 1).bit_length(), LogitsProcessorList(), False)
    assert decoded.no_kernel is None
    errors = torch.zeros(2)
    for _ in range(inputs):
        ids = torch.randint(0, 1000, (rows, length + 1), device="cuda")
        exact, stock = (last_logits(m, ids) for m in (truth, model))
        with torch.no_grad():
            decoded.start(ids[:, :-1], [0] * rows, LogitsProcessorList())
            decoded.put(ids[:, -1])
            decoded.step()
        ours = decoded.logits.float()
        errors += torch.stack([(ours - exact).square().sum(), (stock - exact).square().sum()]).cpu()
        assert torch.equal(decoded.tokens, ours.argmax(-1))
        assert decoded.state.tolist()[1:] == [length + 2] + [length + 1] * rows
    found, stock = errors.sqrt().tolist()
    return found, stock


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length"), [(1, 3), (1, 700), (2, 65), (8, 130)])
def test_step_against_the_stock_forward(shape, dtype, rows, length):
    """Judged as everything that sums in another order: the error against the stock model in float32 exceeds the stock
    model's own by at most a tenth, over eight inputs: a single one's ratio varies by as much."""
    found, stock = errors_of_a_step(*SHAPES[shape], dtype, rows, length, inputs=8)
    assert found <= 1.1 * stock


INT8_SHAPES = {
    "qwen2, 7 heads a group": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 64}),
    "qwen3, scales not on 16 bytes": (
        "qwen3",
        {"hidden_size": 2112, "num_attention_heads": 8, "head_dim": 128, "intermediate_size": 12352},  # in two phases
    ),
    "qwen3, scales on 16 bytes": (
        "qwen3",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "llama, long MLP": ("llama", {"hidden_size": 512, "intermediate_size": 12352, "head_dim": 128}),
}


@pytest.mark.parametrize("int8", ["layers", "all"])
@pytest.mark.parametrize("shape", INT8_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length"), [(1, 70), (3, 65), (8, 30)])
def test_step_over_int8(shape, dtype, rows, length, int8):
    """As above, with the stock model over int8 modules for the stock model."""
    found, stock = errors_of_a_step(*INT8_SHAPES[shape], dtype, rows, length, inputs=8, int8=int8)
    assert found <= 1.1 * stock


@pytest.mark.parametrize(("rows", "length"), [(1, 131071), (3, 33000)])
def test_long_contexts(rows, length):
    """As above, with room for three inputs' ratio; a part of the context left out, or read twice, gives several times
    the error."""
    found, stock = errors_of_a_step(*SHAPES["qwen3, 128"], torch.bfloat16, rows, length, inputs=3)
    assert found <= 1.25 * stock

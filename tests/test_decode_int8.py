"""The decode runtime over int8 linears."""

from __future__ import annotations

import pytest
import torch
from decoding import compared, left_padded
from models import small_model
from torch import nn
from transformers import PreTrainedModel

import qwen_patch
from qwen_patch.generation import models
from qwen_patch.generation.models import reason_against_model, weights_of
from qwen_patch.generation.session import layer_pointers
from qwen_patch.modules import Int8Linear
from qwen_patch.ops.decode_step import AS_EMBEDDING, LAYER_WEIGHTS, W8A8, W8A16

LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def int8_model(family: str = "qwen3", activations: str = "w8a16", head: bool = False, **config) -> PreTrainedModel:
    """A small float32 model, whose linears are int8: float32 shows more of an error than 16 bits."""
    model = small_model(family, **config)
    for layer in model.model.layers:
        for name in LINEARS:
            layer.set_submodule(name, Int8Linear.from_linear(layer.get_submodule(name), activations))
    if head:
        model.lm_head = Int8Linear.from_linear(model.lm_head, activations)
    return model


@pytest.mark.parametrize("activations", ["auto", "w8a16", "w8a8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_generate_over_int8(family, activations, each_way):
    compared(int8_model(family, activations, head=family == "llama"), left_padded(9, 4, 1))


def test_how_the_weights_are_held(monkeypatch):
    assert weights_of(small_model("qwen3"), 1) == AS_EMBEDDING
    assert weights_of(int8_model(), 1) == W8A16
    assert weights_of(int8_model(activations="w8a8", head=True), 1) == W8A8
    monkeypatch.setitem(qwen_patch.modules.linear.W8A8_FROM_ROWS, ("int8_linear", "cpu"), 2)
    assert [weights_of(int8_model(activations="auto"), rows) for rows in (1, 2)] == [W8A16, W8A8]


def some_in_float(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False).eval()


def other_activations(model: PreTrainedModel) -> None:
    model.model.layers[2].self_attn.q_proj.activations = "w8a8"


def a_head_of_its_own(model: PreTrainedModel) -> None:
    model.lm_head = Int8Linear.from_linear(model.lm_head, "w8a8")


def by_the_reference(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.down_proj.backend = "reference"


@pytest.mark.parametrize("change", [some_in_float, other_activations, a_head_of_its_own, by_the_reference])
def test_linears_that_are_not_alike(change):
    """The plain forward takes them: it asks each."""
    model = int8_model()
    change(model)
    assert weights_of(model, 1) is None
    compared(model, left_padded(7, 2))


def test_addresses_of_int8_weights():
    """In the order that csrc's LayerWeights has them."""
    model = int8_model("qwen2")
    for layer, row in zip(model.model.layers, layer_pointers(model.model), strict=True):
        found = dict(zip(LAYER_WEIGHTS, row, strict=True))
        for path in LINEARS:
            name, module = path.rpartition(".")[2].removesuffix("_proj"), layer.get_submodule(path)
            assert found[name] == module.weight.data_ptr()
            assert found[f"{name}_scales"] == module.scales.data_ptr()
    plain = layer_pointers(small_model("qwen2").model)
    assert all(row[LAYER_WEIGHTS.index("q_scales") :] == [0] * 7 for row in plain)


CHANGES = {
    "new scales": lambda m: setattr(m, "scales", m.scales.clone()),
    "other values of scales": lambda m: m.scales.mul_(2),
    "a view of scales": lambda m: setattr(m, "scales", m.scales[:, :1]),
    "codes": lambda m: setattr(m, "weight", nn.Parameter(m.weight.flip(0), requires_grad=False)),
    "activations": lambda m: setattr(m, "activations", "w8a8"),
    "backend": lambda m: setattr(m, "backend", "reference"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_of_an_int8_model(change):
    model = int8_model(intermediate_size=192)
    before, held = models.state_of(model), models.buffers_of(model)
    assert models.state_of(model) == before
    CHANGES[change](model.model.layers[1].mlp.down_proj)
    assert models.state_of(model) != before
    del held


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "a view of scales"])
def test_a_change_between_two_calls(change, each_way):
    model = int8_model(intermediate_size=192)
    compared(model, left_padded(6))
    CHANGES[change](model.model.layers[1].mlp.down_proj)
    found = model.generate(**left_padded(6), max_new_tokens=20, do_sample=False)
    assert model.last_reason is None
    qwen_patch.unpatch_model(model)
    assert torch.equal(found, model.generate(**left_padded(6), max_new_tokens=20, do_sample=False))


def test_scales_of_another_shape_are_refused():
    model = int8_model(intermediate_size=192)
    module = model.model.layers[1].mlp.down_proj
    for scales, reason in (
        (module.scales[:, :2].contiguous(), "is [64, 2] of torch.float32 on cpu"),
        (module.scales.double(), "is [64, 3] of torch.float64 on cpu"),
        (module.scales.t().contiguous().t(), "is not contiguous"),
    ):
        module.scales = scales
        assert models._of_shapes(model) == f"model.layers.1.mlp.down_proj.scales {reason}"
    assert reason_against_model(model) is not None

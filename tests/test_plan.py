"""What a plan says: the golden plans of every family, and a reason for each module that is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from models import FAMILIES, small_config, small_model, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import qwen_patch
from qwen_patch import PatchError, make_plan, requirements
from qwen_patch.modules import Patched
from qwen_patch.recipes import RECIPES

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_plan(family):
    """Every decision for a two-layer model. QWEN_PATCH_WRITE_GOLDEN=1 writes the files; read them then."""
    found = json.loads(json.dumps(make_plan(small_model(family, num_hidden_layers=2)).to_dict()))
    path = GOLDEN / f"{family}.json"
    if os.environ.get("QWEN_PATCH_WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text())


@pytest.mark.parametrize("fusion", RECIPES)
def test_each_decision_has_a_replacement_or_a_reason(fusion):
    plan = make_plan(small_model("qwen3"), fusion)
    assert len(plan.decisions) == 3 * (1 + 1 + 4) + 1
    for decision in plan.decisions:
        assert (decision.replacement is None) != (decision.reason is None)
    assert {d.site for d in plan.replaced} == set(RECIPES[fusion])
    assert plan.to_dict()["fusion"] == fusion
    assert f"fusion={fusion}" in str(plan)


def test_experts_are_reported_and_left_alone():
    plan = make_plan(small_model("qwen3_moe"))
    mlps = {d.name: d for d in plan.decisions if d.site == "mlp"}
    assert [d.replacement for d in mlps.values()] == ["FusedMLP", None, None]
    assert reason_for(small_model("qwen3_moe"), MLP) == (
        "it is a block of experts (Qwen3MoeSparseMoeBlock), which runs as stock"
    )


def test_planning_writes_nothing():
    model = small_model("qwen2")
    before = {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()}
    make_plan(model)
    qwen_patch.explain(model)
    assert {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()} == before


def test_a_patched_model_is_planned_as_if_stock():
    model = small_model("llama")
    expected = make_plan(model, "both")
    qwen_patch.patch_model(model, fusion="mlp")
    assert make_plan(model, "both") == expected


def reason_for(model, name, fusion="both"):
    decision = next(d for d in make_plan(model, fusion).decisions if d.name == name)
    assert decision.replacement is None
    return decision.reason


NORM, LAYER, MLP = "model.layers.1.input_layernorm", "model.layers.1", "model.layers.1.mlp"


def other_norm(model):
    model.model.layers[1].input_layernorm = nn.RMSNorm(64)


def no_norm(model):
    model.model.layers[1].input_layernorm = nn.Identity()


def norm_with_bias(model):
    model.model.layers[1].input_layernorm.bias = nn.Parameter(torch.zeros(64))


def norm_in_float64(model):
    model.model.layers[1].input_layernorm.double()


def norm_of_another_dtype(model):
    model.model.layers[1].input_layernorm.bfloat16()


def forward_of_somebody_else(model):
    model.model.layers[1].input_layernorm.forward = lambda x: x


def norm_on_meta(model):
    model.model.layers[1].input_layernorm.to("meta")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_norm, "it is a torch.nn.modules.normalization.RMSNorm, not the stock Qwen2RMSNorm"),
        (no_norm, "it is a torch.nn.modules.linear.Identity, not the stock Qwen2RMSNorm"),
        (norm_with_bias, "a parameter besides the weight: bias"),
        (norm_in_float64, "its weight is torch.float64"),
        (norm_of_another_dtype, "mixed dtypes: its weight is torch.bfloat16, the layer's linears are torch.float32"),
        (forward_of_somebody_else, "its forward has been replaced on the instance by test_plan"),
        (norm_on_meta, "on the meta device"),
    ],
)
def test_a_strange_norm_is_left_alone_and_the_model_still_answers(change, reason):
    model, ids = small_model("qwen2"), token_ids(1, 7)
    change(model)
    assert reason in reason_for(model, NORM)
    assert reason_for(model, LAYER) == "its input_layernorm is not replaced"
    first = next(d for d in make_plan(model).decisions if d.name == "model.layers.0")
    assert first.replacement == "FusedDecoderLayer"
    assert first.next_norm is None  # the norm that would read its output is not ours
    if change in (norm_on_meta, norm_in_float64, norm_of_another_dtype):
        return  # the stock model does not run either
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(qwen_patch.patch_model(model, backend="reference")(ids).logits, expected)


def test_another_activation():
    model, ids = small_model("qwen3", hidden_act="gelu"), token_ids(1, 7)
    assert reason_for(model, MLP) == "its activation is GELUActivation, not SiLU"
    with pytest.raises(PatchError, match=r"nothing to replace in this Qwen3ForCausalLM with fusion=mlp.*not SiLU"):
        qwen_patch.patch_model(model, fusion="mlp")
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(qwen_patch.patch_model(model, backend="reference")(ids).logits, expected)


def test_a_class_patched_by_somebody_else(monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, x: x)
    assert reason_for(small_model("qwen2"), MLP) == "the forward of Qwen2MLP has been replaced by test_plan"


def test_a_layer_with_another_signature(monkeypatch):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states

    forward.__module__ = Qwen2DecoderLayer.__module__
    monkeypatch.setattr(Qwen2DecoderLayer, "forward", forward)
    assert "other parameters: hidden_states, attention_mask" in reason_for(small_model("qwen2"), LAYER)


def test_unsupported_models_and_arguments_are_refused_whole():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    with pytest.raises(
        PatchError, match=r"GPT2LMHeadModel \(model_type 'gpt2'\) is not supported.*qwen2, qwen3, qwen3_moe, .*mistral"
    ):
        qwen_patch.patch_model(gpt2)
    model = small_model("qwen2")
    with pytest.raises(PatchError, match=r"unknown fusion 'all': supported are none, mlp, rms, both"):
        qwen_patch.patch_model(model, fusion="all")
    with pytest.raises(PatchError, match=r"unknown backend 'tpu'"):
        qwen_patch.patch_model(model, backend="tpu")
    with pytest.raises(PatchError, match=r"backend='cuda'"):
        qwen_patch.patch_model(model, backend="cuda")
    assert not any(isinstance(m, Patched) for m in [*gpt2.modules(), *model.modules()])


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config("qwen2"))
    with pytest.raises(PatchError, match=r"nothing to replace.*meta device: load the model's weights first"):
        qwen_patch.patch_model(model, fusion="rms")


def test_an_untested_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(requirements.transformers, "__version__", "6.0.0")
    with pytest.raises(PatchError, match=r"transformers 6.0.0 is not supported: .*>=5.17,<5.25"):
        qwen_patch.patch_model(small_model("qwen2"))


def test_a_quantized_model_keeps_its_linears():
    """The fused MLP calls the linears as modules, whatever they are: here int8 weights, dequantized in the forward."""

    class Int8Linear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.detach().abs().amax() / 127
            self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) * self.scale).T

    model, ids = small_model("llama"), token_ids(1, 7)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Int8Linear(getattr(layer.mlp, name)))
    with torch.no_grad():
        expected = model(ids).logits
        qwen_patch.patch_model(model, backend="reference")
        assert len(qwen_patch.explain(model).replaced) == 3 * 4 + 1
        assert torch.equal(model(ids).logits, expected)

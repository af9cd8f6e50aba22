"""LoRA over int8 linears."""

from __future__ import annotations

import peft
import pytest
import torch
from models import answers
from test_int8 import IDS, bf16, linears, reason_for

import qwen_patch
from qwen_patch import PatchError
from qwen_patch.quantization.adapters import over_int8


def adapted(**config):
    model = bf16()
    qwen_patch.patch_model(model, quantize="int8", keep_original=True)
    plain = answers(model, IDS).logits
    torch.manual_seed(5)
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
    return peft.get_peft_model(model, over_int8(peft.LoraConfig(**(options | config)))).eval(), plain


def test_adapters_over_int8(tmp_path):
    model, plain = adapted()
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(3, 96).bfloat16()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    added = (x.float() @ a.T @ b.T * layer.scaling["default"]).bfloat16()
    # in float32 beside the base's bfloat16, then one rounding
    assert (layer(x) - (layer.base_layer(x) + added)).abs().max() <= 2**-6 * layer(x).abs().max()
    expected = answers(model, IDS).logits
    assert not torch.equal(expected, plain)
    with model.disable_adapter():
        assert torch.equal(answers(model, IDS).logits, plain)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="an adapter can't be merged into int8 weights"):
            merge()
    assert torch.equal(answers(model, IDS).logits, expected)
    model.save_pretrained(tmp_path)
    base = model.unload()
    assert torch.equal(answers(base, IDS).logits, plain)
    again = peft.PeftModel.from_pretrained(base, tmp_path, config=over_int8(peft.LoraConfig.from_pretrained(tmp_path)))
    assert torch.equal(answers(again, IDS).logits, expected)


def test_adapters_train_and_int8_stays():
    model, _ = adapted()
    codes = {name: m.weight.clone() for name, m in linears(model).items()}
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads
    assert all("lora_" in name and g is not None and g.abs().sum() > 0 for name, g in grads.items())
    assert all(torch.equal(m.weight, codes[name]) for name, m in linears(model).items())


def test_a_model_with_adapters_is_planned_patched_and_not_undone_under_them():
    model, _ = adapted()
    before = linears(model)
    qwen_patch.patch_model(model, quantize="int8", activations="w8a8", keep_original=True)
    assert linears(model) == before
    assert {m.activations for m in before.values()} == {"w8a8"}
    assert len([d for d in qwen_patch.explain(model).replaced if d.site == "rms_norm"]) == 13
    with pytest.raises(PatchError, match="has adapters over its int8 weights: unload them first"):
        qwen_patch.unpatch_model(model)
    qwen_patch.unpatch_model(model.unload())


def test_linears_with_adapters_are_left_alone_and_unknown_adapters_refused():
    wrapped = peft.get_peft_model(bf16(), peft.LoraConfig(target_modules=["q_proj"]))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert reason_for(wrapped, name) == "it has adapters: quantize first, and add them then"
    model = qwen_patch.patch_model(bf16(), quantize="int8")
    with pytest.raises(ValueError, match=r"Target module Int8Linear.* is not supported"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="use_dora"):
        adapted(use_dora=True)

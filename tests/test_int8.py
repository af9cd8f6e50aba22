"""int8 linears in a loaded model: the module, what is replaced and why not, undo, failures."""

from __future__ import annotations

import copy
import gc
import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from models import answers, small_model, token_ids
from torch import nn

import qwen_patch
from qwen_patch import PatchError, make_plan
from qwen_patch.modules import Int8Linear, Patched
from qwen_patch.quantization import convert
from qwen_patch.quantization.format import dequantize, quantize
from qwen_patch.quantization.linears import RECORD

GOLDEN = Path(__file__).parent / "golden"
IDS = token_ids(2, 9)


def bf16(family="qwen3", **config):
    return small_model(family, torch.bfloat16, **config)


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Int8Linear)}


def state_of(model):
    """Everything that an undo must give back: classes, attributes, values, what Transformers knows."""
    modules = {name: (type(m), set(m.__dict__), id(m)) for name, m in model.named_modules()}
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "architectures")}
    return modules, config, dict(model.all_tied_weights_keys), {k: v.clone() for k, v in model.state_dict().items()}


def assert_same_state(found, expected):
    assert found[:3] == expected[:3]
    assert found[3].keys() == expected[3].keys()
    assert all(torch.equal(found[3][k], v) for k, v in expected[3].items())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2_5_vl"])
def test_golden_plan(family):
    """Every decision about a two-layer model. QWEN_PATCH_WRITE_GOLDEN=1 writes the files; read them then."""
    model = bf16(family, num_hidden_layers=2, **({"mlp_only_layers": [0]} if family == "qwen3_moe" else {}))
    found = json.loads(json.dumps(make_plan(model, "none", quantize="int8", activations="w8a16").to_dict()))
    path = GOLDEN / f"int8_{family}.json"
    if os.environ.get("QWEN_PATCH_WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text())


@pytest.mark.parametrize("keep_original", [True, "device"])
def test_patch_and_undo_with_originals_kept(keep_original):
    model = bf16("qwen2")  # with biases
    expected, before = answers(model, IDS).logits, state_of(model)
    assert qwen_patch.patch_model(model, quantize="int8", keep_original=keep_original) is model
    assert len(linears(model)) == 3 * 7
    assert type(model.lm_head) is nn.Linear
    found = answers(model, IDS).logits
    assert not torch.equal(found, expected)
    # The step is max|w| / 127 of 64 weights, and rounding to it an error of 0.55% a linear; 3.3% after these 21.
    assert (found - expected).float().norm() < 0.05 * expected.float().norm()
    assert convert.kept(model)
    qwen_patch.unpatch_model(model)
    assert_same_state(state_of(model), before)
    assert torch.equal(answers(model, IDS).logits, expected)


@pytest.mark.parametrize("keep_original", [True, "device"])
def test_originals_are_kept_as_before_after_another_patch(keep_original):
    model = bf16()
    before = state_of(model)
    options = {"quantize": "int8", "keep_original": keep_original}
    qwen_patch.patch_model(model, **options)
    with qwen_patch.patched(model, fusion="rms"):
        assert not linears(model)
    assert convert.kept(model) == keep_original
    there = linears(model)
    with qwen_patch.patched(model, quantize="int8", activations="w8a8"):
        assert convert.kept(model) == keep_original
        assert all(linear is there[name] for name, linear in linears(model).items())
    assert all(linear is there[name] for name, linear in linears(model).items())
    other = {True: "device", "device": True}[keep_original]
    qwen_patch.patch_model(model, **options | {"keep_original": other})
    assert convert.kept(model) == other
    assert_same_state(state_of(qwen_patch.unpatch_model(model)), before)
    qwen_patch.patch_model(model, **options)
    there = linears(model)
    qwen_patch.patch_model(model, quantize="int8")
    assert convert.kept(model) is False
    assert all(linear is there[name] for name, linear in linears(model).items())


@pytest.mark.cuda
@pytest.mark.parametrize(("keep_original", "place"), [(True, "cpu"), ("device", "cuda")])
def test_where_originals_are_kept(keep_original, place):
    model = small_model("qwen3", torch.bfloat16, "cuda")
    linear = model.model.layers[0].mlp.up_proj
    qwen_patch.patch_model(model, quantize="int8", keep_original=keep_original)
    assert linear.weight.device.type == place
    nbytes = sum(2 * m.in_features * m.out_features for m in linears(model).values())
    assert convert.kept_bytes(model, model.device) == (nbytes if place == "cuda" else 0)
    qwen_patch.unpatch_model(model)
    assert model.model.layers[0].mlp.up_proj is linear
    assert linear.weight.device.type == "cuda"


def test_without_originals_there_is_no_undo_and_it_says_so():
    model = bf16()
    qwen_patch.patch_model(model, quantize="int8")
    expected = answers(model, IDS).logits
    line = r"the linears are int8 and their originals were not kept \(keep_original=True keeps them\): load the model"
    for undo in (qwen_patch.unpatch_model, qwen_patch.patch_model):
        with pytest.raises(PatchError, match=line):
            undo(model)
    with pytest.raises(PatchError, match="keep_original=True comes too late"):
        qwen_patch.patch_model(model, quantize="int8", keep_original=True)
    assert any(isinstance(m, Patched) for m in model.modules())  # nothing was undone in part
    assert torch.equal(answers(model, IDS).logits, expected)


def test_half_the_memory_and_the_originals_are_gone():
    model = bf16("llama", hidden_size=256, intermediate_size=512)
    before = model.get_memory_footprint()
    original = weakref.ref(model.model.layers[0].mlp.up_proj)
    qwen_patch.patch_model(model, quantize="int8")
    gc.collect()
    assert original() is None
    body = before - 2 * 2 * model.model.embed_tokens.weight.numel()  # without embedding and head
    saved = before - model.get_memory_footprint()
    assert 0.45 * body < saved < 0.5 * body


@pytest.mark.parametrize("keep_original", [False, True])
def test_a_model_is_freed_as_soon_as_it_is_let_go(keep_original):
    model = qwen_patch.patch_model(bf16(), quantize="int8", keep_original=keep_original)
    gc.collect()
    gc.disable()
    try:
        alive = [weakref.ref(m) for m in (model, copy.deepcopy(model))]
        assert alive[1]() is None
        del model
        assert alive[0]() is None
    finally:
        gc.enable()


def test_patching_again():
    model = bf16()
    qwen_patch.patch_model(model, quantize="int8", activations="w8a16")
    plan, first = qwen_patch.explain(model), linears(model)
    assert make_plan(model, quantize="int8", activations="w8a16") == plan
    qwen_patch.patch_model(model, quantize="int8", activations="w8a16")
    assert linears(model) == first  # the same objects
    qwen_patch.patch_model(model, fusion="mlp", quantize="int8", activations="w8a8")
    assert linears(model) == first
    assert {m.activations for m in first.values()} == {"w8a8"}
    assert model.config.quantization_config.activations == "w8a8"
    assert qwen_patch.explain(model).fusion == "mlp"
    with qwen_patch.patched(model, fusion="none", quantize="int8"):
        assert not any(isinstance(m, Patched) and m.replacement.__name__ == "FusedMLP" for m in model.modules())
    assert qwen_patch.explain(model).activations == "w8a8"
    assert linears(model) == first


def test_the_context_manager_keeps_what_it_needs_for_the_way_back():
    model = bf16()
    before = state_of(model)
    with qwen_patch.patched(model, quantize="int8", lm_head=True):
        assert isinstance(model.lm_head, Int8Linear)
    assert_same_state(state_of(model), before)
    with qwen_patch.patched(model):
        with qwen_patch.patched(model, quantize="int8"):
            assert linears(model)
        assert not linears(model)
        assert any(isinstance(m, Patched) for m in model.modules())


def test_a_tied_head_becomes_an_untied_copy_and_is_tied_again():
    model = qwen_patch.patch_model(bf16("qwen2", tie_word_embeddings=True), quantize="int8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = bf16("qwen2", tie_word_embeddings=True)
    before, embedding = state_of(model), model.model.embed_tokens.weight
    qwen_patch.patch_model(model, quantize="int8", lm_head=True, keep_original=True)
    assert isinstance(model.lm_head, Int8Linear)
    assert model.model.embed_tokens.weight is embedding
    originals = model.__dict__[RECORD].originals
    alone = sum(p.nbytes for name, m in originals.items() if name != "lm_head" for p in m.parameters())
    assert convert.kept_bytes(model, torch.device("cpu")) == alone  # the head's is the embedding's
    assert model.all_tied_weights_keys == {}
    model.tie_weights()
    assert model.lm_head.weight.dtype == torch.int8
    assert torch.equal(model.lm_head.values, quantize(embedding.detach())[0])
    qwen_patch.unpatch_model(model)
    assert model.lm_head.weight is embedding
    assert_same_state(state_of(model), before)


def fail_at(monkeypatch, call, error):
    calls = []
    real = Int8Linear.from_linear.__func__

    def from_linear(cls, linear):
        calls.append(linear)
        if len(calls) == call:
            raise error
        return real(cls, linear)

    monkeypatch.setattr(Int8Linear, "from_linear", classmethod(from_linear))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("patched_before", [True, False])
def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch, error, patched_before):
    model = bf16(tie_word_embeddings=True)
    if patched_before:
        qwen_patch.patch_model(model, fusion="mlp")
    before, expected = state_of(model), answers(model, IDS).logits
    fail_at(monkeypatch, 12, error)
    with pytest.raises(type(error)):
        qwen_patch.patch_model(model, quantize="int8")
    assert_same_state(state_of(model), before)
    assert torch.equal(answers(model, IDS).logits, expected)


@pytest.mark.parametrize("then", [qwen_patch.unpatch_model, qwen_patch.patch_model, "int8"])
def test_an_undo_interrupted_goes_on(then, monkeypatch):
    model = bf16()
    before = state_of(model)
    options = {"quantize": "int8", "keep_original": True}
    qwen_patch.patch_model(model, **options)
    place, calls = nn.Module.set_submodule, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return place(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "set_submodule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qwen_patch.unpatch_model(model)
    if then == "int8":
        qwen_patch.patch_model(model, **options)
        assert len(linears(model)) == 7 * len(model.model.layers)
    else:
        then(model)
        assert not linears(model)
    assert_same_state(state_of(qwen_patch.unpatch_model(model)), before)


def test_undo_after_a_cast():
    model = qwen_patch.patch_model(bf16(), quantize="int8", keep_original=True)
    model.to(torch.float16)
    expected = bf16().to(torch.float16).state_dict()
    found = qwen_patch.unpatch_model(model).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_failure_after_the_linears_gives_them_back(monkeypatch):
    model = bf16()
    before = state_of(model)

    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr("qwen_patch.patcher._replace", broken)
    with pytest.raises(RuntimeError, match="broken"):
        qwen_patch.patch_model(model, quantize="int8")
    assert_same_state(state_of(model), before)


def with_nan(model):
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = float("nan")


def with_inf(model):
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = -float("inf")


@pytest.mark.parametrize("change", [with_nan, with_inf])
def test_nan_and_inf_are_refused_by_name(change):
    model = bf16()
    change(model)
    with pytest.raises(PatchError, match=r"^model\.layers\.2\.mlp\.down_proj: "):
        qwen_patch.patch_model(model, quantize="int8")
    assert not linears(model)
    assert not any(isinstance(m, Patched) for m in model.modules())


ODD = {"hidden_size": 60, "intermediate_size": 92, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 18}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: small_model("qwen3"), {"quantize": "int8"}, r"bfloat16 and float16 models, .* float32: load it with"),
        (bf16, {"quantize": "int4"}, "unknown quantize 'int4': supported are None, int8"),
        (
            bf16,
            {"quantize": "int8", "keep_original": "disk"},
            "unknown keep_original 'disk': supported are False",
        ),
        (
            bf16,
            {"quantize": "int8", "activations": "w4a4"},
            "unknown activations 'w4a4': supported are auto, w8a16, w8a8",
        ),
        (bf16, {"activations": "w8a8"}, "activations and lm_head are settings of quantize='int8'"),
        (
            lambda: bf16(**ODD),
            {"quantize": "int8"},
            r"no linear to quantize: K is 36, not a multiple of 8; .*; K is 92",
        ),
    ],
)
def test_bad_input(model, options, message):
    model = model()
    with pytest.raises(PatchError, match=message):
        qwen_patch.patch_model(model, **options)
    assert not linears(model)


def reason_for(model, name):
    decision = next(d for d in make_plan(model, quantize="int8").decisions if d.name == name)
    assert decision.replacement is None
    return decision.reason


UP = "model.layers.1.mlp.up_proj"


class OtherLinear(nn.Linear):
    pass


def subclass(model):
    model.model.layers[1].mlp.up_proj = OtherLinear(64, 96, bias=False).bfloat16()


def hooked(model):
    model.get_submodule(UP).register_forward_hook(lambda *args: None)


def own_forward(model):
    model.get_submodule(UP).forward = lambda x: x


def on_meta(model):
    model.get_submodule(UP).to("meta")


def shared(model):
    model.get_submodule(UP).weight = model.model.layers[0].mlp.up_proj.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (subclass, "it is a test_int8.OtherLinear, not a plain nn.Linear"),
        (hooked, "it has hooks"),
        (own_forward, "its forward has been replaced on the instance"),
        (on_meta, "its weight is on the meta device: load the model's weights first"),
        (shared, "its weight is model.layers.0.mlp.up_proj's too"),
    ],
)
def test_a_strange_linear_is_left_alone_with_its_reason(change, reason):
    model = bf16()
    change(model)
    assert reason_for(model, UP) == reason
    qwen_patch.patch_model(model, quantize="int8")
    assert UP not in linears(model)
    assert UP in model.config.quantization_config.modules_to_not_convert
    assert len(linears(model)) == 3 * 7 - (2 if change is shared else 1)


def test_copies_of_a_patched_model():
    model = bf16()
    qwen_patch.patch_model(model, quantize="int8", keep_original=True)
    expected = answers(model, IDS).logits
    twin = copy.deepcopy(model)
    qwen_patch.unpatch_model(model)
    assert torch.equal(answers(twin, IDS).logits, expected)
    qwen_patch.unpatch_model(twin)
    assert not any(hasattr(m, "hf_quantizer") or hasattr(m.config, "quantization_config") for m in (model, twin))
    assert torch.equal(answers(twin, IDS).logits, answers(model, IDS).logits)


def test_training_and_compiling_see_the_same_linears():
    model = bf16()
    qwen_patch.patch_model(model, quantize="int8", backend="reference")
    expected = answers(model, IDS).logits
    assert torch.equal(torch.compile(model, backend="eager")(IDS).logits, expected)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model.train()(inputs_embeds=embeds, labels=IDS).loss.backward()
    assert embeds.grad.abs().sum() > 0
    linear = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    linear(x).sum().backward()
    exact = dequantize(linear.values, linear.scales, torch.float64).sum(0)
    assert torch.allclose(x.grad.double(), exact.expand(3, 64), rtol=2**-8, atol=1e-5)  # one rounding to bfloat16

"""The patched model behaves as the stock one, and the patch undoes.

Where the question is whether the residual graph is rewritten right, backend="reference" is used: its expressions are
the stock ones, so results must be BITWISE equal. Closeness of the kernels: tests/test_ops.py and test_validation.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models import FAMILIES, TOKENS, VISION, VISION_PIXELS, answers, small_model, token_ids
from torch import nn

import qwen_patch
from qwen_patch.modules import FusedRMSNorm, Int8Linear, Patched
from qwen_patch.recipes import RECIPES

FAMILY = pytest.mark.parametrize("family", FAMILIES)
FUSION = pytest.mark.parametrize("fusion", [f for f in RECIPES if f != "none"])
IDS = token_ids(1, 7)
CHANGES = (qwen_patch.unpatch_model, qwen_patch.patch_model)


def assert_same_outputs(found, expected):
    assert type(found) is type(expected)
    assert list(found.keys()) == list(expected.keys())
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    for key in ("hidden_states", "attentions"):
        if expected.get(key) is not None:
            assert len(found[key]) == len(expected[key])
            for a, b in zip(found[key], expected[key], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@FAMILY
@FUSION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_output_is_bitwise_the_stock_models(family, fusion, dtype):
    ids = token_ids(2, 9)
    kwargs = {"output_hidden_states": True, "output_attentions": True, "attention_mask": torch.ones_like(ids)}
    kwargs["attention_mask"][0, :4] = 0  # left padding
    model = small_model(family, dtype, attn_implementation="eager")
    expected = answers(model, ids, **kwargs)
    qwen_patch.patch_model(model, fusion=fusion, backend="reference")
    assert_same_outputs(answers(model, ids, **kwargs), expected)
    assert_same_outputs(
        answers(model, ids, use_cache=False), answers(qwen_patch.unpatch_model(model), ids, use_cache=False)
    )
    assert isinstance(answers(qwen_patch.patch_model(model, backend="reference"), ids, return_dict=False), tuple)
    assert_same_outputs(answers(qwen_patch.unpatch_model(model), ids, **kwargs), expected)


@FAMILY
@FUSION
def test_kernels_are_within_rounding(family, fusion, device):
    """float32: sums of 64 terms in another order, through 3 layers: some tens of eps of the largest logit."""
    model, ids = small_model(family, device=device), token_ids(2, 9, device=device)
    expected = answers(model, ids).logits
    found = answers(qwen_patch.patch_model(model, fusion=fusion), ids).logits
    if fusion != "mlp":
        assert not torch.equal(found, expected), "the kernels did not run, or sum in the very same order"
    assert (found - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize("family", VISION)
def test_an_image_and_text(family):
    """Through both towers; Qwen3-VL edits the hidden states between the first layers of the text tower."""
    model = small_model(family)
    marks = [TOKENS[name] for name in ("vision_start", "image", "image", "image", "image", "vision_end")]
    ids = torch.cat([torch.tensor([marks]), token_ids(1, 5)], dim=1)
    image = {
        "pixel_values": torch.randn(16, VISION_PIXELS),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == TOKENS["image"]).int(),
    }
    plain, expected = answers(model, ids).logits, answers(model, ids, output_hidden_states=True, **image)
    assert not torch.equal(plain, expected.logits), "the image does not matter: the test would prove nothing"
    for backend in ("reference", "auto"):
        qwen_patch.patch_model(model, backend=backend)
        found = answers(model, ids, output_hidden_states=True, **image)
        if backend == "reference":
            assert_same_outputs(found, expected)
        else:  # float32, 3 layers: some tens of eps of the largest logit
            assert (found.logits - expected.logits).abs().max() <= 64 * 2**-23 * expected.logits.abs().max()
    generated = [change(model).generate(ids, max_new_tokens=6, **image) for change in CHANGES]
    assert torch.equal(*generated)


@FAMILY
def test_generate_and_cache(family, device):
    model, ids = small_model(family, device=device), token_ids(2, 9, device=device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True}
    expected = model.generate(ids, **options)
    found = qwen_patch.patch_model(model).generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) == 12
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"cache_implementation": "static"}):
        results = []
        for change in CHANGES:
            torch.manual_seed(3)
            results.append(change(model).generate(ids, attention_mask=mask, max_new_tokens=8, **options))
        assert torch.equal(*results), options


@FAMILY
def test_only_this_instance_changes(family):
    model, other = small_model(family), small_model(family)
    classes = {name: type(m) for name, m in model.named_modules()}
    attributes = {name: set(m.__dict__) for name, m in model.named_modules()}
    parameters = {name: p for name, p in model.named_parameters()}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert qwen_patch.patch_model(model) is model
    assert [type(m) for m in other.modules()] == [classes[name] for name, _ in other.named_modules()]
    assert not any(isinstance(m, Patched) for m in other.modules())
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert [name for name, _ in model.named_modules()] == list(classes)
    answers(model, token_ids(1, 5))
    qwen_patch.unpatch_model(model)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == attributes


def test_patching_again_is_a_no_op_or_a_new_plan():
    model, ids = small_model("qwen3"), token_ids(1, 7)
    expected = answers(model, ids).logits
    qwen_patch.patch_model(model)
    first = [type(m) for m in model.modules()]
    qwen_patch.patch_model(model)
    assert [type(m) for m in model.modules()] == first
    assert not any(issubclass(c.stock, Patched) for c in first if issubclass(c, Patched)), "patched twice over"
    qwen_patch.patch_model(model, fusion="mlp")
    assert {d.site for d in qwen_patch.explain(model).replaced} == {"mlp"}
    qwen_patch.patch_model(model, fusion="none")
    assert torch.equal(answers(model, ids).logits, expected)


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.score = model, nn.Linear(4, 4)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8", "keep_original": True}])
def test_a_wrapper_and_what_is_in_it_are_patched_alike(options):
    model = small_model("qwen3", torch.bfloat16)
    expected, wrapper = answers(model, IDS).logits, Wrapper(model)
    for patched, undone in ((wrapper, model), (model, wrapper), (wrapper, wrapper)):
        assert qwen_patch.patch_model(patched, **options) is patched
        assert qwen_patch.explain(wrapper) == qwen_patch.explain(model)
        assert isinstance(model.model.norm, Patched)
        assert qwen_patch.unpatch_model(undone) is undone
        assert not any(isinstance(m, Patched | Int8Linear) for m in wrapper.modules())
        assert torch.equal(answers(model, IDS).logits, expected)


def test_a_layer_exchanged_since_the_patch_is_patched_again():
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.model.layers[1] = small_model("qwen3").model.layers[1]
    qwen_patch.patch_model(model)
    assert isinstance(model.model.layers[1], Patched)
    assert isinstance(model.model.layers[1].mlp, Patched)


def test_context_manager_brings_back_what_was_there():
    model = small_model("qwen2")
    with qwen_patch.patched(model, fusion="mlp") as inside:
        assert inside is model
        assert qwen_patch.explain(model).fusion == "mlp"
    assert not any(isinstance(m, Patched) for m in model.modules())
    qwen_patch.patch_model(model, fusion="rms")
    with pytest.raises(KeyError), qwen_patch.patched(model, fusion="both"):
        raise KeyError
    assert qwen_patch.explain(model).fusion == "rms"


def test_an_exception_while_patching_leaves_the_model_stock(monkeypatch):
    model, ids = small_model("qwen3"), token_ids(1, 7)
    expected, calls = answers(model, ids).logits, []

    def fail_at_the_tenth(*args):
        calls.append(args)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return original(*args)

    original = qwen_patch.patcher._replace
    monkeypatch.setattr(qwen_patch.patcher, "_replace", fail_at_the_tenth)
    with pytest.raises(KeyboardInterrupt):
        qwen_patch.patch_model(model)
    assert not any(isinstance(m, Patched) for m in model.modules())
    assert torch.equal(answers(model, ids).logits, expected)


def _replace_output(_module, _args, output):
    return output * 1.5


def _edit_output_in_place(_module, _args, output):
    output.mul_(1.5)


def _edit_output_unseen(_module, _args, output):
    output.data.mul_(1.5)  # .data: the version counter does not see it


def _edit_input_in_place(_module, args):
    args[0].add_(0.25)


def _edit_input_unseen(_module, args):
    args[0].data.add_(0.25)


def _replace_input(_module, args):
    return (args[0] * 0.5, *args[1:])


LAYER, NORM, FINAL = "model.layers.1", "model.layers.1.input_layernorm", "model.norm"
POST, ACT, MLP = "model.layers.1.post_attention_layernorm", "model.layers.1.mlp.act_fn", "model.layers.1.mlp"


@pytest.mark.parametrize("where", [LAYER, NORM, FINAL, POST, MLP, ACT])
@pytest.mark.parametrize("hook", [_replace_output, _edit_output_in_place, _edit_output_unseen])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_hooks(where, hook, mode):
    _compare_hooked(where, lambda m: m.register_forward_hook(hook), mode)


@pytest.mark.parametrize("where", [LAYER, NORM, FINAL, POST, MLP, ACT])
@pytest.mark.parametrize("hook", [_replace_input, _edit_input_in_place, _edit_input_unseen])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_pre_hooks(where, hook, mode):
    _compare_hooked(where, lambda m: m.register_forward_pre_hook(hook), mode)


def _compare_hooked(where, register, mode):
    model, ids = small_model("qwen2"), token_ids(1, 7)
    with mode():
        plain = model(ids).logits
        handle = register(model.get_submodule(where))
        expected = model(ids).logits
        assert not torch.equal(plain, expected), "the hook does nothing: the test would prove nothing"
        qwen_patch.patch_model(model, backend="reference")
        assert torch.equal(model(ids).logits, expected)
        handle.remove()
        assert torch.equal(model(ids).logits, plain)


class _Around(nn.Module):
    """A module in the layer's place that edits its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention_type = layer, getattr(layer, "attention_type", None)

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs).add_(1.0)


def _edited_by_its_forward(model):
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs).add_(1.0)


def _edited_by_a_wrapper(model):
    model.model.layers[1] = _Around(model.model.layers[1])


@pytest.mark.parametrize("edit", [_edited_by_its_forward, _edited_by_a_wrapper])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_sum_edited_between_two_layers_without_a_hook(edit, mode):
    logits = []
    for patch in (False, True):
        model = small_model("qwen3", torch.bfloat16)
        if patch:
            qwen_patch.patch_model(model, backend="reference")
        edit(model)
        with mode():
            logits.append(model(IDS).logits)
    assert torch.equal(*logits)


def test_global_hooks_fire_as_often_as_in_the_stock_model():
    model, ids, counts = small_model("qwen3"), token_ids(1, 5), []
    with_hook = torch.nn.modules.module.register_module_forward_hook
    for change in CHANGES:
        change(model)
        seen = []
        handle = with_hook(lambda module, _args, _out, seen=seen: seen.append(id(module)))
        answers(model, ids)
        handle.remove()
        counts.append(seen)
    assert counts[0] == counts[1]


def test_a_norm_asked_about_another_tensor_computes_it():
    """What `add_before` left over is used for its own tensor only, unchanged, and never twice."""
    model = small_model("llama")
    qwen_patch.patch_model(model, backend="reference")
    norm, (a, b) = model.model.norm, torch.randn(2, 1, 3, 64)
    assert isinstance(norm, FusedRMSNorm)
    with torch.no_grad():
        total = qwen_patch.modules.norm.add_before(norm, a, b)
        right = norm.ops.rms_norm(total, norm.weight, norm.variance_epsilon)
        assert torch.equal(norm(total.clone()), right)
        qwen_patch.modules.norm.add_before(norm, a, b)
        assert qwen_patch.modules.norm.PREPARED not in copy.deepcopy(norm).__dict__
        assert torch.equal(norm(a), norm.ops.rms_norm(a, norm.weight, norm.variance_epsilon))
        total = qwen_patch.modules.norm.add_before(norm, a, b)
        total.mul_(3)
        assert torch.equal(norm(total), norm.ops.rms_norm(total, norm.weight, norm.variance_epsilon))
        total = qwen_patch.modules.norm.add_before(norm, a, b)
        assert qwen_patch.modules.norm.PREPARED in norm.__dict__
        norm(total)
    assert qwen_patch.modules.norm.PREPARED not in norm.__dict__


@FAMILY
def test_a_layer_called_by_itself(family):
    """With keywords left out, or given by position, as the stock layer may be called."""
    model = small_model(family)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(2))
    tower = getattr(model.model, "language_model", model.model)
    positions = torch.arange(5)[None] if tower is model.model else torch.arange(5).expand(3, 1, 5)
    embeddings = tower.rotary_emb(hidden, positions)
    mask = torch.zeros(1, 1, 5, 5)
    layer, results = tower.layers[0], []
    for change in (qwen_patch.unpatch_model, lambda m: qwen_patch.patch_model(m, backend="reference")):
        change(model)
        with torch.no_grad():
            by_position = (embeddings, mask) if family == "qwen3_vl" else (mask, None, None, False, embeddings)
            results.append((layer(hidden, position_embeddings=embeddings), layer(hidden, *by_position)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

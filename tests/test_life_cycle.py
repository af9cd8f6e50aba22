"""A patched model's later life: copies, checkpoints, other dtypes and weights, training, compilers, threads."""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import pytest
import torch
from models import FAMILIES, answers, small_model, token_ids
from torch import nn
from torch.nn.utils import parametrize

import qwen_patch
from qwen_patch import PatchError
from qwen_patch.modules import Patched

FAMILY = pytest.mark.parametrize("family", FAMILIES)
IDS = token_ids(1, 7)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()  # all models share Transformers' code objects, and a code object may recompile 8 times


@FAMILY
def test_copies_and_checkpoints(family, tmp_path):
    model, ids = small_model(family), token_ids(1, 7)
    qwen_patch.patch_model(model)
    expected = answers(model, ids).logits
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for other in (twin, pickled):  # a copy that ran the original's weights would answer zeros
        assert torch.equal(answers(other, ids).logits, expected)
        assert qwen_patch.explain(other).replaced
        assert not any(isinstance(m, Patched) for m in qwen_patch.unpatch_model(other).modules())
    stock = type(model).from_pretrained(tmp_path)
    assert not any(isinstance(m, Patched) for m in stock.modules())
    assert torch.equal(answers(qwen_patch.patch_model(stock), ids).logits, expected)


@FAMILY
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_training_step_has_the_stock_gradients(family, checkpointing):
    gradients = []
    for patch in (False, True):
        model = small_model(family).train()
        if patch:
            qwen_patch.patch_model(model)
            assert any("training mode" in note for note in qwen_patch.explain(model).notes)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        ids = token_ids(2, 9)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        if "visual" in name:  # text alone leaves the vision tower without
            assert expected is None
            assert gradients[1][name] is None
        else:
            assert torch.equal(gradients[1][name], expected), name


def test_frozen_body_still_gets_gradients_at_its_input():
    """Only the embedding's output wants a gradient: it must flow through every fused site."""
    results = []
    for patch in (False, True):
        model = small_model("qwen3").requires_grad_(False)
        if patch:
            qwen_patch.patch_model(model)
        embeddings = model.get_input_embeddings()(token_ids(1, 6)).requires_grad_()
        model(inputs_embeds=embeddings).logits.square().sum().backward()
        results.append(embeddings.grad)
    assert torch.equal(*results)


@FAMILY
def test_compiles_as_the_stock_model_does(family):
    model, ids = small_model(family), token_ids(1, 7)
    expected = answers(model, ids, use_cache=False).logits
    qwen_patch.patch_model(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(answers(compiled, ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_autocast(device):
    model, ids = small_model("qwen3", device=device), token_ids(2, 7, device=device)
    results = []
    for change in (qwen_patch.unpatch_model, lambda m: qwen_patch.patch_model(m, backend="reference")):
        change(model)
        with torch.autocast(device.type, torch.bfloat16):
            results.append(answers(model, ids).logits)
    assert torch.equal(*results)


def test_two_threads_on_one_model():
    model = qwen_patch.patch_model(small_model("qwen2"), backend="reference")
    inputs = [token_ids(1, n) for n in (5, 40)]
    expected, wrong = [answers(model, ids).logits for ids in inputs], []

    def work(i):
        for _ in range(30):
            if not torch.equal(answers(model, inputs[i]).logits, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_weights_changed_after_the_patch_count():
    model, ids = small_model("qwen2"), token_ids(1, 7)
    qwen_patch.patch_model(model, backend="reference")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        model.model.layers[0].post_attention_layernorm.weight = nn.Parameter(torch.rand(64))
    model.bfloat16()
    found = answers(model, ids).logits
    assert torch.equal(found, answers(qwen_patch.unpatch_model(model), ids).logits)
    assert found.dtype == torch.bfloat16


@pytest.mark.cuda
def test_moving_between_devices():
    model, ids = small_model("qwen3"), token_ids(1, 7)
    qwen_patch.patch_model(model)
    there = answers(model.cuda(), ids.cuda()).logits.cpu()
    here = answers(model.cpu(), ids).logits
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)  # two devices' GEMMs, fp32


@FAMILY
def test_compiled_with_inductor_and_exported(family):
    """One graph, as stock, through the default compiler; and an export that runs without this package's forward."""
    model, ids = small_model(family), token_ids(1, 7)
    qwen_patch.patch_model(model)
    expected = answers(model, ids, use_cache=False).logits
    exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    assert not any("qwen_patch" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_generate_with_a_compiled_forward(family, device):
    """torch.compile of one layer and of the whole forward, fullgraph, then generate over a static cache."""
    model, ids = small_model(family, device=device), token_ids(1, 7, device=device)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **options)
    qwen_patch.patch_model(model)
    layer = model.model.layers[0]
    hidden = torch.randn(1, 5, 64, device=device)
    kwargs = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(5, device=device)[None])}
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(layer, fullgraph=True)(hidden, **kwargs), layer(hidden, **kwargs), rtol=1e-5, atol=1e-5
        )
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("change", ["half", "bfloat16", "to float64", "to bfloat16 and back"])
def test_another_dtype_after_the_patch(change):
    """float64 is not a kernel's: the stock forward runs."""
    model, ids = small_model("qwen3"), token_ids(1, 7)
    qwen_patch.patch_model(model, backend="reference")
    {
        "half": model.half,
        "bfloat16": model.bfloat16,
        "to float64": model.double,
        "to bfloat16 and back": lambda: model.to(torch.bfloat16).to(torch.float32),
    }[change]()
    found = answers(model, ids).logits
    assert torch.equal(found, answers(qwen_patch.unpatch_model(model), ids).logits)
    assert found.dtype == model.dtype


def test_weights_loaded_after_the_patch():
    model, other, ids = small_model("qwen2"), small_model("qwen2", initializer_range=0.1), token_ids(1, 7)
    expected = answers(other, ids).logits
    qwen_patch.patch_model(model, backend="reference")
    assert not torch.equal(answers(model, ids).logits, expected)
    model.load_state_dict(other.state_dict())
    assert torch.equal(answers(model, ids).logits, expected)
    model.load_state_dict(small_model("qwen2").state_dict(), assign=True)
    assert torch.equal(answers(model, ids).logits, answers(small_model("qwen2"), ids).logits)


def test_patched_unpatched_patched_many_times():
    model, ids = small_model("qwen3"), token_ids(1, 7)
    stock = answers(model, ids).logits
    fused = answers(qwen_patch.patch_model(model), ids).logits
    for _ in range(3):
        assert torch.equal(answers(qwen_patch.unpatch_model(model), ids).logits, stock)
        assert torch.equal(answers(qwen_patch.patch_model(model), ids).logits, fused)


def test_two_models_in_two_threads():
    """One patched, one stock, of one class, generating at once."""
    ids = token_ids(1, 9)
    models = [qwen_patch.patch_model(small_model("qwen3"), backend="reference"), small_model("qwen3")]
    expected = models[1].generate(ids, max_new_tokens=12, do_sample=False)
    results = [[], []]

    def work(i):
        for _ in range(5):
            results[i].append(models[i].generate(ids, max_new_tokens=12, do_sample=False))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [len(r) for r in results] == [5, 5]
    assert all(torch.equal(r, expected) for r in results[0] + results[1])
    assert not any(isinstance(m, Patched) for m in models[1].modules())


def test_forward_mode_derivatives():
    """Equal: a dual tensor goes through the stock expressions."""
    model = small_model("qwen3", attn_implementation="eager")
    inputs, tangents = torch.randn(2, 1, 5, model.config.hidden_size)

    def derivative(function, *at):
        return torch.func.jvp(function, at, (tangents[..., : at[0].shape[-1]],))[1]

    expected = derivative(lambda x: model(inputs_embeds=x).logits, inputs)
    qwen_patch.patch_model(model)
    assert torch.equal(derivative(lambda x: model(inputs_embeds=x).logits, inputs), expected)
    found = derivative(lambda x: qwen_patch.ops.silu_mul(x, x), inputs)
    assert torch.equal(found, derivative(lambda x: torch.nn.functional.silu(x) * x, inputs))


def test_replicas_for_data_parallel():
    """As torch.nn.DataParallel makes them, of every module for itself, here of one device."""
    model = qwen_patch.patch_model(small_model("qwen3"))
    expected = answers(model, IDS).logits
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module.named_children():
            setattr(replica, name, replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach())
    found = answers(replicas[model], IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # float32, of the stock forwards
    assert torch.equal(answers(model, IDS).logits, expected)


def test_a_forward_kept_beyond_the_undo_is_the_stock_one():
    model = small_model("qwen3")
    expected = answers(model, IDS).logits
    qwen_patch.patch_model(model)
    layer = model.model.layers[0]
    for module in (layer, layer.mlp, layer.input_layernorm):
        module.forward = functools.partial(module.forward)
    qwen_patch.unpatch_model(model)
    assert torch.equal(answers(model, IDS).logits, expected)
    model.train()(IDS).logits.sum().backward()


def test_a_class_changed_since_the_patch_is_not_undone():
    model = qwen_patch.patch_model(small_model("qwen3"))
    norm = model.model.layers[0].input_layernorm
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    with pytest.raises(PatchError, match=r"layers\.0\.input_layernorm has become a ParametrizedQwen3RMSNorm since"):
        qwen_patch.unpatch_model(model)
    parametrize.remove_parametrizations(norm, "weight")
    assert not any(isinstance(m, Patched) for m in qwen_patch.unpatch_model(model).modules())

"""What wraps a model: PEFT adapters, accelerate's device maps and offloading, tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import answers, small_model, token_ids

import qwen_patch
from qwen_patch.benchmarks.ops import largest_error
from qwen_patch.modules import FusedRMSNorm, Patched

WHEN = pytest.mark.parametrize("when", ["before", "after"])

ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "all linears": {"target_modules": "all-linear"},
    "lm_head": {"target_modules": ["lm_head", "q_proj"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm", "mlp"]},
}


def adapted(adapter, when, patch=True):
    """A model with a LoRA adapter whose weights are not zero, patched before or after it was added."""
    import peft

    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[adapter])
    model = small_model("qwen3")
    if patch and when == "before":
        qwen_patch.patch_model(model, backend="reference")
    torch.manual_seed(5)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "modules_to_save" in name:
                p.mul_(1.25)  # so that the saved copy is not the original
    if patch and when == "after":
        qwen_patch.patch_model(wrapped, backend="reference")
    return wrapped


@WHEN
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_lora(adapter, when):
    """Active, disabled, merged, unmerged, and merged for good: bitwise the stock model with the same adapter."""
    ids = token_ids(1, 7)
    stock, found = adapted(adapter, when, patch=False), adapted(adapter, when)
    assert qwen_patch.explain(found).replaced
    plain = answers(small_model("qwen3"), ids).logits
    expected = answers(stock, ids).logits
    assert not torch.equal(expected, plain), "the adapter does nothing: the test would prove nothing"
    assert torch.equal(answers(found, ids).logits, expected)
    tokens = [m.generate(input_ids=ids, max_new_tokens=6, do_sample=False) for m in (stock, found)]
    assert torch.equal(*tokens)
    with stock.disable_adapter(), found.disable_adapter():
        assert torch.equal(answers(found, ids).logits, answers(stock, ids).logits)
        assert torch.equal(answers(found, ids).logits, plain)
    for change in ("merge_adapter", "unmerge_adapter"):
        for m in (stock, found):
            getattr(m, change)()
        assert torch.equal(answers(found, ids).logits, answers(stock, ids).logits)
    merged = [m.merge_and_unload() for m in (stock, found)]
    assert torch.equal(answers(merged[1], ids).logits, answers(merged[0], ids).logits)
    assert any(isinstance(m, Patched) for m in merged[1].modules())
    qwen_patch.unpatch_model(merged[1])
    assert not any(isinstance(m, Patched) for m in merged[1].modules())
    assert torch.equal(answers(merged[1], ids).logits, answers(merged[0], ids).logits)


@WHEN
def test_lora_trains_with_the_stock_gradients(when):
    ids, gradients = token_ids(2, 9), []
    for patch in (False, True):
        model = adapted("all linears", when, patch).train()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


@WHEN
def test_a_second_adapter_and_switching(when):
    import peft

    ids, results = token_ids(1, 7), []
    for patch in (False, True):
        model = adapted("mlp", when, patch)
        torch.manual_seed(6)
        second = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
        model.add_adapter("second", second)
        outputs = [answers(model, ids).logits]
        model.set_adapter("second")
        outputs.append(answers(model, ids).logits)
        model.delete_adapter("second")
        model.set_adapter("default")
        outputs.append(answers(model, ids).logits)
        results.append(outputs)
    assert not torch.equal(results[0][0], results[0][1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@WHEN
def test_accelerate_offload_hooks(when):
    """Weights live outside the model between the calls of their modules; hooks wrap every forward."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model, ids = small_model("qwen2"), token_ids(1, 7)
    expected = answers(model, ids).logits
    if when == "before":
        qwen_patch.patch_model(model, backend="reference")
    cpu_offload(model, execution_device=torch.device("cpu"))
    forwards = {name: m.__dict__.get("forward") for name, m in model.named_modules()}
    if when == "after":
        qwen_patch.patch_model(model, backend="reference")
    assert qwen_patch.explain(model).replaced
    assert isinstance(model.model.norm._old_forward.__self__, FusedRMSNorm)
    assert torch.equal(answers(model, ids).logits, expected)
    qwen_patch.unpatch_model(model)
    assert {name: m.__dict__.get("forward") for name, m in model.named_modules()} == forwards
    assert model.model.norm._old_forward.__func__ is type(model.model.norm).forward
    assert torch.equal(answers(model, ids).logits, expected)
    remove_hook_from_submodules(model)
    assert torch.equal(answers(model, ids).logits, expected)


@WHEN
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cpu", "disk"),
        pytest.param("cuda:0", "cpu", marks=pytest.mark.cuda),
        pytest.param("cuda:0", "disk", marks=pytest.mark.cuda),
        pytest.param("cuda:0", "cuda:1", marks=pytest.mark.two_gpus),
    ],
)
def test_device_map(first, second, when, tmp_path):
    """Layers 0 and 2 and the head on one device, layer 1 and the final norm on another: the residual crosses twice."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    model, ids = small_model("qwen3"), token_ids(2, 7)
    expected = answers(model, ids).logits
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    if when == "before":
        qwen_patch.patch_model(model)
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "lm_head": first, "model.norm": second}
    places |= {f"model.layers.{i}": second if i == 1 else first for i in range(3)}
    options = {"main_device": first, "offload_dir": tmp_path / "offload", "force_hooks": True}
    model = dispatch_model(model, places, **options)
    if when == "after":
        qwen_patch.patch_model(model)
    plan = qwen_patch.explain(model)
    assert len(plan.replaced) == len(plan.decisions)
    ids = ids.to(first)
    found = answers(model, ids).logits.cpu()
    # float32 on two kinds of device: GEMMs and norms that sum in other orders
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False).cpu(), tokens)
    qwen_patch.unpatch_model(model)
    torch.testing.assert_close(answers(model, ids).logits.cpu(), expected, rtol=1e-3, atol=1e-4)
    assert not any(isinstance(m, Patched) for m in model.modules())
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_from_pretrained_with_a_device_map(family, tmp_path):
    """Transformers' own loading, part of it offloaded to disk."""
    from transformers import AutoModelForCausalLM

    model, ids = small_model(family), token_ids(1, 7)
    expected = answers(model, ids).logits
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.layers.2": "disk", "model.norm": "disk", "lm_head": "cpu"}
    options = {"device_map": places, "offload_folder": tmp_path / "offload"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options).eval()
    assert torch.equal(answers(loaded, ids).logits, expected)
    qwen_patch.patch_model(loaded, backend="reference")
    assert len(qwen_patch.explain(loaded).replaced) == len(qwen_patch.explain(loaded).decisions)
    assert torch.equal(answers(loaded, ids).logits, expected)
    assert torch.equal(answers(qwen_patch.unpatch_model(loaded), ids).logits, expected)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.two_gpus)])
@pytest.mark.parametrize(
    "family", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.slow)]
)
def test_tensor_parallel(family, place, tmp_path):
    """Two processes, each with half of every linear, over gloo or NCCL."""
    small_model(family).save_pretrained(tmp_path)
    worker = Path(__file__).with_name("distributed_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if place == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [*command, str(worker), str(tmp_path), place], capture_output=True, text=True, check=False, env=env, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("as stock") == 2


@pytest.mark.two_gpus
def test_tensors_on_the_second_gpu_while_the_first_is_current():
    torch.cuda.set_device(0)
    for op in qwen_patch.ops.OPS.values():
        for args in op.samples(torch.device("cuda:1"), torch.bfloat16):
            found, expected = op(*args), op.reference(*args)
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
                assert a.device == torch.device("cuda:1")
                assert b.numel() == 0 or largest_error(a, b, op.of_row) <= op.max_ulp
    assert torch.cuda.current_device() == 0
    model, ids = small_model("qwen3", device="cuda:1"), token_ids(1, 7, device="cuda:1")
    expected = answers(model, ids).logits
    found = answers(qwen_patch.patch_model(model), ids).logits
    assert (found - expected).abs().max() <= 64 * 2**-23 * expected.abs().max()

"""The benchmarks: complete rows, honest verdicts. No assertion on any time."""

from __future__ import annotations

import json

import pytest
import torch

from qwen_patch.benchmarks import generate, ops, results, timing
from qwen_patch.loading import SHAPES, load_model, random_model, sample_tokens


def test_generate_benchmark(tmp_path, device):
    model, tokenizer = load_model("tiny-qwen2", device, torch.float32)
    prompts = {n: sample_tokens(tokenizer, model.config.vocab_size, n) for n in (8, 24)}
    document = generate.run(model, "Qwen2.5-tiny", prompts, ["mlp", "both"], 6, 3, tmp_path / "Qwen2.5-tiny")
    assert json.loads(json.dumps(document)) == json.loads((tmp_path / "Qwen2.5-tiny.json").read_text())
    assert (tmp_path / "Qwen2.5-tiny.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "Qwen2.5-tiny.md").read_text()
    assert table.count("\n| 8 |") == table.count("\n| 24 |") == 3
    assert [(r["prompt"], r["variant"]) for r in document["rows"]] == [
        (p, v) for p in (8, 24) for v in ("stock", "mlp", "both")
    ]
    for row in document["rows"]:
        assert row["correct"]
        assert row["tokens"] == "all 6 equal"
        low, high = row["decode_vs_stock"]["interval95"]
        assert low <= row["decode_vs_stock"]["ratio"] <= high
        assert row["first_token_ms"] > 0
        assert (row["peak_gb"] is None) == (device.type == "cpu")
    assert {"torch", "transformers", "device_name", "commit", "date"} <= set(document["environment"])


def test_a_variant_with_wrong_tokens_has_no_speed(monkeypatch):
    original = generate.generate

    def wrong_when_patched(model, variant, ids, new_tokens, *decoding):
        tokens = original(model, variant, ids, new_tokens)
        return (tokens + 1) % 100 if variant == "mlp" else tokens

    monkeypatch.setattr(generate, "generate", wrong_when_patched)
    model, _ = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
    document = generate.run(model, "tiny", {8: sample_tokens(None, 100, 8)}, ["mlp", "rms"], 4, 2, None)
    stock, mlp, rms = document["rows"]
    assert (stock["correct"], mlp["correct"], rms["correct"]) == (True, False, True)
    assert mlp["decode_vs_stock"] is None
    assert "WRONG" in mlp["tokens"]
    assert "WRONG" in generate.table(document)


def test_op_benchmark(tmp_path, device, monkeypatch):
    monkeypatch.setattr(ops, "MODELS", {"Qwen3-tiny": (64, 96, 4, 2, 16)})
    document = ops.run(device, (torch.float32,), tmp_path / "ops", rounds=2, tokens=(1, 5))
    assert json.loads(json.dumps(document)) == json.loads((tmp_path / "ops.json").read_text())
    seen = {(r["op"], r["model"], r["tokens"], r["variant"]) for r in document["rows"]}
    for op in ("rms_norm", "add_rms_norm", "silu_mul", "silu_and_mul", "rope_kv_write"):
        for tokens in (1, 5):
            assert (op, "Qwen3-tiny", tokens, "stock") in seen
            assert ((op, "Qwen3-tiny", tokens, "ours") in seen) == (op not in document["without_kernel"])
    assert document["without_kernel"] == (["rope_kv_write"] if device.type == "cpu" else [])
    assert ("rms_norm", "Qwen3-tiny q_norm", 5, "torch") in seen
    by_hand = next(
        r for r in document["rows"] if (r["op"], r["tokens"], r["model"]) == ("add_rms_norm", 5, "Qwen3-tiny")
    )
    assert by_hand["bytes"] == (4 * 5 * 64 + 64) * 4
    assert by_hand["gbps"] == pytest.approx(by_hand["bytes"] / by_hand["us"] / 1e3)


def without_values(*args):
    """rope_kv_write, but for the write of the values."""
    return ops.OPS["rope_kv_write"].reference(*args[:-1], args[-1].clone())


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (ops.Case("rms_norm", "x", 3, (3, 64)), lambda *args: ops.OPS["rms_norm"].reference(*args) * 2),
        (ops.Case("rope_kv_write", "x", 3, (3, 4, 2, 16)), without_values),
    ],
    ids=["its result", "what it writes"],
)
def test_a_wrong_op_is_not_timed(monkeypatch, case, wrong):
    monkeypatch.setattr(ops, "variants", lambda op, device: {"ours": wrong})
    with pytest.raises(ops.WrongResult, match=rf"{case.op} .* torch.float32 is off by .*: 16 may be"):
        ops.measure(case, torch.device("cpu"), torch.float32, 2)


def test_errors_are_counted_in_units_in_the_last_place():
    one = torch.tensor([1.0, 2.0, -8.0], dtype=torch.bfloat16)
    assert ops.largest_error(one, one) == 0
    eps = torch.finfo(torch.bfloat16).eps
    assert ops.largest_error(one + torch.tensor([0, 2 * eps, 0]).bfloat16(), one) == 1
    assert ops.largest_error(one * torch.tensor([1, 1, 1 + 3 * eps]).bfloat16(), one) == 3
    nan = torch.tensor([1.0, float("nan"), 0.0], dtype=torch.bfloat16)
    assert ops.largest_error(nan, one) == float("inf")


def test_interleaved_alternates_the_order():
    order = []
    clocks = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}
    found = timing.interleaved(clocks, 2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert found["a"] == timing.Spread(1.0, 1.0, 1.0)


def test_bootstrap_interval_holds_the_median_and_narrows():
    wide, narrow = generate.bootstrap_interval([1.0, 1.5, 2.0, 2.5, 3.0]), generate.bootstrap_interval([2.0] * 9)
    assert wide[0] <= 2.0 <= wide[1]
    assert narrow == (2.0, 2.0)


def test_bytes_a_token_counts_what_decode_reads():
    model = random_model_of_two_layers()
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    head_dim, kv_heads = 16, 2
    assert generate.bytes_a_token(model, 3, 10) == 4 * (weights + 2 * 2 * kv_heads * head_dim * 10 * 3)


def random_model_of_two_layers():
    from models import small_model

    return small_model("qwen3", num_hidden_layers=2, tie_word_embeddings=False)


def test_random_models_have_the_official_shapes(monkeypatch):
    monkeypatch.setitem(SHAPES["Qwen3-8B"][1], "num_hidden_layers", 1)
    monkeypatch.setitem(SHAPES["Qwen3-8B"][1], "vocab_size", 64)
    model = random_model("Qwen3-8B", torch.device("cpu"), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.gate_proj.weight.shape == (12288, 4096)
    assert torch.get_default_dtype() == torch.float32


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    target = tmp_path / "a" / "x.json"
    results.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        results.write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in target.parent.iterdir()] == ["x.json"]

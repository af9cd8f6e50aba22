"""The validator: it passes on the bundled trained models, and it does not pass what is wrong."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from models import small_model, token_ids

import qwen_patch
from qwen_patch.loading import BUNDLED, load_model
from qwen_patch.modules import Int8Linear, Patched, base
from qwen_patch.ops import BACKENDS, OPS
from qwen_patch.recipes import RECIPES
from qwen_patch.validation import agreement, metrics
from qwen_patch.validation.validate import validate

KEYS = [
    "model",
    "fusion",
    "quantize",
    "dtype",
    "device",
    "backend",
    "positions",
    "max_abs_logit_error",
    "mean_abs_logit_error",
    "kl_mean",
    "top1_agreement",
    "greedy_tokens_equal",
    "undo_bitwise",
    "passed",
]


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bundled_models_pass(name, dtype, device):
    model, tokenizer = load_model(name, device, dtype)
    report = validate(model, tokenizer, name=name, new_tokens=48, oracle=True)
    assert report.passed, report.reasons
    assert report.undo_bitwise
    assert report.positions > 600  # four prompts, once alone and once in the padded batch
    assert report.modules_replaced == (25 if name == "tiny-qwen2" else 37)
    assert set(KEYS) <= set(report.to_dict())
    assert not any(isinstance(m, Patched) for m in model.modules())
    if dtype == torch.float32:
        assert report.greedy_tokens_equal
        assert report.top1_agreement == 1.0
        assert 0 < report.max_abs_logit_error < 1e-3
    else:
        assert report.oracle["stock_mean_abs_error"] > 0


@pytest.mark.parametrize("fusion", RECIPES)
def test_the_reference_backend_is_bitwise_stock(fusion):
    model, tokenizer = load_model("tiny-qwen3", torch.device("cpu"), torch.bfloat16)
    report = validate(model, tokenizer, name="tiny-qwen3", fusion=fusion, backend="reference", new_tokens=8)
    assert report.passed
    assert report.max_abs_logit_error == report.kl_mean == 0.0
    assert report.top1_agreement == 1.0
    assert report.greedy_tokens_equal
    assert report.oracle is None  # nothing differs, nothing to judge


def test_the_bundled_models_write_english():
    """Trained until greedy text is plainly English: its words are words of the text that they were not trained on."""
    from qwen_patch.loading import sample_text

    known = set(re.findall(r"[a-z]+", sample_text().lower()))
    for name in BUNDLED:
        model, tokenizer = load_model(name, torch.device("cpu"), torch.float32)
        ids = tokenizer("When the king heard of it, he", return_tensors="pt").input_ids
        text = tokenizer.decode(model.generate(ids, max_new_tokens=60, do_sample=False)[0])
        words = re.findall(r"[a-z]+", text.lower())
        assert len(words) > 30
        assert sum(w in known for w in words) >= 0.8 * len(words), words


def broken(name, function):
    """The op table with one op replaced."""
    return BACKENDS["auto"]._replace(**{name: function})


@pytest.mark.parametrize(
    ("op", "wrong", "site"),
    [
        ("rms_norm", lambda x, w, eps: OPS["rms_norm"].reference(x, w, eps) * 1.05, "model.layers.0.input_layernorm"),
        ("silu_mul", lambda g, u: torch.nn.functional.gelu(g) * u, "model.layers.0.mlp"),
        (
            "add_rms_norm",  # the norm of x alone: the residual is forgotten
            lambda x, r, w, eps: (OPS["rms_norm"].reference(x, w, eps), x + r),
            "model.layers.0.post_attention_layernorm",
        ),
    ],
)
def test_a_wrong_op_does_not_pass_and_is_named(monkeypatch, op, wrong, site):
    monkeypatch.setitem(base.BACKENDS, "auto", broken(op, wrong))
    base.patched_class.cache_clear()
    model, tokenizer = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
    try:
        report = validate(model, tokenizer, name="tiny-qwen2", new_tokens=8)
    finally:
        base.patched_class.cache_clear()
    assert not report.passed
    assert report.reasons
    assert report.first_difference.startswith(f"{site}: differs by")
    assert report.undo_bitwise


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("broken", [False, True])
def test_what_generate_says_after_it_has_parted_counts(quantize, broken, monkeypatch):
    """In bfloat16 a row may part from stock at a tie, or over int8 anywhere; what follows must be what a model says."""
    from qwen_patch.validation import validate as module

    collect, calls = module.collect, []

    def collected(*args):
        answers = collect(*args)
        calls.append(answers)
        if broken and len(calls) == 2:
            for expected, found in zip(calls[0].tokens, answers.tokens, strict=True):
                parted = (expected != found).long().cummax(-1).values.bool()
                found[:, 1:][parted[:, :-1]] = 7
        return answers

    monkeypatch.setattr(module, "collect", collected)
    model, tokenizer = load_model("tiny-qwen3", torch.device("cpu"), torch.bfloat16)
    report = validate(model, tokenizer, name="tiny-qwen3", quantize=quantize)
    assert not report.greedy_tokens_equal
    assert report.passed != broken, report.reasons
    if broken:
        assert all("below the float32 model's best" in reason for reason in report.reasons)


def test_a_repetition_penalty_in_the_generation_config():
    """Tokens are judged by their logits, so they must be chosen by them alone."""
    model, tokenizer = load_model("tiny-qwen3", torch.device("cpu"), torch.bfloat16)
    model.generation_config.repetition_penalty = 1.3
    report = validate(model, tokenizer, name="tiny-qwen3")
    assert report.passed, report.reasons


def test_an_incomplete_undo_does_not_pass(monkeypatch):
    from qwen_patch.validation import validate as module

    calls = []

    def forgetful(model):
        calls.append(model)
        if len(calls) == 2:  # the undo after the patched run
            with torch.no_grad():
                model.model.norm.weight.mul_(1.01)
        return qwen_patch.unpatch_model(model)

    monkeypatch.setattr(module, "unpatch_model", forgetful)
    model, tokenizer = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
    report = validate(model, tokenizer, name="tiny-qwen2", new_tokens=4)
    assert not report.undo_bitwise
    assert not report.passed
    assert "undo" in report.reasons[0]


def test_a_model_that_makes_more_of_a_rounding(monkeypatch):
    """Sharp attention, and branches that outweigh the residual: stock is off by as much. A wrong op still is wrong."""

    def ill_conditioned() -> tuple:
        model, tokenizer = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(10)
                layer.self_attn.o_proj.weight.mul_(3)
                layer.mlp.down_proj.weight.mul_(3)
        return model, tokenizer

    model, tokenizer = ill_conditioned()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = validate(model, tokenizer, name="sharp", new_tokens=8)
    assert report.passed, report.reasons
    assert report.max_abs_logit_error > 1e-4  # far more than the bound for its 25 modules, 4e-5
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    monkeypatch.setitem(base.BACKENDS, "auto", broken("silu_mul", lambda g, u: OPS["silu_mul"].reference(g, u) * 1.001))
    base.patched_class.cache_clear()
    try:
        report = validate(*ill_conditioned(), name="sharp", new_tokens=8)
    finally:
        base.patched_class.cache_clear()
    assert report.reasons[0].startswith("a logit is off by")


def test_logit_distance():
    a = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    b = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 0.0]])
    found = metrics.distance([a], [b])
    p, q = a[1].double().softmax(-1), b[1].double().softmax(-1)
    assert (found.positions, found.max_abs, found.largest) == (2, 3.0, 3.0)
    assert found.mean_abs == pytest.approx(4 / 6)
    assert found.kl_mean == pytest.approx((p * (p / q).log()).sum().item() / 2)
    assert found.top1_agreement == 0.5
    assert metrics.distance([a], [a * float("nan")]).max_abs == float("inf")


def test_agreement_tells_a_tie_from_an_error():
    model, ids = small_model("qwen2"), token_ids(1, 5)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    assert agreement.compare_tokens(model, ids, expected, expected, lambda: None).equal
    wrong = expected.clone()
    wrong[0, 3] = (wrong[0, 3] + 1) % 128
    with torch.no_grad():
        found = agreement.compare_tokens(model, ids, expected, wrong, lambda: None)
        logits = model(torch.cat([ids, expected[:, :3]], 1)).logits[0, -1]
    assert found.first_difference == 3
    assert found.margin == pytest.approx((logits[expected[0, 3]] - logits[wrong[0, 3]]).item())
    assert 0 < found.error < 1e-4  # the two models agree on the logits but for float32's last bits
    assert not found.correct
    assert agreement.Agreement(6, 3, margin=0.1, error=0.06).correct
    assert agreement.first_difference(expected, expected[:, :4]) == (0, 4)


@torch.no_grad()
def test_agreement_looks_beyond_a_tie_and_at_every_row():
    model, ids = small_model("qwen3", tie_word_embeddings=False), token_ids(2, 5)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    twin = next(t for t in range(128) if t not in expected)
    model.lm_head.weight[twin] = model.lm_head.weight[expected[0, 2]]
    parted = expected.clone()
    parted[0, 2] = twin
    text = torch.cat([ids[:1], parted[:1, :3]], 1)
    parted[0, 3:] = model.generate(text, max_new_tokens=3, do_sample=False)[0, 8:]

    def judged(found: torch.Tensor) -> agreement.Agreement:
        return agreement.compare_tokens(model, ids, expected, found, lambda: None)

    tie = judged(parted)
    assert (tie.correct, tie.equal, tie.first_difference, tie.margin) == (True, False, 2, 0.0)
    worst = model(torch.cat([ids[:1], parted[:1, :5]], 1)).logits[0, -1].argmin()
    late, other = parted.clone(), parted.clone()
    late[0, 5] = worst
    other[1, 1] = model(torch.cat([ids[1:], parted[1:, :1]], 1)).logits[0, -1].argmin()
    for wrong, position in ((late, 5), (other, 1)):
        found = judged(wrong)
        assert (found.correct, found.first_difference) == (False, position)


@torch.no_grad()
def test_an_end_of_text_that_is_held_back_is_no_better_token(monkeypatch):
    model, ids = small_model("qwen2", tie_word_embeddings=False), token_ids(1, 5)
    first = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, 5])
    twin = 3 if first != 3 else 4
    model.lm_head.weight[twin] = model.lm_head.weight[first]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    text = torch.cat([ids, torch.tensor([[first if expected[0, 0] == twin else twin]])], 1)
    model.generation_config.eos_token_id = int(model(text).logits[0, -1].argmax())
    found = model.generate(text, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)[:, 5:]
    judged = agreement.compare_tokens(model, ids, expected, found, lambda: None)
    assert (judged.first_difference, judged.correct) == (0, True)
    monkeypatch.setattr(agreement, "ends_of", lambda model: [])
    assert not agreement.compare_tokens(model, ids, expected, found, lambda: None).correct


@torch.no_grad()
def test_the_judge_of_a_mixture_of_experts():
    """Its grouped products are for 16 and 32 bits only."""
    model, ids = small_model("qwen3_moe"), token_ids(1, 5)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    found = expected.clone()
    found[0, 3] = (found[0, 3] + 1) % 128
    assert not agreement.compare_tokens(model, ids, expected, found, lambda: None).correct


@torch.no_grad()
def test_a_wrong_float32_kernel_is_no_tie(monkeypatch):
    """Its own distance from stock is no measure of what rounding does."""
    model, ids = small_model("qwen3"), token_ids(1, 5)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    monkeypatch.setitem(base.BACKENDS, "auto", base.BACKENDS["auto"]._replace(silu_mul=lambda gate, up: gate * up))
    base.patched_class.cache_clear()
    patch = functools.partial(qwen_patch.patch_model, model, generation="stock")
    found = patch().generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]
    assert not torch.equal(found, expected)
    assert not agreement.compare_tokens(model, ids, expected, found, patch).correct
    base.patched_class.cache_clear()


@torch.no_grad()
def test_closeness_of_int8(monkeypatch):
    """An int8 model's tokens are judged by the reference over the same int8 linears, which its kernels do not touch."""
    model, ids = small_model("qwen3", torch.bfloat16), token_ids(1, 5)
    options = {"quantize": "int8", "keep_original": True}

    def generate() -> torch.Tensor:
        return model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:]

    stock = generate()
    qwen_patch.patch_model(model, **options)
    expected = generate()

    def judged(found: torch.Tensor, bar: float) -> agreement.Closeness:
        return agreement.compare_int8(model, ids, stock, found, bar, generate, options)

    found = judged(expected, 0.1)
    assert found.correct
    assert 0 < found.distance.kl_mean < 0.1
    assert qwen_patch.explain(model).quantize == "int8"  # as it was
    kl = found.distance.kl_mean  # of six positions: their mean may be 1.8 times the bar
    assert judged(expected, kl / 1.75).correct
    assert not judged(expected, kl / 1.85).correct
    far = judged(expected, 0.0)
    assert not far.correct
    assert "too far" in str(far)
    wrong = expected.clone()
    wrong[0, 3] = model(torch.cat([ids, expected[:, :3]], 1)).logits[0, -1].argmin()
    found = judged(wrong, 0.1)
    assert (found.tokens.first_difference, found.correct) == (3, False)

    def without_last_group(self: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        scales = self.scales.clone()
        scales[:, -1] *= self.backend == "reference"
        return OPS["int8_linear"].reference(x, self.values, scales, self.bias, False)

    # What a wrong kernel gives must not widen what counts as a tie.
    monkeypatch.setattr(Int8Linear, "forward", without_last_group)
    qwen_patch.patch_model(model, **options, generation="stock")
    wrong = generate()
    qwen_patch.patch_model(model, **options)
    assert not judged(wrong, 100.0).tokens.correct

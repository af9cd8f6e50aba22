"""Property tests. `HYPOTHESIS_PROFILE=long pytest tests/test_fuzz.py` looks at many more cases, others at each run."""

from __future__ import annotations

import copy
import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import FAMILIES, VISION, answers, small_model, token_ids

import qwen_patch
from qwen_patch import ops
from qwen_patch.benchmarks.ops import FLOAT32_ULP, largest_error
from qwen_patch.modules import Patched
from qwen_patch.recipes import RECIPES

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **COMMON)
settings.register_profile("long", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LAYOUTS = ["contiguous", "transposed", "every second element", "every second row", "unaligned", "expanded"]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1e-40, 6e-8, 1e-5, 65504.0, 1e4, 3e38, -3e38]


def in_layout(layout: str, shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of that shape, whose memory is laid out in that way."""
    options = {"dtype": dtype, "device": device}
    *rows, H = shape
    if layout == "transposed" and rows:
        return torch.zeros(*rows[:-1], H, rows[-1], **options).transpose(-1, -2)
    if layout == "every second element":
        return torch.zeros(*rows, 2 * H, **options)[..., ::2]
    if layout == "every second row" and rows:
        return torch.zeros(*rows[:-1], 2 * rows[-1], H, **options)[..., ::2, :]
    if layout == "unaligned":  # starts one element behind a 16-byte boundary
        flat = torch.zeros(1 + torch.Size(shape).numel(), **options)
        return flat[1:].view(shape)
    return torch.zeros(shape, **options)


@st.composite
def tensors(draw, shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values of one scale, with some special ones among them, in some layout."""
    layout = draw(st.sampled_from(LAYOUTS))
    scale = draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0, 1e4, 1e-20, 1e18]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = (torch.randn(shape, generator=generator) * scale).to(dtype)
    for special in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        if values.numel():
            values.view(-1)[draw(st.integers(0, values.numel() - 1))] = special
    if layout == "expanded" and len(shape) > 1 and shape[0] > 0:
        return values[:1].to(device).expand(shape)
    result = in_layout(layout, shape, dtype, device)
    result.copy_(values)
    return result


@st.composite
def arguments(draw, op: ops.Op, device: torch.device) -> tuple:
    dtype = draw(st.sampled_from(ops.DTYPES))
    rows = draw(st.lists(st.integers(0, 9), min_size=0, max_size=2))
    H = draw(st.one_of(st.integers(1, 80), st.integers(81, 1100), st.sampled_from([896, 3584, 4096, 8200])))
    x = draw(tensors([*rows, H], dtype, device))
    if op.name == "silu_mul":
        return x, draw(tensors([*rows, H], dtype, device))
    if op.name == "silu_and_mul":
        return (draw(tensors([*rows, 2 * H], dtype, device)),)
    eps, weight = draw(st.sampled_from([1e-6, 1e-5, 0.1])), draw(tensors([H], dtype, device))
    return (x, weight, eps) if op.name == "rms_norm" else (x, draw(tensors([*rows, H], dtype, device)), weight, eps)


# The linears have a bound of their own: test_linears.py.
@pytest.mark.parametrize(
    "op", [op for op in ops.OPS.values() if not op.mutates and "linear" not in op.name], ids=lambda op: op.name
)
@given(data=st.data())
def test_ops(op, device, data):
    """What is not finite in the stock expression is not finite in the same way; what is, is within the contract's ulps
    of it, and no further from the truth in float64."""
    args = data.draw(arguments(op, device))
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    found, expected = op(*args), op.reference(*args)
    exact = op.reference(*[a.double() if isinstance(a, torch.Tensor) else a for a in args])
    for a, b in zip(args, before, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num()), "an input was changed"
    for a, b, truth in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected, exact)), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())
        assert torch.equal(a[a.isinf()], b[b.isinf()])
        finite = b.isfinite()
        a, b, truth = a[finite], b[finite], truth[finite]
        if a.numel():
            assert largest_error(a, b) <= (FLOAT32_ULP if a.dtype == torch.float32 else op.max_ulp)
            step = torch.finfo(a.dtype).eps * truth.abs() + torch.finfo(a.dtype).smallest_normal
            known = truth.isfinite()  # a float32 intermediate may overflow where float64 does not
            error, stock = (((t.double() - truth)[known] / step[known]).abs() for t in (a, b))
            # In float32 a whole row is off by its mean's last bits, on either side by luck.
            luck = 4 if a.dtype == torch.float32 else 1
            assert error.numel() == 0 or error.max() <= 1.1 * stock.max() + luck


@st.composite
def configurations(draw) -> tuple[str, dict]:
    family = draw(st.sampled_from([f for f in FAMILIES if f not in VISION]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 6, 10, 16, 64]))
    heads = kv_heads * group
    config = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        # Qwen2's attention takes its head_dim from these two alone; qwen3_moe's GEMMs want strides of 16 bytes
        "hidden_size": {"qwen2": head_dim * heads, "qwen3_moe": 32}.get(family, heads * draw(st.integers(1, 40))),
        "intermediate_size": draw(st.integers(1, 200)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "attn_implementation": draw(st.sampled_from(["sdpa", "eager"])),
    }
    return family, config


@given(
    drawn=configurations(),
    fusion=st.sampled_from([f for f in RECIPES if f != "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    batch=st.integers(1, 3),
    length=st.integers(1, 12),
)
def test_configurations(device, drawn, fusion, dtype, batch, length):
    family, config = drawn
    model, ids = small_model(family, dtype, device=device, **config), token_ids(batch, length, device=device)
    expected = answers(model, ids, output_hidden_states=True)
    found = answers(qwen_patch.patch_model(model, fusion=fusion, backend="reference"), ids, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    found = answers(qwen_patch.patch_model(model, fusion=fusion), ids).logits
    assert torch.equal(found.isfinite(), expected.logits.isfinite())
    if dtype == torch.float32:  # 4 layers: some tens of eps of the largest logit
        assert (found - expected.logits).abs().max() <= 128 * 2**-23 * expected.logits.abs().max()
    assert torch.equal(answers(qwen_patch.unpatch_model(model), ids).logits, expected.logits)


class Life(RuleBasedStateMachine):
    """A model that is patched and unpatched, and its stock twin, through the same events: they always answer alike."""

    @initialize(family=st.sampled_from(["qwen2", "qwen3", "llama"]), seed=st.integers(0, 9))
    def start(self, family, seed):
        self.stock, self.subject = small_model(family), small_model(family)
        self.ids = token_ids(2, 6)
        self.hooks, self.adapter = [], False

    @property
    def both(self):
        return self.stock, self.subject

    @rule(fusion=st.sampled_from(list(RECIPES)))
    def patch(self, fusion):
        qwen_patch.patch_model(self.subject, fusion=fusion, backend="reference")

    @rule()
    def unpatch(self):
        qwen_patch.unpatch_model(self.subject)
        assert not any(isinstance(m, Patched) for m in self.subject.modules())

    @rule(beams=st.integers(1, 2))
    def generate(self, beams):
        options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams}
        assert torch.equal(*(m.generate(self.ids, **options) for m in self.both))

    @rule()
    def copy_it(self):
        self.remove_hooks()  # a copy has them too, but their handles would take them off the original
        self.subject = copy.deepcopy(self.subject)

    @precondition(lambda self: not self.adapter)
    @rule()
    def save_and_load(self):
        """The subject's checkpoint, written with the patch on, becomes both."""
        self.remove_hooks()
        with tempfile.TemporaryDirectory() as folder:
            self.subject.save_pretrained(folder)
            self.stock, self.subject = (
                type(self.stock).from_pretrained(folder, dtype=self.stock.dtype).eval() for _ in range(2)
            )

    @rule(where=st.sampled_from(["model.norm", "model.layers.0", "model.layers.1.mlp"]), before=st.booleans())
    def hook(self, where, before):
        for m in self.both:
            module = m.get_submodule(where)
            if before:
                self.hooks.append(module.register_forward_pre_hook(lambda module, args: (args[0] * 1.01, *args[1:])))
            else:
                self.hooks.append(module.register_forward_hook(lambda module, args, out: out.mul_(0.99)))

    @rule()
    def remove_hooks(self):
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    @rule(name=st.sampled_from(["norm", "proj"]), factor=st.sampled_from([0.9, 1.1]))
    def edit_weights(self, name, factor):
        with torch.no_grad():
            for m in self.both:
                for key, p in m.named_parameters():
                    if name in key:
                        p.mul_(factor)

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def cast(self, dtype):
        for m in self.both:
            m.to(dtype)

    @rule()
    def train_a_step(self):
        gradients = []
        for m in self.both:
            m.train()
            m(self.ids, labels=self.ids).loss.backward()
            gradients.append([p.grad for p in m.parameters() if p.grad is not None])
            m.zero_grad()
            m.eval()
        assert len(gradients[0]) == len(gradients[1]) > 0
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    @precondition(lambda self: not self.adapter)
    @rule()
    def add_adapter(self):
        import peft

        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "gate_proj", "down_proj"])
        for m in self.both:
            torch.manual_seed(3)
            peft.inject_adapter_in_model(config, m)
            m.to(m.dtype)
        self.adapter = True

    @invariant()
    def answers_are_the_stock_models(self):
        found, expected = (answers(m, self.ids, output_hidden_states=True) for m in (self.subject, self.stock))
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    def teardown(self):
        if hasattr(self, "subject"):
            qwen_patch.unpatch_model(self.subject)
            assert torch.equal(*(answers(m, self.ids).logits.nan_to_num() for m in self.both))


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=15)

"""The int8 linear by itself: its state, casts, copies; which op its tokens go through."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from qwen_patch.modules import Int8Linear
from qwen_patch.modules import linear as linear_module
from qwen_patch.quantization.format import quantize


def made(bias=True, k=72, n=24, dtype=torch.bfloat16):
    torch.manual_seed(3)
    linear = nn.Linear(k, n, bias).to(dtype)
    return linear, Int8Linear.from_linear(linear)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_linear_computes_with_the_dequantized_weight(bias):
    linear, int8 = made(bias)
    values, scales = quantize(linear.weight.detach())
    assert torch.equal(int8.values, values)
    assert torch.equal(int8.scales, scales)
    assert int8.weight.shape == (24, 9, 8)
    x = torch.randn(5, 72).bfloat16()
    exact = x.double() @ (values.double() * scales.double().repeat_interleave(64, 1)[:, :72]).T
    exact += linear.bias.double() if bias else 0
    # one rounding of the result, and of the weights where they become 16-bit first: 2^-9 of the terms' size each
    assert (int8(x).double() - exact).abs().max() < 2**-8 * (x.double().abs() @ linear.weight.double().abs().T).max()
    assert list(int8.state_dict()) == ["weight", *(["bias"] if bias else []), "scales"]


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.type(torch.float16)])
def test_casts_leave_codes_and_scales_alone(cast):
    _, int8 = made()
    before = {k: v.clone() for k, v in int8.state_dict().items()}
    cast(int8)
    for key in ("weight", "scales"):
        assert torch.equal(int8.state_dict()[key], before[key])
        assert int8.state_dict()[key].dtype == before[key].dtype
    assert int8.bias.dtype in (torch.float16, torch.float64)


def test_copies_and_pickles_are_their_own():
    _, int8 = made()
    x = torch.randn(3, 72).bfloat16()
    expected = int8(x)
    for twin in (copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
        assert torch.equal(twin(x), expected)
        twin.scales.mul_(2)
        assert not torch.equal(twin(x), expected)
    assert torch.equal(int8(x), expected)
    assert "in_features=72, out_features=24, bias=True, activations=auto" in repr(int8)


def test_no_stock_linear_takes_the_state():
    linear, int8 = made()
    assert not isinstance(int8, nn.Linear)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        linear.load_state_dict(int8.state_dict(), strict=False)


class FakeOp:
    def __init__(self, name, call):
        self.name, self.call, self.kernels = name, call, False

    def __call__(self, *args):
        return self.call(*args)

    def has_kernel(self, device):
        return self.kernels


def test_activations_choose_the_path(monkeypatch):
    _, int8 = made()
    seen = []
    monkeypatch.setattr(linear_module, "GROUPED", FakeOp("int8_linear", lambda *args: seen.append(args[-1])))
    monkeypatch.setattr(linear_module, "ROTATED", FakeOp("rotated", lambda *args: seen.append("rotated")))
    x = torch.randn(4, 72).bfloat16()
    for mode in linear_module.ACTIVATIONS:
        int8.activations = mode
        int8(x)
    assert seen == [False, False, True]
    monkeypatch.setitem(linear_module.W8A8_FROM_ROWS, ("int8_linear", "cpu"), 4)
    int8.activations = "auto"
    int8(x)
    int8(x[:3])
    assert seen[3:] == [True, False]
    # One scale a row where there is a kernel for that, but not for a few tokens.
    monkeypatch.setattr(linear_module.ROTATED, "kernels", True)
    monkeypatch.setitem(linear_module.W8A8_FROM_ROWS, ("rotated", "cpu"), 20)
    seen.clear()
    for mode, rows in (("auto", 4), ("auto", 19), ("auto", 20), ("w8a8", 16), ("w8a8", 17), ("w8a16", 40)):
        int8.activations = mode
        int8(torch.randn(rows, 72).bfloat16())
    assert seen == [True, False, "rotated", True, "rotated", False]


def test_training_keeps_16_bits_unless_asked(monkeypatch):
    _, int8 = made()
    seen = []
    monkeypatch.setattr(linear_module, "GROUPED", FakeOp("int8_linear", lambda *args: seen.append(args[-1])))
    monkeypatch.setitem(linear_module.W8A8_FROM_ROWS, ("int8_linear", "cpu"), 4)
    x = torch.randn(4, 72).bfloat16().requires_grad_()
    for int8.activations in ("auto", "w8a8"):
        int8(x)
    with torch.no_grad():
        int8.activations = "auto"
        int8(x)
    assert seen == [False, True, True]


@pytest.mark.parametrize("activations", ["auto", "w8a8"])
def test_export_takes_any_number_of_tokens(activations):
    _, int8 = made()
    int8.activations = activations
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(int8, (torch.randn(20, 72).bfloat16(),), dynamic_shapes=({0: tokens},)).module()
    for rows in (5, 40):
        x = torch.randn(rows, 72).bfloat16()
        assert torch.equal(exported(x), int8(x))

"""The int8 format, and the linears beyond their own samples: the bound on their sums, extreme values, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from qwen_patch import ops
from qwen_patch.quantization import GROUP, dequantize, quantize
from qwen_patch.quantization.format import quantize_rows

DTYPES = pytest.mark.parametrize("dtype", ops.DTYPES, ids=lambda d: str(d).removeprefix("torch."))
ACTIVATIONS = pytest.mark.parametrize("activations", [False, True], ids=["w8a16", "w8a8"])
WIDTHS = pytest.mark.parametrize("width", [136, 144])  # CUDA has another kernel where K is no multiple of 16
SHAPES = [(M, N, K) for M in (1, 2, 7, 16, 33, 70) for N, K in ((35, 72), (64, 128), (1, 8), (97, 1000))]
# Around the CUDA kernels' tiles, and beyond what a block has room for: M of 8, 16, 64, 128 and 192, N of 16 to 256, K
# of one group, of two and of many, and not a multiple of 16.
EDGES = [(8, 17, 64), (9, 130, 1040), (12, 9, 12288), (17, 257, 192), (65, 131, 200), (129, 257, 896), (193, 129, 320)]
EDGES += [(260, 5, 4160)]


def within_the_contract(found, states, weight, bias=None):
    """Within K * 2^-24 of the sum of |terms|, which is the worst that any order of float32 sums can do, and rounded
    once. But for luck an error is that of a random walk: four times the root of K, so that a lost term shows."""
    exact, size = states @ weight.T, states.abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    K = states.shape[-1]
    rounding = 0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / 2
    limit = size * min(K + 2, 4 * math.sqrt(K) + 2) * 2**-24 + exact.abs() * rounding + torch.finfo(found.dtype).tiny
    assert ((found.double() - exact).abs() <= 1.01 * limit).all()


@DTYPES
@ACTIVATIONS
def test_int8_linear_is_within_its_bound_of_float64(device, dtype, activations):
    for M, N, K in SHAPES + EDGES:
        x = torch.randn(M, K, device=device, dtype=dtype)
        values, scales = quantize(torch.randn(N, K, device=device))
        bias = torch.randn(N, device=device, dtype=dtype) if M % 2 else None
        states = dequantize(*quantize_rows(x.float()), torch.float64) if activations else x.double()
        found = ops.int8_linear(x, values, scales, bias, activations)
        assert found.shape == (M, N)
        within_the_contract(found, states, dequantize(values, scales, torch.float64), bias)


@DTYPES
def test_small_linear_is_within_its_bound_of_float64(device, dtype):
    for M, N, K in [(min(M, 16), N, K - odd) for M, N, K in SHAPES for odd in (0, 5)]:
        x, weight = torch.randn(M, K, device=device, dtype=dtype), torch.randn(N, K, device=device, dtype=dtype)
        bias = torch.randn(N, device=device) if M % 2 else None
        within_the_contract(ops.small_linear(x, weight, bias), x.double(), weight.double(), bias)


@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
def test_sums_of_int8_are_exact(device, tokens):
    """Every value +-127, the largest sums there are, and every scale a power of two: no sum rounds."""
    values = torch.full((37, 192), 127, dtype=torch.int8, device=device)
    values[1::3] = -127
    values[2::3, ::2] = -127
    scales = torch.full((37, 3), 2.0, device=device)
    x = torch.full((tokens, 192), 127.0, device=device)
    x[:, 1::5] = -127
    expected = (x.double() @ values.double().T * 2).float()
    for activations in (False, True):
        assert torch.equal(ops.int8_linear(x, values, scales, None, activations), expected)
    values[:] = -128  # no quantizer writes it, a file may hold it
    expected = (x.double() @ values.double().T * 2).float()
    for activations in (False, True):
        assert torch.equal(ops.int8_linear(x, values, scales, None, activations), expected)


@DTYPES
@pytest.mark.parametrize(("tokens", "rows", "width"), [(20, 67, 2112), (150, 200, 2112), (20, 1000, 1152)])
def test_sums_that_several_blocks_make(device, dtype, tokens, rows, width):
    """On CUDA blocks share a tile, and some of them have none of its 33 groups."""
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    values, scales = quantize(torch.randn(rows, width, device=device))
    found = ops.int8_linear(x, values, scales)
    within_the_contract(found, x.double(), dequantize(values, scales, torch.float64))


@DTYPES
@WIDTHS
@pytest.mark.parametrize("tokens", [1, 2, 5, 20, 150])
@pytest.mark.parametrize("size", [1, 3e-29, 5e-29, 1e-30])  # from scales of 2^-100 down CUDA divides in another way
def test_activations_are_quantized_to_the_bit(device, dtype, width, tokens, size):
    """With a weight of one 1 a row and 0 elsewhere, the results are the quantized activations themselves."""
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    x[0, 64:128] = torch.arange(-64, 0, device=device).to(dtype) * 127 / 64  # scale 1: many ties of rounding
    x[-1, 128:136] = torch.tensor([0.0, -0.0, 0.5, 1.5, 2.5, 127.0, -126.5, -0.5], device=device)
    x[tokens // 2] *= size if dtype != torch.float16 else max(size, 1e-6)  # float16's smallest step is 6e-8
    values, scales = torch.eye(width, device=device).to(torch.int8), torch.ones(width, 3, device=device)
    expected = dequantize(*quantize_rows(x.float())).to(dtype)
    assert torch.equal(ops.int8_linear(x, values, scales, None, True), expected)


@DTYPES
@ACTIVATIONS
@WIDTHS
@pytest.mark.parametrize("tokens", [1, 2, 5, 20, 150])
def test_what_is_not_finite_shows(device, dtype, activations, width, tokens):
    values, scales = quantize(torch.randn(40, width, device=device))
    clean = torch.randn(tokens, width, device=device, dtype=dtype)
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 70, width - 1):
            x = clean.clone()
            x[-1, place] = bad
            found = ops.int8_linear(x, values, scales, None, activations)
            assert not found[-1].isfinite().any()
            assert found[:-1].isfinite().all()
            if activations:
                assert found[-1].isnan().all()
    payload = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    scales[3, 1] = payload  # a NaN whose bits could round to a number
    found = ops.int8_linear(clean, values, scales, None, activations)
    assert found[:, 3].isnan().all()
    assert found[:, 4:].isfinite().all()
    small = ops.small_linear(clean[:16], torch.full((3, width), math.nan, device=device, dtype=dtype))
    assert small.isnan().all()


@DTYPES
@ACTIVATIONS
def test_int8_linear_of_extreme_values(device, dtype, activations):
    """Groups of zeros, of subnormals, and of the largest numbers beside small ones."""
    values, scales = quantize(torch.randn(33, 192, device=device))
    for tokens in (1, 2, 5, 40):
        x = torch.zeros(tokens, 192, device=device, dtype=dtype)
        assert not ops.int8_linear(x, values, scales, None, activations).any()
        x[:, 64] = torch.finfo(dtype).smallest_normal / 4
        assert ops.int8_linear(x, values, scales, None, activations).abs().max() <= torch.finfo(dtype).smallest_normal
        x[:, 64] = torch.finfo(dtype).max / 1024
        x[:, 128:] = torch.randn(64, device=device).to(dtype)
        states = dequantize(*quantize_rows(x.float()), torch.float64) if activations else x.double()
        found = ops.int8_linear(x, values, scales, None, activations)
        within_the_contract(found, states, dequantize(values, scales, torch.float64))
    assert not ops.int8_linear(x, values, scales * 0, None, activations).any()


def test_more_tokens_than_one_buffer_holds(device):
    """Hundreds of tokens, and threads that share them: each result is that of its token alone."""
    x = torch.randn(3, 131, 200, device=device)
    values, scales = quantize(torch.randn(300, 200, device=device))
    for activations in (False, True):
        found = ops.int8_linear(x, values, scales, None, activations)
        for row in (0, 63, 64, 130):
            one = ops.int8_linear(x[1, row], values, scales, None, activations)
            torch.testing.assert_close(found[1, row], one, rtol=1e-5, atol=1e-4)


@DTYPES
@ACTIVATIONS
def test_memory_that_starts_anywhere(device, dtype, activations):
    """Contiguous views that do not start on 16 bytes."""

    def moved(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    for tokens in (3, 40):
        x, values = torch.randn(tokens, 192, device=device, dtype=dtype), torch.randn(70, 192, device=device)
        args = [x, *quantize(values), torch.randn(70, device=device)]
        expected = ops.int8_linear(*args, activations)
        assert torch.equal(ops.int8_linear(*map(moved, args), activations), expected)


def test_quantize_is_the_nearest_of_the_format(device):
    weight = torch.randn(7, 136, device=device)
    weight[2, 64:128] = 0
    weight[3, 128:] = torch.arange(8, device=device) * 2.0**-140
    values, scales = quantize(weight)
    assert values.shape == (7, 136)
    assert values.dtype == torch.int8
    assert scales.shape == (7, 3)
    assert scales.dtype == torch.float32
    assert values.min() >= -127
    for g in range(3):
        part = weight[:, g * GROUP : (g + 1) * GROUP]
        assert torch.equal(scales[:, g], part.abs().amax(-1) / torch.tensor(127.0, device=device))
        normal = scales[:, g] > 2.0**-126
        rounded = (part / scales[:, g, None]).round()
        assert torch.equal(values[normal, g * GROUP : (g + 1) * GROUP].float(), rounded[normal])
        error = (dequantize(values, scales, torch.float64)[:, g * GROUP : (g + 1) * GROUP] - part.double()).abs()
        assert (error <= scales[:, g, None].double() * 0.501)[normal].all()
    assert scales[2, 1] == 0
    assert not values[2, 64:128].any()
    again = quantize(dequantize(values, scales))[0]
    assert torch.equal(again[:, :128], values[:, :128])  # what was quantized once stays, where no scale is subnormal


@DTYPES
def test_quantize_takes_any_dtype_strides_and_size(device, dtype, monkeypatch):
    weight = torch.randn(130, 64, device=device).to(dtype).t()
    whole = quantize(weight[:, :128])
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize(weight[:, :128].float().contiguous()), strict=True))
    monkeypatch.setattr("qwen_patch.quantization.format.CHUNK", 5 * 128)  # chunks of five rows, and a last one of four
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize(weight[:, :128]), strict=True))
    assert quantize(weight[:0, :128])[0].shape == (0, 128)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.randn(3, 12), r"K a multiple of 8, got \[3, 12\] float32"),
        (torch.randn(64), r"\[N, K\].*got \[64\] float32"),
        (torch.randn(3, 0), r"got \[3, 0\]"),
        (torch.ones(3, 64, dtype=torch.int8), r"floating-point weight.*int8"),
        (torch.tensor([[1.0, math.nan, math.inf, -math.inf, 0, 0, 0, 0]]), "got 3 of 8 that are NaN or infinite"),
        (torch.full((2, 8), 1e300, dtype=torch.float64), "got 16 of 16"),
    ],
)
def test_quantize_refuses(device, weight, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight.to(device))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.randn(3, 64)}, r"x \[\.\.\., K\] and values \[N, K\].*\[3, 64\].*\[5, 128\]"),
        ({0: torch.randn(3, 128).double()}, r"float32, bfloat16 and float16.*float64"),
        ({1: torch.randn(5, 128)}, r"values int8 and scales float32.*\[5, 128\] float32"),
        ({2: torch.randn(5, 3)}, r"scales \[N, ceil\(K / 64\)\].*\[5, 3\]"),
        ({2: torch.randn(5, 2).half()}, r"values int8 and scales float32.*float16"),
        ({3: torch.randn(6)}, r"bias \[N\].*\[6\] float32"),
        ({3: torch.randn(5).half()}, r"bias \[N\] of x's dtype or float32.*float16"),
        ({0: torch.randn(2, 12), 1: torch.ones(5, 12, dtype=torch.int8)}, r"multiple of 8.*\[2, 12\]"),
    ],
    ids=lambda value: str(min(value)) if isinstance(value, dict) else None,
)
def test_int8_linear_refuses(device, changed, message):
    args = [torch.randn(3, 128), *quantize(torch.randn(5, 128)), torch.randn(5), False]
    for i, tensor in changed.items():
        args[i] = tensor
    args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(RuntimeError, match=message):
        ops.int8_linear(*args)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ((17, 64), (5, 64), None, r"at most 16 tokens, got \[17, 64\]"),
        ((3, 64), (5, 63), None, r"x \[\.\.\., K\] and weight \[N, K\].*\[3, 64\].*\[5, 63\]"),
        ((3, 64), (5, 64), (4,), r"bias \[N\].*\[4\]"),
    ],
)
def test_small_linear_refuses(x, weight, bias, message):
    with pytest.raises(RuntimeError, match=message):
        ops.small_linear(torch.randn(x), torch.randn(weight), None if bias is None else torch.randn(bias))

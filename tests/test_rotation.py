"""The rotation of rows and their int8 form with one scale a row."""

from __future__ import annotations

import pytest
import torch

from qwen_patch.modules import Int8Linear
from qwen_patch.modules import linear as linear_module
from qwen_patch.modules.linear import side_by_side
from qwen_patch.ops import OPS
from qwen_patch.quantization.format import quantize
from qwen_patch.quantization.rotation import NORM, SMALLEST, quantize_rotated, rotate

SIZES = (24, True), (8, False), (16, True)


def hadamard() -> torch.Tensor:
    two, whole = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
    for _ in range(6):
        whole = torch.kron(two, whole)
    return whole


@pytest.mark.parametrize("K", [8, 64, 200, 4096])
def test_rotate_multiplies_each_group_by_the_hadamard_matrix(K):
    x = torch.randint(-127, 128, (3, K)).float()
    padded = torch.nn.functional.pad(x, (0, -K % 64)).unflatten(-1, (-1, 64))
    assert torch.equal(rotate(x), padded @ hadamard())  # whole numbers: exact


def test_products_of_rotated_rows_are_those_of_the_rows():
    x, w = torch.randn(5, 200, dtype=torch.float64), torch.randn(7, 200, dtype=torch.float64)
    rotated = (rotate(x).flatten(1) / NORM) @ (rotate(w).flatten(1) / NORM).T
    torch.testing.assert_close(rotated, x @ w.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_value_is_within_half_a_step(scaled):
    """... of its row's one scale, and a row's largest is 127 of them."""
    rotated = rotate(torch.randn(9, 640) * torch.rand(9, 1) * 50)
    scales = torch.rand(9, 10) if scaled else None
    values, rows = quantize_rotated(rotated, scales)
    exact = (rotated * (scales[..., None] if scaled else 1)).flatten(1).double() / NORM
    # The factor is rounded twice: of 127 steps, two parts in 2^24.
    assert ((values * rows.double() - exact).abs() / rows <= 0.5 + 127 * 2**-22).all()
    assert (values.abs().amax(1) == 127).all()


def test_rows_of_nothing_and_of_no_number():
    x = torch.randn(6, 128)
    x[0], x[1], x[2, 3], x[3, 70], x[4] = 0, x[1] * SMALLEST / 1000, torch.nan, -torch.inf, x[4] * 1e30
    values, rows = quantize_rotated(rotate(x))
    assert (values[:4] == 0).all()
    assert rows[:2].tolist() == [[0], [0]]
    assert rows[2:4].isnan().all()
    assert torch.equal(values[4], quantize_rotated(rotate(x[4] * 1e-30))[0])
    assert rows[4:].isfinite().all()


def test_the_op_is_near_the_linear_and_spares_outliers():
    """Two sides in int8: 0.6% of the results' size each (a step's half over the root of 3, at 4 deviations a row's
    largest), together within 1.3%; an outlier channel 30 times the others costs a factor of 2, where a token's one
    scale without a rotation would lose the others: 30 times the error."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 1024), torch.randn(256, 1024)
    for outlier, bar in ((1, 0.013), (30, 0.03)):
        x[:, 5] = outlier
        exact = x.double() @ w.double().T
        found = OPS["rotated_int8_linear"].reference(x, *([t] for t in quantize(w)), [x[0, :0]]).double()
        assert (found - exact).norm() < bar * exact.norm()


def test_reference_backend_rotates_where_the_kernel_would(monkeypatch):
    linear = torch.nn.Linear(72, 24).bfloat16()
    int8 = Int8Linear.from_linear(linear, "w8a8")
    int8.backend = "reference"
    monkeypatch.setattr(type(linear_module.ROTATED), "has_kernel", lambda self, device: True)
    x = torch.randn(17, 72).bfloat16()
    grouped = OPS["int8_linear"].reference(x, int8.values, int8.scales, int8.bias, True)
    rotated = OPS["rotated_int8_linear"].reference(x, [int8.values], [int8.scales], [int8.bias])
    assert torch.equal(int8(x), rotated)
    assert not torch.equal(rotated, grouped)
    assert torch.equal(int8(x[:16]), grouped[:16])


def test_weights_side_by_side_are_the_linears_one_by_one(monkeypatch):
    """... where the kernel is and every one of them goes through it; else nothing is done."""
    x = torch.randn(17, 72).bfloat16()
    linears = [Int8Linear.from_linear(torch.nn.Linear(72, n, bias).bfloat16(), "w8a8") for n, bias in SIZES]
    assert side_by_side(linears, x) is None
    monkeypatch.setattr(type(linear_module.ROTATED), "has_kernel", lambda self, device: True)
    assert torch.equal(side_by_side(linears, x), torch.cat([linear(x) for linear in linears], -1))
    assert side_by_side(linears, x[:16]) is None
    assert side_by_side([*linears, torch.nn.Linear(72, 8).bfloat16()], x) is None
    linears[1].activations = "w8a16"
    assert side_by_side(linears, x) is None


# On 132 multiprocessors: each of the kernel's shapes of tiles, and several tiles a block; K of one short group, of a
# short last one, of one to four chunks a warp, and the largest.
SHAPES = [
    (1, 64, 8), (17, 1001, 576), (130, 192, 896), (285, 5654, 72), (396, 5654, 72), (655, 5654, 72), (520, 5654, 136),
    (1472, 4096, 4096), (1734, 24576, 1096), (2048, 4096, 12288), (33, 136, 32768),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_gives_what_its_codes_say(dtype, shape, bias):
    """Also of tokens and rows of zeros; a token with a NaN, an infinity, or too large to be rotated, is NaN."""
    if not OPS["rotated_int8_linear"].has_kernel(torch.device("cuda")):
        pytest.skip("there is no kernel for this card")
    (M, N, K), on = shape, {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    x, weight = torch.randn(M, K, **on), torch.randn(N, K, **on)
    x[:, 3] *= 40
    x[M // 2], weight[N // 2] = 0, 0
    values, scales = quantize(weight)
    if bias == torch.bfloat16:
        bias = dtype  # the kernel takes x's dtype or float32
    added = None if bias is None else torch.randn(N, **on).to(bias)
    x = x.to(dtype)
    bad = min(M, 9) - 1 if M > 1 else 0
    if bad:
        x[1, K - 1], x[bad, 0] = torch.nan, -torch.inf
    if bad and dtype != torch.float16:
        x[2, :8] = torch.tensor([3e38, -3e38, 3e38, -3e38, 3e38, -3e38, -3e38, 3e38])
        x[2, 8:] = 0
    found = OPS["rotated_int8_linear"](x, [values], [scales], [scales[0, :0] if added is None else added])
    tokens, of_tokens = quantize_rotated(rotate(x.float()))
    rows, of_rows = quantize_rotated(rotate(values.float()), scales)
    exact = (tokens.double() @ rows.double().T) * of_tokens.double() * of_rows.double().T
    exact = exact if added is None else exact + added.double()
    lost = of_tokens.isnan().flatten()
    assert lost.sum() == (0 if not bad else 2 if dtype == torch.float16 else 3)
    assert found[lost].isnan().all()
    error, eps = (found.double() - exact)[~lost].abs(), torch.finfo(dtype).eps
    # Half a step for the last rounding, and three of float32 of the sum and the bias before it.
    terms = exact.abs() + (0 if added is None else 2 * added.double().abs())
    limit = eps / 2 * exact.abs() + 3 * 2**-24 * terms + torch.finfo(dtype).smallest_normal * eps
    assert (error <= limit[~lost]).all()

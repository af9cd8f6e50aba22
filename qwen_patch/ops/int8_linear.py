"""int8_linear: a linear whose weight is int8 in groups of 64, with activations as they are or in int8 too."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..quantization.format import dequantize, quantize, quantize_rows
from ._registry import Cost, Op, register


def reference(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, quantize_activations: bool
) -> torch.Tensor:
    """round(x @ dequantize(values, scales).T + bias), everything before the rounding in float32.

    With quantize_activations x is quantized first, as the weight was; its gradient passes straight through that
    rounding (Bengio et al. 2013, arXiv:1308.3432). A product of two int8 values and their scales is the same number
    whether the scales come before the sum over a group or after it, but for float32's last bits.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    states = x.to(compute)
    if quantize_activations:
        rounded = dequantize(*quantize_rows(x.detach().float()), compute)
        states = rounded + (states - states.detach()) if x.requires_grad else rounded
    weight = dequantize(values, scales.detach(), compute)
    return torch.nn.functional.linear(states, weight, None if bias is None else bias.to(compute)).to(x.dtype)


def fake(x, values, scales, bias, quantize_activations) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0]))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """T around every tile's edge, N odd, K of one short group, with a short last group, and of the supported models;
    bias in both dtypes; groups of zeros; views with gaps; no tokens at all."""

    def sample(shape: tuple[int, ...], N: int, activations: bool, bias: torch.dtype | None = None) -> tuple:
        weight = torch.randn(N, shape[-1], device=device)
        weight[N // 2, :64] = 0
        x = torch.randn(shape, device=device, dtype=dtype)
        x[..., :64].view(-1, x[..., :64].shape[-1])[:1] = 0
        return x, *quantize(weight), None if bias is None else torch.randn(N, device=device).to(bias), activations

    for activations in (False, True):
        yield sample((1, 576), 192, activations)
        yield sample((17, 896), 67, activations, dtype)
        yield sample((2, 8), 5, activations)
        yield sample((3, 72), 33, activations, torch.float32)
        yield sample((7, 200), 64, activations, dtype)
        yield sample((2, 8, 1536), 35, activations)
        yield sample((0, 128), 9, activations)
        yield sample((33, 4096), 96, activations)
        x, values, scales, _, _ = sample((5, 656), 40, activations)
        yield x[:, 1:641:2], values[:, 8:328], scales[:, 1:6], None, activations  # strided rows, unaligned start


def cost(x, values, scales, bias, quantize_activations) -> Cost:
    (N, K), tokens = values.shape, x.numel() // x.shape[-1]
    moved = values.numel() + 4 * scales.numel() + (x.numel() + tokens * N) * x.element_size()
    return Cost(bytes=moved + (0 if bias is None else bias.numel() * bias.element_size()), flops=2 * tokens * N * K)


OP = register(
    Op(
        name="int8_linear",
        schema="(Tensor x, Tensor values, Tensor scales, Tensor? bias, bool quantize_activations) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        max_ulp=1,  # the order of the float32 sums tips a rounding,
        of_row=True,  # ... and where a sum cancels, its error is that of its terms
        tipped=1e-2,  # mostly of results in float16 that are small beside their terms
    )
)


def int8_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantize_activations: bool = False,
) -> torch.Tensor:
    """A linear over `quantization.quantize`'s weight: x [..., K] -> [..., N], in x's dtype.

    quantize_activations=False (w8a16): y = sum over the weight's int8 values times x, in float32. True (w8a8): x is
    quantized too, each token in groups of 64 as the weight is, and a group's int8 products are summed exactly. Then the
    bias (of x's dtype or float32) is added in float32, and the sum rounded once. Before that rounding a result is
    within K * 2^-24 * (sum of |terms|) of the exact sum over the same int8 values: the bound of float32 sums in any
    order. bf16 subnormals may count as zero. A NaN or an infinity in x makes every result of its token NaN or infinite
    (w8a8: NaN).

    On compute capability 9.0 w8a8 of more than 16 tokens is `rotated_int8_linear`'s, which is 4 to 6 times as fast.

    On CUDA, a float32 x with quantize_activations=False is the reference's own expression, at PyTorch's precision for
    float32 products.

    x float32, bfloat16 or float16, any strides; values int8 [N, K], scales float32 [N, ceil(K / 64)]; one device.
    A new contiguous tensor. Differentiable in x and bias: through the dequantized weight, and straight through the
    rounding of x. Raises RuntimeError on other input.
    """
    return OP(x, values, scales, bias, quantize_activations)

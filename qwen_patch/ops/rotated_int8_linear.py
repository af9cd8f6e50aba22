"""rotated_int8_linear: W8A8 for many tokens, with one scale a token and one a row of the weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..quantization.format import GROUP, groups, quantize
from ..quantization.rotation import NORM, quantize_rotated, rotate
from ._registry import Cost, Op, register
from .int8_linear import samples as grouped_samples

LARGEST_K = 1 << 15  # of the CUDA kernel


def reference(
    x: torch.Tensor,
    values: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
) -> torch.Tensor:
    """round(x' @ W'.T + bias), both rotated and then quantized row by row; the sums and what follows in float64.

    The gradient of x passes straight through its quantizing (Bengio et al. 2013, arXiv:1308.3432).
    """
    states = _restored(rotate(x.detach().float()))
    if x.requires_grad:
        rotated = rotate(x.double()).flatten(-2) / NORM
        states = states + (rotated - rotated.detach())
    results = []
    for codes, of_groups, bias in zip(values, scales, biases, strict=True):
        weight = _restored(rotate(codes.float()), of_groups.detach())
        results.append(torch.nn.functional.linear(states, weight, bias.double() if len(bias) else None))
    return torch.cat(results, -1).to(x.dtype)


def _restored(rotated: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    values, of_rows = quantize_rotated(rotated, scales)
    return values * of_rows.double()


def fake(x, values, scales, biases) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(codes.shape[0] for codes in values)))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """int8_linear's, each as one weight; tokens, rows and groups beyond one tile, with outliers; weights side by side,
    with a bias of either dtype and without."""
    for x, values, scales, bias, quantized in grouped_samples(device, dtype):
        if not quantized:
            yield x, [values], [scales], [scales.new_empty(0) if bias is None else bias]
    x, weight = torch.randn(300, 328, device=device, dtype=dtype), torch.randn(520, 328, device=device)
    x[:, 7] *= 8
    values, scales = quantize(weight)
    bias = torch.randn(520, device=device)
    yield x, [values], [scales], [bias]
    parts = [values[:200], values[200:267], values[267:]], [scales[:200], scales[200:267], scales[267:]]
    yield x[:65], *parts, [bias[:200], bias[:0], bias[267:].to(dtype)]
    yield x[:17], *parts, [bias[:0]] * 3


def cost(x, values, scales, biases) -> Cost:
    N, tokens, K = sum(codes.shape[0] for codes in values), x.numel() // x.shape[-1], x.shape[-1]
    read = sum(t.nbytes for t in (*values, *scales, *biases))
    again = 2 * (N + tokens) * groups(K) * GROUP  # both sides' codes, written and read
    return Cost(bytes=read + (x.numel() + tokens * N) * x.element_size() + again, flops=2 * tokens * N * K)


OP = register(
    Op(
        name="rotated_int8_linear",
        schema="(Tensor x, Tensor[] values, Tensor[] scales, Tensor[] biases) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        max_ulp=1,  # a sum and its scales are rounded to float32 before the last rounding,
        of_row=True,  # and where the bias cancels it, in units of what it was
        tipped=1e-2,
        cuda_major=9,
    )
)


def rotated_int8_linear(
    x: torch.Tensor,
    values: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
) -> torch.Tensor:
    """Linears over `quantization.quantize`'s weights, W8A8, for prompts: x [..., K] -> [..., sum of N], in x's dtype.

    The results of 1 to 4 weights stand side by side. Both sides are rotated and quantized again row by row
    (`quantization.rotation`), so that all K products are one exact integer sum and nothing is scaled within it. y =
    that sum times the token's and the row's scale, plus the bias (of x's dtype or float32) in float32, rounded once:
    before that within K * 2^-24 * (sum of |terms|) of the exact sum over the same int8 values. A NaN or an infinity in
    x makes every result of its token NaN.

    x float32, bfloat16 or float16, any strides; of each weight values int8 [N, K] with K a multiple of 8, scales
    float32 [N, ceil(K / 64)] and a bias [N], or [0]: none; one device. A new contiguous tensor; while it runs (M + N) *
    K bytes more. Values of x beyond a 64th of float32's range may give NaN. Differentiable in x and the biases,
    straight through the rounding of x. The kernel is for CUDA, compute capability 9.0 and K up to 32,768, and raises
    RuntimeError on other input; elsewhere the reference runs.
    """
    return (OP if x.shape[-1] <= LARGEST_K else OP.reference)(x, values, scales, biases)

"""small_linear: a linear for a few tokens, where reading the weight is all the work: decode, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._registry import Cost, Op, register

MAX_TOKENS = 16


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """round(x @ weight.T + bias), everything before the rounding in float32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(compute)
    return torch.nn.functional.linear(x.to(compute), weight.to(compute), bias).to(x.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """T around every tile's edge, N odd, K of one, odd, and of the supported models; views with gaps; no tokens."""

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    yield rand(1, 576), rand(192, 576), None
    yield rand(16, 896), rand(67, 896), rand(67)
    yield rand(2, 1), rand(5, 1), rand(5)
    yield rand(3, 77), rand(33, 77), None
    yield rand(7, 1536), rand(35, 1536), rand(35)
    yield rand(2, 2, 4099), rand(66, 4099), None
    yield rand(0, 64), rand(9, 64), rand(9)
    yield rand(5, 641)[:, 1::2], rand(41, 641)[:, 1::2], rand(82)[::2]
    yield rand(12, 300)[:, 1:298].unsqueeze(1), rand(31, 300)[:, 3:], None


def cost(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Cost:
    (N, K), tokens = weight.shape, x.numel() // x.shape[-1]
    moved = weight.numel() + x.numel() + tokens * N + (0 if bias is None else N)
    return Cost(bytes=moved * x.element_size(), flops=2 * tokens * N * K)


OP = register(
    Op(
        name="small_linear",
        schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        max_ulp=1,  # see int8_linear
        of_row=True,
        tipped=1e-2,
    )
)


def small_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], at most 16 tokens, times weight [N, K], plus bias [N] -> [..., N].

    float32, bfloat16 or float16, of one dtype and on one device; any strides. Summed in float32, bias included, and
    rounded once. Before that rounding a result is within K * 2^-24 * (sum of |terms|) of the exact sum; bf16 subnormals
    may count as zero. A new contiguous tensor. Differentiable, with the reference's gradients. Raises RuntimeError on
    other input.
    """
    return OP(x, weight, bias)

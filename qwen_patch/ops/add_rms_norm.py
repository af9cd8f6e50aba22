"""add_rms_norm: the residual add and the RMSNorm that follows it, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import rms_norm as norm
from ._registry import Cost, Op, register


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum = round(residual + x); (rms_norm(sum), sum). The norm reads the ROUNDED sum, as in the stock layer."""
    total = residual + x
    return norm.reference(total, weight, eps), total


def fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    for x, weight, eps in norm.samples(device, dtype):
        yield x, torch.randn(x.shape, device=device, dtype=dtype), weight, eps


def cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Cost:
    return Cost(bytes=(4 * x.numel() + weight.numel()) * x.element_size(), flops=5 * x.numel())


OP = register(
    Op(
        name="add_rms_norm",
        schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        max_ulp=2,  # see rms_norm
    )
)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (normed, sum): sum = residual + x, rounded to the dtype, and normed = rms_norm(sum, weight, eps).

    x and residual [..., H] of one shape, weight [H]; float32, bfloat16 or float16, of one dtype and on one device; any
    strides. Both results are new contiguous tensors; no input is changed. sum is bit-equal to the reference, normed as
    close to it as rms_norm's result is. Differentiable, with the reference's gradients. Raises RuntimeError on other
    input.
    """
    return OP(x, residual, weight, eps)

"""rms_norm: root-mean-square normalisation over the last dimension, with a weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._registry import Cost, Op, register


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * round(x / sqrt(mean(x^2) + eps)), rounded.

    The expression of transformers' Qwen2RMSNorm, Qwen3RMSNorm and LlamaRMSNorm (Zhang and Sennrich, 2019,
    arXiv:1910.07467): x [..., H] is taken to float32, normalised, ROUNDED to its own dtype, then multiplied by weight
    [H] and ROUNDED again.
    """
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(x.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """T of 1, odd and many; H of one element, odd, and of the supported models; a view with gaps; no tokens at all."""
    for shape in [
        (1, 1),
        (3, 7),
        (1, 896),
        (17, 896),
        (5, 3584),
        (2, 3, 128),
        (2, 5, 4, 64),
        (0, 896),
        (3, 4099),
        (1, 40000),
    ]:
        yield (
            3 * torch.randn(shape, device=device, dtype=dtype),
            torch.randn(shape[-1], device=device, dtype=dtype),
            1e-6,
        )
    wide = torch.randn(4, 10, 257, device=device, dtype=dtype)
    yield wide[:, ::3, 1:], torch.randn(256, device=device, dtype=dtype), 1e-5  # strided rows, unaligned start
    yield wide.transpose(0, 1), torch.randn(514, device=device, dtype=dtype)[::2], 1e-5
    yield torch.zeros(2, 64, device=device, dtype=dtype), torch.ones(64, device=device, dtype=dtype), 1e-6


def cost(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Cost:
    return Cost(bytes=(2 * x.numel() + weight.numel()) * x.element_size(), flops=4 * x.numel())


OP = register(
    Op(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        max_ulp=2,  # the mean's sum runs in another order: 1 ulp at the first rounding, up to 2 after the weight
    )
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the rows of x: see `reference` for the formula and where it rounds.

    x [..., H] and weight [H], float32, bfloat16 or float16, of one dtype and on one device; H > 0; any strides (a
    tensor that is not contiguous is copied first). Returns a new contiguous tensor of x's shape, equal to the
    reference but for under 0.1% of the elements, where the mean's other order of summing tips a rounding by 1 unit in
    the last place, 2 after the multiplication by the weight. Differentiable, with the reference's gradients.
    Raises RuntimeError on other shapes, dtypes or mixed devices, naming them.
    """
    return OP(x, weight, eps)

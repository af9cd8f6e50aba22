"""silu_mul: the gated activation of the MLP, silu(gate) * up, of two tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._registry import Cost, Op, register


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """round(silu(gate)) * up, rounded: the stock MLP's expression, with silu(g) = g / (1 + e^-g) in float32
    (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
    return torch.nn.functional.silu(gate) * up


def fake(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """T of 1, odd and many; I odd and of the supported models; unaligned and strided views; nothing at all."""
    for shape in [(1, 1), (3, 7), (1, 4864), (17, 4864), (2, 3, 257), (0, 64), (5, 18944)]:
        yield 4 * torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
    packed = torch.randn(6, 2 * 65, device=device, dtype=dtype)
    yield packed[:, :65], packed[:, 65:]
    yield packed.t(), packed.t()


def cost(gate: torch.Tensor, up: torch.Tensor) -> Cost:
    return Cost(bytes=3 * gate.numel() * gate.element_size(), flops=6 * gate.numel())


OP = register(
    Op(
        name="silu_mul",
        schema="(Tensor gate, Tensor up) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
    )
)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: see `reference` for the formula and where it rounds.

    gate and up [..., I] of one shape, dtype (float32, bfloat16, float16) and device; any strides. Returns a new
    contiguous tensor, bit-equal to the reference. Differentiable, with the reference's gradients. Raises RuntimeError
    on other input.
    """
    return OP(gate, up)

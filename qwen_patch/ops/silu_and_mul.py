"""silu_and_mul: silu_mul of one packed tensor [..., 2I] whose first half is the gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._registry import Cost, Op, register


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate, up = halves of the last dimension; round(silu(gate)) * up, rounded. See silu_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def fake(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    for shape in [(1, 2), (3, 14), (1, 2 * 4864), (17, 2 * 896), (2, 3, 2 * 257), (0, 64)]:
        yield (4 * torch.randn(shape, device=device, dtype=dtype),)
    yield (torch.randn(64, 6, device=device, dtype=dtype).t(),)
    yield (torch.randn(4 * 128 + 1, device=device, dtype=dtype)[1:].view(4, 128),)  # unaligned start


def cost(gate_up: torch.Tensor) -> Cost:
    return Cost(bytes=3 * gate_up.numel() // 2 * gate_up.element_size(), flops=3 * gate_up.numel())


OP = register(
    Op(
        name="silu_and_mul",
        schema="(Tensor gate_up) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
    )
)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2I] = [gate | up]; returns [..., I].

    float32, bfloat16 or float16; any strides. A new contiguous tensor, bit-equal to the reference. Differentiable, with
    the reference's gradients. Raises RuntimeError where the last dimension is odd or empty.
    """
    return OP(gate_up)

"""int8 with one scale a row: rows are rotated first, so that no single value decides a row's scale.

Each 64 neighbours become their product with the Hadamard matrix of order 64. Done to both sides of a product it leaves
the product as it is, and spreads an outlier over its 64 neighbours (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
"""

from __future__ import annotations

import torch

from .format import GROUP

NORM = 8  # the square root of 64: the matrix divided by it is orthogonal
SMALLEST = 2.0**-100  # what a row's largest |value| must reach; rows below count as zeros, and no quotient overflows


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] -> [..., ceil(K / 64), 64]: each 64 neighbours, the last ones padded by zeros, times the Hadamard
    matrix in Sylvester's order, not normalized. In x's dtype; sums of neighbours 1, 2, 4 ... 32 apart in turn."""
    v = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    apart = 1
    while apart < GROUP:
        a, b = v.unflatten(-1, (GROUP // 2 // apart, 2, apart)).unbind(-2)
        v = torch.stack((a + b, a - b), -2).flatten(-3)
        apart *= 2
    return v


def quantize_rotated(rotated: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of scales * rotated -> (values int8 [..., G * 64], scales float32 [..., 1]).

    rotated float32 [..., G, 64] from `rotate`; scales float32 [..., G], those of the groups, or None: 1. The largest
    is that of a row's |scales * rotated|, rounded to float32. value = rotated * (scales * (127 / largest)), rounded to
    the nearest, ties to even, of a factor rounded to float32 twice; scale = largest / 1016, which is 127 times NORM. A
    row with a NaN or an infinity has scale NaN and values 0.
    """
    of_groups = rotated.abs().amax(-1)
    largest = (of_groups if scales is None else of_groups * scales).amax(-1, keepdim=True)
    counts = largest.isfinite() & (largest >= SMALLEST)
    factors = torch.full_like(largest, 127) / largest
    factors = factors if scales is None else factors * scales
    exact = rotated.double() * factors[..., None].double()
    values = torch.where(counts[..., None], exact, 0).round_().to(torch.int8).flatten(-2)
    rows = torch.where(counts, largest / torch.full_like(largest, 127 * NORM), 0)
    return values, torch.where(largest.isfinite(), rows, torch.nan)

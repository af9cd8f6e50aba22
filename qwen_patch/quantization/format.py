"""Symmetric int8 in groups of 64 along K, one float32 scale a group: w = scale * value, value = -127..127.

Weights are quantized once; activations may be, at every call, by the same rule.
"""

from __future__ import annotations

import torch

GROUP = 64
CHUNK = 1 << 20  # elements quantized at a time: the float32 copies of a chunk are what it takes beside the result


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (values int8 [N, K], scales float32 [N, ceil(K / 64)]), on its device.

    scale = max|w| / 127 of a row's 64 neighbours (the last group may have fewer); value = w / scale, rounded to the
    nearest, ties to even; both divisions in float32, so that every device gives the same bits. A group of zeros has
    scale 0 and values 0. Any floating dtype and strides; K a multiple of 8. Raises ValueError on other shapes and
    dtypes, and where a weight is NaN or infinite in float32.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] == 0 or weight.shape[1] % 8:
        raise ValueError(
            "int8 needs a floating-point weight [N, K] with K a multiple of 8, "
            f"got {list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"
        )
    (N, K), weight = weight.shape, weight.detach()
    values = torch.empty((N, K), dtype=torch.int8, device=weight.device)
    scales = torch.empty((N, groups(K)), dtype=torch.float32, device=weight.device)
    bad = torch.zeros((), dtype=torch.int64, device=weight.device)
    step = max(1, CHUNK // K)
    for first in range(0, N, step):
        rows = weight[first : first + step].float()
        bad += rows.isfinite().logical_not_().sum()
        values[first : first + step], scales[first : first + step] = quantize_rows(rows)
    if count := bad.item():
        raise ValueError(f"int8 needs finite weights, got {count} of {N * K} that are NaN or infinite")
    return values, scales


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales) of x [..., K], float32: the format's rule, as `quantize` has it.

    A group with a NaN or an infinity has scale NaN and values 0: whatever is computed from it is NaN.
    """
    K = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -K % GROUP)).unflatten(-1, (-1, GROUP))
    largest = padded.abs().amax(-1)
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, which may be off by one bit.
    scales = largest / torch.full_like(largest, 127)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    # The clamp is for groups so small that their scale is subnormal and rounds to much less than max|x| / 127.
    values = (padded / scales[..., None]).round_().clamp_(-127, 127)
    values = torch.where(scales[..., None] > 0, values, 0).to(torch.int8)
    return values.flatten(-2)[..., :K], scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """scale * value [..., K], in float32 (float64 where that is asked for), rounded once to dtype."""
    K = values.shape[-1]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    spread = scales.to(compute).repeat_interleave(GROUP, dim=-1)[..., :K]
    return spread.mul_(values).to(dtype)


def groups(K: int) -> int:
    return -(-K // GROUP)

"""The distance between two models' logits, summed up over batches of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 256  # positions compared at once: 256 x 152k float32 logits are 156 MB


@dataclass
class LogitDistance:
    """Sums over positions; the properties are what a report shows.

    max_abs and mean_abs: |a - b| over positions and vocabulary. kl_mean: KL(reference || other) in nats, mean over
    positions. top1_agreement: share of positions where both prefer the same token.
    """

    positions: int = 0
    elements: int = 0
    max_abs: float = 0.0
    largest: float = 0.0  # |logit| of the reference
    sum_abs: float = 0.0
    sum_kl: float = 0.0
    same_top1: int = 0

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / max(1, self.elements)

    @property
    def kl_mean(self) -> float:
        return self.sum_kl / max(1, self.positions)

    @property
    def top1_agreement(self) -> float:
        return self.same_top1 / max(1, self.positions)

    def add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Adds positions: both [P, V], any floating dtype. NaN anywhere makes max_abs infinite."""
        for i in range(0, reference.shape[0], CHUNK):
            a, b = reference[i : i + CHUNK].float(), other[i : i + CHUNK].float()
            error = (a - b).abs()
            self.positions += a.shape[0]
            self.elements += a.numel()
            worst = error.max().item()
            self.max_abs = max(self.max_abs, worst) if worst == worst else float("inf")
            self.largest = max(self.largest, a.abs().max().item())
            self.sum_abs += error.double().sum().item()
            p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
            self.sum_kl += (p.exp() * (p - q)).sum().item()
            self.same_top1 += int((a.argmax(-1) == b.argmax(-1)).sum())


def distance(reference: list[torch.Tensor], other: list[torch.Tensor]) -> LogitDistance:
    total = LogitDistance()
    for a, b in zip(reference, other, strict=True):
        total.add(a, b)
    return total


def bitwise_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Same values everywhere; NaN equals NaN, as in the stock model run twice."""
    return all(
        torch.equal(x, y) or (x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all()))
        for x, y in zip(a, b, strict=True)
    )

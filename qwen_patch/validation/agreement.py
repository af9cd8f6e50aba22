"""Greedy tokens of two runs, and whether a difference is an error or a tie that rounding may break either way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..patcher import unpatch_model
from .metrics import LogitDistance, distance


class Bar(NamedTuple):
    """What int8 must reach: the share of positions with the stock model's token, ties left aside, and nats."""

    top1: float
    kl: float


# int8 is another model, close to the stock one: not rounding is the bar but how often it chooses another token. The KL
# divergences are three times what the bundled models measure (5e-4 to 8e-4, and 1.1e-3 to 1.4e-3).
BARS = {"w8a16": Bar(0.985, 2e-3), "w8a8": Bar(0.975, 4e-3)}


@dataclass(frozen=True)
class Agreement:
    """How far two greedy continuations agree.

    `first_difference` is the first new token that differs in any row, None if all are equal. There, `margin` is how
    much the stock model in float32 prefers the stock run's token to the other, in logits, and `error` the largest
    difference between its logits and those of the stock model in its own dtype, for the same text: what rounding does
    to a logit. In float32 itself it is the difference between the two models. At least it is the dtype's step at that
    logit: `generate` computes with a cache, whose last bits are not a full forward's, so a stock model too may part
    from itself there. A margin inside twice the error (each logit may move by one) is a tie.
    """

    tokens: int
    first_difference: int | None = None
    margin: float = 0.0
    error: float = 0.0

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def correct(self) -> bool:
        return self.equal or self.margin <= 2 * self.error

    def __str__(self) -> str:
        if self.equal:
            return f"all {self.tokens} equal"
        verdict = "a tie" if self.correct else "WRONG"
        return f"{verdict} at token {self.first_difference}: margin {self.margin:.3g}, error {self.error:.3g}"


def first_difference(expected: torch.Tensor, found: torch.Tensor) -> tuple[int, int] | None:
    """(row, position) of the earliest position where [B, N] tokens differ."""
    if expected.shape != found.shape:
        return 0, min(expected.shape[1], found.shape[1])
    positions = (expected != found).any(dim=0).nonzero()
    if len(positions) == 0:
        return None
    position = int(positions[0])
    return int((expected != found)[:, position].nonzero()[0]), position


def compare_tokens(
    model: PreTrainedModel,
    ids: torch.Tensor,
    expected: torch.Tensor,
    found: torch.Tensor,
    reactivate: Callable[[], None],
) -> Agreement:
    """Compares new tokens [B, N]; where they differ, asks the models about the text before the first difference.

    `model` is in the state that gave `found`; it is left so: `reactivate` brings it back after stock was asked.
    In a 16-bit dtype that takes a float32 copy of the model. No padding: for prompts ids [B, T] of one length.
    """
    where = first_difference(expected, found)
    if where is None:
        return Agreement(expected.numel())
    row, position = where
    if position >= expected.shape[1] or position >= found.shape[1]:
        return Agreement(expected.numel(), position, float("inf"), 0.0)
    text = torch.cat([ids, expected[:, :position]], dim=1)[row : row + 1]
    theirs = model(text).logits[0, -1].float()
    unpatch_model(model)
    stock = model(text).logits[0, -1].float()
    truth = stock
    if model.dtype != torch.float32:
        truth = theirs = torch.nn.Module.float(copy.deepcopy(model))(text).logits[0, -1]
    reactivate()
    margin = (truth[expected[row, position]] - truth[found[row, position]]).item()
    step = torch.finfo(model.dtype).eps * stock.abs().max().item()
    return Agreement(expected.numel(), position, margin, max((theirs - stock).abs().max().item(), step))


@dataclass(frozen=True)
class Closeness:
    """How close an int8 model's logits come to the stock model's along a greedy continuation of the stock model."""

    distance: LogitDistance
    bar: Bar

    @property
    def correct(self) -> bool:
        """By the KL divergence alone: of random weights, which benchmarks use, many choices are ties."""
        return self.distance.kl_mean <= self.bar.kl

    def __str__(self) -> str:
        verdict = "close" if self.correct else "WRONG"
        return f"{verdict}: {self.distance.top1_agreement:.1%} equal, KL {self.distance.kl_mean:.2g}"


def compare_logits(
    model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, activations: str, reactivate: Callable[[], None]
) -> Closeness:
    """Asks the model as it is, int8, and stock about every token of the text `ids` [B, T] and `expected` [B, N].

    `reactivate` brings the int8 state back after stock was asked.
    """
    text, first = torch.cat([ids, expected], dim=1), ids.shape[1] - 1
    theirs = model(text).logits[:, first:-1].flatten(0, 1)
    unpatch_model(model)
    stock = model(text).logits[:, first:-1].flatten(0, 1)
    reactivate()
    return Closeness(distance([stock], [theirs]), BARS["w8a8" if activations == "w8a8" else "w8a16"])

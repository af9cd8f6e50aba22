"""Greedy tokens of two runs, and whether a difference is an error or a tie that rounding may break either way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..patcher import unpatch_model


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
        truth = theirs = copy.deepcopy(model).float()(text).logits[0, -1]
    reactivate()
    margin = (truth[expected[row, position]] - truth[found[row, position]]).item()
    step = torch.finfo(model.dtype).eps * stock.abs().max().item()
    return Agreement(expected.numel(), position, margin, max((theirs - stock).abs().max().item(), step))

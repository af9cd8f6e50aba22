"""Greedy tokens of two runs, and whether a difference is an error or a tie that rounding may break either way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..modules.linear import Int8Linear
from ..patcher import patch_model, unpatch_model
from .metrics import LogitDistance, distance


class Bar(NamedTuple):
    """What int8 must reach: the share of positions with the stock model's token, ties left aside, and nats."""

    top1: float
    kl: float


# int8 is another model, close to the stock one: not rounding is the bar but how often it chooses another token. The KL
# divergences are three times what smollm2-135m measures (3.3e-3 and 8.7e-3, at perplexities within 0.1% and 0.5%); the
# bundled models measure 5e-4 to 8e-4, and 1.1e-3 to 1.4e-3, and scales that are off by a tenth 7e-2.
BARS = {"w8a16": Bar(0.985, 1e-2), "w8a8": Bar(0.975, 2.5e-2)}
# Nats for random weights, whose layers add up the error of each, where a trained model's correct it: five times what
# Qwen3-8B's 36 layers measure in W8A16 (in W8A8 0.04), far below what a wrong product gives.
BAR_OF_RANDOM_WEIGHTS = 0.05


def bar_of(model: PreTrainedModel, tokens: int) -> Bar:
    """Of a model in int8 that takes up to so many tokens at once: W8A8's where one of its linears does that."""
    linears = (m for m in model.modules() if isinstance(m, Int8Linear))
    return BARS["w8a8" if any(m.quantizes(tokens, m.weight.device) for m in linears) else "w8a16"]


@dataclass(frozen=True)
class Agreement:
    """How far two greedy continuations agree.

    `first_difference` is where a row first differs, None if all are equal. There, `margin` is how much the stock
    model in a wider dtype (float32, of a float32 model float64) prefers the stock run's token to the other, in logits,
    and `error` the largest difference between its logits and those of the stock model in its own dtype, for the same
    text: what rounding does to a logit. (Of an int8 model, the stock model is the reference's expressions over its int8
    linears.) At least it is the dtype's step at that logit: `generate` computes with a cache, whose last bits are not a
    full forward's, so a stock model too may part from itself there. A margin inside twice the error (each logit may
    move by one) is a tie. Where a later token is wrong, `first_difference` is that one, and `margin` to the best.
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


def below_best(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[N]: how much less than the best of logits [N, V] those of the tokens [N] are."""
    return logits.amax(-1) - logits.gather(1, tokens[:, None]).squeeze(1)


def _judge(
    model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, found: torch.Tensor, whole: bool = True
) -> Agreement:
    """Compares new tokens [B, N] after ids [B, T], by the stock model `model` and a copy of it in a wider dtype.

    Every row that differs is looked at, where it first differs, and with `whole` at every token: that one is no further
    below the copy's best, ends of text aside, than twice what a logit of the text is off by at most. The answer is of
    the first row that is wrong, or else of the one that differs first.
    """
    if expected.shape != found.shape:
        return Agreement(expected.numel(), first_difference(expected, found)[1], float("inf"))
    if torch.equal(expected, found):
        return Agreement(expected.numel())
    wider, ties = in_wider_dtype(model), []
    for row in (expected != found).any(dim=1).nonzero().flatten().tolist():
        a, b = expected[row], found[row]
        _, position = first_difference(a[None], b[None])
        b = b if whole else b[: position + 1]
        text = torch.cat([ids[row], b[:-1]])[None]
        truth, own = (m(text, logits_to_keep=len(b)).logits[0] for m in (wider, model))
        step = torch.finfo(own.dtype).eps * own.abs().amax(-1)
        errors = torch.maximum((truth - own).abs().amax(-1), step)
        margin = (truth[position, a[position]] - truth[position, b[position]]).item()
        ties.append(Agreement(expected.numel(), position, margin, errors[position].item()))
        if not ties[-1].correct:
            return ties[-1]
        if whole:
            truth[:, ends_of(model)] = -torch.inf
            below = below_best(truth, b)
            worst = int(below.argmax())
            if not (late := Agreement(expected.numel(), worst, below[worst].item(), errors.max().item())).correct:
                return late
    return min(ties, key=lambda tie: tie.first_difference)


def in_wider_dtype(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model in float32; of a float32 model, in float64."""
    wider = copy.deepcopy(model)
    if hasattr(wider.config.get_text_config(), "num_experts"):
        wider.set_experts_implementation("eager")  # another one refuses float64
    return torch.nn.Module.to(wider, torch.float64 if model.dtype == torch.float32 else torch.float32)


def ends_of(model: PreTrainedModel) -> list[int]:
    """The ends of text that generate holds back for `min_new_tokens`."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return [i for i in ends if 0 <= i < model.config.get_text_config().vocab_size]


def compare_tokens(
    model: PreTrainedModel,
    ids: torch.Tensor,
    expected: torch.Tensor,
    found: torch.Tensor,
    reactivate: Callable[[], None],
) -> Agreement:
    """Compares new tokens [B, N]; where they differ, asks the stock model about the text of `found`.

    `model` is in the state that gave `found`; it is left so: `reactivate` brings it back after stock was asked, which
    takes a copy of the model in a wider dtype. No padding: for prompts ids [B, T] of one length. Ends of text were held
    back.
    """
    if torch.equal(expected, found):
        return Agreement(expected.numel())
    unpatch_model(model)
    try:
        return _judge(model, ids, expected, found)
    finally:
        reactivate()


@dataclass(frozen=True)
class Closeness:
    """An int8 model: whether its tokens are those of the reference over the same int8 linears; and how close its logits
    come to the stock model's along that one's greedy continuation. bar: nats that the mean KL divergence may have; the
    mean over n positions twice its standard error more, because one position's scatters by as much as the mean is."""

    tokens: Agreement
    distance: LogitDistance
    bar: float

    @property
    def correct(self) -> bool:
        """Not by how many tokens are the stock model's: of random weights, which benchmarks use, many are ties."""
        scatter = 2 / max(1, self.distance.positions) ** 0.5
        return self.tokens.correct and self.distance.kl_mean <= self.bar * (1 + scatter)

    def __str__(self) -> str:
        too_far = self.tokens.correct and not self.correct
        verdict = "WRONG, too far from stock" if too_far else str(self.tokens)
        return f"{verdict}; of stock's {self.distance.top1_agreement:.1%} equal, KL {self.distance.kl_mean:.2g}"


def compare_int8(
    model: PreTrainedModel,
    ids: torch.Tensor,
    stock: torch.Tensor,
    found: torch.Tensor,
    bar: float,
    generate: Callable[[], torch.Tensor],
    options: dict[str, Any],
) -> Closeness:
    """Judges an int8 model's new tokens `found` [B, N], and its logits along the text `ids` [B, T] and `stock` [B, N].

    `options` are what patch_model was given; with keep_original, for stock is asked too. `generate` gives the model's
    new tokens as it is. Where the tokens differ from the reference's it takes a float32 copy of the model.
    """
    text, first = torch.cat([ids, stock], dim=1), ids.shape[1] - 1
    theirs = model(text).logits[:, first:-1].flatten(0, 1)
    # Not the kernels: a wrong one must not be what it is measured with.
    patch_model(model, **options | {"backend": "reference", "generation": "stock"})
    # The first difference only: decode and prompts may go through different int8 products, which a text's logits, all
    # of one of them, are no measure of.
    tokens = _judge(model, ids, generate(), found, whole=False)
    unpatch_model(model)
    logits = model(text).logits[:, first:-1].flatten(0, 1)
    patch_model(model, **options)
    return Closeness(tokens, distance([logits], [theirs]), bar)

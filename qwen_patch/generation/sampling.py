"""The next token of each row from its scores: Transformers' processors, then the best one or a draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..ops.draw_token import LARGEST_K
from .calls import MINIMUM_LENGTHS


class Filters(NamedTuple):
    """What `draw_token` takes from a distribution before it draws, in its words and order."""

    top_k: int
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    keep: int = 1


# Transformers' processor -> what `draw_token` calls its figure; from the last in `generate`'s order to the first.
LAST_FIRST = {
    logits_process.MinPLogitsWarper: "min_p",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TemperatureLogitsWarper: "temperature",
}


def split(processors: LogitsProcessorList, vocabulary: int) -> tuple[LogitsProcessorList, Filters | None]:
    """(the processors that run by themselves, what `draw_token` does of the others and the draw); or (all, None).

    It does what follows a top-k of `generate`'s order: temperature, top-k, top-p and min-p, of which only the top-k
    must be there. Without it a draw is among the whole vocabulary.
    """
    rest, found, keep = list(processors), {}, set()
    for kind, name in LAST_FIRST.items():
        if rest and type(rest[-1]) is kind and getattr(rest[-1], "filter_value", -torch.inf) == -torch.inf:
            item = rest.pop()
            found[name] = getattr(item, name)
            if name in ("top_p", "min_p"):
                keep.add(item.min_tokens_to_keep)
    if not 0 < (top_k := min(found.get("top_k", 0), vocabulary)) <= LARGEST_K or len(keep) > 1:
        return processors, None
    return LogitsProcessorList(rest), Filters(**found | {"top_k": top_k, "keep": max(keep, default=1)})


def kept_by_graphs(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that are part of a captured step; minimal lengths are told to it before each call."""
    return LogitsProcessorList(item for item in processors if type(item) not in MINIMUM_LENGTHS)


def minimum_lengths(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that are not."""
    return LogitsProcessorList(item for item in processors if type(item) in MINIMUM_LENGTHS)


def choose(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """The next token of each row from scores [B, V], as generate's loop chooses it.

    On a CPU it raises RuntimeError where there are no probabilities to draw by, as that loop does.
    """
    if not do_sample:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    return draw(probabilities) if probabilities.is_cuda else probabilities.multinomial(1).squeeze(1)


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One sample a row of probabilities [B, V], which are written over, without a wait for the GPU.

    torch.multinomial draws one sample as argmax(p / q) with q exponential, and asks the host whether p is valid; this
    is the same draw without the question (the exponential-race form of Gumbel-max).
    """
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)

"""The next token of each row from its scores: Transformers' processors, then the best one or a draw."""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from .calls import FILTERS, MINIMUM_LENGTHS

# So many of the best tokens, and at least four times a top-k's k, are a short list.
SHORT = 512


class Chooser:
    """Chooses as generate's loop does: `processors` over scores [B, V] and the tokens so far, then softmax and a draw.

    A top-k leaves a few tokens of a vocabulary; what comes after it need not sort and add up all the others. With
    `short_list` it and what follows see only the best tokens, in the vocabulary's order: the same distribution, unless
    more tokens tie with the k-th than are in the list. The draws are others than without.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, vocabulary: int, short_list: bool) -> None:
        kept = [copy.copy(item) for item in kept_by_graphs(processors)]  # the caller may change its own later
        first, self.short = short_list_of(kept, vocabulary) if short_list else (len(kept), 0)
        self.before, self.after = LogitsProcessorList(kept[:first]), LogitsProcessorList(kept[first:])
        self.do_sample = do_sample

    def __bool__(self) -> bool:
        """Whether it is more than the highest score."""
        return bool(self.do_sample or self.before or self.after)

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The next tokens [B]. Raises what `choose` raises."""
        scores = self.before(tokens, scores)
        if self.short == 0:
            return choose(scores, self.do_sample)
        ids = scores.topk(self.short, sorted=False).indices.sort().values
        scores = self.after(tokens, scores.gather(1, ids))
        return ids.gather(1, choose(scores, self.do_sample)[:, None]).squeeze(1)


def short_list_of(processors: LogitsProcessorList, vocabulary: int) -> tuple[int, int]:
    """(number of the first processor that may see a short list, its length); (all, 0) where none may."""
    for i, item in enumerate(processors):
        if type(item) is logits_process.TopKLogitsWarper:
            length = max(SHORT, 4 * item.top_k)
            rest = all(type(other) in (*FILTERS, logits_process.TemperatureLogitsWarper) for other in processors[i:])
            if rest and item.filter_value == -torch.inf and 2 * length <= vocabulary:
                return i, length
    return len(processors), 0


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

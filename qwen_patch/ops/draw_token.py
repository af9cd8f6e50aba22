"""draw_token: the next token of each sequence, drawn from the best ones, where a session has its buffers.

Like decode_step it works in place and returns nothing. On CUDA (csrc/cuda/draw_token_kernel.cuh) it is one kernel, to
be captured in a graph; elsewhere it is `drawn`, the same rules in PyTorch.
"""

from __future__ import annotations

import torch

from ._registry import _TORCH_LIBRARY

LARGEST_K = 256

_TORCH_LIBRARY.define(
    "draw_token(Tensor scores, Tensor uniform, Tensor banned, Tensor state, Tensor(a!) tokens, Tensor(b!) history, "
    "float temperature, int top_k, float top_p, float min_p, int keep) -> ()"
)


def draw_token(
    scores: torch.Tensor,
    uniform: torch.Tensor,
    banned: torch.Tensor,
    state: torch.Tensor,
    tokens: torch.Tensor,
    history: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    keep: int,
) -> None:
    """Writes a token of each row of scores [B, V] into tokens [B] and column state[1] - 1 of history [B, N], int64.

    The distribution is that of Transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and
    MinPLogitsWarper, in this order, and then of a softmax; a temperature or top_p of 1 and a min_p of 0 change nothing.
    All that tie with the k-th count as top_k's, up to 1,024 in all; of those that tie with the last of top_p's, it has
    the first in the vocabulary (Transformers as many, those that its sort has last). With uniform [B] float32 in [0, 1)
    the token is the first, from the best one on and of equal ones from the first in the vocabulary, where the sum of
    the probabilities is over it. scores: bfloat16, float16 or float32, contiguous. top_k: 1 to LARGEST_K, at most V.
    keep: so many of the best are not taken away by top_p and min_p. banned: int32 [1 + MAX_BANNED], {column, token ids,
    -1 ...}: not drawn before that column. state: int32, as decode_step leaves it. A score that is NaN counts as -inf,
    and a token of -inf is drawn only where all are; one of a row of NaN is any. Raises RuntimeError on other input.
    """
    if scores.is_cuda:
        torch.ops.qwen_patch.draw_token(
            scores, uniform, banned, state, tokens, history, temperature, top_k, top_p, min_p, keep
        )
        return
    column, ids = state[1:2].long() - 1, banned[1:].long()
    held_back = (torch.arange(scores.shape[1]) == ids[:, None]).any(0) & (column < banned[0])
    tokens.copy_(drawn(scores.masked_fill(held_back, -torch.inf), uniform, temperature, top_k, top_p, min_p, keep))
    history.scatter_(1, column.expand(len(tokens), 1), tokens[:, None])


def drawn(
    scores: torch.Tensor, uniform: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, keep: int
) -> torch.Tensor:
    """The tokens [B] of `draw_token`, nothing banned, and however many tie with the k-th score."""
    ordered, ids = scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True, stable=True)
    scaled = ordered / temperature
    mass = torch.where(scaled == scaled[:, :1], 1.0, (scaled - scaled[:, :1]).exp())
    mass = torch.where(ordered >= ordered[:, top_k - 1 : top_k], mass, 0)
    sums = mass.cumsum(-1)
    total, rank = sums[:, -1:], torch.arange(scores.shape[1], device=scores.device)
    in_top_p = total - (sums - mass) > (1 - top_p) * total if top_p < 1 else True
    kept = (mass >= min_p) & in_top_p | (rank < keep)
    left = (kept & (mass > 0)).sum(-1, keepdim=True)
    below = sums <= uniform[:, None] * sums.gather(1, left - 1)
    return ids.gather(1, (below & (rank < left - 1)).sum(-1, keepdim=True)).squeeze(1)

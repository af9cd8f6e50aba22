"""A session: the buffers of one batch being decoded, and what takes its prompt and moves it on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import LogitsProcessorList

from ..ops.decode_step import LAYER_WEIGHTS, MAX_BANNED, decode_step
from ..ops.draw_token import draw_token
from .forward import forward, mask_of
from .models import reason_against_kernel, sizes_of, weights_of
from .sampling import choose, kept_by_graphs, minimum_lengths, split

logger = logging.getLogger("qwen_patch")


def layer_pointers(decoder: nn.Module) -> list[list[int]]:
    """The addresses that `decode_step` reads: a row a layer, in LAYER_WEIGHTS' order, 0 where a family has none."""

    def address(module: nn.Module | None, name: str = "weight") -> int:
        tensor = getattr(module, name, None)
        return 0 if tensor is None else tensor.data_ptr()

    rows = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found = {name: address(getattr(attention, f"{name}_proj")) for name in "qkvo"}
        found |= {f"{name}_bias": address(getattr(attention, f"{name}_proj"), "bias") for name in "qkv"}
        found |= {name: address(getattr(attention, name, None)) for name in ("q_norm", "k_norm")}
        found |= {name: address(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")}
        found |= {f"{name}_scales": address(getattr(attention, f"{name}_proj"), "scales") for name in "qkvo"}
        found |= {f"{name}_scales": address(getattr(mlp, f"{name}_proj"), "scales") for name in ("gate", "up", "down")}
        found |= {"input_norm": address(layer.input_layernorm), "post_norm": address(layer.post_attention_layernorm)}
        rows.append([found[name] for name in LAYER_WEIGHTS])
    return rows


def banned_by(processors: LogitsProcessorList, vocabulary: int) -> list[int]:
    """{column, ids, -1 ...}: the ends of text that the minimal lengths hold back until that column of the history.
    Those beyond the vocabulary have no score to hold back."""
    until, ids = 0, []
    for item in minimum_lengths(processors):  # calls.py: of the same ends
        new = getattr(item, "min_new_tokens", None)
        until = max(until, item.min_length if new is None else item.prompt_length_to_skip + new)
        ids = [i for i in item.eos_token_id.flatten().tolist() if 0 <= i < vocabulary]
    return [until, *ids, *[-1] * (MAX_BANNED - len(ids))]


SMALLEST_ROOM = 256


def room_for(tokens: int) -> int:
    """For so many tokens: the smallest room, or twice as much, and so on, which texts of different lengths share."""
    room = SMALLEST_ROOM
    while room < tokens:
        room *= 2
    return room


class Session:
    """`rows` sequences of at most `capacity` tokens: `start` takes their prompt, `step` decodes one token each.

    Whatever it is asked to do is done when it returns. captured.py has the one for CUDA, which is not so.
    """

    burst = 1  # steps that are as well asked for together
    ahead = 0  # bursts that may be under way while the host looks for the end
    draws_itself = False  # with `draw_token`: other draws than generate's loop makes with the same seed

    def __init__(
        self, model: nn.Module, rows: int, capacity: int, processors: LogitsProcessorList, do_sample: bool
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.decoder = model.model  # not the model, which holds the sessions: it is freed as soon as it is let go
        self.embedding, self.norm, self.head = (
            model.get_input_embeddings().weight, model.model.norm.weight, model.lm_head
        )  # fmt: skip
        device, dtype = self.embedding.device, self.embedding.dtype
        sizes = sizes_of(self.decoder)
        with torch.inference_mode(False), torch.device(device):
            positions = torch.arange(capacity)[None]
            cos, sin = self.decoder.rotary_emb(torch.empty(1, dtype=dtype), positions)
            self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
            self.cache = torch.empty(sizes.layers, 2, rows, sizes.kv_heads, capacity, sizes.head_dim, dtype=dtype)
            self.at = torch.zeros(1 + rows, dtype=torch.int32)  # of the prompt: its width, each row's length
            self.state = torch.zeros(2 + rows, dtype=torch.int32)
            self.tokens = torch.zeros(rows, dtype=torch.int64)
            self.history = torch.zeros(rows, capacity, dtype=torch.int64)
            self.banned, self.banned_now = torch.full((1 + MAX_BANNED,), -1, dtype=torch.int32), None
            self.logits = torch.empty(rows, self.head.weight.shape[0], dtype=dtype)
            self.uniform = torch.empty(rows)
        # Why the steps are the plain forward's; None: they are `decode_step`'s.
        self.no_kernel = reason_against_kernel(model, rows)
        if self.no_kernel is None:
            self._prepare_kernel(model)
        else:
            logger.info("generate decodes without decode_step: %s", self.no_kernel)
        kept = LogitsProcessorList(map(copy.copy, kept_by_graphs(processors)))  # the caller may change its own later
        draws = do_sample and self.draws_itself
        self.processors, self.filters = split(kept, self.logits.shape[1]) if draws else (kept, None)
        self.do_sample = do_sample
        self.greedy = self.no_kernel is None and not (do_sample or self.processors)  # `decode_step` chooses
        self.column = self.sent = 0  # of the history: the next to be written; the first that the host has not been sent

    def _prepare_kernel(self, model: nn.Module) -> None:
        sizes = sizes_of(self.decoder)
        self.sizes = {
            "heads": sizes.heads,
            "intermediate": sizes.inner,
            "weights": weights_of(model, self.rows),
            "eps": self.decoder.norm.variance_epsilon,
            "scale": self.decoder.layers[0].self_attn.scaling,
        }
        self.head_tensors = self.head.weight.flatten(1), getattr(self.head, "scales", None)
        with torch.inference_mode(False), torch.device(self.embedding.device):
            self.table = torch.tensor(layer_pointers(self.decoder), dtype=torch.int64)
            self.exchange = torch.empty(0, dtype=torch.int32)

    def start(self, prompt: torch.Tensor, starts: Sequence[int], processors: LogitsProcessorList) -> torch.Tensor:
        """Takes the prompt [rows, T], row b from starts[b] on; returns the logits [rows, V] of what comes next.

        processors: of this call; only the minimal lengths may differ from those that the session was made with.

        Padding on the left is left out, so that every row starts at position 0, where its rotary embedding does too.
        The logits are the session's: the next step writes over them.
        """
        width = prompt.shape[1]
        lengths = [width - start for start in starts]
        self.at.copy_(torch.tensor([width, *lengths], dtype=torch.int32, device="cpu"))
        turned = prompt
        if any(starts):
            turned = prompt.gather(1, (torch.arange(width, device=prompt.device) - self.at[1:, None]) % width)
        self._take(turned[:, : max(lengths)])
        if self.no_kernel is None:
            self.exchange.zero_()  # what parts of a longer context left there might pass for this one's (exchange.cuh)
        else:
            # The forward's attention multiplies what stands in the slots to come by zero: no inf, no NaN may be there.
            unused = torch.arange(self.capacity, device=prompt.device) >= self.at[1:, None]
            self.cache.masked_fill_(unused[:, None, :, None], 0)
        self.state[1:] = self.at
        if (banned := banned_by(processors, self.logits.shape[1])) != self.banned_now:
            self.banned.copy_(torch.tensor(banned, dtype=torch.int32, device="cpu"))
            self.banned_now = banned
        self.history[:, :width] = prompt
        self.column = self.sent = width
        return self.logits

    def replays(self, length: int) -> bool:
        """Whether a prompt of so many tokens begins at once, with the weights that were there when it was captured."""
        return False

    def _take(self, tokens: torch.Tensor) -> None:
        """Fills the cache, and `logits`, from prompts at position 0, padded on the right."""
        self._prompt_work(tokens)

    def _prompt_work(self, tokens: torch.Tensor) -> None:
        last = self.at[1:].long() - 1
        first = torch.zeros_like(last)
        self.logits.copy_(forward(self.decoder, self.head, tokens, first, last, self.cache, self.cos, self.sin))

    def put(self, tokens: torch.Tensor) -> None:
        """The first new tokens, which the prompt's logits gave."""
        self.tokens.copy_(tokens)
        # Processors see the whole history: what is beyond its end repeats its first new token, which changes nothing
        # for a penalty on tokens that have occurred, even one that leaves the prompt out.
        self.history[:, self.column :] = tokens[:, None]
        self.state[1] += 1
        self.column += 1

    def step(self, tokens: int = 1, unchanged: Callable[[], bool] = lambda: True) -> None:
        """That many tokens more for every row, 1 or `burst`. unchanged: whether the weights are what they were."""
        for _ in range(tokens):
            self._work()
        self.column += tokens

    def send(self) -> Callable[[], torch.Tensor]:
        """Sends the tokens that the host has not been sent yet; the function returned waits for them: [rows, new]."""
        new = self.history[:, self.sent : self.column].clone()
        self.sent = self.column
        return lambda: new

    def _slots_in_use(self) -> int:
        """Of the cache, which may have room for far more: what the plain forward attends to."""
        return self.column

    def _work(self) -> None:
        if self.no_kernel is None:
            decode_step(
                self.table, self.embedding, self.norm, *self.head_tensors, self.cos, self.sin, self.tokens, self.cache,
                self.exchange, self.state, self.history, self.banned, self.logits, greedy=self.greedy, **self.sizes,
            )  # fmt: skip
        else:
            first, slots = self.state[2:].long(), self._slots_in_use()
            logits = forward(
                self.decoder, self.head, self.tokens[:, None], first, torch.zeros_like(first),
                self.cache[..., :slots, :], self.cos, self.sin, mask_of(first, slots, self.logits.dtype),
            )  # fmt: skip
            self.logits.copy_(logits)
            self.state[1:] += 1
        if not self.greedy:
            self._choose()

    def _choose(self) -> None:
        scores = self.logits
        if self.processors or self.filters is None:
            scores = scores.float()
            self._ban(scores)
            scores = self.processors(self.history, scores)
        if self.filters is not None:
            to = self.uniform.uniform_(), self.banned, self.state, self.tokens, self.history
            draw_token(scores, *to, **self.filters._asdict())
            return
        self.tokens.copy_(choose(scores, self.do_sample))
        column = (self.state[1:2].long() - 1).expand(self.rows, 1)
        self.history.scatter_(1, column, self.tokens[:, None])

    def _ban(self, scores: torch.Tensor) -> None:
        """What `decode_step` does itself where it chooses the token."""
        ids = self.banned[1:].long()
        now = (ids >= 0) & (self.state[1] - 1 < self.banned[0])
        at = ids.clamp(min=0).expand(self.rows, MAX_BANNED)
        scores.scatter_reduce_(1, at, torch.where(now, -torch.inf, torch.inf).expand_as(at).to(scores.dtype), "amin")

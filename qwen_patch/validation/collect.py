"""What a model answers: logits at every position and greedy tokens, for single prompts and a left-padded batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .agreement import ends_of

# The token with the highest logit, which is what is judged: a generation_config may ask for more, as Qwen2.5's asks for
# a repetition penalty.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@dataclass(frozen=True)
class Batch:
    """Prompts that run together: ids and attention_mask [B, T], left-padded."""

    name: str
    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """For each batch: logits [P, V] at its P real positions, in the model's dtype, and the new tokens [B, N]."""

    logits: list[torch.Tensor]
    tokens: list[torch.Tensor]


def make_batches(tokenizer: PreTrainedTokenizerBase, prompts: list[str], device: torch.device) -> list[Batch]:
    """Each prompt alone, and all of them left-padded in one batch (where there are several)."""
    batches = []
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        batches.append(Batch(f"prompt {i + 1}", ids, torch.ones_like(ids)))
    if len(prompts) > 1:
        padded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(device)
        batches.append(Batch("left-padded batch", padded.input_ids, padded.attention_mask))
    return batches


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids of a left-padded batch, as `generate` makes them: the first real token is 0."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def collect(model: PreTrainedModel, batches: list[Batch], new_tokens: int) -> Answers:
    """Runs every batch through the model's forward and through greedy `generate`."""
    logits, tokens = [], []
    for batch in batches:
        output = model(batch.ids, attention_mask=batch.mask, position_ids=positions(batch.mask), use_cache=False)
        logits.append(output.logits[batch.mask.bool()])
        generated = model.generate(
            batch.ids,
            attention_mask=batch.mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            **GREEDY,
        )
        tokens.append(generated[:, batch.ids.shape[1] :])
    return Answers(logits, tokens)


@torch.no_grad()
def logits_of_answer(model: PreTrainedModel, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 logits [N, V], by this model's forward, in the places of the new `tokens` [N] of the first prompt of
    `batch`, without padding. Those of ends of text, which `collect` holds back, are -inf."""
    real = batch.ids[0][batch.mask[0].bool()]
    logits = model(torch.cat([real, tokens])[None], use_cache=False).logits[0, len(real) - 1 : -1].float()
    logits[:, ends_of(model)] = -torch.inf
    return logits

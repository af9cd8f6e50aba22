"""Which calls of generate the decode runtime takes; for the others, why not, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process, stopping_criteria

from ..ops.decode_step import MAX_BANNED

# Processors that work on the scores where they are, so that a graph can hold them. Exact classes: a subclass may do
# anything.
MINIMUM_LENGTHS = (logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor)
FILTERS = (logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper, logits_process.MinPLogitsWarper)
PROCESSORS = (
    *MINIMUM_LENGTHS,
    *FILTERS,
    logits_process.TemperatureLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
)
CRITERIA = (
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
)
MAX_ROWS = 64  # sequences at once
# What generate may hand to the model beside the tokens: the runtime needs no more than the mask.
CACHE_NAMES = ("past_key_values", "cache")  # before and from transformers 5.24 on
MODEL_KWARGS = {
    *CACHE_NAMES,
    "attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep", "tokenizer",
}  # fmt: skip


@dataclass
class Call:
    """What generate gives its sampling loop."""

    input_ids: torch.Tensor  # [B, T]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]

    @cached_property
    def starts(self) -> list[int] | None:
        """How many tokens of padding each row has on the left; None if mask or positions are not those of that.

        Found on the host, which waits for one copy: each of these small steps would be a launch on the GPU.
        """
        mask, positions = self.model_kwargs.get("attention_mask"), self.model_kwargs.get("position_ids")
        rows, width = self.input_ids.shape
        if mask is None and positions is None:
            return [0] * rows
        if mask is not None and mask.shape != self.input_ids.shape:
            return None
        seen = torch.ones(rows, width, dtype=torch.bool, device="cpu") if mask is None else (mask != 0).cpu()
        wrong = (seen[:, 1:] < seen[:, :-1]).any() or not seen[:, -1].all()
        if positions is not None:
            wrong = wrong or ((positions.cpu() != seen.long().cumsum(-1) - 1) & seen).any()
        return None if wrong else (width - seen.sum(-1)).tolist()


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    return next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


def reason_against_call(call: Call) -> str | None:
    """Why the runtime can't take this call; None if it can."""
    input_ids, processors, criteria, config, model_kwargs = (
        call.input_ids, call.processors, call.criteria, call.config, call.model_kwargs
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return "it is being compiled"
    if len(input_ids) > MAX_ROWS:
        return f"{len(input_ids)} sequences at once: the runtime takes up to {MAX_ROWS}"
    if input_ids.numel() == 0:
        return "the prompt is empty"
    if call.synced_gpus:
        return "several GPUs generate in step"
    if config.return_dict_in_generate:
        return "return_dict_in_generate is set"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size is set"
    if config.is_assistant:
        return "the model assists another one"
    for kind, found, known in (
        ("logits processor", processors, PROCESSORS),
        ("stopping criterion", criteria, CRITERIA),
    ):
        other = next((type(item).__name__ for item in found if type(item) not in known), None)
        if other is not None:
            return f"the {kind} {other} needs the host at every token"
    if criteria.max_length is None:
        return "no criterion gives a maximal length"
    ignored = [
        item.prompt_ignore_length for item in processors if getattr(item, "prompt_ignore_length", None) is not None
    ]
    if any(int(torch.as_tensor(length).max()) > input_ids.shape[1] for length in ignored):
        return "the repetition penalty leaves out more than the prompt"
    ends = [tuple(item.eos_token_id.flatten().tolist()) for item in processors if type(item) in MINIMUM_LENGTHS]
    if len(set(ends)) > 1:
        return "two minimal lengths hold back different ends of text"
    if ends and len(ends[0]) > MAX_BANNED:
        return f"a minimal length holds {len(ends[0])} ends of text back: the kernel knows {MAX_BANNED}"
    filtered = False
    for item in processors:  # a session holds ends back before anything is filtered: see session.py
        if filtered and type(item) in MINIMUM_LENGTHS:
            return "a minimal length comes after a filter of the scores"
        filtered = filtered or type(item) in FILTERS
    cache = cache_of(model_kwargs)
    if type(cache) is not DynamicCache or cache.offloading or {type(layer) for layer in cache.layers} - {DynamicLayer}:
        return f"the cache is a {type(cache).__name__}, not the default one"
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0:
        return "a cache was given"
    if call.starts is None:
        return "the attention mask or the positions are not those of padding on the left"
    other = next((k for k, v in model_kwargs.items() if k not in MODEL_KWARGS and v is not None), None)
    if other is not None:
        return f"{other} was given"
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast is on"
    return None

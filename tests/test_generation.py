"""`generate` in every mode that Transformers has: the patched model's tokens are the stock model's.

float32: equal, through the kernels. bfloat16: equal with backend="reference", whose rounding is the stock model's bit
for bit; through the kernels, greedy tokens may part where the stock model in float32 calls the two tokens a tie.
Set QWEN_PATCH_REAL_MODEL to a folder of a Qwen model to run the kernels on that model too.

Contrastive search, DoLa and group beams are not here: Transformers 5 has moved them to repositories on the hub.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from models import TRAINED, assert_parts_only_at_ties
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import is_flash_attn_2_available, is_hqq_available

import qwen_patch
from qwen_patch.loading import BUNDLED, load_model

TEXTS = [
    "She looked at the sea and thought of her brother, who had gone away many years before. She looked at the sea and",
    "It was",
    "The old man walked slowly along the road",
]
NEW_TOKENS = 20


@functools.lru_cache(maxsize=4)
def load(name: str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_model(name, device, dtype)
    model.generation_config.eos_token_id = None  # every run is as long as it may be
    return model, tokenizer


class Subject:
    """A model with its tokenizer: what a case generates with."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        tokenizer.padding_side = "left"

    def inputs(self, texts: list[str]) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(texts, return_tensors="pt", padding=True).to(self.model.device))

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        return self.inputs(TEXTS)

    @property
    def single(self) -> dict[str, torch.Tensor]:
        return self.inputs(TEXTS[:1])

    def generate(self, inputs: dict[str, Any], **options: Any) -> Any:
        torch.manual_seed(11)
        return self.model.generate(**inputs, **({"max_new_tokens": NEW_TOKENS, "do_sample": False} | options))


class Ban(LogitsProcessor):
    """A user's own processor: the token that was best last time may not come again."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


class StopAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def assisted(s: Subject) -> torch.Tensor:
    """By a smaller copy of itself, patched if the model is."""
    assistant = copy.deepcopy(s.model)
    assistant.model.layers = assistant.model.layers[:-1]
    assistant.config.num_hidden_layers -= 1
    assistant.config.layer_types = assistant.config.layer_types[:-1]
    qwen_patch.unpatch_model(assistant)
    if qwen_patch.patcher.current_plan(s.model):
        qwen_patch.patch_model(assistant)
    return s.generate(s.single, assistant_model=assistant)


def streamed(s: Subject) -> torch.Tensor:
    streamer = Collect()
    result = s.generate(s.single, streamer=streamer)
    assert streamer.ended
    assert [token for part in streamer.parts for token in part] == result[0].tolist()
    return result


def continued(s: Subject) -> torch.Tensor:
    """A conversation: the cache of the first turn goes on into the second."""
    used = DynamicCache()
    first = s.generate(s.single, past_key_values=used, max_new_tokens=8)
    longer = torch.cat([first, s.inputs(TEXTS[2:])["input_ids"]], dim=1)
    return s.generate({"input_ids": longer}, past_key_values=used)


def from_a_static_cache(s: Subject) -> torch.Tensor:
    """The user's own, used twice, the second time for a shorter prompt."""
    cache = StaticCache(config=s.model.config, max_cache_len=96)
    s.generate(s.single, past_key_values=cache)
    cache.reset()
    return s.generate(s.inputs(TEXTS[2:]), past_key_values=cache)


def from_embeddings(s: Subject) -> torch.Tensor:
    embeddings = s.model.get_input_embeddings()(s.batch["input_ids"])
    return s.generate({"inputs_embeds": embeddings, "attention_mask": s.batch["attention_mask"]})


def continuous_batching(s: Subject) -> torch.Tensor:
    """generate_batch: requests of unequal lengths packed into one row, over a paged cache."""
    ids = [s.tokenizer(text).input_ids for text in TEXTS]
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    options = {"generation_config": config, "continuous_batching_config": small, "warmup": False}
    results = s.model.generate_batch(ids, **options)
    assert len(results) == len(ids)
    return torch.tensor([results[key].generated_tokens for key in sorted(results)])


def everything_returned(s: Subject) -> dict[str, Any]:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return s.generate(s.batch, output_hidden_states=True, output_attentions=True, **options)


def case(inputs: str = "batch", **options: Any) -> Callable[[Subject], torch.Tensor]:
    """Generates with these options; a plain function among them gets the subject and gives the value."""

    def run(s: Subject) -> torch.Tensor:
        values = {k: v(s) if isinstance(v, FunctionType) else v for k, v in options.items()}
        return s.generate(getattr(s, inputs), **values)

    return run


# Greedy: the tokens are the argmax of the model's own logits, so that a difference in bfloat16 can be judged.
GREEDY: dict[str, Callable[[Subject], torch.Tensor]] = {
    "greedy": case(),
    "static cache": case(cache_implementation="static"),
    "no cache": case(use_cache=False, max_new_tokens=6),
    "chunked prefill": case(prefill_chunk_size=4),
    "prompt lookup": case("single", prompt_lookup_num_tokens=4),
    "assisted": assisted,
    "streamer": streamed,
    "continued": continued,
    "from a static cache": from_a_static_cache,
    "from embeddings": from_embeddings,
}
OTHER: dict[str, Callable[[Subject], torch.Tensor]] = {
    "sample": case(do_sample=True),
    "sample top-k, top-p, min-p": case(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    "sample three each": case(do_sample=True, num_return_sequences=3, top_k=30),
    "beams 2": case(num_beams=2),
    "beams 4, two returned": case(num_beams=4, num_return_sequences=2, length_penalty=0.5),
    "beams 2, sampled": case(num_beams=2, do_sample=True),
    "beams 4, sampled": case(num_beams=4, do_sample=True, top_k=20),
    "beams 4, static cache": case(num_beams=4, cache_implementation="static"),
    "repetition penalty": case(repetition_penalty=1.5, no_repeat_ngram_size=3),
    "own processor": case(logits_processor=LogitsProcessorList([Ban()])),
    "own criterion": case(stopping_criteria=StoppingCriteriaList([StopAfter(30)])),
    "stop strings": case(stop_strings=[" the", "."], tokenizer=lambda s: s.tokenizer),
    "end of text": case(eos_token_id=lambda s: s.tokenizer(" the").input_ids[:1]),
    # generate takes the backend out of the dictionary that it is given: a new one each time
    "quantized cache": case(cache_implementation="quantized", cache_config=lambda s: {"backend": "hqq", "nbits": 4}),
}
NEEDS_HQQ = pytest.mark.skipif(not is_hqq_available(), reason="hqq is not installed")
ALL_MODES = [pytest.param(mode, marks=NEEDS_HQQ if "quantized" in mode else ()) for mode in GREEDY | OTHER]
ON_A_GPU = {
    "offloaded cache": case(cache_implementation="offloaded"),
    "offloaded static cache": case(cache_implementation="offloaded_static"),
}


def run_both(subject: Subject, run: Callable[[Subject], Any], backend: str = "auto") -> tuple[Any, Any]:
    expected = run(subject)
    with qwen_patch.patched(subject.model, backend=backend):
        return expected, run(subject)


@pytest.mark.parametrize("name", TRAINED, ids=lambda name: Path(name).name)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_float32_tokens_are_equal(name, mode, device):
    expected, found = run_both(Subject(*load(name, device, torch.float32)), (GREEDY | OTHER)[mode])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_bfloat16_tokens_are_equal_without_the_kernels(name, mode, device):
    expected, found = run_both(Subject(*load(name, device, torch.bfloat16)), (GREEDY | OTHER)[mode], "reference")
    assert torch.equal(found, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ON_A_GPU)
def test_offloaded_caches(mode, monkeypatch):
    """Transformers copies a layer's cache back on a stream that, in its code, waits for nothing: where the host is
    ahead of the GPU, keys may be read that are not there yet. Waiting first leaves the patch as the only difference."""

    def prefetch_when_all_is_done(cache: Cache, *args: Any) -> None:
        torch.cuda.synchronize()
        prefetch(cache, *args)

    prefetch = Cache.prefetch
    monkeypatch.setattr(Cache, "prefetch", prefetch_when_all_is_done)
    expected, found = run_both(Subject(*load("tiny-qwen3", torch.device("cuda"), torch.float32)), ON_A_GPU[mode])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", TRAINED, ids=lambda name: Path(name).name)
@pytest.mark.parametrize("mode", GREEDY)
def test_bfloat16_tokens_part_only_at_ties(name, mode, device):
    subject = Subject(*load(name, device, torch.bfloat16))
    expected, found = run_both(subject, GREEDY[mode])
    assert found.shape == expected.shape
    prompts = subject.batch if len(found) > 1 else {}
    if mode == "from embeddings":  # only the new tokens come back
        expected, found = (torch.cat([prompts["input_ids"], tokens], dim=1) for tokens in (expected, found))
    assert_parts_only_at_ties(
        subject.model, lambda: load(name, device, torch.float32)[0], prompts.get("attention_mask"), expected, found
    )


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_generate_returns(name, attention, dtype, device):
    model, tokenizer = load_model(name, device, dtype)
    model.set_attn_implementation(attention)
    expected, found = run_both(Subject(model, tokenizer), everything_returned, "reference")
    assert found.keys() == expected.keys()
    assert torch.equal(found.sequences, expected.sequences)
    for key in ("scores", "logits"):
        assert len(found[key]) == len(expected[key]) == found.sequences.shape[1] - subject_length(tokenizer)
        assert all(torch.equal(a, b) for a, b in zip(found[key], expected[key], strict=True))
    for key in ("hidden_states", "attentions"):
        for a_step, b_step in zip(found[key] or (), expected[key] or (), strict=True):
            for a, b in zip(a_step, b_step, strict=True):
                assert torch.equal(a, b) if a is not None else b is None


def subject_length(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(len(tokenizer(text).input_ids) for text in TEXTS)


@pytest.mark.cuda
@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed")
@pytest.mark.parametrize("mode", ["greedy", "continued", "prompt lookup"])
def test_flash_attention(mode):
    model, tokenizer = load_model("tiny-qwen3", torch.device("cuda"), torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    expected, found = run_both(Subject(model, tokenizer), GREEDY[mode], "reference")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", BUNDLED)
def test_continuous_batching(name, device):
    expected, found = run_both(Subject(*load(name, device, torch.float32)), continuous_batching)
    assert torch.equal(found, expected)

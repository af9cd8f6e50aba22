"""The decode runtime's loop, on the CPU. Its kernel there is in test_decode_step.py, CUDA's and its graphs in
test_decode_kernel.py, what the runtime leaves to Transformers' loop in test_decode_or_stock.py."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import compared, left_padded, without_kernel
from models import assert_parts_only_at_ties, small_model, token_ids
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

import qwen_patch
from qwen_patch.generation import captured, models, session
from qwen_patch.generation.forward import mask_of
from qwen_patch.generation.session import Session
from qwen_patch.loading import BUNDLED
from qwen_patch.modules.causal_lm import RUNTIME

WEIGHTS = {"hidden_size": 192, "intermediate_size": 448, "num_attention_heads": 6, "head_dim": 32}


def all_compared(model: PreTrainedModel, inputs: list[dict[str, Any]], **options: Any) -> list[Session]:
    """The same of one call after the other; returns the sessions."""
    options = {"do_sample": False} | options
    expected = [model.generate(**item, **options) for item in inputs]
    qwen_patch.patch_model(model)
    for item, tokens in zip(inputs, expected, strict=True):
        assert torch.equal(model.generate(**item, **options), tokens)
        assert model.last_reason is None
    return list(model.__dict__[RUNTIME].sessions.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_greedy_left_padded(family, each_way):
    compared(small_model(family), left_padded(9, 4, 1))


def test_many_rows(each_way):
    model = small_model("qwen3")
    compared(model, left_padded(*range(1, 13)))
    (kept,) = model.__dict__[RUNTIME].sessions.values()
    assert kept.rows == 12


@pytest.mark.parametrize("most", [captured.MAX_CAPTURED_TOKENS, 64], ids=["", "not all captured"])
def test_prompts_fill_buckets(most, captured_on_cpu, monkeypatch):
    """At a bucket's edges, each bucket used twice, with what another prompt has left there."""
    monkeypatch.setattr(captured, "MAX_CAPTURED_TOKENS", most)
    prompts = [left_padded(n, max(1, n - 5)) for n in (1, 16, 17, 32, 100, 3, 64, 20, 230, 251, 256, 257)]
    model = small_model("qwen2", max_position_embeddings=1024)
    short, long = all_compared(model, prompts, max_new_tokens=5)
    assert (short.capacity, long.capacity) == (256, 512)
    assert set(short.prompts) == ({16, 32} if most == 64 else {16, 32, 64, 128, 256})
    assert set(long.prompts) == (set() if most == 64 else {256, 384})


def test_padding_of_all_rows(each_way):
    inputs = left_padded(9, 4)
    inputs = {key: torch.nn.functional.pad(value, (20, 0)) for key, value in inputs.items()}
    compared(small_model("qwen3"), inputs)


def test_nothing_of_a_call_reaches_the_next(each_way):
    """Not even a NaN."""
    model = small_model("qwen3")
    compared(model, left_padded(9, 4))
    (kept,) = model.__dict__[RUNTIME].sessions.values()
    kept.cache.fill_(torch.nan)
    options = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(**left_padded(7, 3), **options)
    assert list(model.__dict__[RUNTIME].sessions.values()) == [kept]
    assert torch.equal(found, qwen_patch.unpatch_model(model).generate(**left_padded(7, 3), **options))


def test_a_model_is_freed_as_soon_as_it_is_let_go(each_way):
    """Its sessions make no cycle of references with it, which would keep its memory until Python looks for cycles."""
    model = small_model("qwen3")
    compared(model, left_padded(5))
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_no_memory_for_a_graph_of_prompts(captured_on_cpu, monkeypatch, caplog):
    def full(work: Any, device: Any, pool: Any) -> SimpleNamespace:
        if work.func.__name__ == "_prompt_work":  # not the steps
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(captured, "capture", full)
    all_compared(small_model("qwen3"), [left_padded(n) for n in (5, 5, 40)], max_new_tokens=20)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "qwen_patch"]
    assert told == ["no memory for a graph of prompts of 16 tokens: they run eagerly (CUDA out of memory)"]


@pytest.mark.parametrize("fails", ["", "captured", "tried"])
def test_steps_attend_to_as_many_slots_as_they_need(fails, captured_on_cpu, monkeypatch, caplog):
    """Their graphs are for powers of two; where there can't be one, it is the whole capacity's."""

    def capture(work: Any, device: Any, pool: Any) -> SimpleNamespace:
        if fails == "captured" and work.func.__name__ == "_steps" and work.args[1] == 512:
            raise RuntimeError("CUDA out of memory\nand so on")
        return SimpleNamespace(replay=work)

    def run_aside(work: Any, device: Any) -> None:
        work()
        if fails == "tried" and work.func.__name__ == "_steps" and work.args[1] == 512:
            raise torch.OutOfMemoryError("CUDA out of memory")  # when the step has been counted

    monkeypatch.setattr(captured, "capture", capture)
    monkeypatch.setattr(captured, "run_aside", run_aside)
    model = small_model("qwen3", max_position_embeddings=2048)
    (kept,) = all_compared(model, [left_padded(n, 3) for n in (230, 900)], max_length=1030)
    assert kept.capacity == 2048
    slots = {slots for _, slots in kept.graphs}
    assert slots == ({256, 2048} if fails else {256, 512, 1024, 2048})
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "qwen_patch"]
    assert told == ["no graph over 512 tokens: steps are over 2048 (CUDA out of memory)"] * bool(fails)


def test_one_token_and_none_to_spare(each_way):
    model = small_model("qwen3")
    for tokens in (1, 2, 3):
        assert compared(model, left_padded(5), max_new_tokens=tokens).shape == (1, 5 + tokens)


def test_bursts(captured_on_cpu):
    """Whole ones, single steps after them, less than one."""
    model = small_model("qwen3")
    for tokens in range(1, 2 * captured.BURST + 3):
        assert compared(model, left_padded(5), max_new_tokens=tokens).shape == (1, 5 + tokens)


def test_a_gpu_runs_ahead_by_so_much(captured_on_cpu):
    model = small_model("qwen2")
    end = int(compared(model, left_padded(6))[0, 9])
    compared(model, left_padded(6), eos_token_id=end, pad_token_id=0, max_new_tokens=200)
    (kept,) = model.__dict__[RUNTIME].sessions.values()
    assert 6 + 4 < kept.column <= 6 + 4 + (1 + kept.ahead) * kept.burst


def test_rows_end_one_after_the_other(each_way):
    model = small_model("qwen2")
    plain = compared(model, left_padded(6, 6, 3))
    ends = [int(plain[0, 9]), int(plain[1, 14])]
    found = compared(model, left_padded(6, 6, 3), eos_token_id=ends, pad_token_id=0)
    assert (found[0, 10:] == 0).all()
    # The rows end long before max_new_tokens: not one step is made that nobody needs.
    found = compared(model, left_padded(6), eos_token_id=ends, pad_token_id=0, max_new_tokens=200)
    (single,) = [s for s in model.__dict__[RUNTIME].sessions.values() if s.rows == 1]
    assert single.column == found.shape[1] < 26


def no_change(model: PreTrainedModel) -> None:
    model(token_ids(1, 4))
    model.generate(**left_padded(4), max_new_tokens=2, do_sample=False)


CHANGES = {
    "nothing": no_change,
    "a weight's data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "a weight's layout": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.t()),
    "a weight": lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(torch.ones(192))),
    "dtype": lambda model: model.half(),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "training": lambda model: model.model.layers[1].train(),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *args: None),
    "a forward": lambda model: setattr(model.model.layers[1].mlp, "forward", lambda x: x),
    "epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-2),
    "a layer less": lambda model: model.model.layers.pop(1),
    "an adapter": lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_of_a_model(change):
    """What the runtime goes by to tell that its graphs, and its reasons, still hold."""
    model = small_model("qwen3", **WEIGHTS)
    qwen_patch.patch_model(model)
    before = models.state_of(model)
    CHANGES[change](model)
    assert (models.state_of(model) == before) == (change == "nothing")


def test_weights_are_told_without_being_kept():
    model = small_model("qwen3")
    weights = models.Weights(model)
    assert weights.held()
    swapped = model.model.layers
    swapped[0].mlp, swapped[1].mlp = swapped[1].mlp, swapped[0].mlp
    assert weights.held()  # their memory is: `state_of` sees the change
    swapped[0].mlp.down_proj.weight.data = swapped[0].mlp.down_proj.weight.data.clone()
    assert not weights.held()
    weights = models.Weights(model)
    del model.model.layers[2]
    assert not weights.held()
    weights = models.Weights(model)
    model.lm_head.weight = None
    assert not weights.held()


def test_a_cast_that_swaps_parameters(each_way, monkeypatch):
    """torch then moves the new weights into the old parameters, which must have no weak references."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, options = small_model("qwen3"), {"max_new_tokens": 20, "do_sample": False}
    compared(model, left_padded(5))
    expected = small_model("qwen3", torch.bfloat16).generate(**left_padded(5), **options)
    found = model.to(torch.bfloat16).generate(**left_padded(5), **options)
    assert model.last_reason is None
    assert_parts_only_at_ties(model, lambda: small_model("qwen3"), None, expected, found)


def test_processors_see_the_history(each_way):
    compared(small_model("qwen3"), left_padded(7, 3), repetition_penalty=1.7, max_new_tokens=40)
    without_prompt = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=6)])
    compared(small_model("qwen3"), left_padded(6), logits_processor=without_prompt, max_new_tokens=30)


def test_minimal_lengths(each_way):
    model = small_model("qwen2")
    end = int(compared(model, left_padded(6))[0, 9])
    for minimum in ({"min_new_tokens": 9}, {"min_length": 12}, {"min_new_tokens": 20}):
        compared(model, left_padded(6), eos_token_id=[end, 3], pad_token_id=0, **minimum)


def test_an_end_of_text_beyond_the_vocabulary(each_way):
    """Nothing to hold back, in a step of its own or in one that runs processors."""
    model = small_model("qwen2")
    ends = {"eos_token_id": [3, model.config.vocab_size], "pad_token_id": 0, "min_new_tokens": 9}
    compared(model, left_padded(6), **ends)
    compared(model, left_padded(6), **ends, repetition_penalty=1.2)


def test_a_config_class_of_somebodys_own(each_way):
    class OwnConfig(Qwen2Config):
        model_type = "somebodys-own"

    shape = small_model("qwen2").config.to_dict()
    config = OwnConfig(**{key: value for key, value in shape.items() if key not in ("model_type", "dtype")})
    torch.manual_seed(0)
    compared(Qwen2ForCausalLM(config).eval(), left_padded(6, 3))


def test_the_plain_forward_reads_no_more_of_the_cache_than_is_in_use(monkeypatch):
    """On a CPU: a cache has room for the longest answer, and attention over all of that took most of the time."""
    without_kernel(monkeypatch)
    monkeypatch.setattr(
        session, "mask_of", lambda first, slots, dtype: asked.append(slots) or mask_of(first, slots, dtype)
    )
    asked: list[int] = []
    compared(small_model("qwen3", max_position_embeddings=9000), left_padded(6, 3), max_length=9000, max_time=0.1)
    assert asked == list(range(7, 7 + len(asked)))


@pytest.mark.parametrize("freed", [qwen_patch.release, qwen_patch.unpatch_model, torch.nn.Module.double])
def test_buffers_are_freed(freed, each_way):
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(**left_padded(5), max_new_tokens=3)
    (kept,) = map(weakref.ref, model.__dict__[RUNTIME].sessions.values())
    assert freed(model) is model
    gc.collect()
    assert kept() is None
    compared(model.float(), left_padded(5))


def test_beams_are_told_too_and_no_longer_than_they_last(caplog):
    caplog.set_level("INFO", "qwen_patch")
    model = qwen_patch.patch_model(small_model("qwen3"))
    for _ in range(2):
        model.generate(token_ids(1, 5), max_new_tokens=3, num_beams=2)
        (note,) = qwen_patch.explain(model).notes
        assert note == "the last generate ran Transformers' own loop: it was neither greedy search nor sampling"
    assert len([r for r in caplog.records if "neither" in r.getMessage()]) == 1
    model.generate(token_ids(1, 5), max_new_tokens=8, do_sample=False)
    assert not qwen_patch.explain(model).notes


def test_processors_of_the_callers_changed_later(each_way):
    model, top_k = qwen_patch.patch_model(small_model("qwen3")), TopKLogitsWarper(50)
    options = {"max_new_tokens": 20, "do_sample": True, "top_k": 0}
    found = []
    for given in (top_k, TopKLogitsWarper(50)):
        torch.manual_seed(0)
        found.append(model.generate(**left_padded(5), logits_processor=LogitsProcessorList([given]), **options))
        assert model.last_reason is None
        top_k.top_k = 1
    assert torch.equal(*found)


def test_a_streamer_that_writes_into_what_it_is_given(each_way):
    model = small_model("qwen3")
    expected = compared(model, left_padded(5))
    streamer = SimpleNamespace(put=lambda tokens: tokens.zero_() if tokens.dim() == 1 else None, end=lambda: None)
    assert torch.equal(
        model.generate(**left_padded(5), max_new_tokens=20, do_sample=False, streamer=streamer), expected
    )


def test_stop_strings_and_streamer(each_way):
    name = "tiny-qwen3"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BUNDLED[name]), AutoTokenizer.from_pretrained(BUNDLED[name])
    inputs = dict(tokenizer("The old man looked at the sea", return_tensors="pt"))
    compared(model, inputs, stop_strings=[" the"], tokenizer=tokenizer, max_new_tokens=60)
    shown: list[torch.Tensor] = []
    streamer = SimpleNamespace(put=lambda tokens: shown.append(tokens.flatten()), end=lambda: shown.append(None))
    result = model.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
    assert shown[-1] is None
    assert torch.equal(torch.cat(shown[:-1]), result[0])


def test_max_time_ends_it(each_way):
    model = qwen_patch.patch_model(small_model("qwen2"))
    found = model.generate(token_ids(1, 4), max_new_tokens=200, do_sample=False, max_time=0.0)
    assert found.shape == (1, 5)  # the stock loop, too, gives the token that was under way


def test_an_error_midway_leaves_the_model_usable(each_way):
    model = small_model("qwen3")
    expected = compared(model, left_padded(5))

    def fail(tokens: torch.Tensor) -> None:
        seen.append(tokens)
        if len(seen) == 4:  # the prompt, and three tokens
            raise KeyboardInterrupt

    seen: list[torch.Tensor] = []
    with pytest.raises(KeyboardInterrupt):
        model.generate(**left_padded(5), do_sample=False, streamer=SimpleNamespace(put=fail, end=None))
    assert torch.equal(model.generate(**left_padded(5), max_new_tokens=20, do_sample=False), expected)


def test_a_streamer_that_generates(each_way):
    """The call within the call has no buffers of its own, and is the stock loop's."""
    model = small_model("qwen3")
    expected, short = compared(model, left_padded(5)), compared(model, left_padded(3))
    inner = []
    streamer = SimpleNamespace(
        put=lambda tokens: inner.append(model.generate(**left_padded(3), max_new_tokens=20, do_sample=False)),
        end=lambda: None,
    )
    options = {"max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    assert torch.equal(model.generate(**left_padded(5), **options), expected)
    assert len(inner) == 21
    assert all(torch.equal(found, short) for found in inner)


def test_weights_that_a_streamer_replaces():
    """The step has their addresses: they stay in memory until the call ends, and no longer."""
    model = small_model("qwen3", hidden_size=512, intermediate_size=4096)  # so large that freed weights are unmapped
    expected = compared(model, left_padded(5))
    places = [layer.mlp.down_proj.weight for layer in model.model.layers]
    old = [StorageWeakRef(weight.untyped_storage()) for weight in places]
    seen = 0

    def replace(tokens: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            for weight in places:
                weight.data = torch.zeros_like(weight)

    streamer, options = SimpleNamespace(put=replace, end=lambda: None), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(**left_padded(5), **options, streamer=streamer), expected)
    assert all(storage.expired() for storage in old)
    changed = model.generate(**left_padded(5), **options)
    assert torch.equal(changed, qwen_patch.unpatch_model(model).generate(**left_padded(5), **options))


@pytest.mark.parametrize("good", [0, 3], ids=["the prompt", "a step"])
def test_sampling_where_there_is_no_probability_raises_as_stock_does(good, each_way):
    """What comes next is not a number, from token `good` of the answer on."""
    model = small_model("qwen3", tie_word_embeddings=False)
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    torch.manual_seed(3)
    tokens = model.generate(**left_padded(5), **options)[0]
    bad = int(tokens[4 + good])
    assert bad not in tokens[: 4 + good]
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = torch.nan
    for _ in ("stock", "patched"):
        torch.manual_seed(3)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(**left_padded(5), **options)
        qwen_patch.patch_model(model)

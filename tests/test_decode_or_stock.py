"""What the decode runtime leaves to Transformers' own loop: which calls, and which models, each with its reason."""

from __future__ import annotations

import functools
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import compared, left_padded
from models import small_model, token_ids
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.activations import ACT2FN
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.models.qwen3 import modeling_qwen3

import qwen_patch
from qwen_patch.generation import runtime
from qwen_patch.modules.causal_lm import RUNTIME

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])},
        {"position_ids": torch.tensor([[3, 40, 52, 66, 77]])},
    ],
    ids=["a hole", "padding on the right", "positions"],
)
def test_other_masks_and_positions_go_to_the_stock_loop(changed):
    model = small_model("qwen3")
    inputs = {"input_ids": token_ids(1, 5), "attention_mask": torch.ones(1, 5, dtype=torch.long)} | changed
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(qwen_patch.patch_model(model).generate(**inputs, max_new_tokens=6, do_sample=False), expected)
    assert model.last_reason == "the attention mask or the positions are not those of padding on the left"


def test_more_ends_of_text_than_the_kernel_holds_back():
    model, many = qwen_patch.patch_model(small_model("qwen3")), list(range(100, 109))
    model.generate(token_ids(1, 5), max_new_tokens=3, min_new_tokens=2, eos_token_id=many, pad_token_id=0)
    assert model.last_reason == "a minimal length holds 9 ends of text back: the kernel knows 8"


def test_more_room_than_the_model_has_positions_for():
    """As those ask for who leave the end to the model: the buffers of the runtime would be of that size."""
    model, ids = small_model("qwen3"), token_ids(1, 5)
    end = int(model.generate(ids, max_new_tokens=8, do_sample=False)[0, -1])
    options = {"do_sample": False, "eos_token_id": end}
    expected = model.generate(ids, max_length=10**15, **options)
    qwen_patch.patch_model(model)
    for length, reason in ((512, None), (513, "room for 1024 tokens"), (10**15, "room for")):
        assert torch.equal(model.generate(ids, max_length=length, **options), expected)
        assert model.last_reason is None if reason is None else model.last_reason.startswith(reason)


def test_no_memory_on_a_cpu():
    """The session asks for more than an address can reach; the stock cache grows as the answer does."""
    model, ids = small_model("qwen3", max_position_embeddings=2**55), token_ids(1, 5)
    end = int(model.generate(ids, max_new_tokens=8, do_sample=False)[0, -1])
    options = {"max_length": 2**55, "do_sample": False, "eos_token_id": end}
    expected = model.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(qwen_patch.patch_model(model).generate(ids, **options), expected)
        assert model.last_reason == "no memory for the decode runtime"


def test_a_device_that_refuses(monkeypatch, caplog):
    """As a driver may a launch of all blocks at once, or a capture."""
    model, ids = small_model("qwen3"), token_ids(1, 5)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    qwen_patch.patch_model(model)

    def refuse(*args: Any) -> None:
        raise RuntimeError("decode_step: too many blocks in cooperative launch\nand more")

    with monkeypatch.context() as patch:
        patch.setitem(runtime.SESSIONS, "cpu", refuse)
        for _ in range(2):
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
        assert model.last_reason == "the decode runtime could not start"
    said = "the decode runtime could not start (decode_step: too many blocks in cooperative launch)"
    assert [r.getMessage() for r in caplog.records if r.name == "qwen_patch"] == [
        f"generate runs Transformers' own loop: {said}"
    ]
    caplog.clear()
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert model.last_reason is None


def test_a_minimal_length_after_a_filter():
    """The filter has left nothing but the end of text, which is then held back: all scores are -inf."""
    model, ids = small_model("qwen3"), token_ids(1, 5)
    end = int(model.generate(ids, max_new_tokens=3, do_sample=False)[0, -1])
    late = LogitsProcessorList([TopKLogitsWarper(1), MinNewTokensLengthLogitsProcessor(5, 6, end, device="cpu")])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    expected = model.generate(ids, logits_processor=late, **options)
    assert torch.equal(qwen_patch.patch_model(model).generate(ids, logits_processor=late, **options), expected)
    assert model.last_reason == "a minimal length comes after a filter of the scores"
    usual = LogitsProcessorList(late[::-1])
    model.generate(ids, logits_processor=usual, **options)
    assert model.last_reason is None


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_processor": LogitsProcessorList([Own()])}, "the logits processor Own needs the host"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is set"),
        ({"past_key_values": DynamicCache()}, "a cache was given"),
        ({"cache_implementation": "static"}, "the cache is a StaticCache"),
        ({"use_cache": False}, "the cache is a NoneType"),
        ({"num_return_sequences": 65, "do_sample": True}, "65 sequences at once"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size is set"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_calls_that_the_stock_loop_takes(options, reason):
    model = qwen_patch.patch_model(small_model("qwen2"))
    model.generate(token_ids(1, 5), **{"max_new_tokens": 3, "do_sample": False} | options)
    assert model.last_reason.startswith(reason)
    assert any(reason in note for note in qwen_patch.explain(model).notes)


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    return model


def scaled(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].self_attn.scaling = 0.1
    return model


def limited(model: PreTrainedModel) -> PreTrainedModel:
    model.model.embed_tokens.max_norm = 0.1
    return model


def seeing_all(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].self_attn.is_causal = False
    return model


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "model.layers.1.mlp has hooks"),
        (adapted, "model.layers.0.self_attn.q_proj is a peft."),
        (lambda model: model.train(), "the model is in training mode"),
        (scaled, "its attentions are not alike"),
        (limited, "its embedding has a maximal norm"),
        (seeing_all, "the attention of model.layers.1.self_attn is not causal"),
    ],
    ids=["hook", "adapter", "training", "scaling", "max_norm", "not causal"],
)
def test_models_that_the_stock_loop_takes(change, reason):
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(input_ids=token_ids(1, 5), max_new_tokens=3, do_sample=False)
    assert model.last_reason is None
    changed = change(model)
    changed.generate(input_ids=token_ids(1, 5), max_new_tokens=3, do_sample=False)
    assert model.last_reason.startswith(reason)


def test_another_activation_goes_to_the_stock_loop():
    model = small_model("qwen2", hidden_act="gelu")
    qwen_patch.patch_model(model, generation="auto").generate(token_ids(1, 5), max_new_tokens=3)
    assert model.last_reason == "its activation is 'gelu'"


def test_a_sliding_window_goes_to_the_stock_loop():
    model = small_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    qwen_patch.patch_model(model).generate(token_ids(1, 5), max_new_tokens=3)
    assert model.last_reason == "some layers have a sliding window"


def test_hidden_states_once_asked_for_do_not_slow_it_down_for_ever():
    model = small_model("qwen3")
    model(token_ids(1, 3), output_hidden_states=True, output_attentions=True)
    compared(model, left_padded(5))


def test_hooks_on_all_modules_are_seen_beside_the_recorders():
    model = qwen_patch.patch_model(small_model("qwen3"))
    model(token_ids(1, 3), output_hidden_states=True)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        model.generate(token_ids(1, 5), max_new_tokens=3, do_sample=False)
    finally:
        handle.remove()
    assert model.last_reason == "the model has hooks"


def test_a_dtype_that_no_kernel_takes():
    model = qwen_patch.patch_model(small_model("qwen3")).double()
    model.generate(token_ids(1, 5), max_new_tokens=3)
    assert model.last_reason.startswith("its weights are torch.float64, not torch.float32")


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(qwen_patch.ops.LIBRARIES["cpu"], "loaded", False)
    monkeypatch.setattr(qwen_patch.ops.LIBRARIES["cpu"], "reason", "it was not built")
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(token_ids(1, 5), max_new_tokens=3)
    assert model.last_reason == "the cpu library is not in use: it was not built"


def test_generation_stock():
    model = qwen_patch.patch_model(small_model("qwen3"), generation="stock")
    model.generate(token_ids(1, 5), max_new_tokens=3)
    assert RUNTIME not in model.__dict__
    with qwen_patch.patched(model):
        assert qwen_patch.explain(model).generation.replacement == "FastGenerate"
    assert qwen_patch.explain(model).generation.reason == "generation=stock"
    with pytest.raises(qwen_patch.PatchError, match="unknown generation 'fast': supported are auto, stock"):
        qwen_patch.patch_model(model, generation="fast")


def narrower(model: PreTrainedModel) -> PreTrainedModel:
    """One layer's MLP pruned to half its width."""
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).weight = torch.nn.Parameter(getattr(mlp, name).weight[:48].contiguous())
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :48].contiguous())
    return model


def biased(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.randn(64))
    return model


def shorter(model: PreTrainedModel) -> PreTrainedModel:
    model.config.num_hidden_layers = 2
    return model


def other_activation(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.act_fn = ACT2FN["gelu_new"].eval()
    return model


def other_inputs(model: PreTrainedModel) -> PreTrainedModel:
    prepare = model.prepare_inputs_for_generation

    def doubled(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] * 2) % 128
        return inputs

    model.prepare_inputs_for_generation = doubled
    return model


def learned(config: Any) -> Any:
    return lambda model: get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()


MODELS = {
    "a narrower layer": (narrower, "layer 1 has a mlp.gate_proj.weight"),
    "a bias": (biased, "layer 1 has a mlp.down_proj.bias"),
    "early exit": (shorter, "its config asks for a part of its layers"),
    "another activation": (other_activation, "model.layers.1.mlp.act_fn is a transformers.activations"),
    "inputs prepared otherwise": (other_inputs, "prepare_inputs_for_generation has been replaced"),
    "prompt tuning": (learned(PromptTuningConfig), "prepare_inputs_for_generation has been replaced"),
    "prefix tuning": (learned(PrefixTuningConfig), "prepare_inputs_for_generation has been replaced"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_not_stock_throughout(case):
    change, reason = MODELS[case]
    model = small_model("qwen3")
    changed, inputs = change(model), left_padded(6)
    expected = changed.generate(**inputs, **OPTIONS)
    qwen_patch.patch_model(model)
    assert torch.equal(changed.generate(**inputs, **OPTIONS), expected)
    assert model.last_reason.startswith(reason)


def test_a_class_that_somebody_patched(monkeypatch):
    """After a call that the runtime took: it must see the change of the class, too."""
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(**left_padded(6), **OPTIONS)
    assert model.last_reason is None
    stock = modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3Attention, "forward", lambda self, *args, **kwargs: (-stock(self, *args, **kwargs)[0], None)
    )
    found = model.generate(**left_padded(6), **OPTIONS)
    assert model.last_reason.startswith("the forward of Qwen3Attention has been replaced by test_decode_or_stock")
    qwen_patch.unpatch_model(model)
    assert torch.equal(found, model.generate(**left_padded(6), **OPTIONS))


def test_positions_in_the_middle():
    model = small_model("qwen3")
    inputs = left_padded(6) | {"position_ids": torch.tensor([[0, 0, 0, 0, 0, 5]])}
    expected = model.generate(**inputs, **OPTIONS)
    assert torch.equal(qwen_patch.patch_model(model).generate(**inputs, **OPTIONS), expected)
    assert model.last_reason == "the attention mask or the positions are not those of padding on the left"


@pytest.mark.parametrize(
    ("processors", "reason"),
    [
        ([RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=7)], "the repetition penalty leaves out more"),
        (
            [MinLengthLogitsProcessor(20, 5), MinNewTokensLengthLogitsProcessor(6, 2, 7)],
            "two minimal lengths hold back different ends",
        ),
    ],
    ids=["penalty", "lengths"],
)
def test_processors_given_by_hand(processors, reason):
    model = small_model("qwen3")
    options = OPTIONS | {"logits_processor": LogitsProcessorList(processors), "max_new_tokens": 30}
    expected = model.generate(**left_padded(6), **options)
    assert torch.equal(qwen_patch.patch_model(model).generate(**left_padded(6), **options), expected)
    assert model.last_reason.startswith(reason)


def test_a_loop_called_without_a_maximal_length():
    """As a custom_generate callable may: here with a criterion of its own, which is none that the runtime knows."""
    model = qwen_patch.patch_model(small_model("qwen3"))
    ids, config = token_ids(1, 6), GenerationConfig(max_length=None, pad_token_id=0)
    config._pad_token_tensor = torch.tensor(0)
    found = model._sample(
        ids, LogitsProcessorList(), StoppingCriteriaList([MaxLengthCriteria(9)]), config, past_key_values=DynamicCache()
    )
    assert found.shape == (1, 9)
    assert model.last_reason is None
    empty = StoppingCriteriaList()
    stock = type(model).stock
    called = []
    stock_loop = stock._sample

    def remember(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(args[2])
        return args[0]

    stock._sample = remember
    try:
        model._sample(ids, LogitsProcessorList(), empty, config, past_key_values=DynamicCache())
    finally:
        stock._sample = stock_loop
    assert called == [empty]
    assert model.last_reason == "no criterion gives a maximal length"


def test_a_prompt_longer_than_the_maximal_length():
    """Stock gives one token more."""
    model, ids = small_model("qwen3", max_position_embeddings=1024), token_ids(1, 300)
    options = {"do_sample": False, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(200)])}
    expected = model.generate(ids, **options)
    assert torch.equal(qwen_patch.patch_model(model).generate(ids, **options), expected)
    assert expected.shape == (1, 301)


def test_a_reason_is_its_own_calls(monkeypatch):
    """Two threads: a call that the runtime refuses must not take the other one's leave, whatever comes in between."""
    model = small_model("qwen3")
    holed = {"input_ids": token_ids(1, 5), "attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}
    expected = model.generate(**holed, **OPTIONS)
    qwen_patch.patch_model(model)

    def other_call(*args: Any) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: model.generate(**left_padded(4), **OPTIONS))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    monkeypatch.setattr(runtime.logger, "info", other_call)
    assert torch.equal(model.generate(**holed, **OPTIONS), expected)


def test_sessions_are_let_go_where_the_model_is_no_longer_taken():
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(**left_padded(4), **OPTIONS)
    assert len(model.__dict__[RUNTIME].sessions) == 1
    model.train()
    model.generate(**left_padded(4), **OPTIONS)
    assert not model.__dict__[RUNTIME].sessions


def test_a_streamer_may_wait_for_a_thread_that_generates():
    """As one does whose reader is slow; two calls that waited for each other would never end."""
    model = small_model("qwen3")
    expected = compared(model, left_padded(4), **OPTIONS)
    written: queue.Queue = queue.Queue(1)
    streamer = SimpleNamespace(put=functools.partial(written.put, timeout=30), end=lambda: None)
    found: list[torch.Tensor] = []
    writer = threading.Thread(
        target=lambda: found.append(model.generate(**left_padded(4), **OPTIONS, streamer=streamer))
    )
    writer.start()
    shown = [written.get(timeout=30).flatten()]  # the prompt
    for _ in range(OPTIONS["max_new_tokens"]):
        shown.append(written.get(timeout=30))
        found.append(model.generate(**left_padded(4), **OPTIONS))
    writer.join()
    assert all(torch.equal(tokens, expected) for tokens in [*found, torch.cat(shown)[None]])
    assert len(found) == 1 + OPTIONS["max_new_tokens"]

"""generate through the decode runtime: its loop on the CPU, with the model's own forward in the kernel's place; the
kernel, the graphs and what makes them stale on CUDA."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import small_model, token_ids
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import qwen_patch
from qwen_patch.generation import eligibility, runtime
from qwen_patch.generation.session import Session, choose
from qwen_patch.loading import BUNDLED
from qwen_patch.modules.causal_lm import RUNTIME

WEIGHTS = {"hidden_size": 192, "intermediate_size": 448, "num_attention_heads": 6, "head_dim": 32}


class Forward(Session):
    """A session whose step is the model's own forward over a cache without padding, row by row: no GPU, no graph."""

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int, processors: Any, do_sample: bool) -> None:
        self.model, self.rows, self.processors, self.do_sample = model, rows, processors, do_sample
        self.steps = 0

    def capture(self) -> None:
        pass

    def start(self, cache: DynamicCache, starts: list[int], prompt: torch.Tensor, processors: Any) -> None:
        self.prompt, self.columns, self.starts = prompt, [], starts
        self.caches = []
        for row, first in enumerate(starts):
            own = DynamicCache(config=self.model.config)
            for layer, kept in enumerate(cache.layers):
                states = (kept.keys[row : row + 1, :, first:], kept.values[row : row + 1, :, first:])
                own.update(*states, layer)
            self.caches.append(own)

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.columns.append(tokens)

    def step(self) -> None:
        self.steps += 1
        logits = [
            self.model(token.view(1, 1), past_key_values=cache).logits[:, -1].float()
            for token, cache in zip(self.tokens, self.caches, strict=True)
        ]
        history = torch.cat([self.prompt, torch.stack(self.columns, dim=1)], dim=1)
        self.put(choose(self.processors(history, torch.cat(logits)), self.do_sample))

    def send(self) -> Callable[[], torch.Tensor]:
        tokens = self.tokens.clone()
        return lambda: tokens


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets the runtime take small models on the CPU, in any dtype."""
    monkeypatch.setattr(eligibility, "_of_device", lambda model: None)
    monkeypatch.setattr(eligibility, "_of_shapes", lambda model: None)
    monkeypatch.setattr(runtime, "Session", Forward)


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    ids, mask = token_ids(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
        ids[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compared(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """generate of the patched model, through the runtime, after the stock model's has been found to be the same."""
    options = {"max_new_tokens": 20, "do_sample": False} | options
    qwen_patch.unpatch_model(model)
    expected = model.generate(**inputs, **options)
    qwen_patch.patch_model(model)
    found = model.generate(**inputs, **options)
    assert model.last_reason is None
    assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_greedy_left_padded(family, on_cpu):
    compared(small_model(family), left_padded(9, 4, 1))


def test_one_token_and_none_to_spare(on_cpu):
    model = small_model("qwen3")
    assert compared(model, left_padded(5), max_new_tokens=1).shape == (1, 6)
    assert compared(model, left_padded(5), max_new_tokens=runtime.AHEAD).shape == (1, 5 + runtime.AHEAD)


def test_rows_end_one_after_the_other(on_cpu):
    model = small_model("qwen2")
    plain = compared(model, left_padded(6, 6, 3))
    ends = [int(plain[0, 9]), int(plain[1, 14])]
    found = compared(model, left_padded(6, 6, 3), eos_token_id=ends, pad_token_id=0)
    assert (found[0, 10:] == 0).all()
    # The rows end long before max_new_tokens: the loop must not run on.
    compared(model, left_padded(6), eos_token_id=ends, pad_token_id=0, max_new_tokens=200)
    (session,) = [s for s in model.__dict__[RUNTIME].sessions.values() if s.rows == 1]
    assert session.steps < 20 + 2 * runtime.AHEAD


def test_processors_see_the_history(on_cpu):
    compared(small_model("qwen3"), left_padded(7, 3), repetition_penalty=1.7, max_new_tokens=40)


def test_minimal_lengths(on_cpu):
    model = small_model("qwen2")
    end = int(compared(model, left_padded(6))[0, 9])
    for minimum in ({"min_new_tokens": 9}, {"min_length": 12}, {"min_new_tokens": 20}):
        compared(model, left_padded(6), eos_token_id=[end, 3], pad_token_id=0, **minimum)


def test_stop_strings_and_streamer(on_cpu):
    name = "tiny-qwen3"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BUNDLED[name]), AutoTokenizer.from_pretrained(BUNDLED[name])
    inputs = dict(tokenizer("The old man looked at the sea", return_tensors="pt"))
    compared(model, inputs, stop_strings=[" the"], tokenizer=tokenizer, max_new_tokens=60)
    shown: list[torch.Tensor] = []
    streamer = SimpleNamespace(put=lambda tokens: shown.append(tokens.flatten()), end=lambda: shown.append(None))
    result = model.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
    assert shown[-1] is None
    assert torch.equal(torch.cat(shown[:-1]), result[0])


def test_max_time_ends_it(on_cpu):
    model = qwen_patch.patch_model(small_model("qwen2"))
    found = model.generate(token_ids(1, 4), max_new_tokens=200, do_sample=False, max_time=0.0)
    assert found.shape == (1, 5)  # the stock loop, too, gives the token that was under way


def test_an_error_midway_leaves_the_model_usable(on_cpu):
    model = small_model("qwen3")
    expected = compared(model, left_padded(5))

    def fail(tokens: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**left_padded(5), do_sample=False, streamer=SimpleNamespace(put=fail, end=None))
    assert torch.equal(model.generate(**left_padded(5), max_new_tokens=20, do_sample=False), expected)


def test_a_streamer_that_generates(on_cpu):
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


def test_sampling_draws_from_the_distribution():
    """choose() against the probabilities: a chi-square of 63 degrees of freedom is over 120 once in 50,000 runs."""
    scores = torch.randn(64)
    draws = choose(scores.expand(200_000, 64).contiguous(), True).bincount(minlength=64)
    expected = scores.softmax(0) * draws.sum()
    assert float(((draws - expected) ** 2 / expected).sum()) < 120
    assert torch.equal(choose(scores[None], False), scores.argmax()[None])


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])},
        {"position_ids": torch.tensor([[3, 40, 52, 66, 77]])},
    ],
    ids=["a hole", "padding on the right", "positions"],
)
def test_other_masks_and_positions_go_to_the_stock_loop(changed, on_cpu):
    model = small_model("qwen3")
    inputs = {"input_ids": token_ids(1, 5), "attention_mask": torch.ones(1, 5, dtype=torch.long)} | changed
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(qwen_patch.patch_model(model).generate(**inputs, max_new_tokens=6, do_sample=False), expected)
    assert model.last_reason == "the attention mask or the positions are not those of padding on the left"


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
        ({"num_return_sequences": 9, "do_sample": True}, "9 sequences at once"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_calls_that_the_stock_loop_takes(options, reason, on_cpu):
    model = qwen_patch.patch_model(small_model("qwen2"))
    model.generate(token_ids(1, 5), **{"max_new_tokens": 3, "do_sample": False} | options)
    assert model.last_reason.startswith(reason)
    assert any(reason in note for note in qwen_patch.explain(model).notes)


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    return model


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "model.layers.1.mlp has hooks"),
        (adapted, "model.layers.0.self_attn.q_proj is a peft."),
        (lambda model: model.train(), "the model is in training mode"),
    ],
    ids=["hook", "adapter", "training"],
)
def test_models_that_the_stock_loop_takes(change, reason, on_cpu):
    model = qwen_patch.patch_model(small_model("qwen3"))
    changed = change(model)
    changed.generate(input_ids=token_ids(1, 5), max_new_tokens=3, do_sample=False)
    assert model.last_reason.startswith(reason)


def test_a_sliding_window_goes_to_the_stock_loop(on_cpu):
    model = small_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    qwen_patch.patch_model(model).generate(token_ids(1, 5), max_new_tokens=3)
    assert model.last_reason == "some layers have a sliding window"


def test_hidden_states_once_asked_for_do_not_slow_it_down_for_ever(on_cpu):
    model = small_model("qwen3")
    model(token_ids(1, 3), output_hidden_states=True, output_attentions=True)
    compared(model, left_padded(5))


def test_a_model_on_the_cpu_says_so():
    model = qwen_patch.patch_model(small_model("qwen3"))
    model.generate(token_ids(1, 5), max_new_tokens=3)
    assert "the model is on cpu" in model.last_reason


def test_generation_stock():
    model = qwen_patch.patch_model(small_model("qwen3"), generation="stock")
    model.generate(token_ids(1, 5), max_new_tokens=3)
    assert RUNTIME not in model.__dict__
    with qwen_patch.patched(model):
        assert qwen_patch.explain(model).generation.replacement == "FastGenerate"
    assert qwen_patch.explain(model).generation.reason == "generation=stock"
    with pytest.raises(qwen_patch.PatchError, match="unknown generation 'fast': supported are auto, stock"):
        qwen_patch.patch_model(model, generation="fast")


# ---- on CUDA ----


def bundled(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Any]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED[name], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[name], dtype=dtype).to("cuda")
    model.generation_config.eos_token_id = None
    return model, tokenizer


def random_batch(model: PreTrainedModel, *lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)), device="cuda")
    mask = torch.tensor([[int(i >= max(lengths) - n) for i in range(max(lengths))] for n in lengths], device="cuda")
    return {"input_ids": ids, "attention_mask": mask}


def assert_parts_only_at_ties(
    model: PreTrainedModel, truth: PreTrainedModel, inputs: dict[str, torch.Tensor], expected: Any, found: Any
) -> None:
    """DESIGN's oracle rule: where two greedy answers part, the float32 model's margin between the two tokens lies
    within what the stock model's rounding does to the two."""
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        if torch.equal(a, b):
            continue
        where = int((a != b).nonzero()[0])
        text = a[None, int((inputs["attention_mask"][row] == 0).sum()) : where]
        with torch.no_grad():
            exact, stock = truth(text).logits[0, -1], model(text).logits[0, -1].float()
        assert exact[a[where]] - exact[b[where]] <= 2 * (exact - stock).abs().max(), f"row {row} parts at {where}"


@pytest.mark.cuda
@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("lengths", [(7,), (5, 40, 1), (3, 9, 1, 30, 12, 30, 2, 8), (600, 900)], ids=len)
def test_greedy_on_cuda(name, lengths):
    model, _ = bundled(name)
    truth, _ = bundled(name, torch.float32)
    inputs, options = random_batch(model, *lengths), {"max_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    with qwen_patch.patched(model):
        found = model.generate(**inputs, **options)
        assert model.last_reason is None
    assert_parts_only_at_ties(model, truth, inputs, expected, found)


SHAPES = {
    "qwen2, 7 heads a group": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 64}),
    "qwen3, 128": ("qwen3", {"hidden_size": 1024, "num_attention_heads": 4, "head_dim": 128}),
    "qwen3, 4 heads a group": ("qwen3", {"hidden_size": 2080, "num_attention_heads": 8, "head_dim": 128}),
    "llama, long MLP": ("llama", {"hidden_size": 512, "intermediate_size": 12320, "head_dim": 128}),
    "llama, one head a group": ("llama", {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 96}),
}


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length"), [(1, 3), (1, 700), (2, 65), (8, 130)])
def test_step_against_the_stock_forward(shape, dtype, rows, length):
    """Logits of a step, judged as everything that sums in another order: the error against the stock model in float32
    exceeds the stock model's own by at most a tenth, over eight inputs: a single one's ratio varies by as much."""
    family, sizes = SHAPES[shape]
    sizes = {"intermediate_size": 1536, "vocab_size": 1000, "initializer_range": 0.05} | sizes
    model = small_model(family, dtype, "cuda", max_position_embeddings=2048, **sizes)
    truth = small_model(family, torch.float32, "cuda", max_position_embeddings=2048, **sizes)
    truth.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    session = Session(model, rows, 1024, LogitsProcessorList(), False)
    errors = torch.zeros(2)
    for _ in range(8):
        ids = torch.randint(0, 1000, (rows, length + 1), device="cuda")
        with torch.no_grad():
            exact, stock = truth(ids).logits[:, -1], model(ids).logits[:, -1].float()
            cache = DynamicCache(config=model.config)
            model(ids[:, :-1], past_key_values=cache)
            session.start(cache, [0] * rows, ids[:, :-1], LogitsProcessorList())
            session.put(ids[:, -1])
            session.step()
        ours = session.logits.float()
        errors += torch.stack([(ours - exact).square().sum(), (stock - exact).square().sum()]).cpu()
        assert torch.equal(session.tokens, ours.argmax(-1))
        assert session.state.tolist()[1:] == [length + 2] + [length + 1] * rows
    assert errors[0].sqrt() <= 1.1 * errors[1].sqrt()


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["greedy", "with a processor"])
def test_minimal_lengths_on_cuda(options):
    """The end comes where the minimal length lets it, with one captured graph for all prompts and lengths."""
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    options |= {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 40}
    for length in (5, 8):
        inputs = random_batch(model, length)
        free = model.generate(**inputs, **options)[0, length:]
        end = int(free[3])
        first = int((free == end).nonzero()[0]) + 1
        for minimum in (first, first + 9):
            found = model.generate(**inputs, **options, eos_token_id=end, min_new_tokens=minimum)[0, length:]
            assert model.last_reason is None
            ends = (found == end).nonzero().flatten().tolist()
            assert all(i >= minimum for i in ends)
            assert len(found) == (ends[0] + 1 if ends else 40)
    assert len(model.__dict__[RUNTIME].sessions) == 1


@pytest.mark.cuda
def test_same_seed_same_tokens():
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    options = {"max_new_tokens": 48, "do_sample": True, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3}
    inputs = random_batch(model, 9, 4)
    found = []
    for seed in (3, 3, 4, 3):  # the first call captures the graph
        torch.manual_seed(seed)
        found.append(model.generate(**inputs, **options, pad_token_id=0))
    assert model.last_reason is None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[2])


@pytest.mark.cuda
def test_sampled_tokens_have_the_stock_distribution():
    """The second new token, over many draws, against what the stock model draws: chi-square of two samples over the
    common tokens. With df degrees of freedom it exceeds df + 5 sqrt(2 df) about once in a million runs."""
    model, _ = bundled("tiny-qwen2")
    inputs = random_batch(model, 6)
    inputs = {key: value.expand(8, -1) for key, value in inputs.items()}
    options = {"max_new_tokens": 2, "do_sample": True, "temperature": 1.5, "top_k": 12, "pad_token_id": 0}
    counts = []
    for patch in (False, True):
        if patch:
            qwen_patch.patch_model(model)
        drawn = torch.cat([model.generate(**inputs, **options)[:, -1] for _ in range(150)])
        counts.append(drawn.bincount(minlength=model.config.vocab_size).double())
    both = counts[0] + counts[1]
    common = both >= 20
    statistic = float(((counts[0] - counts[1])[common] ** 2 / both[common]).sum())
    df = int(common.sum())
    assert df > 5
    assert statistic < df + 5 * math.sqrt(2 * df)


def edit(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(-1)


def replace(model: PreTrainedModel) -> None:
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.detach().flip(0).contiguous())


def retype(model: PreTrainedModel) -> None:
    model.half()


def move(model: PreTrainedModel) -> None:
    model.cpu().cuda()


@pytest.mark.cuda
@pytest.mark.parametrize("change", [edit, replace, retype, move])
def test_nothing_stale_is_replayed(change):
    model, _ = bundled("tiny-qwen3")
    inputs, options = random_batch(model, 6, 11), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    qwen_patch.patch_model(model)
    before = model.generate(**inputs, **options)
    change(model)
    found = model.generate(**inputs, **options)
    fresh = Session(model, 2, 256, LogitsProcessorList(), False)
    model.__dict__[RUNTIME].sessions.clear()
    assert torch.equal(model.generate(**inputs, **options), found)
    assert fresh.embedding.dtype == model.dtype
    assert torch.equal(found, before) == (change is move)


@pytest.mark.cuda
def test_two_threads_on_one_model():
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    prompts = [random_batch(model, 5), random_batch(model, 9)]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(**inputs, **options) for inputs in prompts]
    found: list[list[torch.Tensor]] = [[], []]

    def work(i: int) -> None:
        for _ in range(4):
            found[i].append(model.generate(**prompts[i], **options))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(found[i]) == 4
        assert all(torch.equal(result, expected[i]) for result in found[i])


@pytest.mark.cuda
def test_memory_comes_back_and_does_not_grow():
    model, _ = bundled("tiny-qwen2")
    inputs = random_batch(model, 5)
    model.generate(**inputs, max_new_tokens=4)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    qwen_patch.patch_model(model)
    used = []
    for length in (20, 300, 600, 20, 300, 600, 20):
        model.generate(**inputs, max_new_tokens=length, do_sample=False)
        used.append(torch.cuda.memory_allocated() - before)
    assert len(model.__dict__[RUNTIME].sessions) == runtime.MAX_SESSIONS
    assert used[-1] <= max(used[:4])
    qwen_patch.unpatch_model(model)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20  # what the library for matrix products keeps


@pytest.mark.cuda
def test_no_memory_for_a_session(monkeypatch, caplog):
    model, _ = bundled("tiny-qwen2")
    inputs, options = random_batch(model, 5), {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **options)
    qwen_patch.patch_model(model, fusion="both")

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runtime, "Session", full)
    found = model.generate(**inputs, **options)
    assert found.shape == expected.shape
    assert "no memory for the cache of the decode runtime" in caplog.text

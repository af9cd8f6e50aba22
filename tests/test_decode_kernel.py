"""The decode runtime on CUDA: its tokens against the stock model's, its graphs, what makes them stale, its memory."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import edit, random_batch, replace
from models import TRAINED, assert_parts_only_at_ties, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import qwen_patch
from qwen_patch.generation import captured, graphs, runtime
from qwen_patch.loading import BUNDLED
from qwen_patch.modules.causal_lm import RUNTIME

pytestmark = pytest.mark.cuda


def bundled(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Any]:
    folder = BUNDLED.get(name, name)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda")
    model.generation_config.eos_token_id = None
    return model, tokenizer


LENGTHS = [
    (7,),
    (5, 40, 1),
    (3, 9, 1, 30, 12, 30, 2, 8),
    (600, 900),
    (7900,),
    (7900, 300, 5000),
    tuple(range(1, 13)),
    (300, *range(1, 12)),
]


@pytest.mark.parametrize("name", TRAINED, ids=lambda name: Path(name).name)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} of up to {max(lengths)}")
def test_greedy_on_cuda(name, lengths):
    model, _ = bundled(name)
    model.config.max_position_embeddings = 8192  # the runtime keeps no room for many times what a model was made for
    inputs, options = random_batch(model, *lengths), {"max_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    with qwen_patch.patched(model):
        found = model.generate(**inputs, **options)
        assert model.last_reason is None
        (kept,) = model.__dict__[RUNTIME].sessions.values()
        assert (kept.no_kernel is None) == (len(lengths) <= 8)
    assert_parts_only_at_ties(model, lambda: bundled(name, torch.float32)[0], inputs["attention_mask"], expected, found)


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_at_the_edges_of_buckets(rows, monkeypatch):
    """Each length twice: the first use of a bucket runs eagerly, the next ones replay; above 512 all run eagerly."""
    monkeypatch.setattr(runtime, "MAX_SESSIONS", 3)  # of 256, 512 and 1024 tokens
    model, _ = bundled("tiny-qwen3")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    lengths = (1, 16, 17, 128, 129, 244, 245, 512, 513, 600)
    prompts = [random_batch(model, *[max(1, n - 3 * row) for row in range(rows)]) for n in lengths * 2]
    expected = [model.generate(**inputs, **options) for inputs in prompts]
    qwen_patch.patch_model(model)
    found = [model.generate(**inputs, **options) for inputs in prompts]
    assert model.last_reason is None
    captured = {bucket for kept in model.__dict__[RUNTIME].sessions.values() for bucket in kept.prompts}
    assert captured == {16, 32, 128, 192, 256, 512}
    qwen_patch.unpatch_model(model)

    def truth() -> PreTrainedModel:
        return bundled("tiny-qwen3", torch.float32)[0]

    for inputs, a, b in zip(prompts, expected, found, strict=True):
        assert_parts_only_at_ties(model, truth, inputs["attention_mask"], a, b)


@pytest.mark.parametrize(
    ("family", "sizes", "rows"),
    [
        ("qwen3", {"head_dim": 80, "hidden_size": 320}, 2),
        ("llama", {"head_dim": 64, "hidden_size": 258, "num_attention_heads": 6}, 1),
        ("qwen2", {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}, 64),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 32, "hidden_size": 512}, 8),
    ],
    ids=["head size", "hidden size", "rows", "key-value heads"],
)
def test_what_the_kernel_does_not_take(family, sizes, rows):
    sizes = {"vocab_size": 1000, "initializer_range": 0.05, "max_position_embeddings": 1024} | sizes
    model = small_model(family, torch.bfloat16, "cuda", **sizes)

    def truth() -> PreTrainedModel:
        exact = small_model(family, torch.float32, "cuda", **sizes)
        exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
        return exact

    inputs = random_batch(model, *[1 + 7 * row % 40 for row in range(rows)])
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    with qwen_patch.patched(model):
        found = model.generate(**inputs, **options)
        assert model.last_reason is None
        (kept,) = model.__dict__[RUNTIME].sessions.values()
        assert kept.no_kernel is not None
    assert_parts_only_at_ties(model, truth, inputs["attention_mask"], expected, found)


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


@pytest.mark.parametrize("lengths", [(9, 4), (240, *range(1, 10))], ids=["decode_step", "graphs on the way"])
def test_same_seed_same_tokens(lengths):
    """The second: of more rows than decode_step has, its first call captures a graph for longer texts in the midst."""
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    options = {"max_new_tokens": 48, "do_sample": True, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3}
    if len(lengths) > 2:
        options |= {"max_new_tokens": None, "max_length": 520}
    inputs = random_batch(model, *lengths)
    found = []
    for seed in (3, 3, 4, 3):  # the first call captures the graph
        torch.manual_seed(seed)
        found.append(model.generate(**inputs, **options, pad_token_id=0))
    assert model.last_reason is None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[2])


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


def exchange(model: PreTrainedModel) -> None:
    """So that all that a graph reads is still there."""
    one, other = model.model.layers[0].mlp, model.model.layers[1].mlp
    one.up_proj, other.up_proj = other.up_proj, one.up_proj


def retype(model: PreTrainedModel) -> None:
    model.half()


def move(model: PreTrainedModel) -> None:
    model.cpu().cuda()


@pytest.mark.parametrize("change", [edit, replace, exchange, retype, move])
def test_nothing_stale_is_replayed(change):
    model, _ = bundled("tiny-qwen3")
    inputs, options = random_batch(model, 6, 11), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    qwen_patch.patch_model(model)
    before = model.generate(**inputs, **options)
    change(model)
    found = model.generate(**inputs, **options)
    sessions = model.__dict__[RUNTIME].sessions
    assert {session.embedding.dtype for session in sessions.values()} == {model.dtype}
    sessions.clear()
    assert torch.equal(model.generate(**inputs, **options), found)
    if change is not retype:  # in another dtype the tokens may, and need not, be others
        assert torch.equal(found, before) == (change is move)


def test_a_context_that_shrinks_and_grows_again():
    """On one session, whose parts of attention a short context leaves as a long one has left them."""
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    options = {"max_length": 1000, "do_sample": False, "pad_token_id": 0}
    prompts, expected = [random_batch(model, 20), random_batch(model, 900)], []
    for inputs in prompts:
        expected.append(model.generate(**inputs, **options))
        model.__dict__[RUNTIME].sessions.clear()
    for i in (1, 0, 1, 0, 1):
        assert torch.equal(model.generate(**prompts[i], **options), expected[i])
    assert len(model.__dict__[RUNTIME].sessions) == 1


def test_calls_on_different_streams():
    """A call that ends early leaves steps under way, on its stream; the next one, on another, must not meet them."""
    model, _ = bundled("tiny-qwen3")
    qwen_patch.patch_model(model)
    options = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    prompts = [random_batch(model, 5), random_batch(model, 9)]
    expected = [model.generate(**inputs, **options) for inputs in prompts]
    ends = [int(tokens[0, inputs["input_ids"].shape[1] + 3]) for tokens, inputs in zip(expected, prompts, strict=True)]
    expected = [model.generate(**i, **options, eos_token_id=end) for i, end in zip(prompts, ends, strict=True)]
    torch.cuda.synchronize()
    for _ in range(10):
        for inputs, end, tokens in zip(prompts, ends, expected, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                assert torch.equal(model.generate(**inputs, **options, eos_token_id=end), tokens)


def test_a_default_device():
    model, _ = bundled("tiny-qwen2")
    qwen_patch.patch_model(model)
    inputs, options = random_batch(model, 5, 8), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    with torch.device("cuda"):
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert model.last_reason is None


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


def test_memory_comes_back_and_does_not_grow():
    model, _ = bundled("tiny-qwen2")
    inputs = random_batch(model, 5)
    for _ in range(2):  # stock and patched: the library for matrix products keeps memory for each stream
        model.generate(**inputs, max_new_tokens=4)
        qwen_patch.patch_model(model)
    qwen_patch.unpatch_model(model)
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
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_memory_of_the_graphs_of_prompts(monkeypatch):
    """All buckets of a session share one pool, and further rounds of prompts take no more."""
    monkeypatch.setattr(runtime, "MAX_SESSIONS", 3)  # of 256, 512 and 1024 tokens
    model, _ = bundled("tiny-qwen2")
    prompts = [random_batch(model, n) for n in captured.BUCKETS]
    qwen_patch.patch_model(model)
    reserved = []
    for _ in range(3):
        for inputs in prompts:
            model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[1]
    sessions = model.__dict__[RUNTIME].sessions.values()
    assert sum(len(kept.prompts) for kept in sessions) == len(captured.BUCKETS)


def test_no_memory_for_a_graph(monkeypatch, caplog):
    model, _ = bundled("tiny-qwen2")
    inputs, options = random_batch(model, 5), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    qwen_patch.patch_model(model)
    expected = model.generate(**inputs, **options)
    (kept,) = model.__dict__[RUNTIME].sessions.values()
    kept.prompts.clear()

    def full(*args: Any) -> None:
        torch.empty(2**50, device="cuda")

    # Out of memory in the midst of the capture itself, after the run before it.
    monkeypatch.setattr(captured, "capture", lambda work, device, pool: graphs.capture(full, device, pool))
    before = torch.cuda.current_stream()
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert torch.cuda.current_stream() == before
    assert caplog.text.count("no memory for a graph of prompts of 16 tokens") == 1
    assert not kept.prompts


def test_no_memory_for_a_session(monkeypatch, caplog):
    model, _ = bundled("tiny-qwen2")
    inputs, options = random_batch(model, 5), {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **options)
    qwen_patch.patch_model(model, fusion="both")

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(runtime.SESSIONS, "cuda", full)
    found = model.generate(**inputs, **options)
    assert found.shape == expected.shape
    assert "no memory for the decode runtime" in caplog.text

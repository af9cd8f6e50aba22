"""decode_step on the CPU: its logits against the stock forward, its choice of tokens, its threads, its refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import edit, random_batch, replace
from models import answers, assert_parts_only_at_ties, small_model
from test_decode_int8 import int8_model
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

import qwen_patch
from qwen_patch.generation.session import Session
from qwen_patch.loading import BUNDLED
from qwen_patch.modules.causal_lm import RUNTIME

SHAPES = {
    "qwen2, 7 heads a group": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 64}),
    "qwen3, 128": ("qwen3", {"hidden_size": 320, "num_attention_heads": 4, "head_dim": 128}),
    "llama, one head a group": ("llama", {"hidden_size": 264, "num_key_value_heads": 4, "head_dim": 96}),
    "nothing a multiple of 8": ("qwen3", {"hidden_size": 77, "head_dim": 18, "intermediate_size": 131}),
    "mistral, tied": ("mistral", {"hidden_size": 576, "head_dim": 32, "tie_word_embeddings": True}),
}
BATCHES = [(1, 3), (1, 500), (3, 65), (33, 9)]


def model_and_truth(shape: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A small model, and the same numbers in a dtype that shows its errors."""
    family, sizes = SHAPES[shape]
    sizes = {"intermediate_size": 448, "vocab_size": 1003, "initializer_range": 0.05} | sizes
    sizes |= {"max_position_embeddings": 1024}
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    model, truth = (small_model(family, d, **sizes) for d in (dtype, wide))
    truth.load_state_dict({k: v.to(wide) for k, v in model.state_dict().items()})
    return model, truth


def step_of(session: Session, ids: torch.Tensor) -> torch.Tensor:
    """Logits after ids [rows, T], the last token of which has gone through `decode_step`."""
    with torch.no_grad():
        session.start(ids[:, :-1], [0] * len(ids), LogitsProcessorList())
        session.put(ids[:, -1])
        session.step()
    return session.logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length"), BATCHES)
def test_step_against_the_stock_forward(shape, dtype, rows, length):
    """As test_decode_step_cuda.py judges CUDA's: the error against the same model in a wider dtype exceeds the stock
    model's own by at most a tenth, over a few inputs: a single one's ratio varies by as much."""
    model, truth = model_and_truth(shape, dtype)
    decoded = Session(model, rows, 1024, LogitsProcessorList(), False)
    assert decoded.no_kernel is None
    errors = torch.zeros(2, dtype=torch.float64)
    for _ in range(3 if rows > 1 else 8):
        ids = torch.randint(0, 1003, (rows, length + 1))
        exact, stock = answers(truth, ids).logits[:, -1], answers(model, ids).logits[:, -1].to(truth.dtype)
        ours = step_of(decoded, ids).to(truth.dtype)
        errors += torch.stack([(ours - exact).square().sum(), (stock - exact).square().sum()])
        assert torch.equal(decoded.tokens, ours.argmax(-1))
        assert torch.equal(decoded.history[:, length + 1], decoded.tokens)
        assert decoded.state.tolist()[1:] == [length + 2] + [length + 1] * rows
    assert errors[0].sqrt() <= 1.1 * errors[1].sqrt()


INT8 = {"hidden_size": 200, "intermediate_size": 328, "initializer_range": 0.05}


@pytest.mark.parametrize("activations", ["w8a16", "w8a8"])
@pytest.mark.parametrize("head", [False, True], ids=["", "lm_head too"])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_int8_step_against_the_modules(activations, head, rows):
    """The modules' int8 products are the op's: in float32 the two differ as two orders of sums do. That may tip the
    rounding of an activation to int8, by 1/127 of its group's largest, about once in 40 tokens here: not in most."""
    model = int8_model("qwen2", activations, head, **INT8)
    decoded, errors = Session(model, rows, 256, LogitsProcessorList(), False), []
    assert decoded.no_kernel is None
    for _ in range(5):
        ids = torch.randint(0, 128, (rows, 4))
        expected, found = answers(model, ids).logits[:, -1], step_of(decoded, ids)
        errors += ((found - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
    assert sorted(errors)[len(errors) // 2] < 1e-5
    assert max(errors) < (5e-2 if activations == "w8a8" else 1e-5)


@pytest.mark.parametrize("activations", ["w8a16", "w8a8"])
@pytest.mark.parametrize("rows", [1, 5])
def test_int8_step_in_bfloat16(activations, rows):
    """Judged as the 16-bit steps are."""
    truth, model = (int8_model("qwen3", activations, **INT8) for _ in range(2))
    model.to(torch.bfloat16)
    truth.load_state_dict({k: v.float() if v.dtype == torch.bfloat16 else v for k, v in model.state_dict().items()})
    decoded, errors = Session(model, rows, 256, LogitsProcessorList(), False), torch.zeros(2)
    for _ in range(16):
        ids = torch.randint(0, 128, (rows, 40))
        exact, stock = answers(truth, ids).logits[:, -1], answers(model, ids).logits[:, -1].float()
        ours = step_of(decoded, ids).float()
        errors += torch.stack([(ours - exact).square().sum(), (stock - exact).square().sum()])
    assert errors[0].sqrt() <= 1.1 * errors[1].sqrt()


def bundled(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[name], dtype=dtype)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize(
    "lengths", [(7,), (5, 40, 1), (3, 9, 1, 30, 12, 30, 2, 8), (600, 900), tuple(range(1, 13))], ids=len
)
def test_greedy_in_bfloat16(name, lengths):
    model = bundled(name)
    inputs, options = random_batch(model, *lengths), {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    with qwen_patch.patched(model):
        found = model.generate(**inputs, **options)
        assert model.last_reason is None
        (kept,) = model.__dict__[RUNTIME].sessions.values()
        assert kept.no_kernel is None
    assert_parts_only_at_ties(model, lambda: bundled(name, torch.float32), inputs["attention_mask"], expected, found)


@pytest.mark.parametrize("change", [edit, replace, lambda model: model.half()], ids=["edit", "replace", "retype"])
def test_nothing_stale_is_used(change):
    model = bundled("tiny-qwen3")
    inputs, options = random_batch(model, 6, 11), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    qwen_patch.patch_model(model)
    before = model.generate(**inputs, **options)
    change(model)
    found = model.generate(**inputs, **options)
    assert model.last_reason is None
    model.__dict__[RUNTIME].sessions.clear()
    assert torch.equal(model.generate(**inputs, **options), found)
    assert not torch.equal(found, before)


def prepared(rows: int = 2) -> Session:
    """A session of a small model after a prompt of 5 tokens."""
    session = Session(small_model("qwen3"), rows, 16, LogitsProcessorList(), False)
    ids = torch.randint(0, 128, (rows, 5))
    session.start(ids, [0] * rows, LogitsProcessorList())
    session.put(ids[:, 0])
    return session


def test_banned_tokens():
    """They are not chosen before their column, and are logits as any."""
    session = prepared()
    kept = [session.state.clone(), session.tokens.clone()]
    session.step()
    logits, first = session.logits.clone(), session.tokens.clone()
    for column, chosen in ((int(kept[0][1]), False), (int(kept[0][1]) + 1, True)):
        for tensor, value in zip((session.state, session.tokens), kept, strict=True):
            tensor.copy_(value)
        session.banned[:4] = torch.tensor([column, *first.tolist(), int(first[0])])
        session.step()
        assert torch.equal(session.logits, logits)
        held = logits.index_fill(1, first, -math.inf) if chosen else logits
        assert torch.equal(session.tokens, held.argmax(-1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_logits_that_are_no_numbers(value):
    """Chosen as torch.argmax chooses, and the other row is as it was."""
    plain, session = prepared(), prepared()
    plain.step()
    session.head.weight.data[[7, 50, 127]] *= value
    with torch.no_grad():
        session.step()
    assert torch.equal(session.tokens, session.logits.argmax(-1))
    session.head.weight.data[:] = 1
    session.cache[:, :, 0] = value
    session.step()
    assert session.logits[1].isfinite().all()


def test_refusals():
    def refused(message: str, change: Any) -> None:
        session = prepared()
        change(session)
        state, tokens = session.state.clone(), session.tokens.clone()
        with pytest.raises(RuntimeError, match=message):
            session.step()
        assert torch.equal(session.state, state)
        assert torch.equal(session.tokens, tokens)

    refused("row 1 has 16 tokens, and there is room for 16", lambda s: s.state[3].fill_(16))
    refused("row 0 has -1 tokens", lambda s: s.state[2].fill_(-1))
    refused("token 128 of row 1 is not in the vocabulary of 128", lambda s: s.tokens[1].fill_(128))
    refused("column 16 is outside of a history of 16", lambda s: s.state[1].fill_(16))
    refused(r"expects a contiguous cos \[16, 16\]", lambda s: setattr(s, "cos", s.cos.t().contiguous().t()))
    refused(r"expects a contiguous logits \[2, 128\]", lambda s: setattr(s, "logits", s.logits[:1]))
    refused("weights is 3", lambda s: s.sizes.update(weights=3))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads(threads):
    """More than there are processors, too; and two models at once, as two requests of a server."""
    before = torch.get_num_threads()
    models = [qwen_patch.patch_model(small_model(family)) for family in ("qwen3", "llama")]
    options = {"max_new_tokens": 40, "do_sample": False}
    ids = torch.randint(0, 128, (2, 5))
    expected = [qwen_patch.unpatch_model(model).generate(ids, **options) for model in models]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def generate(number: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(3):
            found[number].append(qwen_patch.patch_model(models[number]).generate(ids, **options))

    try:
        workers = [threading.Thread(target=generate, args=(number,)) for number in found]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(100)
            assert not worker.is_alive()
    finally:
        torch.set_num_threads(before)
    for number, tokens in found.items():
        assert all(torch.equal(t, expected[number]) for t in tokens)
        assert models[number].last_reason is None


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_parts_of_a_context(threads):
    """A context is cut into as many parts as the threads want, of 64 keys or more: float32 shows one lost key."""
    before = torch.get_num_threads()
    model = small_model("qwen3", num_key_value_heads=1, max_position_embeddings=1024)
    decoded, ids = Session(model, 2, 512, LogitsProcessorList(), False), torch.randint(0, 128, (2, 301))
    try:
        torch.set_num_threads(threads)
        found = step_of(decoded, ids)
    finally:
        torch.set_num_threads(before)
    expected = answers(model, ids).logits[:, -1]
    assert (found - expected).norm() / expected.norm() < 1e-5


FORKED = """
import os, torch
from models import small_model
import qwen_patch
model = qwen_patch.patch_model(small_model("qwen3"))
ids = torch.arange(5)[None]
expected = model.generate(ids, max_new_tokens=20, do_sample=False)
if os.fork() == 0:
    torch.set_num_threads(1)  # as workers of a DataLoader: torch's own threads do not survive a fork
    equal = torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    os._exit(0 if equal and model.last_reason is None else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


FORKED_MEANWHILE = """
import os, threading, torch
from models import small_model
from transformers import TextStreamer
import qwen_patch
torch.set_num_threads(1)
model = qwen_patch.patch_model(small_model("qwen3"))
ids = torch.arange(5)[None]
expected = model.generate(ids, max_new_tokens=20, do_sample=False)
under_way, go_on = threading.Event(), threading.Event()

class Slow(TextStreamer):
    def __init__(self): pass
    def put(self, tokens):
        if tokens.numel() == 1:  # not the prompt, which is put before the turn
            under_way.set()
            go_on.wait(60)
    def end(self): pass

thread = threading.Thread(target=lambda: model.generate(ids, max_new_tokens=20, do_sample=False, streamer=Slow()))
thread.start()
under_way.wait(60)
if os.fork() == 0:
    equal = torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    os._exit(0 if equal and model.last_reason is None else 1)
go_on.set()
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("code", [FORKED, FORKED_MEANWHILE], ids=["alone", "while a thread generates"])
def test_a_forked_worker(code):
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)

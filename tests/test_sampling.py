"""How a session draws the next token from its scores."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from qwen_patch.generation.sampling import Filters, choose, draw, split
from qwen_patch.ops import DTYPES
from qwen_patch.ops.decode_step import MAX_BANNED
from qwen_patch.ops.draw_token import LARGEST_K, draw_token, drawn


def test_sampling_draws_from_the_distribution():
    """draw() against the probabilities: a chi-square of 63 degrees of freedom is over 120 once in 50,000 runs."""
    scores = torch.randn(64)
    draws = draw(scores.softmax(-1).expand(200_000, 64).contiguous()).bincount(minlength=64)
    expected = scores.softmax(0) * draws.sum()
    assert float(((draws - expected) ** 2 / expected).sum()) < 120
    assert torch.equal(choose(scores[None], False), scores.argmax()[None])


TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY = (
    logits_process.TemperatureLogitsWarper(0.7),
    logits_process.TopKLogitsWarper(40),
    logits_process.TopPLogitsWarper(0.8),
    logits_process.MinPLogitsWarper(0.05),
    logits_process.RepetitionPenaltyLogitsProcessor(1.3),
)
KEEP_3 = [
    logits_process.TopKLogitsWarper(10, min_tokens_to_keep=3),
    logits_process.TopPLogitsWarper(0.01, min_tokens_to_keep=3),
    logits_process.MinPLogitsWarper(0.9, min_tokens_to_keep=3),
]
ORDERS = [[TOP_K], [TEMPERATURE, TOP_K, TOP_P], [TOP_K, TOP_P, MIN_P], [TEMPERATURE, TOP_K, MIN_P], KEEP_3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16: tokens that tie with the 40th
@pytest.mark.parametrize("processors", ORDERS, ids=lambda found: "-".join(type(item).__name__ for item in found))
def test_drawn_has_transformers_distribution(processors, dtype):
    """`drawn` for uniform numbers at equal distances: how often a token comes is its probability, but for one time."""
    scores = 2 * torch.randn(1, 3000).to(dtype)
    scores[0, :60] = scores.amax() - 1  # more than 40 in the second place
    expected = LogitsProcessorList(processors)(None, scores.float()).softmax(-1)[0]
    rest, filters = split(LogitsProcessorList(processors), 3000)
    assert not rest
    count = 20_000
    uniform = (torch.arange(count) + 0.5) / count
    found = drawn(scores.expand(count, -1), uniform, **filters._asdict()).bincount(minlength=3000) / count
    # Of tokens that tie, top-p keeps as many; which ones is up to the sort.
    torch.testing.assert_close(found.sort().values, expected.sort().values, atol=1.5 / count, rtol=0)
    torch.testing.assert_close(found[60:], expected[60:], atol=1.5 / count, rtol=0)


def test_what_is_left_to_the_processors():
    def of(*processors, vocabulary=5000):
        rest, filters = split(LogitsProcessorList(processors), vocabulary)
        return [type(item) for item in rest], filters

    assert of(TEMPERATURE, TOP_K, TOP_P) == ([], Filters(40, 0.7, 0.8, 0.0, 1))
    assert of(PENALTY, TOP_K, MIN_P) == ([type(PENALTY)], Filters(40, min_p=0.05))
    assert of(TOP_K, vocabulary=30) == ([], Filters(30))
    assert of(*KEEP_3) == ([], Filters(10, 1.0, 0.01, 0.9, 3))
    for others in (
        [TEMPERATURE, TOP_P],
        [logits_process.TopKLogitsWarper(LARGEST_K + 1)],
        [TOP_K, PENALTY],
        [TOP_K, TEMPERATURE],
        [TOP_K, MIN_P, TOP_P],
        [TOP_K, KEEP_3[1], MIN_P],
        [logits_process.TopKLogitsWarper(40, filter_value=-50.0)],
    ):
        assert of(*others) == ([type(item) for item in others], None)


NOTHING_BANNED = [0, *[-1] * MAX_BANNED]


def at_column(scores, uniform, filters, banned=NOTHING_BANNED, column=3):
    """(the tokens that draw_token gives, its history)."""
    rows, on = len(scores), {"device": scores.device}
    state = torch.tensor([9, column + 1], dtype=torch.int32, **on)
    tokens, history = torch.full((rows,), -7, **on), torch.full((rows, 7), -5, **on)
    banned = torch.tensor(banned, dtype=torch.int32, **on)
    draw_token(scores, uniform, banned, state, tokens, history, **filters._asdict())
    return tokens, history


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("vocabulary", [151936, 5000, 1003, 300])
def test_the_kernel_draws_what_drawn_does(dtype, vocabulary):
    """Equal: a difference takes a number within a few float32 steps of a sum, one row in 100,000."""
    torch.manual_seed(0)
    for filters in (
        Filters(20, 0.7, 0.8),
        Filters(50),
        Filters(256, 1.3, 0.95, 0.02),
        Filters(1),
        Filters(40, 1.0, 0.3, 0.2, 3),
    ):
        scores, uniform = 3 * torch.randn(8, vocabulary, device="cuda").to(dtype), torch.rand(8, device="cuda")
        scores[0, ::200] = 9.0  # as many ties as it has room for
        scores[1] = 1.5  # more ties than it has room for, and what is over them last
        scores[1, -3:] = 2.0
        found, _ = at_column(scores, uniform, filters)
        expected = drawn(scores, uniform, **filters._asdict())
        assert torch.equal(found[2:], expected[2:])
        assert torch.equal(found[0], expected[0])
        ties = min(1024, vocabulary) - 3
        assert found[1] in (*range(ties), *range(vocabulary - 3, vocabulary))


def test_what_is_never_drawn(device):
    scores = torch.randn(4, 5000, device=device).bfloat16()
    scores[:, 7], scores[0, 11], scores[1], scores[2, 4000] = 99, torch.nan, torch.nan, torch.inf
    ban, uniform = [5, 7, *[-1] * (MAX_BANNED - 1)], torch.full((4,), 0.999, device=device)
    found, history = at_column(scores, uniform, Filters(1), ban, column=4)
    best = scores[3].index_fill(0, torch.tensor(7, device=device), -torch.inf).argmax()
    assert found[2:].tolist() == [4000, best]
    assert found[0] not in (7, 11)
    assert found[1] in range(5000)
    assert torch.equal(history[:, 4], found)
    assert (history == -5).sum() == 4 * 6
    assert at_column(scores, uniform, Filters(1), ban, column=5)[0][[0, 2, 3]].tolist() == [7, 4000, 7]
    # A banned token has no probability, even as one of the k.
    few = torch.full((1, 2000), -torch.inf, device=device)
    few[0, 7:9] = 1
    assert at_column(few, uniform[:1], Filters(50), ban, column=4)[0].item() == 8


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 257}, "supports top_k of 1 to 256, got 257"),
        ({"temperature": 0.0}, "expects a temperature over 0"),
        ({"scores": torch.zeros(300, 2).t()}, "expects contiguous scores"),
        ({"uniform": torch.zeros(3)}, r"can't use uniform \[3\] float32 with scores \[2, 300\]"),
    ],
)
def test_bad_input_of_draw_token_is_refused(changed, message):
    given = {"scores": torch.zeros(2, 300), "uniform": torch.zeros(2), **Filters(20)._asdict()} | changed
    scores, uniform = (given.pop(name).cuda() for name in ("scores", "uniform"))
    with pytest.raises(RuntimeError, match=message):
        at_column(scores, uniform, Filters(**given))

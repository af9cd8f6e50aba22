"""How a session draws the next token from its scores."""

from __future__ import annotations

import pytest
import torch
from models import token_ids
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from qwen_patch.generation import sampling
from qwen_patch.generation.sampling import choose, draw


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16: tokens that tie with the 40th
@pytest.mark.parametrize(
    "filters", [[TOP_K], [TOP_K, TOP_P], [PENALTY, TEMPERATURE, TOP_K, TOP_P, MIN_P], [TOP_K, MIN_P]]
)
def test_a_short_list_has_the_same_distribution(filters, dtype, monkeypatch):
    tokens, scores = token_ids(3, 9), torch.randn(3, 5000).to(dtype).float()
    scores[0, :60] = 3.25  # more than 40 in the first place
    expected = LogitsProcessorList(filters)(tokens, scores.clone()).softmax(-1)
    chooser = sampling.Chooser(LogitsProcessorList(filters), True, 5000, short_list=True)
    assert chooser.short == 512
    asked = []
    monkeypatch.setattr(sampling, "choose", lambda scores, do_sample: asked.append(scores) or scores.argmax(-1))
    best = chooser(tokens, scores.clone())
    found = asked[0].softmax(-1)
    assert found.shape == (3, 512)
    # Of tokens that tie, top-p keeps as many; which ones is up to the sort.
    torch.testing.assert_close(found.sort().values, expected.sort().values[:, -512:])
    assert torch.equal(expected.gather(1, best[:, None]).squeeze(1), expected.amax(-1))


def test_short_lists_only_where_nothing_else_is_asked_for():
    def length(*processors, vocabulary=5000):
        return sampling.short_list_of(LogitsProcessorList(processors), vocabulary)[1]

    assert length(TEMPERATURE, TOP_K, TOP_P) == 512
    assert length(logits_process.TopKLogitsWarper(200)) == 800
    assert length(logits_process.TopKLogitsWarper(1000)) == 0
    assert length(TOP_K, vocabulary=1000) == 0
    assert length(TOP_P, MIN_P) == 0
    assert length(TOP_K, PENALTY) == 0  # it knows tokens by their number
    assert length(logits_process.TopKLogitsWarper(40, filter_value=-50.0)) == 0

"""perplexity: its windows, its intervals, its command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from qwen_patch.benchmarks import perplexity
from qwen_patch.cli import app
from qwen_patch.loading import UsageError, load_model, sample_text

runner = CliRunner()


def test_windows_score_every_token_once_with_its_context():
    for total, length, stride in [(10, 4, 2), (11, 4, 3), (3, 8, 4), (9, 4, 3), (2, 2, 1)]:
        scored = []
        for begin, end, first in perplexity.windows(total, length, stride):
            assert end - begin <= length
            assert begin < first
            scored += range(first, end)
        assert scored == list(range(1, total))


def test_perplexity_is_that_of_the_whole_text():
    model, tokenizer = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
    ids = perplexity.text_ids(tokenizer, sample_text(), 100)
    document = perplexity.run(model, "tiny", "text", ids, ["both"], 128, 64, None)
    stock, both = document["rows"]
    with torch.no_grad():
        expected = model(ids[None], labels=ids[None]).loss.item()
    assert stock["nll_mean"] == pytest.approx(expected, rel=1e-5)
    assert stock["vs_stock"] == {"ratio": 1.0, "interval95": (1.0, 1.0)}
    assert both["perplexity"] == pytest.approx(stock["perplexity"], rel=1e-4)
    short = perplexity.run(model, "tiny", "text", ids, ["both"], 32, 16, None)
    assert short["settings"] == {"text": "text", "tokens": 99, "window": 32, "stride": 16, "windows": 6}
    assert short["rows"][0]["perplexity"] > stock["perplexity"]  # less context
    with pytest.raises(UsageError, match="fewer than two tokens"):
        perplexity.text_ids(tokenizer, "", 100)


def test_the_interval_holds_a_difference_that_is_there_and_zero_where_there_is_none():
    torch.manual_seed(0)
    stock = (100 * torch.rand(40)).tolist()
    counts = [10] * 40
    low, high = perplexity.ratio_interval(stock, [a + 0.1 + 0.01 * (i % 3 - 1) for i, a in enumerate(stock)], counts)
    assert 1.0 < low < 1.01005 < high < 1.011  # e^0.01
    noise = torch.randn(40).tolist()
    low, high = perplexity.ratio_interval(stock, [a + n for a, n in zip(stock, noise, strict=True)], counts)
    assert low < 1.0 < high


def test_the_perplexity_command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(sample_text()[:3000])
    args = ["perplexity", "--device", "cpu", "--text", str(text), "--window", "128", "--stride", "64"]
    result = runner.invoke(app, [*args, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["settings"]["text"] == "text.txt"
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == ["stock", "both", "int8-w8a16", "int8-w8a8"]
    assert "| int8-w8a8 |" in (tmp_path / "out.md").read_text()
    for variant, bar in (("int8-w8a16", 0.01), ("int8-w8a8", 0.02)):  # of a short text: rounding alone is 0.1% here
        assert abs(rows[variant]["vs_stock"]["ratio"] - 1) < bar
        assert rows[variant]["tokens_per_s"] > 0

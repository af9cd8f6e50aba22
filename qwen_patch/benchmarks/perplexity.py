"""`qwen-patch perplexity`: what a text costs stock, patched and int8, window by window, on one copy of the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..loading import UsageError
from . import results, timing
from .generate import STOCK, activate

ROWS_AT_ONCE = 256  # positions whose logits are float32 at one time: 156 MB of 152k


@dataclass
class Scores:
    """Of one variant, in the windows' order: summed negative log-likelihoods in nats, and the tokens preferred."""

    nll: list[float] = field(default_factory=list)
    top1: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0


def dataset_text(name: str, split: str, characters: int) -> str:
    """The beginning of a `datasets` data set, "NAME" or "NAME:CONFIG", streamed: no more is fetched than is used."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError("a data set needs the datasets package: pip install datasets") from error
    parts, length = [], 0
    try:
        for row in load_dataset(*name.split(":", 1), split=split, streaming=True):
            parts.append(row["text"])
            length += len(parts[-1])
            if length >= characters:
                break
    except KeyError as error:
        raise UsageError(f"data set {name!r} has no column {error}") from error
    except Exception as error:
        raise UsageError(f"data set {name!r}, split {split!r}: {str(error).splitlines()[0]}") from error
    return "\n".join(parts)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> torch.Tensor:
    """[T] ids of the text, at most `limit`."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0][:limit]
    if len(ids) < 2:
        raise UsageError("the text has fewer than two tokens")
    return ids


def windows(total: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) over `total` tokens: every token but the very first is scored once, after the first
    window with at least length - stride tokens before it. `stride` is less than `length`."""
    ends = [min(length, total)]
    while ends[-1] < total:
        ends.append(min(ends[-1] + stride, total))
    for scored, end in pairwise([1, *ends]):
        yield max(0, end - length), end, scored


@torch.no_grad()
def score(model: PreTrainedModel, ids: torch.Tensor, window: tuple[int, int, int], scores: Scores) -> None:
    """Adds one window of `ids` [T]."""
    begin, end, scored = window
    timing.synchronize(ids.device)
    start = time.perf_counter()
    logits = model(ids[None, begin:end], use_cache=False).logits[0, scored - 1 - begin : -1]
    timing.synchronize(ids.device)
    scores.seconds += time.perf_counter() - start
    targets, total = ids[scored:end], 0.0
    for rows, wanted in zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        total += torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="sum").item()
    scores.nll.append(total)
    scores.top1.append(logits.argmax(-1))


def ratio_interval(stock: list[float], other: list[float], counts: list[int], draws: int = 2000) -> tuple[float, float]:
    """95% interval of the ratio of two perplexities, by resampling the windows in pairs (percentile bootstrap)."""
    difference, tokens = np.asarray(other) - np.asarray(stock), np.asarray(counts)
    picks = np.random.default_rng(0).integers(0, len(tokens), (draws, len(tokens)))
    low, high = np.percentile(np.exp(difference[picks].sum(1) / tokens[picks].sum(1)), [2.5, 97.5])
    return float(low), float(high)


def run(
    model: PreTrainedModel,
    name: str,
    text_name: str,
    ids: torch.Tensor,
    variants: list[str],
    length: int,
    stride: int,
    output: Path | None,
) -> dict[str, Any]:
    """Scores `ids` [T] with the stock model and each variant; writes `<output>.json` and `.md` where one is given."""
    device = next(model.parameters()).device
    ids, variants = ids.to(device), [STOCK, *variants]
    spans = list(windows(len(ids), length, stride))
    counts = [end - scored for _, end, scored in spans]
    found = {variant: Scores() for variant in variants}
    with Progress(transient=True) as progress:
        task = progress.add_task(name, total=len(variants) * len(spans))
        for variant, scores in found.items():
            progress.update(task, description=f"{name}, {variant}")
            activate(model, variant)
            score(model, ids, spans[0], Scores())  # the first call of a variant pays for more than the call
            for span in spans:
                score(model, ids, span, scores)
                progress.advance(task)
    activate(model, STOCK)
    document = {
        "benchmark": "perplexity",
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "environment": results.environment(device),
        "settings": {
            "text": text_name,
            "tokens": sum(counts),
            "window": length,
            "stride": stride,
            "windows": len(spans),
        },
        "rows": [row_of(variant, scores, found[STOCK], counts, spans) for variant, scores in found.items()],
    }
    if output is not None:
        results.write_json(results.beside(output, ".json"), document)
        results.write_whole(results.beside(output, ".md"), table(document))
    return document


def row_of(
    variant: str, scores: Scores, stock: Scores, counts: list[int], spans: list[tuple[int, int, int]]
) -> dict[str, Any]:
    tokens = sum(counts)
    same = sum(int((a == b).sum()) for a, b in zip(stock.top1, scores.top1, strict=True))
    ratio = float(np.exp((sum(scores.nll) - sum(stock.nll)) / tokens))
    return {
        "variant": variant,
        "perplexity": float(np.exp(sum(scores.nll) / tokens)),
        "nll_mean": sum(scores.nll) / tokens,
        "vs_stock": {"ratio": ratio, "interval95": ratio_interval(stock.nll, scores.nll, counts)},
        "top1_agreement": same / tokens,
        "tokens_per_s": sum(end - begin for begin, end, _ in spans) / scores.seconds,
    }


COLUMNS = {
    "variant": "variant",
    "perplexity": "perplexity",
    "difference": "against stock [95%]",
    "top1": "top-1 agreement",
    "tokens_per_s": "tokens/s",
}


def flat_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with their differences as text, for tables."""

    def percent(ratio: float) -> str:
        return f"{100 * (ratio - 1):+.3f}%"

    rows = []
    for row in document["rows"]:
        low, high = map(percent, row["vs_stock"]["interval95"])
        difference = f"{percent(row['vs_stock']['ratio'])} [{low}, {high}]"
        texts = {"difference": difference, "top1": f"{row['top1_agreement']:.2%}"}
        rows.append(row | texts | {"perplexity": f"{row['perplexity']:.4f}"})
    return rows


def table(document: dict[str, Any]) -> str:
    env, settings = document["environment"], document["settings"]
    head = (
        f"# Perplexity, {document['model']}, {document['dtype']}, {settings['text']}\n\n"
        f"{env['device_name']}, torch {env['torch']}, transformers {env['transformers']}, commit {env['commit']}, "
        f"{env['date']}; {settings['tokens']} tokens in {settings['windows']} windows of {settings['window']}, stride "
        f"{settings['stride']}.\n\n"
    )
    return head + results.markdown_table(flat_rows(document), COLUMNS)

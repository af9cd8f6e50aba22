"""The flow of `validate_qwen`: one model in memory, run stock, patched and stock again, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..loading import sample_text
from ..patcher import explain, patch_model, unpatch_model
from ..plan import make_plan
from .agreement import Bar, bar_of, below_best, first_difference, in_wider_dtype
from .collect import Answers, Batch, collect, logits_of_answer, make_batches
from .locate import first_difference as first_differing_site
from .locate import outputs_of_sites
from .metrics import bitwise_equal, distance

# A patched model may be this much further from the float32 stock model than the stock model itself is.
ORACLE_MARGIN = 1.10
# A margin between two tokens inside this many mean logit errors is a tie: the difference of two logits, each off by a
# normal error, spreads by 1.8 of them, and this is 3.4 standard deviations.
TIE = 6
# The largest logit error that rounding explains, in eps of the dtype times the largest logit, for each root of the
# number of modules replaced: their roundings add up like a random walk. Trained models of 6 and 30 layers in float32
# measured 1 to 2 of these on a CPU and a GPU; a wrong kernel brings thousands.
ROUNDING = 4
# Weights may also make more of a rounding than a walk does: then the stock model is off as well, from itself in a wider
# dtype, and the difference of two models is within this many of its largest error.
CONDITION = 3


@dataclass
class Report:
    """What was found. `to_dict` is the JSON that `--json` writes; `reasons` says why it did not pass."""

    model: str
    fusion: str
    quantize: str | None
    dtype: str
    device: str
    backend: str
    positions: int = 0
    max_abs_logit_error: float = 0.0
    mean_abs_logit_error: float = 0.0
    kl_mean: float = 0.0
    top1_agreement: float = 0.0
    new_tokens: int = 0
    greedy_tokens_equal: bool = False
    greedy_differences: list[str] = field(default_factory=list)
    undo_bitwise: bool = False
    oracle: dict[str, float] | None = None
    modules_replaced: int = 0
    first_difference: str | None = None
    reasons: list[str] = field(default_factory=list)
    passed: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_prompts(count: int = 4) -> list[str]:
    """Passages of the bundled text, of unequal lengths."""
    paragraphs = [p.replace("\n", " ").strip() for p in sample_text().split("\n\n")]
    chosen = [p for p in paragraphs if len(p) > 120][:count]
    return [p[: 120 + 160 * i] for i, p in enumerate(chosen)]


def validate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    fusion: str = "both",
    backend: str = "auto",
    quantize: str | None = None,
    activations: str = "auto",
    prompts: list[str] | None = None,
    new_tokens: int = 64,
    oracle: bool = False,
) -> Report:
    """Compares the patched model with the stock one, and judges.

    The model is run stock, patched, and stock again. It passes if the undo is bitwise, the logits are as close as the
    dtype's rounding allows (what it does to the stock model counts, where that is more), and every token that it
    prefers is the stock model's. Where a token differs, in 16 bits where any logit does, or with `oracle`, the judge is
    the stock model in float32: in 16 bits the patched model's mean error against it may exceed the stock model's by
    10%, and a token may differ only where the oracle's margin between the two is inside the models' own error. The
    oracle is made by casting this model in place, so the model is float32 afterwards; it is left unpatched.

    With `quantize`, the model passes if the undo is bitwise and it reaches the `BARS`: the share of positions where it
    prefers the stock model's token, or where the oracle's margin between the two is inside the stock model's own error,
    and the mean KL divergence. Greedy tokens may part. With or without it, the oracle looks at every token of an answer
    that has parted.
    """
    make_plan(model, fusion, backend, quantize=quantize, activations=activations)  # what can't be, before it takes time
    batches = make_batches(tokenizer, prompts or default_prompts(), next(model.parameters()).device)
    unpatch_model(model)
    stock = collect(model, batches, new_tokens)
    int8 = {} if quantize is None else {"quantize": quantize, "activations": activations, "keep_original": True}
    patch_model(model, fusion=fusion, backend=backend, **int8)
    patched = collect(model, batches, new_tokens)
    bar = bar_of(model, max(batch.ids.numel() for batch in batches))
    plan = explain(model)
    patched_sites = outputs_of_sites(model, plan, batches[0])
    unpatch_model(model)
    undone = collect(model, batches, 1)
    stock_sites = outputs_of_sites(model, plan, batches[0])

    found = distance(stock.logits, patched.logits)
    report = Report(
        model=name,
        fusion=fusion,
        quantize=None if quantize is None else f"{quantize} ({activations})",
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(next(model.parameters()).device),
        backend=backend,
        positions=found.positions,
        max_abs_logit_error=found.max_abs,
        mean_abs_logit_error=found.mean_abs,
        kl_mean=found.kl_mean,
        top1_agreement=found.top1_agreement,
        new_tokens=new_tokens,
        greedy_tokens_equal=bitwise_equal(stock.tokens, patched.tokens),
        # Of the logits: on a GPU, generate itself may part from an earlier run of the same stock model.
        undo_bitwise=bitwise_equal(stock.logits, undone.logits),
        modules_replaced=len(plan.replaced),
    )
    if not report.undo_bitwise:
        report.reasons.append("the model does not answer bitwise as before after the undo")
    if quantize is not None:
        _judge_int8(report, model, batches, stock, patched, bar)
        report.passed = not report.reasons
        return report
    limit = ROUNDING * len(plan.replaced) ** 0.5 * torch.finfo(model.dtype).eps * found.largest
    if not found.max_abs <= limit:
        limit = max(limit, CONDITION * _error_of_stock(model, batches, stock))
    if not found.max_abs <= limit:
        report.reasons.append(f"a logit is off by {found.max_abs:.3g}: rounding explains {limit:.3g}")
    narrow = model.dtype in (torch.bfloat16, torch.float16) and found.max_abs > 0
    if oracle or narrow or found.same_top1 < found.positions or not report.greedy_tokens_equal:
        _judge_by_oracle(report, model, batches, stock, patched)
    report.passed = not report.reasons
    if not report.passed:
        report.first_difference = first_differing_site(stock_sites, patched_sites)
    return report


def _error_of_stock(model: PreTrainedModel, batches: list[Batch], stock: Answers) -> float:
    """The largest error of its logits, against a wider dtype's; that of a model that is not finite is 0."""
    error = distance(collect(in_wider_dtype(model), batches, 1).logits, stock.logits).max_abs
    return error if isfinite(error) else 0.0


def _judge_int8(
    report: Report, model: PreTrainedModel, batches: list[Batch], stock: Answers, patched: Answers, bar: Bar
) -> None:
    """Adds the errors against the float32 stock model, and which bar is missed. Casts `model` to float32."""
    nn.Module.float(model)
    truth = collect(model, batches, 1)
    stock_error, patched_error = distance(truth.logits, stock.logits), distance(truth.logits, patched.logits)
    for batch, found in zip(batches, patched.tokens, strict=True):
        for row in range(found.shape[0]):
            one = _row(batch, row)
            _judge_text(report, one, logits_of_answer(model, one, found[row]), found[row], patched_error.max_abs)
    undecided = 0
    for exact, a, b in zip(truth.logits, stock.logits, patched.logits, strict=True):
        tokens = torch.stack([a.float().argmax(-1), b.float().argmax(-1)], dim=1)
        margins = exact.gather(1, tokens).diff(dim=1).abs()[tokens[:, 0] != tokens[:, 1]]
        undecided += int((margins <= TIE * stock_error.mean_abs).sum())
    report.oracle = {
        "stock_mean_abs_error": stock_error.mean_abs,
        "patched_mean_abs_error": patched_error.mean_abs,
        "stock_top1_agreement": stock_error.top1_agreement,
        "patched_top1_agreement": patched_error.top1_agreement,
        "top1_agreement_or_tie": report.top1_agreement + undecided / report.positions,
    }
    if not (top1 := report.oracle["top1_agreement_or_tie"]) >= bar.top1:
        report.reasons.append(f"top-1 agreement, ties included, is {top1:.2%}: the bar is {bar.top1:.1%}")
    if not report.kl_mean <= bar.kl:
        report.reasons.append(f"the mean KL divergence is {report.kl_mean:.3g} nats: the bar is {bar.kl:.3g}")


def _judge_by_oracle(
    report: Report, model: PreTrainedModel, batches: list[Batch], stock: Answers, patched: Answers
) -> None:
    """Adds the errors against the float32 stock model, and what is wrong by it. Casts `model` to float32."""
    narrow = model.dtype != torch.float32  # a float32 model is its own oracle: only the rounding bound judges its error
    nn.Module.float(model)  # PreTrainedModel's own refuses a model that was loaded in int8
    truth = collect(model, batches, 1)
    stock_error, patched_error = distance(truth.logits, stock.logits), distance(truth.logits, patched.logits)
    report.oracle = {
        "stock_mean_abs_error": stock_error.mean_abs,
        "patched_mean_abs_error": patched_error.mean_abs,
        "stock_max_abs_error": stock_error.max_abs,
        "patched_max_abs_error": patched_error.max_abs,
        "stock_top1_agreement": stock_error.top1_agreement,
        "patched_top1_agreement": patched_error.top1_agreement,
    }
    if narrow and not patched_error.mean_abs <= ORACLE_MARGIN * stock_error.mean_abs:
        report.reasons.append(
            f"mean error against the float32 model is {patched_error.mean_abs:.3g}, the stock model's is "
            f"{stock_error.mean_abs:.3g}"
        )
    noise = TIE * max(stock_error.mean_abs, patched_error.mean_abs)
    for exact, a, b, batch in zip(truth.logits, stock.logits, patched.logits, batches, strict=True):
        chosen_a, chosen_b = a.float().argmax(-1), b.float().argmax(-1)
        for p in (chosen_a != chosen_b).nonzero().flatten().tolist():
            margin = (exact[p, chosen_a[p]] - exact[p, chosen_b[p]]).abs().item()
            if not margin <= noise:
                report.reasons.append(f"{batch.name}: top-1 differs at position {p}, margin {margin:.3g}")
    largest = max(stock_error.max_abs, patched_error.max_abs)
    for batch, expected, found in zip(batches, stock.tokens, patched.tokens, strict=True):
        for row in range(expected.shape[0]):
            if torch.equal(expected[row], found[row]):
                continue
            one = _row(batch, row)
            exact = logits_of_answer(model, one, found[row])
            _judge_parting(report, one, exact, expected[row], found[row], noise)
            _judge_text(report, one, exact, found[row], largest)


def _row(batch: Batch, row: int) -> Batch:
    one = slice(row, row + 1)
    return Batch(
        f"{batch.name}, row {row + 1}" if batch.ids.shape[0] > 1 else batch.name, batch.ids[one], batch.mask[one]
    )


def _judge_text(report: Report, batch: Batch, exact: torch.Tensor, found: torch.Tensor, largest: float) -> None:
    """New tokens [N] of one prompt, all of them, also where they have parted from the stock model's; exact: the
    oracle's logits [N, V] in their places. A model whose logits are off by `largest` at most can't choose one that is
    further than twice that below the oracle's best."""
    margins = below_best(exact, found)
    worst = int(margins.argmax())
    if not margins[worst] <= 2 * largest:
        report.reasons.append(
            f"{batch.name}: new token {worst} is {margins[worst]:.3g} below the float32 model's best, and logits are "
            f"off by {largest:.3g} at most"
        )


def _judge_parting(
    report: Report, batch: Batch, exact: torch.Tensor, expected: torch.Tensor, found: torch.Tensor, noise: float
) -> None:
    """Greedy tokens [N] of one prompt that differ: at the first difference the oracle must be undecided."""
    _, position = first_difference(expected[None], found[None])
    margin = (exact[position, expected[position]] - exact[position, found[position]]).abs().item()
    line = f"{batch.name}: greedy tokens part at {position}, margin {margin:.3g}, error {noise:.3g}"
    report.greedy_differences.append(line)
    if not margin <= noise:
        report.reasons.append(line)

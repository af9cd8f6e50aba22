"""`qwen-patch bench`: model.generate, stock against patched, interleaved in one process on one copy of the weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from ..modules import FastGenerate, Int8Linear
from ..patcher import patch_model, unpatch_model
from ..quantization.convert import kept_bytes
from ..recipes import RECIPES
from ..validation.agreement import (
    BAR_OF_RANDOM_WEIGHTS,
    Agreement,
    Closeness,
    bar_of,
    compare_int8,
    compare_tokens,
)
from ..validation.collect import GREEDY
from . import results, timing

STOCK, STATIC = "stock", "static"
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}  # Qwen's own generation_config
INT8: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8-head": {"lm_head": True},
    "int8-w8a16": {"activations": "w8a16"},
    "int8-w8a8": {"activations": "w8a8"},
}
# What `patch_model` is given for a variant. "modules" is a full patch under Transformers' own loop; the ablations have
# that loop anyway. The int8 ones keep their originals, so that stock can come back.
VARIANTS = {fusion: {"fusion": fusion} for fusion in RECIPES} | {"modules": {"fusion": "both", "generation": "stock"}}
VARIANTS |= {name: {"quantize": "int8", **options} for name, options in INT8.items()}


@dataclass
class Samples:
    """What the rounds of one variant gave, in order; the rounds of all variants pair up."""

    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    bytes_a_token: int = 0  # what a decode step must read
    cold_s: float = 0.0  # the first generate, with all that is compiled or captured on the way


def options_of(variant: str, originals: bool | str = True) -> dict[str, Any]:
    """What `patch_model` is given. originals: where int8 keeps them."""
    return VARIANTS[variant] | ({"keep_original": originals} if variant in INT8 else {})


def activate(model: PreTrainedModel, variant: str, originals: bool | str = True) -> None:
    """Makes the model what `variant` names: stock code, or patched."""
    if variant in (STOCK, STATIC):
        unpatch_model(model)
    else:
        patch_model(model, **options_of(variant, originals))


def place_of_originals(model: PreTrainedModel) -> bool | str:
    """A GPU's memory where int8 fits beside a stock model: to the host's and back takes 20 s for 8 billion weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return True
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return "device" if free > sum(p.nbytes for p in model.parameters()) else True


def generate(
    model: PreTrainedModel, variant: str, ids: torch.Tensor, new_tokens: int, decoding: dict[str, Any] = GREEDY
) -> torch.Tensor:
    """The new tokens [B, new_tokens]."""
    options = decoding | ({"cache_implementation": "static"} if variant == STATIC else {})
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        **options,
    )
    return output[:, ids.shape[1] :]


def described(decoding: dict[str, Any]) -> str:
    if not decoding["do_sample"]:
        return "greedy"
    return "sampling with " + ", ".join(f"{name} {value}" for name, value in decoding.items() if name != "do_sample")


def bootstrap_interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95% interval of the median of paired ratios, by resampling the pairs (percentile bootstrap, Efron 1979)."""
    values = np.asarray(ratios)
    picks = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def bytes_a_token(model: PreTrainedModel, batch: int, context: int) -> int:
    """What a decode step must read: every weight once but for the embedding's other rows; keys and values."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * context * batch
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    skipped = 0 if tied else model.get_input_embeddings().weight.numel()
    scales = sum(m.scales.nbytes for m in model.modules() if isinstance(m, Int8Linear))
    weights = sum(p.nbytes for p in model.parameters()) + scales
    return weights + (cache - skipped) * model.dtype.itemsize


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """(seconds, what the call returned)."""
    timing.synchronize(device)
    start = time.perf_counter()
    result = call()
    timing.synchronize(device)
    return time.perf_counter() - start, result


def measure(
    model: PreTrainedModel,
    ids: torch.Tensor,
    variants: list[str],
    new_tokens: int,
    rounds: int,
    step: Callable[[], None],
    trained: bool = True,
    decoding: dict[str, Any] = GREEDY,
) -> tuple[dict[str, Samples], dict[str, Agreement | Closeness]]:
    """Checks each variant's greedy tokens against stock, then times all, one after the other, in alternating order.

    trained: whether int8 must come as close to stock as with trained weights. decoding: of what is timed.
    """
    device, samples = ids.device, {v: Samples() for v in variants}
    activate(model, STOCK)
    originals = place_of_originals(model)
    expected = generate(model, STOCK, ids, new_tokens)
    agreements = {}
    for variant in variants:
        activate(model, variant, originals)
        samples[variant].cold_s, found = _timed(lambda v=variant: generate(model, v, ids, new_tokens), device)
        samples[variant].bytes_a_token = bytes_a_token(model, len(ids), ids.shape[1] + new_tokens // 2)
        if variant in INT8:
            bar = bar_of(model, ids.numel()).kl if trained else BAR_OF_RANDOM_WEIGHTS
            tokens = functools.partial(generate, model, variant, ids, new_tokens)
            options = options_of(variant, originals)
            agreements[variant] = compare_int8(model, ids, expected, found, bar, tokens, options)
        else:
            again = functools.partial(activate, model, variant)
            agreements[variant] = compare_tokens(model, ids, expected, found, again)
        step()
    for i in range(rounds):
        for variant in variants if i % 2 == 0 else reversed(variants):
            activate(model, variant, originals)
            if isinstance(model, FastGenerate):  # its graphs went with the patch; what capturing costs is in `cold_s`
                for tokens in (1, new_tokens):  # they may be of two sessions
                    generate(model, variant, ids, tokens, decoding)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            sample = samples[variant]
            sample.first_token_s.append(_timed(lambda v=variant: generate(model, v, ids, 1, decoding), device)[0])
            sample.total_s.append(_timed(lambda v=variant: generate(model, v, ids, new_tokens, decoding), device)[0])
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - kept_bytes(model, device)
                sample.peak_bytes = max(sample.peak_bytes or 0, peak)
            step()
    activate(model, STOCK)
    return samples, agreements


def rows_of(
    samples: dict[str, Samples],
    agreements: dict[str, Agreement | Closeness],
    prompt: int,
    new_tokens: int,
    copy_gbps: float,
) -> list[dict[str, Any]]:
    def decode_s(s: Samples) -> list[float]:
        return [total - first for total, first in zip(s.total_s, s.first_token_s, strict=True)]

    def ratio(variant: list[float], stock: list[float]) -> dict[str, Any]:
        paired = [b / a for a, b in zip(variant, stock, strict=True)]
        return {"ratio": float(np.median(paired)), "interval95": bootstrap_interval(paired)}

    stock, rows = samples[STOCK], []
    for variant, s in samples.items():
        first, decode, total = timing.spread(s.first_token_s), timing.spread(decode_s(s)), timing.spread(s.total_s)
        decode_tps = (new_tokens - 1) / decode.median
        agreement = agreements[variant]
        correct = agreement.correct or variant == STOCK  # stock is right by definition, even where it parts from itself
        rows.append(
            {
                "prompt": prompt,
                "new_tokens": new_tokens,
                "variant": variant,
                "correct": correct,
                "cold_s": s.cold_s,
                "tokens": str(agreement),
                "first_token_ms": first.median * 1e3,
                "first_token_ms_quartiles": [first.low * 1e3, first.high * 1e3],
                "decode_tps": decode_tps,
                "decode_tps_quartiles": [(new_tokens - 1) / decode.high, (new_tokens - 1) / decode.low],
                "end_to_end_tps": new_tokens / total.median,
                "peak_gb": None if s.peak_bytes is None else s.peak_bytes / 1e9,
                "share_of_copy": decode_tps * s.bytes_a_token / (copy_gbps * 1e9),
                # How many times faster than stock; a variant whose tokens are wrong has no speed.
                "decode_vs_stock": ratio(decode_s(s), decode_s(stock)) if correct else None,
                "first_token_vs_stock": ratio(s.first_token_s, stock.first_token_s) if correct else None,
                "end_to_end_vs_stock": ratio(s.total_s, stock.total_s) if correct else None,
            }
        )
    return rows


def run(
    model: PreTrainedModel,
    name: str,
    prompts: dict[int, torch.Tensor],
    fusions: list[str],
    new_tokens: int,
    rounds: int,
    output: Path | None,
    static: bool = False,
    trained: bool = True,
    sample: bool = False,
) -> dict[str, Any]:
    """Measures every fusion at every prompt length; writes `<output>.json`, `.md` and `.png` where one is given.

    `prompts` maps a length to ids [B, length]. `static` adds Transformers' own compiled static cache as a
    second baseline. `trained`: as in `measure`. `sample`: times SAMPLING in place of greedy decoding.
    """
    device = next(model.parameters()).device
    variants, decoding = [STOCK, *fusions, *([STATIC] if static else [])], SAMPLING if sample else GREEDY
    copy_gbps = timing.copy_bandwidth(device).median
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        task = progress.add_task(name, total=len(prompts) * len(variants) * (rounds + 1))
        for length, ids in prompts.items():
            progress.update(task, description=f"{name}, prompt {length}")
            samples, agreements = measure(
                model, ids.to(device), variants, new_tokens, rounds, lambda: progress.advance(task), trained, decoding
            )
            rows += rows_of(samples, agreements, length, new_tokens, copy_gbps)
    document = {
        "benchmark": "generate",
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch": next(iter(prompts.values())).shape[0],
        "environment": results.environment(device),
        "settings": {"rounds": rounds, "new_tokens": new_tokens, "variants": variants, "decoding": described(decoding)},
        "copy_gbps": copy_gbps,
        "rows": rows,
    }
    if output is not None:
        from .plots import plot_generate

        results.write_json(results.beside(output, ".json"), document)
        results.write_whole(results.beside(output, ".md"), table(document))
        plot_generate(document, results.beside(output, ".png"))
    return document


TERMINAL_COLUMNS = {
    "prompt": "prompt",
    "variant": "variant",
    "first_token_ms": "first ms",
    "first": "x stock",
    "decode_tps": "tokens/s",
    "decode": "x stock [95%]",
    "tokens": "tokens",
}
COLUMNS = {
    "prompt": "prompt",
    "variant": "variant",
    "first_token_ms": "first token, ms",
    "first": "x stock",
    "decode_tps": "decode tokens/s",
    "decode": "x stock [95%]",
    "end_to_end_tps": "end to end tokens/s",
    "end": "x stock",
    "share_of_copy": "share of copy",
    "peak_gb": "peak GB",
    "cold_s": "first call, s",
    "tokens": "tokens",
}


def flat_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with their ratios as text, for tables."""

    def times(entry: dict[str, Any] | None, interval: bool) -> str:
        if entry is None:
            return "WRONG"
        low, high = entry["interval95"]
        return f"{entry['ratio']:.2f}" + (f" [{low:.2f}, {high:.2f}]" if interval else "")

    return [
        row
        | {
            "first": times(row["first_token_vs_stock"], False),
            "decode": times(row["decode_vs_stock"], True),
            "end": times(row["end_to_end_vs_stock"], False),
        }
        for row in document["rows"]
    ]


def table(document: dict[str, Any]) -> str:
    env = document["environment"]
    head = (
        f"# model.generate, {document['model']}, {document['dtype']}, batch {document['batch']}\n\n"
        f"{env['device_name']}, torch {env['torch']}, transformers {env['transformers']}, commit {env['commit']}, "
        f"{env['date']}; {document['settings']['new_tokens']} new tokens, {document['settings']['decoding']}, "
        f"{document['settings']['rounds']} "
        f"paired rounds, medians; copy {document['copy_gbps']:,.0f} GB/s.\n\n"
    )
    return head + results.markdown_table(flat_rows(document), COLUMNS)

"""`qwen-patch gemm`: the linears of a model at the shapes of real ones, each checked against float64, then timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from ..loading import UsageError
from ..ops.small_linear import MAX_TOKENS
from . import results, timing
from .gemm_candidates import BASELINE, TYPES, Candidate, Weights, candidates, shares_of_bound
from .gemm_outputs import Baseline, name, save
from .ops import MODELS

VOCABULARY = {"Qwen2.5-0.5B": 151936, "Qwen2.5-7B": 152064, "Qwen3-0.6B": 151936, "Qwen3-8B": 151936}
TOKENS = (1, 8, 16, 128, 512, 1734, 2048)
HEAD_TOKENS = 128  # generate asks the head for each sequence's last position only: a batch, never a prompt
SQUARE = "1472x4096x4096"
SETS = (SQUARE, *MODELS)
SAMPLE_US = 5000  # of calls a sample, so that neither the clock nor the start of a graph counts
COPIES = 1024  # of a weight, at most: of the smallest ones so many may fit into the cache


class Layer(NamedTuple):
    """Linears of one size [N, K], and for how many tokens."""

    names: str
    N: int
    K: int
    tokens: tuple[int, ...]


def model_layers(model: str, tokens: tuple[int, ...] | None) -> Iterator[Layer]:
    """Every linear of a model, the fused ones too; those of one size are one layer."""
    hidden, intermediate, heads, kv_heads, head_dim = MODELS[model]
    head_dim = head_dim or hidden // heads
    sizes = {
        "q": (heads * head_dim, hidden),
        "k": (kv_heads * head_dim, hidden),
        "v": (kv_heads * head_dim, hidden),
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
        "lm_head": (VOCABULARY[model], hidden),
    }
    for size in dict.fromkeys(sizes.values()):
        names = " ".join(n for n, s in sizes.items() if s == size)
        default = tuple(t for t in TOKENS if t <= HEAD_TOKENS) if names == "lm_head" else TOKENS
        yield Layer(names, *size, tokens or default)


def layers_of(shapes: str | None, m: list[int] | None, n: list[int] | None, k: list[int] | None) -> list[Layer]:
    """What the command's options name. Raises UsageError where they name nothing."""
    tokens = tuple(dict.fromkeys(m)) if m else None
    if n or k:
        if shapes is not None:
            raise UsageError("give --shapes, or -n and -k, not both")
        if not (n and k):
            raise UsageError("-n and -k go together: a weight is [N, K]")
        return [Layer("", *size, tokens or TOKENS) for size in dict.fromkeys(itertools.product(n, k))]
    if shapes in (None, SQUARE):
        return [Layer("", 4096, 4096, tokens or (1472,))]
    if shapes not in MODELS:
        raise UsageError(f"unknown shapes {shapes!r}: known are {', '.join(SETS)}")
    return list(model_layers(shapes, tokens))


def types_of(text: str) -> tuple[str, ...]:
    wanted = [part.strip() for part in text.split(",")]
    if unknown := [part for part in wanted if part not in TYPES]:
        raise UsageError(f"unknown type {unknown[0]!r}: supported are {', '.join(TYPES)}")
    return tuple(kind for kind in TYPES if kind in wanted)


def random_numbers(rows: int, K: int, seed: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, K], normal, made on the CPU: the same for every device."""
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).to(device)


def clock(candidate: Candidate, device: torch.device) -> tuple[Callable[[], float], int]:
    """us a call, and over how many copies of the weight: in turn, more than 4 times what the last-level cache holds.

    x stays warm, as the activations of a model are.
    """
    copies = min(COPIES, 1 + 4 * timing.last_level_cache(device) // candidate.weight_bytes)
    clones = [tuple(w.clone() for w in candidate.weights) for _ in range(copies - 1)]
    calls = [functools.partial(candidate.call, candidate.x, *weights) for weights in (candidate.weights, *clones)]
    turn = itertools.cycle(calls)

    def make(count: int) -> None:
        for _ in range(count):
            next(turn)()

    warm_up = timing.wall_clock_us(lambda: make(2), 2, device)
    warm_up()
    count = max(1, int(SAMPLE_US / warm_up()))
    if device.type == "cpu" or not candidate.capturable:
        return timing.wall_clock_us(lambda: make(count), count, device), copies
    turns = -(-min(count, COPIES) // copies)  # whole ones: a replay that stops before would meet the same weights again
    return timing.graph_us(lambda: [call() for _ in range(turns) for call in calls], turns * copies), copies


def outputs_of(found: list[Candidate]) -> list[tuple[Candidate, torch.Tensor]]:
    """What each gives; one that fails says so in its note."""
    outputs = []
    for c in found:
        try:
            if c.call is not None:
                outputs.append((c, c.call(c.x, *c.weights)))
        except RuntimeError as error:
            c.note = f"fails: {str(error).splitlines()[0]}"
    return outputs


def measure(
    x: torch.Tensor, weights: Weights, rounds: int, keep: Callable[[dict[str, Any], torch.Tensor], None]
) -> list[dict[str, Any]]:
    """One row a candidate, x float32 [M, K]. Only right ones are timed; `keep(row, output)` gets every result."""
    (M, K), N, device = x.shape, weights.shape[0], x.device
    found = list(candidates(x, weights))
    outputs = outputs_of(found)
    shares = shares_of_bound(outputs)
    clocks = {c.key: clock(c, device) for c, _ in outputs if shares[c.key] <= 1}
    spreads = timing.interleaved({key: measured for key, (measured, _) in clocks.items()}, rounds)
    output_of = {c.key: output for c, output in outputs}
    rows = []
    for c in found:
        row = {"shape": [M, N, K], "type": c.type, "candidate": c.name, "ours": c.ours, "note": c.note}
        # A peer that is missing or fails is neither right nor wrong; an op of ours that fails is wrong.
        row |= {"correct": False if c.ours else None, "error_of_bound": None, "us": None}
        if (output := output_of.get(c.key)) is not None:
            row |= {"correct": shares[c.key] <= 1, "error_of_bound": shares[c.key]}
            keep(row, output)
        if (spread := spreads.get(c.key)) is not None:
            moved = c.weight_bytes + c.x.nbytes + output.nbytes
            row |= {
                "us": spread.median,
                "us_quartiles": [spread.low, spread.high],
                "bytes": moved,
                "gbps": moved / spread.median / 1e3,
                "tflops": 2 * M * N * K / spread.median / 1e6,
                "weight_copies": clocks[c.key][1],
            }
            if BASELINE in spreads:
                row["vs_torch_bf16"] = spreads[BASELINE].median / spread.median
        rows.append(row)
    return rows


def run(
    device: torch.device,
    layers: list[Layer],
    types: tuple[str, ...],
    seed: int = 0,
    rounds: int = 15,
    output: Path | None = None,
    save_to: Path | None = None,
    baseline_from: Path | None = None,
) -> dict[str, Any]:
    """Checks and times every candidate at every shape; writes, and compares with, what the paths name."""
    if {"w8a16", "w8a8"} & {*types} and (odd := next((layer.K for layer in layers if layer.K % 8), None)):
        raise UsageError(f"K {odd} is not a multiple of 8, which int8 needs; --types fp32,bf16 takes any")
    shapes = [[M, layer.N, layer.K] for layer in layers for M in layer.tokens]
    document: dict[str, Any] = {
        "benchmark": "gemm",
        "environment": results.environment(device),
        "settings": {
            "seed": seed,
            "rounds": rounds,
            "types": list(types),
            "shapes": shapes,
            "timed": "in a CUDA graph" if device.type == "cuda" else "called from Python",
            "weights": f"rotated through 4x the last-level cache, up to {COPIES} copies",
        },
    }
    baseline = None if baseline_from is None else Baseline(baseline_from, document)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # whose streams the graphs are captured on
    rows: list[dict[str, Any]] = []
    kept: dict[str, torch.Tensor] = {}

    def keep(row: dict[str, Any], result: torch.Tensor) -> None:
        if baseline is not None:
            row["baseline"] = baseline.compare(row, result.cpu())
        if save_to is not None:
            kept[name(row)] = result.cpu().contiguous()

    copies = [timing.copy_bandwidth(device).median]
    with Progress(transient=True) as progress, torch.no_grad():
        task = progress.add_task(f"linears on {device}", total=len(shapes))
        for layer in layers:
            weights = Weights(random_numbers(layer.N, layer.K, seed, device), types)
            for M in layer.tokens:
                x = random_numbers(M, layer.K, seed + 1, device)
                rows += [{"layer": layer.names} | row for row in measure(x, weights, rounds, keep)]
                progress.advance(task)
    copies.append(timing.copy_bandwidth(device).median)
    document["copy_gbps"] = sum(copies) / 2
    for row in rows:
        row["share_of_copy"] = row["gbps"] / document["copy_gbps"] if row["us"] else None
        if row.get("baseline") is not None:
            row["baseline"]["times_faster"] = baseline.times(row)
    document["rows"] = rows
    if output is not None:
        results.write_json(results.beside(output, ".json"), document)
        results.write_whole(results.beside(output, ".md"), table(document))
    if save_to is not None:
        save(save_to, document, kept)
    return document


def passed(document: dict[str, Any], exact: bool) -> bool:
    """Whether every result is right; with `exact`, whether all of our ops have the baseline's bits, too."""
    if any(row["correct"] is False for row in document["rows"]):
        return False
    compared = [row["baseline"] for row in document["rows"] if row["ours"]] if exact else []
    return all(found is not None and found["differing"] == 0 for found in compared)


WHERE = {"layer": "layer", "M": "M", "N": "N", "K": "K"}
COLUMNS = {
    "type": "type",
    "linear": "linear",
    "time": "us",
    "quartiles": "quartiles",
    "tflops": "TFLOP/s",
    "gbps": "GB/s",
    "share_of_copy": "share of copy",
    "vs_torch_bf16": "x torch bf16",
    "error_of_bound": "error / bound",
}
TERMINAL_COLUMNS = {
    "typed": "linear",
    "time": "us",
    "rate": "rate",
    "share_of_copy": "of copy",
    "vs_torch_bf16": "x bf16",
    "error_of_bound": "of bound",
}
COMPARED = {"bits": "bits differ", "largest_difference": "by at most", "times_faster": "x baseline"}


def columns(document: dict[str, Any], shown: dict[str, str]) -> dict[str, str]:
    return shown | (COMPARED if any("baseline" in row for row in document["rows"]) else {})


def flat_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with their times, rates and comparisons as text, for tables."""
    flat = []
    for row in document["rows"]:
        row = row | dict(zip("MNK", row["shape"], strict=True)) | {"time": row["us"]}
        row["linear"] = row["candidate"] + (f" ({row['note']})" if row["note"] else "")
        row["typed"] = f"{row['type']} {row['candidate']}"
        if row["correct"] is False:
            row["time"] = "WRONG"
        elif row["us"] is not None:
            row["quartiles"] = " - ".join(results.cell(q) for q in row["us_quartiles"])
            # A few tokens cost what reading the weight costs, more of them what the arithmetic does.
            few = row["M"] <= MAX_TOKENS
            row["rate"] = results.cell(row["gbps"]) + " GB/s" if few else results.cell(row["tflops"]) + " TFLOP/s"
        if (found := row.get("baseline")) is not None:
            row |= found | {"bits": f"{found['differing']:,} of {found['elements']:,}"}
        elif "baseline" in row:
            row["bits"] = "not in it"
        flat.append(row)
    return flat


def notes(document: dict[str, Any]) -> list[str]:
    noted = [f"{row['type']} {row['candidate']}: {row['note']}" for row in document["rows"] if row["note"]]
    return list(dict.fromkeys(noted))


def title(document: dict[str, Any]) -> str:
    return f"linears on {document['environment']['device_name']}, copy {document['copy_gbps']:,.0f} GB/s"


def table(document: dict[str, Any]) -> str:
    env, settings = document["environment"], document["settings"]
    head = (
        f"# {title(document)[0].upper()}{title(document)[1:]}\n\n"
        f"torch {env['torch']}, {env['cpu_threads']} CPU threads, commit {env['commit']}, {env['date']}; "
        f"{settings['timed']}, {settings['rounds']} rounds, medians; weights {settings['weights']}; seed "
        f"{settings['seed']}.\n\n"
    )
    return head + results.markdown_table(flat_rows(document), WHERE | columns(document, COLUMNS))

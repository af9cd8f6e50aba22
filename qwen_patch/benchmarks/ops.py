"""`qwen-patch ops`: every op at the shapes of real models, against the stock expression and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

from ..ops import OPS
from . import results, timing

# (hidden, intermediate, query heads, kv heads, head_dim of q_norm and k_norm or None)
MODELS = {
    "Qwen2.5-0.5B": (896, 4864, 14, 2, None),
    "Qwen2.5-7B": (3584, 18944, 28, 4, None),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128),
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
}
TOKENS = (1, 8, 128, 512, 4096)
EPS = 1e-6
# float32 results are not rounded to a narrower type, so another order of summing shows in their last bits: a mean of
# thousands of terms is a few eps off on either side, and so is all that is multiplied by it.
FLOAT32_ULP = 16


class Case(NamedTuple):
    op: str
    model: str
    tokens: int
    shape: tuple[int, ...]  # rows, and H or I; rope_kv_write: tokens, heads, kv heads, D


def cases(tokens: tuple[int, ...] = TOKENS) -> Iterator[Case]:
    for model, (hidden, intermediate, heads, kv_heads, head_dim) in MODELS.items():
        for t in tokens:
            yield Case("rms_norm", model, t, (t, hidden))
            if head_dim:
                yield Case("rms_norm", f"{model} q_norm", t, (t * heads, head_dim))
            yield Case("add_rms_norm", model, t, (t, hidden))
            yield Case("silu_mul", model, t, (t, intermediate))
            yield Case("silu_and_mul", model, t, (t, intermediate))
            yield Case("rope_kv_write", model, t, (t, heads, kv_heads, head_dim or hidden // heads))


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> tuple:
    rows, width = case.shape[:2]

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def attention(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple:
        """Of a prompt: a batch of one, from position 0 on, with q_norm and k_norm."""
        q, k, v = (rand(1, tokens, n * head_dim) for n in (heads, kv_heads, kv_heads))
        angles, first = rand(tokens, head_dim), torch.zeros(1, dtype=torch.int64, device=device)
        cache = rand(2, 1, kv_heads, tokens, head_dim)
        return q, k, v, rand(head_dim), rand(head_dim), EPS, angles.cos(), angles.sin(), first, cache[0], cache[1]

    return {
        "rms_norm": lambda: (rand(rows, width), rand(width), EPS),
        "add_rms_norm": lambda: (rand(rows, width), rand(rows, width), rand(width), EPS),
        "silu_mul": lambda: (rand(rows, width), rand(rows, width)),
        "silu_and_mul": lambda: (rand(rows, 2 * width),),
        "rope_kv_write": lambda: attention(*case.shape),
    }[case.op]()


def _torch_peers() -> dict[str, Callable]:
    def add_rms_norm(x, residual, weight, eps):
        total = residual + x
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total

    return {
        "rms_norm": lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps),
        "add_rms_norm": add_rms_norm,
    }


def _liger_peers() -> dict[str, Callable]:
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    return {
        "rms_norm": lambda x, w, eps: LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w, eps: LigerFusedAddRMSNormFunction.apply(x, r, w, eps, 0.0, "llama", False),
        "silu_mul": lambda g, u: LigerSiLUMulFunction.apply(g, u),
    }


def variants(op: str, device: torch.device) -> dict[str, Callable]:
    """ours (the kernel, where there is one), stock (the model's own expression) and the peers that have this op."""
    found = {"ours": OPS[op].no_grad} if OPS[op].has_kernel(device) else {}
    found["stock"] = OPS[op].reference
    peers = {"torch": _torch_peers(), "liger": _liger_peers() if device.type == "cuda" else {}}
    return found | {name: table[op] for name, table in peers.items() if op in table}


def results_of(op: str, call: Callable, args: tuple) -> tuple[torch.Tensor, ...]:
    """What a call returns, and what it writes into its arguments: into copies of them."""
    args = tuple(a.clone() if i in OPS[op].mutates else a for i, a in enumerate(args))
    out = call(*args)
    return (*(out if isinstance(out, tuple) else (out,)), *(args[i] for i in OPS[op].mutates))


def largest_error(found: Any, expected: Any, of_row: bool = False) -> float:
    """The largest difference, in units in the last place of the expected values, or of the largest in their row."""
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    worst = 0.0
    for a, b in pairs:
        # ulp(b) = 2^exponent(b) * eps, never below that of the smallest normal number
        magnitude = b.double().abs().clamp_min(torch.finfo(b.dtype).tiny)
        if of_row:
            magnitude = magnitude.amax(-1, keepdim=True)
        ulp = torch.exp2(torch.floor(torch.log2(magnitude))) * torch.finfo(b.dtype).eps
        error = ((a.double() - b.double()).abs() / ulp).max().item()
        worst = max(worst, error if error == error else float("inf"))  # a NaN is as wrong as can be
    return worst


class WrongResult(RuntimeError):
    """A kernel of ours is further from the reference than rounding explains."""


def measure(case: Case, device: torch.device, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One row a variant. Every variant is checked against the reference on fresh inputs before it is timed."""
    first = inputs(case, device, dtype)
    cost = OPS[case.op].cost(*first)
    expected = results_of(case.op, OPS[case.op].reference, first)
    functions = variants(case.op, device)
    found = {name: results_of(case.op, f, first) for name, f in functions.items()}
    errors = {name: largest_error(out, expected, OPS[case.op].of_row) for name, out in found.items()}
    limit = FLOAT32_ULP if dtype == torch.float32 else OPS[case.op].max_ulp
    if (error := errors.get("ours", 0.0)) > limit:
        raise WrongResult(
            f"{case.op} {list(case.shape)} {dtype} is off by {error:.3g} units in the last place: {limit} may be"
        )

    # Cold inputs: enough sets to push each out of the cache before its turn comes again, up to 64.
    wanted = -(-4 * timing.last_level_cache(device) // cost.bytes)
    sets = [inputs(case, device, dtype) for _ in range(max(2, min(64, wanted)))]

    # ... and enough calls that starting a graph, some 10 us, does not count.
    turns = -(-(256 if cost.bytes < 1 << 20 else 16) // len(sets))
    count = turns * len(sets)

    def keep(f: Callable) -> list[object]:  # in a graph every call writes its own memory
        return [f(*args) for _ in range(turns) for args in sets]

    def discard(f: Callable) -> None:  # from Python the allocator gives memory again, as in a model
        for _ in range(turns):
            for args in sets:
                f(*args)

    python = {n: timing.wall_clock_us(lambda f=f: discard(f), count, device) for n, f in functions.items()}
    for clock in python.values():
        clock()
    from_python = timing.interleaved(python, rounds)
    in_graph = {}
    if device.type == "cuda":
        in_graph = timing.interleaved(
            {n: timing.graph_us(lambda f=f: keep(f), count) for n, f in functions.items()}, rounds
        )
    rows = []
    for name in functions:
        kernel = in_graph.get(name, from_python[name])
        rows.append(
            {
                "op": case.op,
                "model": case.model,
                "tokens": case.tokens,
                "shape": list(case.shape),
                "dtype": str(dtype).removeprefix("torch."),
                "variant": name,
                "max_error_ulp": errors[name],
                "bytes": cost.bytes,
                "input_sets": len(sets),
                "us": kernel.median,
                "us_quartiles": [kernel.low, kernel.high],
                "python_us": from_python[name].median,
                "gbps": cost.bytes / kernel.median / 1e3,
            }
        )
    return rows


def run(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    output: Path | None,
    rounds: int = 15,
    tokens: tuple[int, ...] = TOKENS,
) -> dict[str, Any]:
    """Measures all cases; writes `<output>.json` and `<output>.md` where an output is given."""
    rows: list[dict[str, Any]] = []
    todo = [(case, dtype) for dtype in dtypes for case in cases(tokens)]
    if 4096 in tokens:
        todo += [(Case(op, "4096x4096", 4096, (4096, 4096)), dtypes[0]) for op in ("rms_norm", "add_rms_norm")]
    copies = [timing.copy_bandwidth(device).median]
    with torch.no_grad():
        for case, dtype in track(todo, description=f"ops on {device}"):
            rows += measure(case, device, dtype, rounds)
    copies.append(timing.copy_bandwidth(device).median)
    copy_gbps = sum(copies) / 2
    for row in rows:
        row["share_of_copy"] = row["gbps"] / copy_gbps
    how = "in a CUDA graph" if device.type == "cuda" else "called from Python"
    document = {
        "benchmark": "ops",
        "environment": results.environment(device),
        "settings": {
            "rounds": rounds,
            "timed": how,
            "inputs": "rotated through 4x the last-level cache, up to 64 sets",
        },
        "copy_gbps": copy_gbps,
        "without_kernel": sorted({case.op for case, _ in todo if not OPS[case.op].has_kernel(device)}),
        "rows": rows,
    }
    if output is not None:
        results.write_json(results.beside(output, ".json"), document)
        results.write_whole(results.beside(output, ".md"), table(document))
    return document


COLUMNS = {
    "op": "op",
    "model": "model",
    "tokens": "tokens",
    "dtype": "dtype",
    "variant": "variant",
    "us": "us",
    "python_us": "from Python, us",
    "gbps": "GB/s",
    "share_of_copy": "share of copy",
    "max_error_ulp": "error, ulp",
}


def table(document: dict[str, Any]) -> str:
    env = document["environment"]
    head = (
        f"# Ops on {env['device_name']}\n\n"
        f"torch {env['torch']}, {env['cpu_threads']} CPU threads, commit {env['commit']}, {env['date']}; "
        f"{document['settings']['timed']}; copy {document['copy_gbps']:,.0f} GB/s. `us` is the device's time a call, "
        "`from Python` the time between calls from Python.\n\n"
    )
    return head + results.markdown_table(document["rows"], COLUMNS)

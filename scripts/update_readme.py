"""Write the README's measured tables from the files in benchmark_results/, so that no figure is typed by hand.

python scripts/update_readme.py [--check]     --check writes nothing and fails where the README is out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark_results"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def conditions(document: dict[str, Any]) -> str:
    env = document["environment"]
    return (
        f"{env['device_name']}, torch {env['torch']}, transformers {env['transformers']}, commit {env['commit']}, "
        f"{env['date']}, copy {document['copy_gbps']:,.0f} GB/s"
    )


def variants_at(document: dict[str, Any], prompt: int) -> dict[str, dict[str, Any]]:
    """variant -> its row. Files from before the decode runtime call "both" what is "modules" since."""
    found = {row["variant"]: row for row in document["rows"] if row["prompt"] == prompt}
    if "modules" not in found:
        found["modules"] = found["both"]
    return found


def prompts_of(document: dict[str, Any]) -> list[int]:
    return list(dict.fromkeys(row["prompt"] for row in document["rows"]))


def generate() -> str:
    parts = []
    for path in sorted(RESULTS.glob("h200/generate_*.json")):
        document = read(f"h200/{path.name}")
        rows = []
        for prompt in prompts_of(document):
            found = variants_at(document, prompt)
            stock, modules = found["stock"], found["modules"]
            low, high = modules["decode_vs_stock"]["interval95"]
            rows.append(
                [
                    str(prompt),
                    f"{stock['decode_tps']:.0f}",
                    f"{modules['decode_tps']:.0f}",
                    f"**{modules['decode_vs_stock']['ratio']:.2f}** [{low:.2f}, {high:.2f}]",
                    f"{stock['first_token_ms']:.0f}",
                    f"{modules['first_token_ms']:.0f}",
                    f"{modules['first_token_vs_stock']['ratio']:.2f}",
                    f"{100 * modules['share_of_copy']:.1f}%",
                    modules["tokens"],
                ]
            )
        head = ["prompt", "stock tokens/s", "patched", "x stock [95%]", "stock first token, ms", "patched", "x stock"]
        name = document["model"].removesuffix(" (random)")
        settings = document["settings"]
        text = f"**{name}**, {document['dtype']}, batch 1, {settings['new_tokens']} new tokens, "
        text += f"{settings['rounds']} rounds"
        parts.append(f"{text}. {conditions(document)}.\n\n{table([*head, 'share of copy', 'tokens'], rows)}")
    return "\n\n".join(parts)


def decode() -> str:
    paths = [path for kind in ("decode", "sampling") for path in sorted(RESULTS.glob(f"h200/{kind}_*.json"))]
    documents = [read(f"h200/{path.name}") for path in paths]
    rows = []
    for document in documents:
        batch, decoding = document["batch"], document["settings"]["decoding"]
        how = "" if decoding == "greedy" else f", {decoding}"
        for prompt in prompts_of(document):
            found = variants_at(document, prompt)
            stock, both, static = found["stock"], found["both"], found.get("static")
            low, high = both["decode_vs_stock"]["interval95"]
            rows.append(
                [
                    f"{document['model'].removesuffix(' (random)')}, batch {batch}, prompt {prompt}{how}",
                    f"{batch * stock['decode_tps']:,.0f}",
                    f"{batch * static['decode_tps']:,.0f}" if static else "",
                    f"**{batch * both['decode_tps']:,.0f}**",
                    f"**{both['decode_vs_stock']['ratio']:.1f}x** [{low:.1f}, {high:.1f}]",
                    f"{100 * both['share_of_copy']:.0f}%",
                    " / ".join(f"{v['first_token_ms']:.0f}" if v else "-" for v in (stock, static, both)),
                    f"{static['cold_s']:.0f} / {both['cold_s']:.1f}" if static else f"- / {both['cold_s']:.1f}",
                    both["tokens"],
                    document["environment"]["commit"],
                ]
            )
    head = ["decode tokens/s", "stock", "static cache, compiled", "patched", "x stock [95%]", "share of copy"]
    head += ["first token, ms: stock / static / patched", "first call, s: static / patched", "tokens", "commit"]
    settings = documents[0]["settings"]
    env = documents[0]["environment"]
    for other in documents:
        for key in ("device_name", "torch", "transformers"):
            if other["environment"][key] != env[key]:
                raise SystemExit(f"decode of {other['model']} is from another {key} than {documents[0]['model']}")
    copies = [document["copy_gbps"] for document in documents]
    text = f"{settings['new_tokens']} new tokens, {settings['rounds']} rounds. {env['device_name']}, "
    text += f"torch {env['torch']}, transformers {env['transformers']}, "
    text += f"copy {min(copies):,.0f} to {max(copies):,.0f} GB/s in the same runs."
    return f"{text}\n\n{table(head, rows)}"


def ablations() -> str:
    variants = ["mlp", "rms", "modules", "static"]
    documents = [read(f"h200/{path.name}") for path in sorted(RESULTS.glob("h200/ablations_*.json"))]
    rows = []
    for document in documents:
        found = variants_at(document, *prompts_of(document))
        row = [document["model"].removesuffix(" (random)"), f"{found['stock']['decode_tps']:.0f}"]
        for variant in variants:
            speed = found[variant]["decode_vs_stock"]
            text = "parted from eager" if speed is None else f"{speed['ratio']:.2f}x"
            row.append(f"{found[variant]['decode_tps']:.0f} ({text})")
        rows.append(row)
    head = [
        "decode tokens/s",
        "stock eager",
        *(f'fusion="{v}"' for v in ("mlp", "rms", "both")),
        "stock, static cache, compiled",
    ]
    first = f"{conditions(documents[0])}, {documents[0]['settings']['rounds']} rounds"
    return f"Prompt 128, 64 new tokens. {first}.\n\n{table(head, rows)}"


OPS_SHOWN = [
    ("add_rms_norm", "Qwen2.5-0.5B", 1),
    ("add_rms_norm", "Qwen3-8B", 1),
    ("add_rms_norm", "Qwen3-8B", 8),
    ("add_rms_norm", "Qwen3-8B", 512),
    ("add_rms_norm", "Qwen3-8B", 4096),
    ("rms_norm", "Qwen3-8B q_norm", 8),
    ("silu_mul", "Qwen2.5-0.5B", 1),
    ("silu_mul", "Qwen3-8B", 8),
    ("silu_mul", "Qwen3-8B", 512),
    ("silu_mul", "Qwen3-8B", 4096),
]


def ops_cuda() -> str:
    document = read("h200/ops.json")
    rows = []
    for op, model, tokens in OPS_SHOWN:
        key = {"op": op, "model": model, "tokens": tokens}
        found = {r["variant"]: r for r in document["rows"] if all(r[k] == v for k, v in key.items())}

        def us(variant: str, key: str, found: dict[str, Any] = found) -> str:
            return f"{found[variant][key]:.3g}" if variant in found else ""

        rows.append(
            [
                f"{op} {found['ours']['shape'][0]} x {found['ours']['shape'][1]}",
                f"**{us('ours', 'us')}**",
                *(us(v, "us") for v in ("stock", "torch", "liger")),
                f"{100 * found['ours']['share_of_copy']:.0f}%",
                f"**{us('ours', 'python_us')}**",
                us("stock", "python_us"),
                us("liger", "python_us"),
            ]
        )
    head = [
        "bf16",
        "ours, us",
        "stock ops",
        "F.rms_norm",
        "Liger",
        "share of copy",
        "from Python: ours",
        "stock",
        "Liger",
    ]
    return f"{conditions(document)}.\n\n{table(head, rows)}"


def ops_cpu() -> str:
    document = read("cpu/ops.json")
    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        for op, model in [("rms_norm", "Qwen2.5-0.5B"), ("add_rms_norm", "Qwen2.5-0.5B"), ("silu_mul", "Qwen2.5-0.5B")]:
            row = [f"{op}, {dtype}"]
            for tokens in (1, 8, 512):
                key = {"op": op, "model": model, "dtype": dtype, "tokens": tokens}
                found = {r["variant"]: r for r in document["rows"] if all(r[k] == v for k, v in key.items())}
                row.append(f"{found['stock']['us'] / found['ours']['us']:.2f}")
            rows.append(row)
    threads = document["environment"]["cpu_threads"]
    head = ["times stock", "1 token", "8 tokens", "512 tokens"]
    return f"Qwen2.5-0.5B shapes, {threads} threads, {conditions(document)}.\n\n{table(head, rows)}"


def validation() -> str:
    rows = []
    for path in sorted(RESULTS.glob("*/validate_*.json")):
        report = read(f"{path.parent.name}/{path.name}")
        oracle = report["oracle"] or {}
        rows.append(
            [
                report["model"],
                report["dtype"],
                report["environment"]["device_name"],
                f"{report['max_abs_logit_error']:.2g}",
                f"{report['kl_mean']:.2g}",
                f"{report['top1_agreement']:.2%}",
                "all equal" if report["greedy_tokens_equal"] else f"{len(report['greedy_differences'])} ties",
                f"{oracle['stock_mean_abs_error']:.3g} / {oracle['patched_mean_abs_error']:.3g}" if oracle else "",
                "yes" if report["undo_bitwise"] else "NO",
                "yes" if report["passed"] else "NO",
            ]
        )
    head = ["model", "dtype", "on", "largest logit error", "KL, nats", "top-1", "greedy tokens"]
    return table([*head, "mean error against float32: stock / patched", "undo bitwise", "passed"], rows)


TESTS_SHOWN = {
    "test_ops": "the ops: reference, float64, opcheck, gradients, all 65,536 16-bit values",
    "test_linears": "the linears for a few tokens and in int8, against float64; the int8 format",
    "test_patcher": "the residual graph, hooks, undo, every family",
    "test_plan": "plans, golden files, what is left alone and why",
    "test_transformers_suite": "Transformers' own common tests, on patched models",
    "test_generation": "generate's modes, tokens compared with stock",
    "test_decode_runtime": "the decode runtime's loop",
    "test_decode_or_stock": "what the decode runtime leaves to the stock loop",
    "test_forward": "the decoder written out over the ops: prompts, and single tokens",
    "test_decode_step": "the decode step on a CPU: logits against wider dtypes, int8, its threads",
    "test_decode_int8": "the decode runtime over int8 linears",
    "test_decode_kernel": "the decode runtime on CUDA: its graphs, its memory",
    "test_decode_step_cuda": "the decode step on CUDA: logits against the stock forward, int8, long contexts",
    "test_sampling": "drawing tokens: the distribution, what is never drawn",
    "test_life_cycle": "copies, checkpoints, dtypes, training, compile, export, threads",
    "test_wrappers": "PEFT, device maps, offloading, tensor parallelism",
    "test_fuzz": "property tests and random sequences of events",
    "test_installation": "builds and libraries that go wrong",
    "test_validation": "validate_qwen catches what it should",
    "test_int8": "int8 linears of a model: plans, undo, failures in the middle",
    "test_int8_module": "the int8 linear: state, copies, which op its tokens go through",
    "test_rotation": "rotated rows in int8: exact, half a step off at most, outliers",
    "test_int8_adapters": "LoRA over int8 linears",
    "test_int8_checkpoints": "int8 checkpoints: round trips, damaged ones, offloading, the commands",
    "test_perplexity": "perplexity: windows, intervals, the command",
    "test_cli": "the commands",
    "test_benchmarks": "the benchmarks' arithmetic",
    "test_gemm": "the benchmark of linears: wrong ones are found, saved results are compared to the bit",
}


def tests() -> str:
    documents = [read(f"{path.parent.name}/tests.json") for path in sorted(RESULTS.glob("*/tests.json"))]
    rows = []
    for name, what in TESTS_SHOWN.items():
        row = [what]
        for document in documents:
            counts = document["files"].get(name)
            if counts is None:
                row.append("not in this run")
                continue
            passed, failed, skipped = (counts.get(o, 0) for o in ("passed", "failed", "skipped"))
            row.append(f"{passed} of {passed + failed}" + (f", {skipped} skipped" if skipped else ""))
        rows.append(row)
    heads = []
    for document in documents:
        env = document["environment"]
        heads.append(f"{env['device_name']}, torch {env['torch']}, transformers {env['transformers']}, {env['commit']}")
    return table(["tests passed", *heads], rows)


def int8() -> str:
    return "\n\n".join(int8_on(place) for place in ("h200", "cpu"))


def int8_on(place: str) -> str:
    speeds, text = read(f"{place}/int8_smollm2-135m.json"), read(f"{place}/perplexity_smollm2-135m.json")
    found = {row["variant"]: row for row in speeds["rows"]}
    rows = []
    for row in text["rows"]:
        speed, ratio = found[row["variant"]], row["vs_stock"]["ratio"] - 1
        low, high = (bound - 1 for bound in row["vs_stock"]["interval95"])
        rows.append(
            [
                row["variant"],
                f"{row['perplexity']:.2f}",
                "" if row["variant"] == "stock" else f"{ratio:+.2%} [{low:+.2%}, {high:+.2%}]",
                f"{row['top1_agreement']:.1%}",
                f"{speed['decode_tps']:,.0f}",
                f"{speed['decode_vs_stock']['ratio']:.2f}",
                f"{speed['first_token_vs_stock']['ratio']:.2f}",
            ]
        )
    head = ["", "perplexity", "against stock [95%]", "top-1", "decode tokens/s", "x stock", "first token, x stock"]
    prompt = speeds["rows"][0]["prompt"]
    about = f"{text['model']}, {text['dtype']}, {text['settings']['tokens']:,} tokens of text; prompt {prompt}"
    return f"{about}. {conditions(speeds)}.\n\n{table(head, rows)}"


def int8_cuda() -> str:
    """generate over int8 linears, against the same runtime in bfloat16, in one run each."""
    documents = [read(f"h200/{path.name}") for path in sorted(RESULTS.glob("h200/decode_*.json"))]
    documents += [read(f"h200/{path.name}") for path in sorted(RESULTS.glob("h200/prefill_*.json"))]
    rows = []
    for document in documents:
        batch = document["batch"]
        for prompt in prompts_of(document):
            found = variants_at(document, prompt)
            both = found["both"]
            for variant in ("int8", "int8-head", "int8-w8a16"):
                if (row := found.get(variant)) is None:
                    continue
                rows.append(
                    [
                        f"{document['model'].removesuffix(' (random)')}, batch {batch}, prompt {prompt:,}",
                        variant,
                        f"{batch * both['decode_tps']:,.0f}",
                        f"{batch * row['decode_tps']:,.0f}",
                        f"**{row['decode_tps'] / both['decode_tps']:.2f}x**",
                        f"{100 * row['share_of_copy']:.0f}%",
                        f"{both['first_token_ms']:.1f} / {row['first_token_ms']:.1f}",
                        f"{both['first_token_ms'] / row['first_token_ms']:.2f}x",
                        f"{both['peak_gb']:.1f} / {row['peak_gb']:.1f}",
                        row["tokens"],
                        document["environment"]["commit"],
                    ]
                )
    head = ["", "", "tokens/s in bfloat16", "int8", "x bfloat16", "share of copy"]
    head += ["first token, ms: bfloat16 / int8", "x bfloat16", "peak GB: bfloat16 / int8"]
    head += ["int8 tokens against the reference's", "commit"]
    return table(head, rows)


GEMM_SHOWN = {1: "w8a16", 8: "w8a16", 16: "w8a16", 128: "w8a16"}
GEMM_SHOWN |= {512: "w8a8", 1472: "w8a8", 1734: "w8a8", 2048: "w8a8"}


def int8_gemm() -> str:
    """Our faster op against the library's bfloat16 and int8 products, in one run each: a row a weight."""
    documents = [read(f"h200/{path.name}") for path in sorted(RESULTS.glob("h200/gemm_*.json"))]
    if len({document["environment"]["commit"] for document in documents}) > 1:
        raise SystemExit("the files of h200/gemm_* are of several commits, and their table names one")
    cells: dict[tuple[int, int], dict[int, list[dict[str, Any]]]] = {}
    for row in (row for document in documents for row in document["rows"] if row["us"]):
        tokens, *weight = row["shape"]
        cells.setdefault(tuple(weight), {}).setdefault(tokens, []).append(row)
    rows = []
    for weight, of_tokens in sorted(cells.items()):
        row = [" x ".join(map(str, weight))]
        for tokens, kind in GEMM_SHOWN.items():
            found = of_tokens.get(tokens, [])
            ours = [r for r in found if r["ours"] and r["type"] == kind]
            if not ours:
                row.append("")
                continue
            best = min(ours, key=lambda r: r["us"])
            library = [r["us"] for r in found if r["candidate"].startswith("torch._int_mm")]
            more = f"{library[0] / best['us']:.2f}" if kind == "w8a8" else f"{100 * best['share_of_copy']:.0f}%"
            row.append(f"**{best['vs_torch_bf16']:.2f}** / {more}")
        rows.append(row)
    head = ["N x K", *(f"{tokens:,} tokens, {kind}" for tokens, kind in GEMM_SHOWN.items())]
    return f"{conditions(documents[0])}.\n\n{table(head, rows)}"


def before_and_after() -> str:
    """The two lines of the first example."""
    gpu, cpu = read("h200/decode_Qwen3-0.6B.json"), read("cpu/int8_smollm2-135m.json")
    parts = []
    for document, name in ((gpu, "Qwen3-0.6B"), (cpu, "a model of 135 M parameters")):
        found = {row["variant"]: row["decode_tps"] for row in document["rows"]}
        env = document["environment"]
        where = env["device_name"] if document is gpu else f"{env['cpu_threads']} cores of an {env['device_name']}"
        parts.append(f"{name} on {where}: {found['stock']:,.0f} tokens/s before, **{found['both']:,.0f}** after")
    return f"{'; '.join(parts)} (bfloat16, one sequence; [measured how](#how-fast-is-it))."


TABLES: dict[str, Callable[[], str]] = {
    "before and after": before_and_after,
    "generate": generate,
    "ablations": ablations,
    "decode": decode,
    "ops_cuda": ops_cuda,
    "ops_cpu": ops_cpu,
    "validation": validation,
    "tests": tests,
    "int8": int8,
    "int8 on CUDA": int8_cuda,
    "int8 linears on CUDA": int8_gemm,
}


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the table {name!r}, it should have one")
    if "--check" not in sys.argv:
        path.write_text(text)
    elif text != path.read_text():
        raise SystemExit("README.md is out of date: run python scripts/update_readme.py")


if __name__ == "__main__":
    main()

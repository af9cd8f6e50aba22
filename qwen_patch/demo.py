"""`qwen-patch demo`: a bundled trained model is patched, validated and timed, with no model hub and no GPU."""

from __future__ import annotations

from rich.console import Console

from .benchmarks import generate
from .loading import load_model, pick_device, pick_dtype, sample_tokens
from .patcher import explain, patched
from .report import show_bench, show_plan, show_validation
from .validation.validate import validate

PROMPT = "The old man opened the door and"


def run(console: Console, model_name: str, device_name: str = "auto") -> bool:
    """Shows the whole path on one model; returns whether the validation passed."""
    device = pick_device(device_name)
    dtype = pick_dtype("auto", device)
    model, tokenizer = load_model(model_name, device, dtype)
    console.rule(f"[bold]{model_name}, {str(dtype).removeprefix('torch.')}, on {device}")

    console.print("\n[bold]1. What patch_model(model) replaces[/]  (qwen-patch plan)")
    with patched(model):
        show_plan(console, explain(model))
        ids = tokenizer(PROMPT, return_tensors="pt").to(device)
        output = model.generate(**ids, max_new_tokens=40, do_sample=False)
        console.print("\n[bold]2. The patched model writes[/]")
        console.print(f"  [dim]{PROMPT}[/]{tokenizer.decode(output[0, ids.input_ids.shape[1] :])}", highlight=False)

    console.print("\n[bold]3. Are its answers the stock model's?[/]  (validate_qwen)")
    report = validate(model, tokenizer, name=model_name, new_tokens=32)
    show_validation(console, report)

    console.print("\n[bold]4. What is gained?[/]  (qwen-patch bench)")
    prompts = {n: sample_tokens(tokenizer, model.config.vocab_size, n) for n in (64,)}
    document = generate.run(model, model_name, prompts, ["mlp", "rms", "both"], 32, 5, None)
    show_bench(console, document)
    return report.passed

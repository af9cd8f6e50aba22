"""The commands: `qwen-patch demo | validate | bench | ops | plan | doctor`, and `validate_qwen`.

Exit status: 0 all well, 1 a check did not pass, 2 unusable input (one line on stderr says what and what to do).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Progress bars and advice of the libraries underneath would bury the tables.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

app = typer.Typer(
    help="Faster Qwen models in Hugging Face Transformers, with the same answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[str, typer.Option(help="A folder, a hub id, or a bundled model: tiny-qwen2, tiny-qwen3.")]
Fusion = Annotated[str, typer.Option(help="What is patched: both, rms, mlp or none.")]
Device = Annotated[str, typer.Option(help="auto (the GPU where there is one), cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16, float16.")]
Backend = Annotated[str, typer.Option(help="auto, cuda, cpu or reference.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns unusable input into one line and exit status 2."""
    from .loading import UsageError
    from .plan import PatchError

    try:
        yield
    except (UsageError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def numbers(text: str) -> list[int]:
    from .loading import UsageError

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers such as 128,512") from error
    if not found or min(found) < 1:
        raise UsageError(f"{text!r}: every number must be at least 1")
    return found


def display_name(model: str) -> str:
    """What a report calls the model: of a folder its own name, for where it lies is nobody's business."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def load(model: str, device: str, dtype: str) -> tuple[Any, Any]:
    from .loading import load_model, pick_device, pick_dtype

    where = pick_device(device)
    return load_model(model, where, pick_dtype(dtype, where))


@app.command()
def demo(device: Device = "auto") -> None:
    """Patch, validate and time the two bundled trained models: no model hub, no GPU needed."""
    from .demo import run
    from .loading import BUNDLED

    with usage_errors():
        passed = [run(console, name, device) for name in BUNDLED]
    raise typer.Exit(0 if all(passed) else 1)


@app.command()
def validate(
    model: Model = "tiny-qwen2",
    fusion: Fusion = "both",
    backend: Backend = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given more than once.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A text file with one prompt a line.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens compared a prompt.")] = 64,
    oracle: Annotated[bool, typer.Option(help="Compare both with the stock model in float32, in any case.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Check a patched model's logits and greedy tokens against the stock model's, and that the patch undoes."""
    from .loading import UsageError

    with usage_errors():
        prompts = list(prompt or [])
        if prompts_file is not None:
            if not prompts_file.is_file():
                raise UsageError(f"no such prompts file: {prompts_file}")
            prompts += [line for line in prompts_file.read_text().splitlines() if line.strip()]
            if not prompts:
                raise UsageError(f"{prompts_file} holds no prompts: write one a line")
        if any(not p.strip() for p in prompts):
            raise UsageError("a prompt is empty")
        loaded, tokenizer = load(model, device, dtype)
        from .benchmarks.results import environment, write_json
        from .report import show_validation
        from .validation.validate import validate as run

        env = environment(next(loaded.parameters()).device)
        options = {"fusion": fusion, "backend": backend, "new_tokens": new_tokens, "oracle": oracle}
        report = run(loaded, tokenizer, name=display_name(model), prompts=prompts or None, **options)
    show_validation(console, report)
    if json_file is not None:
        write_json(json_file, report.to_dict() | {"environment": env})
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def plan(
    model: Model = "tiny-qwen2",
    fusion: Fusion = "both",
    backend: Backend = "auto",
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Every decision, as JSON.")] = False,
) -> None:
    """Show what a patch would replace, what not and why, without applying it."""
    from .plan import make_plan
    from .report import show_plan

    with usage_errors():
        loaded, _ = load(model, device, "auto")
        found = make_plan(loaded, fusion, backend)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        show_plan(console, found)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="As in validate; or random:NAME for official shapes.")] = "tiny-qwen2",
    fusion: Annotated[
        str, typer.Option(help="Variants to compare with stock, comma-separated.")
    ] = "mlp,rms,modules,both",
    device: Device = "auto",
    dtype: Dtype = "auto",
    prompt_lengths: Annotated[str, typer.Option(help="Comma-separated.")] = "128,512,1024",
    new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="Paired rounds; each runs every variant once.")] = 9,
    static: Annotated[bool, typer.Option(help="Also measure cache_implementation='static' (it compiles).")] = False,
    output: Annotated[Path | None, typer.Option(help="Write OUTPUT.json, OUTPUT.md and OUTPUT.png.")] = None,
) -> None:
    """Time model.generate, stock and patched, interleaved in one process on one copy of the weights."""
    from .benchmarks import generate
    from .loading import SHAPES, UsageError, pick_device, pick_dtype, random_model, sample_tokens
    from .report import show_bench

    with usage_errors():
        fusions = [f.strip() for f in fusion.split(",")]
        if unknown := [f for f in fusions if f not in generate.VARIANTS]:
            raise UsageError(f"unknown fusion {unknown[0]!r}: supported are {', '.join(generate.VARIANTS)}")
        lengths = numbers(prompt_lengths)
        if model.startswith("random:"):
            shape = model.removeprefix("random:")
            if shape not in SHAPES:
                raise UsageError(f"unknown shape {shape!r}: known are {', '.join(SHAPES)}")
            where = pick_device(device)
            loaded, tokenizer, name = random_model(shape, where, pick_dtype(dtype, where)), None, f"{shape} (random)"
        else:
            (loaded, tokenizer), name = load(model, device, dtype), display_name(model)
        config, longest = loaded.config.get_text_config(), max(lengths) + new_tokens
        if longest > config.max_position_embeddings:
            raise UsageError(f"{longest} tokens are more than the {config.max_position_embeddings} of {name}")
        prompts = {n: sample_tokens(tokenizer, config.vocab_size, n).repeat(batch, 1) for n in lengths}
        document = generate.run(loaded, name, prompts, fusions, new_tokens, rounds, output, static=static)
    show_bench(console, document)
    raise typer.Exit(0 if all(row["correct"] for row in document["rows"]) else 1)


@app.command()
def ops(
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
    tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,128,512,4096",
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    output: Annotated[Path | None, typer.Option(help="Write OUTPUT.json and OUTPUT.md.")] = None,
) -> None:
    """Time every op at the shapes of real models, against the stock expression, torch and liger-kernel."""
    from .benchmarks import ops as benchmark
    from .loading import pick_device, pick_dtype
    from .report import show_rows

    with usage_errors():
        where = pick_device(device)
        dtypes = tuple(pick_dtype(name.strip(), where) for name in dtype.split(","))
        document = benchmark.run(where, dtypes, output, rounds, tuple(numbers(tokens)))
    title = f"ops on {document['environment']['device_name']}, copy {document['copy_gbps']:,.0f} GB/s"
    show_rows(console, title, document["rows"], benchmark.COLUMNS)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show versions, GPU, compilers and which native libraries are in use, or why not and what to do."""
    from .doctor import examine
    from .report import show_examination

    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show_examination(console, found)


def main() -> None:
    app()


def validate_main() -> None:
    """`validate_qwen ...` is `qwen-patch validate ...`."""
    typer.run(validate)


if __name__ == "__main__":
    main()

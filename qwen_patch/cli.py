"""The commands: `qwen-patch demo | validate | bench | ops | gemm | plan | quantize | perplexity | doctor`,
`validate_qwen`.

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
Quantize = Annotated[str | None, typer.Option(help="int8: the linears in int8 (auto is bfloat16 then).")]
Activations = Annotated[str, typer.Option(help="Of int8: auto, w8a16 (weights only) or w8a8.")]
Output = Annotated[Path | None, typer.Option(dir_okay=False, help="Write OUTPUT.json and OUTPUT.md.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the result to this file.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns unusable input, and a file that can't be written, into one line and exit status 2."""
    from .loading import UsageError
    from .plan import PatchError

    try:
        yield
    except (UsageError, PatchError, OSError) as error:
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


def text_of(path: Path, kind: str) -> str:
    from .loading import UsageError

    if not path.is_file():
        raise UsageError(f"no such {kind}: {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a {kind} in UTF-8: {error.reason} at byte {error.start}") from error


def display_name(model: str) -> str:
    """What a report calls the model: of a folder its own name, for where it lies is nobody's business."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def load(model: str, device: str, dtype: str, int8: bool = False) -> tuple[Any, Any]:
    from .loading import is_int8, load_model, pick_device, pick_dtype

    where = pick_device(device)
    if dtype == "auto" and (int8 or is_int8(model)):
        dtype = "bfloat16"
    return load_model(model, where, pick_dtype(dtype, where))


def variants_of(text: str) -> list[str]:
    from .benchmarks.generate import VARIANTS
    from .loading import UsageError

    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in found if name not in VARIANTS]:
        raise UsageError(f"unknown fusion {unknown[0]!r}: supported are {', '.join(VARIANTS)}")
    return found


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
    quantize: Quantize = None,
    activations: Activations = "auto",
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
            prompts += [line for line in text_of(prompts_file, "prompts file").splitlines() if line.strip()]
            if not prompts:
                raise UsageError(f"{prompts_file} holds no prompts: write one a line")
        if any(not p.strip() for p in prompts):
            raise UsageError("a prompt is empty")
        loaded, tokenizer = load(model, device, dtype, quantize is not None)
        from .benchmarks.results import environment, write_json
        from .report import show_validation
        from .validation.validate import validate as run

        env = environment(next(loaded.parameters()).device)
        options = {"fusion": fusion, "backend": backend, "new_tokens": new_tokens, "oracle": oracle}
        options |= {"quantize": quantize, "activations": activations}
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
    quantize: Quantize = None,
    activations: Activations = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Every decision, as JSON.")] = False,
) -> None:
    """Show what a patch would replace, what not and why, without applying it."""
    from .plan import make_plan
    from .report import show_plan

    with usage_errors():
        loaded, _ = load(model, device, "auto", quantize is not None)
        found = make_plan(loaded, fusion, backend, quantize=quantize, activations=activations)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        show_plan(console, found)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="As in validate; or random:NAME for official shapes.")] = "tiny-qwen2",
    fusion: Annotated[
        str, typer.Option(help="Variants to compare with stock, comma-separated; also int8, int8-head (it too).")
    ] = "mlp,rms,modules,both",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Annotated[str | None, typer.Option(help="int8: add the variants int8-w8a16 and int8-w8a8.")] = None,
    prompt_lengths: Annotated[str, typer.Option(help="Comma-separated.")] = "128,512,1024",
    new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="Paired rounds; each runs every variant once.")] = 9,
    static: Annotated[bool, typer.Option(help="Also measure cache_implementation='static' (it compiles).")] = False,
    sample: Annotated[bool, typer.Option(help="Time sampling as Qwen's generation_config has it, not greedy.")] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write OUTPUT.json, OUTPUT.md and OUTPUT.png.")
    ] = None,
) -> None:
    """Time model.generate, stock and patched, interleaved in one process on one copy of the weights."""
    from .benchmarks import generate
    from .loading import SHAPES, UsageError, pick_device, pick_dtype, random_model, sample_tokens
    from .report import show_bench

    with usage_errors():
        fusions = variants_of(fusion)
        if quantize not in (None, "int8"):
            raise UsageError(f"unknown quantize {quantize!r}: supported is int8")
        if quantize is not None:
            fusions = list(dict.fromkeys([*fusions, "int8-w8a16", "int8-w8a8"]))
        int8 = any(f in generate.INT8 for f in fusions)
        lengths = numbers(prompt_lengths)
        if model.startswith("random:"):
            shape = model.removeprefix("random:")
            if shape not in SHAPES:
                raise UsageError(f"unknown shape {shape!r}: known are {', '.join(SHAPES)}")
            where = pick_device(device)
            dtype = "bfloat16" if int8 and dtype == "auto" else dtype
            loaded, tokenizer, name = random_model(shape, where, pick_dtype(dtype, where)), None, f"{shape} (random)"
        else:
            (loaded, tokenizer), name = load(model, device, dtype, int8), display_name(model)
        config, longest = loaded.config.get_text_config(), max(lengths) + new_tokens
        if longest > config.max_position_embeddings:
            raise UsageError(f"{longest} tokens are more than the {config.max_position_embeddings} of {name}")
        prompts = {n: sample_tokens(tokenizer, config.vocab_size, n).repeat(batch, 1) for n in lengths}
        trained = not model.startswith("random:")
        document = generate.run(loaded, name, prompts, fusions, new_tokens, rounds, output, static, trained, sample)
    show_bench(console, document)
    raise typer.Exit(0 if all(row["correct"] for row in document["rows"]) else 1)


@app.command()
def ops(
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
    tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,128,512,4096",
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    output: Output = None,
) -> None:
    """Time every op at the shapes of real models, against the stock expression, torch and liger-kernel."""
    from .benchmarks import ops as benchmark
    from .loading import pick_device, pick_dtype
    from .report import show_rows

    with usage_errors():
        where = pick_device(device)
        dtypes = tuple(pick_dtype(name.strip(), where) for name in dtype.split(","))
        try:
            document = benchmark.run(where, dtypes, output, rounds, tuple(numbers(tokens)))
        except benchmark.WrongResult as error:
            print(f"WRONG: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
    title = f"ops on {document['environment']['device_name']}, copy {document['copy_gbps']:,.0f} GB/s"
    show_rows(console, title, document["rows"], benchmark.COLUMNS)
    for op in document["without_kernel"]:
        console.print(f"{op}: no {where.type} kernel of ours here; the stock expression runs")


@app.command()
def gemm(
    m: Annotated[str | None, typer.Option("-m", help="Tokens, comma-separated: 1,8,128.")] = None,
    n: Annotated[str | None, typer.Option("-n", help="Output features, comma-separated.")] = None,
    k: Annotated[
        str | None, typer.Option("-k", help="Input features, comma-separated: every -n with every -k.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Instead of -n and -k: 1472x4096x4096 (default), Qwen2.5-0.5B, Qwen2.5-7B, Qwen3-0.6B, Qwen3-8B."
        ),
    ] = None,
    types: Annotated[
        str, typer.Option(help="Comma-separated: fp32, bf16, w8a16 (int8 weights), w8a8 (activations too).")
    ] = "fp32,bf16,w8a16,w8a8",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights and activations.")] = 0,
    rounds: Annotated[int, typer.Option(min=2, help="Each times every linear once.")] = 15,
    output: Output = None,
    save: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write PATH.json, and every result to PATH.safetensors, for --baseline."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A saved run: count the elements that differ in any bit, and compare times.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Exit 1 where an op of ours differs from the baseline.")
    ] = False,
) -> None:
    """Time linears in fp32, bf16 and int8 against torch's and torchao's, each first checked against float64.

    A result beyond the error that its rounding allows is WRONG, is not timed, and makes the exit status 1.
    """
    from .benchmarks import gemm as benchmark
    from .loading import UsageError, pick_device
    from .report import show_gemm

    with usage_errors():
        if exact and baseline is None:
            raise UsageError("--exact compares with a run that --baseline names")
        sizes = [None if text is None else numbers(text) for text in (m, n, k)]
        layers, kinds = benchmark.layers_of(shapes, *sizes), benchmark.types_of(types)
        where = pick_device(device)
        document = benchmark.run(where, layers, kinds, seed, rounds, output, save, baseline)
    show_gemm(console, document)
    raise typer.Exit(0 if benchmark.passed(document, exact) else 1)


@app.command()
def quantize(
    model: Annotated[str, typer.Option(help="A 16-bit model: a folder, a hub id or a bundled one.")],
    output: Annotated[Path, typer.Option(help="The folder to write, whole or not at all.")],
    activations: Activations = "auto",
    lm_head: Annotated[
        bool, typer.Option("--lm-head", help="The head too, as an untied copy where it is tied.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), bfloat16 or float16.")] = "auto",
    device: Device = "auto",
) -> None:
    """Write an int8 checkpoint, which from_pretrained reads wherever qwen_patch is imported."""
    from rich.progress import Progress

    from .loading import UsageError, pick_device, pick_dtype
    from .quantization.files import quantize_checkpoint
    from .quantization.quantizer import QwenPatchInt8Config

    with usage_errors(), Progress(console=console, transient=True) as progress:
        where = pick_device(device)
        wanted = None if dtype == "auto" else pick_dtype(dtype, where)
        try:
            settings = QwenPatchInt8Config(activations, lm_head)
        except ValueError as error:
            raise UsageError(str(error)) from error
        task = progress.add_task(display_name(model), total=None)

        def on_linear(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = quantize_checkpoint(model, output, settings, wanted, where, on_linear)
    before, after = found["bytes_before"], found["bytes_after"]
    console.print(f"{display_name(model)}: {found['linears']} linears in int8, the rest in {found['dtype']}")
    console.print(f"{before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB after ({after / before:.0%}), in {output}")


@app.command()
def perplexity(
    model: Model = "tiny-qwen2",
    variant: Annotated[str, typer.Option(help="Compared with stock, comma-separated, as in bench.")] = (
        "both,int8-w8a16,int8-w8a8"
    ),
    text: Annotated[Path | None, typer.Option(help="A text file; without it, the bundled text.")] = None,
    dataset: Annotated[str | None, typer.Option(help="NAME or NAME:CONFIG of the datasets package, streamed.")] = None,
    split: Annotated[str, typer.Option(help="Of the data set.")] = "test",
    device: Device = "auto",
    dtype: Dtype = "auto",
    window: Annotated[int, typer.Option(min=2, help="Tokens at once.")] = 512,
    stride: Annotated[int, typer.Option(min=1, help="Tokens scored a window, after the first one.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text.")] = 100_000,
    output: Output = None,
) -> None:
    """Perplexity by sliding window: stock, patched and int8 side by side, with the difference and its interval."""
    from .benchmarks import perplexity as benchmark
    from .benchmarks.generate import INT8
    from .loading import UsageError, sample_text
    from .report import show_rows

    with usage_errors():
        variants = variants_of(variant)
        if stride >= window:
            raise UsageError(f"stride {stride} is not less than the window of {window}: tokens would have no context")
        if text is not None and dataset is not None:
            raise UsageError("give --text or --dataset, not both")
        given = None if text is None else text_of(text, "text file")
        loaded, tokenizer = load(model, device, dtype, any(v in INT8 for v in variants))
        if window > (limit := loaded.config.get_text_config().max_position_embeddings):
            raise UsageError(f"a window of {window} is more than the {limit} of {display_name(model)}")
        source = text.name if text is not None else dataset or "bundled text"
        if dataset is not None:
            content = benchmark.dataset_text(dataset, split, 8 * max_tokens)
        else:
            content = sample_text() if given is None else given
        ids = benchmark.text_ids(tokenizer, content, max_tokens)
        document = benchmark.run(loaded, display_name(model), source, ids, variants, window, stride, output)
    title = f"{document['model']}, {document['dtype']}, {source}: {document['settings']['tokens']} tokens"
    show_rows(console, title, benchmark.flat_rows(document), benchmark.COLUMNS)


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

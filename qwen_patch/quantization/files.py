"""`qwen-patch quantize`: a 16-bit checkpoint in, an int8 one out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from ..loading import BUNDLED, UsageError, auto_class
from .quantizer import QwenPatchInt8Config


def memory_bytes(model: torch.nn.Module) -> int:
    """Of all parameters and buffers, each counted once."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def quantize_checkpoint(
    source: str,
    output: Path,
    settings: QwenPatchInt8Config,
    dtype: torch.dtype | None,
    device: torch.device,
    on_linear: Callable[[int, int], None],
) -> dict[str, Any]:
    """Reads `source`, a folder, hub id or bundled model, weight by weight into int8, and writes `output`.

    The folder appears when all of it is written, or not at all. Memory holds the int8 model and the weight at hand.
    `dtype` None is the checkpoint's own. `on_linear(done, of)` is called after each linear. Returns what to tell: how
    many linears, and the bytes of the model in memory before and after. Raises UsageError where that can't be.
    """
    if output.exists():
        raise UsageError(f"{output} is there already: name a folder that is not")
    path = str(BUNDLED.get(source, source))
    settings._on_linear = on_linear
    part = output.with_name(f".{output.name}.part")
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        if (method := getattr(config, "quantization_config", None)) is not None:
            raise UsageError(f"model {source!r} is quantized already ({method.get('quant_method')})")
        options = {"quantization_config": settings, "device_map": {"": str(device)}}
        auto = auto_class(config)
        model = auto.from_pretrained(path, dtype="auto" if dtype is None else dtype, **options)
        with torch.device("meta"):
            before = memory_bytes(auto.from_config(config, dtype=model.dtype))
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(path).save_pretrained(part)
        part.rename(output)
    except UsageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"model {source!r} can't be quantized: {str(error).splitlines()[0]}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {
        "linears": model.hf_quantizer.done,
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes_before": before,
        "bytes_after": memory_bytes(model),
    }

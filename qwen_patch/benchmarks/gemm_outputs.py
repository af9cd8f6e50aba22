"""`qwen-patch gemm --save` and `--baseline`: the results of a run kept, and those of another compared bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..loading import UsageError
from . import results

BITS = {2: torch.int16, 4: torch.int32}


def stem(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".json" else path


def name(row: dict[str, Any]) -> str:
    """What a result is called in both files."""
    return f"{row['type']}/{row['candidate']}/" + "x".join(map(str, row["shape"]))


def save(path: Path, document: dict[str, Any], outputs: dict[str, torch.Tensor]) -> None:
    """Writes the document to PATH.json and the results to PATH.safetensors, each in one step."""
    with results.whole(results.beside(stem(path), ".safetensors")) as part:
        save_file(outputs, part)
    results.write_json(results.beside(stem(path), ".json"), document)


class Baseline:
    """A saved run, for one of the same device and seed, and of types and shapes that it has; or else UsageError."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        file, tensors = (results.beside(stem(path), suffix) for suffix in (".json", ".safetensors"))
        if missing := next((f for f in (file, tensors) if not f.is_file()), None):
            raise UsageError(f"no such baseline file: {missing}")
        try:
            self.document = json.loads(file.read_text(encoding="utf-8"))
            found = conditions(self.document)
            self.outputs = safe_open(tensors, "pt")
        except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"{path} is not a run that `qwen-patch gemm --save` wrote: {reason}") from error
        for what, wanted in conditions(run).items():
            if lacking := [value for value in wanted if value not in found[what]]:
                raise UsageError(f"the baseline has no {what} {lacking[0]}: its own are {', '.join(found[what][:8])}")
        self.names = set(self.outputs.keys())
        self.us = {name(row): row["us"] for row in self.document["rows"]}

    def compare(self, row: dict[str, Any], output: torch.Tensor) -> dict[str, Any] | None:
        """How `output` differs from the saved one: elements of other bits, and the largest difference (a NaN in one of
        them: infinite). None where the baseline has no such result."""
        if name(row) not in self.names:
            return None
        saved = self.outputs.get_tensor(name(row))
        if saved.shape != output.shape or saved.dtype != output.dtype:
            return {"differing": output.numel(), "elements": output.numel(), "largest_difference": float("inf")}
        bits = BITS[output.element_size()]
        unequal = output.view(bits) != saved.view(bits)
        difference = (output[unequal].double() - saved[unequal].double()).abs().nan_to_num(nan=float("inf"))
        return {
            "differing": int(unequal.sum()),
            "elements": output.numel(),
            "largest_difference": difference.max().item() if len(difference) else 0.0,
        }

    def times(self, row: dict[str, Any]) -> float | None:
        """How many times faster than in the baseline."""
        before = self.us.get(name(row))
        return before / row["us"] if before and row["us"] else None


def conditions(document: dict[str, Any]) -> dict[str, list[str]]:
    """What a baseline must share with a run for the two to be comparable."""
    settings = document["settings"]
    return {
        "device": [document["environment"]["device_name"]],
        "seed": [str(settings["seed"])],
        "type": settings["types"],
        "shape": ["x".join(map(str, shape)) for shape in settings["shapes"]],
    }

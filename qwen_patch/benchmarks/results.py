"""One schema for every result file: what was measured, on what, with which settings, and the rows."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def commit() -> str:
    """The commit of the source tree, "+changes" where it is not clean, "unknown" outside a checkout of it.

    QWEN_PATCH_COMMIT overrides it, for a copy of the tree on a machine without its history.
    """
    if given := os.environ.get("QWEN_PATCH_COMMIT"):
        return given

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie in somebody else's checkout
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    import transformers

    found = {
        "device": device.type,
        "device_name": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_name": properties.name,
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
        }
    return found


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` in one step: a reader, or an interruption, never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def beside(output: Path, suffix: str) -> Path:
    """output + suffix. Not with_suffix, which would cut "Qwen2.5-0.5B" at its last point."""
    return output.with_name(output.name + suffix)


def finite(value: Any) -> Any:
    """The value with None for what JSON has no word for: NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, json.dumps(finite(document), indent=1) + "\n")


def cell(value: Any) -> str:
    """A value as tables show it: floats with three significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def markdown_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """`columns` maps a key of the rows to its heading."""

    lines = ["| " + " | ".join(columns.values()) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"

"""`qwen-patch doctor`: what is installed, which libraries are in use, why not, and what to do about it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__
from .ops import LIBRARIES
from .requirements import TRANSFORMERS_BEFORE, TRANSFORMERS_FROM, problem_with_transformers


def _nvcc() -> str:
    """The CUDA compiler's version line, or why there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).exists():
        return "not found (needed only to build the CUDA library)"
    try:
        output = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        return f"{found} does not run: {error.strerror}"
    return next((line.split("release ")[1] for line in output.splitlines() if "release " in line), found)


def _compiler() -> str:
    """Where the C++ compiler that builds would take is."""
    if given := shlex.split(os.environ.get("CXX") or ""):
        return shutil.which(given[0]) or f"not found: CXX is {given[0]}"
    return shutil.which("g++") or shutil.which("c++") or "not found"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none" if torch.version.cuda is None else "none visible to torch"
    names = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        names.append(f"{p.name} (sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB)")
    return ", ".join(names)


def examine() -> dict[str, Any]:
    """What a bug report needs: `versions`, `libraries` (kind -> state), and `advice`, empty where all is well."""
    advice = list(filter(None, [problem_with_transformers()]))
    needed = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    libraries = {}
    for kind, library in LIBRARIES.items():
        libraries[kind] = f"in use: {library.path}" if library.loaded else f"not in use: {library.reason}"
        if kind in needed and not library.loaded:
            advice.append(f"{kind} ops run their slower PyTorch reference: {library.remedy}")
    for i in range(torch.cuda.device_count() if LIBRARIES["cuda"].loaded else 0):
        if problem := LIBRARIES["cuda"].problem(torch.device("cuda", i)):
            advice.append(f"cuda:{i} runs the slower PyTorch reference: {problem}")
    return {
        "versions": {
            "qwen_patch": __version__,
            "torch": torch.__version__,
            "transformers": f"{transformers.__version__} (supported: >={TRANSFORMERS_FROM},<{TRANSFORMERS_BEFORE})",
            "python": platform.python_version(),
            "GPU": _gpus(),
            "nvcc": _nvcc(),
            "C++ compiler": _compiler(),
            "CPU threads": str(torch.get_num_threads()),
        },
        "libraries": libraries,
        "advice": advice,
    }

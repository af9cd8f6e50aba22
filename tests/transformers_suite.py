"""Transformers' own common model tests, brought from the source archive of the installed version.

The wheel does not carry them, and the archive on the package index carries a part: `test_modeling_common.py` and its
neighbours, but not the mixins for `generate` and for exporting that it imports. Empty ones stand in for those.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from types import ModuleType

import torch
import transformers
from filelock import FileLock
from models import SHAPE
from transformers import PretrainedConfig
from transformers.testing_utils import torch_device

# The archive of each version that the suite runs with: a version bump brings its hash.
SHA256 = {
    "5.17.0": "a153be279169b55b92d8000bf4af294aed684503d091cca7804da2dd8a9de000",
    "5.24.0": "906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3",
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qwen_patch"
MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def fetch(version: str) -> Path:
    """The folder with the package `transformers_tests` of that version, downloaded once and checked against its hash.

    Where nothing can be downloaded, put the archive transformers-VERSION.tar.gz into the cache folder beforehand.
    """
    if version not in SHA256:
        raise RuntimeError(f"no known hash for the source archive of transformers {version}: add it to {__file__}")
    folder, archive = CACHE / f"transformers-{version}", CACHE / f"transformers-{version}.tar.gz"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"), tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        if folder.exists():
            return folder
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(f"transformers=={version} --hash=sha256:{SHA256[version]}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--require-hashes", "-d", temporary, "-r", str(requirement)]
        if archive.exists():
            command += ["--no-index", "--find-links", str(CACHE)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"can't download transformers-{version}.tar.gz to {CACHE}: {result.stderr.strip()}")
        unpacked = Path(temporary) / "unpacked" / "transformers_tests"
        with tarfile.open(Path(temporary) / archive.name) as tar:
            tar.extractall(temporary, filter="data")
        unpacked.parent.mkdir()
        (Path(temporary) / f"transformers-{version}" / "tests").rename(unpacked)
        for name, text in MISSING.items():
            (unpacked / name).parent.mkdir()
            (unpacked / name).write_text(text)
        for package in {unpacked, *(p.parent for p in unpacked.glob("*/*.py"))}:
            (package / "__init__.py").touch()
        unpacked.parent.rename(folder)
    return folder


def common_tests() -> ModuleType:
    """The module `test_modeling_common` of the installed version."""
    sys.path.insert(0, str(fetch(transformers.__version__)))
    try:
        return importlib.import_module("transformers_tests.test_modeling_common")
    finally:
        sys.path.pop(0)


class CausalLMTester:
    """What the common tests ask of a model tester, for a causal language model of two small layers."""

    batch_size, seq_length = 3, 7
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4
    is_training = True

    def __init__(self, parent: unittest.TestCase, config_class: type[PretrainedConfig], **differing: object) -> None:
        self.parent, self.config_class, self.differing = parent, config_class, differing

    def get_config(self) -> PretrainedConfig:
        own = {name: getattr(self, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
        own |= {"head_dim": 8, "intermediate_size": 37, "initializer_range": 0.02}
        return self.config_class(**(SHAPE | own | self.differing))

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(0, SHAPE["vocab_size"], (self.batch_size, self.seq_length), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}

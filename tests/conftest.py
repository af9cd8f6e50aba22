"""Devices, the bundled models, and a quiet Transformers."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pytest_configure(config):
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Two workers with all cores each spend their time waiting for each other: ten times slower.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
    # A machine without a GPU is the normal case: say so once in the head line rather than a skip a test.
    config.stash["cuda"] = torch.cuda.is_available()


def pytest_report_header(config):
    return f"GPU: {torch.cuda.get_device_name()}" if config.stash["cuda"] else "GPU: none, the cuda tests are left out"


def pytest_collection_modifyitems(config, items):
    if not config.stash["cuda"]:
        left_out = [item for item in items if item.get_closest_marker("cuda")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("cuda")]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

"""Devices, the bundled models, and a quiet Transformers."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

from qwen_patch.generation.runtime import NOT_STARTED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pytest_configure(config):
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Two workers with all cores each spend their time waiting for each other: ten times slower.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
    # A machine without a GPU is the normal case: say so once in the head line rather than a skip a test.
    config.stash["gpus"] = torch.cuda.device_count()


def pytest_report_header(config):
    gpus = [torch.cuda.get_device_name(i) for i in range(config.stash["gpus"])]
    return f"GPUs: {', '.join(gpus)}" if gpus else "GPU: none, the cuda tests are left out"


def pytest_collection_modifyitems(config, items):
    needed = {"cuda": 1, "two_gpus": 2}
    missing = [marker for marker, gpus in needed.items() if gpus > config.stash["gpus"]]
    left_out = {item for item in items if any(item.get_closest_marker(marker) for marker in missing)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _the_runtime_starts(caplog):
    """Its errors lead to Transformers' own loop, and would be seen by no test of what a model answers. A test that
    wants one clears what was logged."""
    yield
    assert NOT_STARTED not in caplog.text


@pytest.fixture(params=["kernel", "forward"])
def each_way(request, monkeypatch):
    """Once with the decode step as one op, once with the plain forward in its place."""
    from decoding import without_kernel

    if request.param == "forward":
        without_kernel(monkeypatch)


@pytest.fixture
def captured_on_cpu(monkeypatch):
    from decoding import capture_on_cpu

    capture_on_cpu(monkeypatch)

"""CUDA graphs of work on fixed buffers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_taken = threading.Lock()  # of the streams below: one capture at a time


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: the library for matrix products keeps 32 MiB for each stream that it has once worked on."""
    return torch.cuda.Stream(device)


def run_aside(work: Callable[[], Any], device: torch.device) -> None:
    """Runs `work` where `capture` will, so that what is loaded or allocated at a first run is there."""
    current, side = torch.cuda.current_stream(device), _stream(device)
    with _taken:
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                work()
        finally:
            current.wait_stream(side)


def capture(work: Callable[[], Any], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """`work` as a graph whose memory is the pool's; it does not run. Raises torch.OutOfMemoryError."""
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            _taken,
            torch.cuda.stream(torch.cuda.current_stream(device)),  # again the current one, however a capture ends
            torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"),
        ):
            work()
    except RuntimeError as error:
        # The end of a capture that has failed may fail in its turn, with words that don't say why.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    return graph

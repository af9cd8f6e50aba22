"""Clocks: how a call is timed on a GPU (in a graph, and from Python) and on a CPU, and the memory limit beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """Median and quartiles of repeated measurements, in one unit."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")  # within what was measured, of two values too
    return Spread(statistics.median(values), low, high)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def last_level_cache(device: torch.device) -> int:
    """Bytes of the cache before memory: what cold inputs must exceed. 32 MB where a CPU does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        return int(caches[-1].read_text().strip().removesuffix("K")) << 10
    except (IndexError, OSError, ValueError):
        return 32 << 20


def interleaved(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Runs each variant once a round, in alternating order, so that drift meets all alike; returns their spreads."""
    names, samples = list(variants), {name: [] for name in variants}
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            samples[name].append(variants[name]())
    return {name: spread(values) for name, values in samples.items()}


def wall_clock_us(calls: Callable[[], None], count: int, device: torch.device) -> Callable[[], float]:
    """us a call of `calls`, which makes `count` of them; the device's work is waited for."""

    def measure() -> float:
        synchronize(device)
        start = time.perf_counter()
        calls()
        synchronize(device)
        return (time.perf_counter() - start) * 1e6 / count

    return measure


def graph_us(calls: Callable[[], object], count: int) -> Callable[[], float]:
    """us a call on the GPU alone: `calls`, which makes `count` of them, is captured in a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = calls()

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    # Alive as long as the graph: the outputs, so that no call writes into a warm one of another, and with the calls all
    # that they read.
    measure.kept = calls, outputs
    for _ in range(3):
        measure()
    return measure


def copy_bandwidth(device: torch.device, rounds: int = 15) -> Spread:
    """GB/s of a large copy, bytes read plus bytes written: the limit that memory-bound work is measured against."""
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    if device.type == "cpu":
        measure = wall_clock_us(lambda: target.copy_(source), 1, device)
    else:  # not in a graph: there a copy becomes a memcpy node, which reaches two thirds of this

        def measure() -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3

    measure()
    return spread([2 * size / measure() / 1e3 for _ in range(rounds)])

"""A session on CUDA: CUDA graphs take the prompt and decode, and the host is a few tokens behind the GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers import LogitsProcessorList

from ..ops.decode_step import exchange_words
from .graphs import capture, run_aside
from .models import sizes_of
from .session import Session, room_for

logger = logging.getLogger("qwen_patch")

# Parts that a context is cut into, and keys that one has at least. Qwen3-0.6B, one row, with 32, 64, 128 and 256 keys:
# 511, 508, 514 and 535 us at 192 tokens, 559, 561, 552 and 576 at 900; three rows 874, 963 and 1,003 from 64 keys on.
MAX_SPLITS, SPLIT_KEYS = 16, 64
# Lengths that prompts are padded to, each captured at its first use; longer ones, and batches of more tokens, run
# eagerly at their own length: there the launches are hidden behind the work.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512)
MAX_CAPTURED_TOKENS = 2048
BURST = 4  # steps in one graph: the gap between two graphs, and the copy to the host, take 20 us


class CapturedSession(Session):
    """A session whose work is graphs: where they are captured, it only asks the GPU for it, and returns."""

    burst = BURST
    ahead = 2
    draws_itself = True

    def __init__(
        self, model: nn.Module, rows: int, capacity: int, processors: LogitsProcessorList, do_sample: bool
    ) -> None:
        super().__init__(model, rows, capacity, processors, do_sample)
        with torch.inference_mode(False):
            self.prompt = torch.zeros(max(MAX_CAPTURED_TOKENS, rows), dtype=torch.int64, device=self.tokens.device)
        self.pool = torch.cuda.graph_pool_handle() if self.tokens.device.type == "cuda" else None
        self.prompts: dict[int, torch.cuda.CUDAGraph] = {}  # by bucket
        self.capturing, self.slots = True, capacity
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by steps, and by the slots that they attend to
        self._capture_steps(self.capacity)

    def _prepare_kernel(self, model: nn.Module) -> None:
        super()._prepare_kernel(model)
        device, rows = self.embedding.device, self.rows
        sizes = sizes_of(self.decoder)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        splits = max(1, min(MAX_SPLITS, blocks // (rows * sizes.kv_heads)))
        self.sizes |= {"max_splits": splits, "split_keys": SPLIT_KEYS}
        words = exchange_words(self.embedding, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.inner, rows, splits)
        with torch.inference_mode(False):
            self.exchange = torch.zeros(words, dtype=torch.int32, device=device)

    def bucket_of(self, length: int) -> int | None:
        """The length that prompts of so many tokens are padded to; None for those that run at their own."""
        most = min(self.capacity, MAX_CAPTURED_TOKENS // self.rows)
        return next((b for b in BUCKETS if length <= b <= most), None)

    def replays(self, length: int) -> bool:
        return self.bucket_of(length) in self.prompts

    def _take(self, tokens: torch.Tensor) -> None:
        length = tokens.shape[1]
        bucket = self.bucket_of(length)
        if bucket is None:
            self._prompt_work(tokens)
            return
        padded = self.prompt[: self.rows * bucket].view(self.rows, bucket)
        padded[:, :length] = tokens  # what earlier prompts left beyond it is padding
        if bucket in self.prompts:
            self.prompts[bucket].replay()
            return
        work, device = functools.partial(self._prompt_work, padded), tokens.device
        run_aside(work, device)
        if self.capturing:
            try:
                self.prompts[bucket] = capture(work, device, self.pool)
            except torch.OutOfMemoryError as error:
                self.capturing = False
                logger.warning("no memory for a graph of prompts of %d tokens: they run eagerly (%s)", bucket, error)

    def step(self, tokens: int = 1, unchanged: Callable[[], bool] = lambda: True) -> None:
        self._graph_of(tokens, unchanged).replay()
        self.column += tokens

    def _graph_of(self, tokens: int, unchanged: Callable[[], bool]) -> torch.cuda.CUDAGraph:
        """Over as many slots as these steps need; the whole capacity's, which is there from the start, where there can
        be none: an answer does not change its weights, nor end in an error, for it."""
        slots = self.capacity
        if self.no_kernel is not None:  # decode_step knows the lengths
            slots = min(slots, room_for(self.column + tokens))
        if (tokens, slots) not in self.graphs and self.capturing and unchanged():
            try:
                self._capture_steps(slots)
            except RuntimeError as error:
                self.capturing = False
                reason = str(error).partition("\n")[0]
                logger.warning("no graph over %d tokens: steps are over %d (%s)", slots, self.capacity, reason)
        return self.graphs.get((tokens, slots)) or self.graphs[tokens, self.capacity]

    def send(self) -> Callable[[], torch.Tensor]:
        new = self.history[:, self.sent : self.column].contiguous()
        self.sent = self.column
        slot, arrived = torch.empty(new.shape, dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event()
        slot.copy_(new, non_blocking=True)
        arrived.record()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return slot

        return wait

    def _slots_in_use(self) -> int:
        return self.slots

    def _steps(self, tokens: int, slots: int) -> None:
        self.slots = slots
        for _ in range(tokens):
            self._work()

    def _capture_steps(self, slots: int) -> None:
        """One step, and BURST of them. The step before, which loads what is loaded lazily, is taken back."""
        kept = [t.clone() for t in (self.state[1:], self.tokens, self.history)]
        device = self.tokens.device
        random = torch.cuda.get_rng_state(device)
        try:
            run_aside(functools.partial(self._steps, 1, slots), device)
        finally:
            torch.cuda.set_rng_state(random, device)
            for tensor, value in zip((self.state[1:], self.tokens, self.history), kept, strict=True):
                tensor.copy_(value)
        made = {(n, slots): capture(functools.partial(self._steps, n, slots), device, self.pool) for n in (1, BURST)}
        self.graphs |= made

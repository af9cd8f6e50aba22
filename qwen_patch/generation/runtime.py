"""The decode runtime: generate's sampling loop with the token chosen on the GPU and the host a few tokens behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from .eligibility import (
    MINIMUM_LENGTHS,
    reason_against_call,
    reason_against_config,
    reason_against_model,
    state_of,
)
from .session import BURST, Session, choose

logger = logging.getLogger("qwen_patch")
AHEAD = 2  # bursts that the GPU may be ahead of the host, which looks for the end
MAX_SESSIONS = 2  # kept between calls: each has a cache of keys and values
SMALLEST_CAPACITY = 256


class Runtime:
    """What one model's generate keeps between calls."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[Any, Session] = OrderedDict()
        self.lock = threading.RLock()
        self.busy = False  # seen true only by a call from within a call, of a streamer say
        self.state: list[Any] = []  # of the model, at the last call; and what it means
        self.model_reason: str | None = None
        self.state_of_sessions: list[Any] = []
        self.last_reason: str | None = None
        self.told: set[str] = set()

    def why_not(self, model: nn.Module, *call: Any) -> str | None:
        """Why a call goes to Transformers' own loop; said once a reason, and kept for `explain`."""
        state = state_of(model)
        if state != self.state:
            self.state, self.model_reason = state, reason_against_model(model)
        self.last_reason = reason_against_config(model.config) or self.model_reason or reason_against_call(*call)
        if self.last_reason is not None and self.last_reason not in self.told:
            self.told.add(self.last_reason)
            logger.info("generate runs Transformers' own loop: %s", self.last_reason)
        return self.last_reason

    @contextmanager
    def claim(self, model: nn.Module, device: torch.device, *wanted: Any) -> Iterator[Session | None]:
        """The `session` wanted, for one call; None for a call from within a call, and where there is no memory.

        A second thread waits: the buffers are one batch's. The device is made the current one.
        """
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self.lock, current:
            session = None if self.busy else self._session_if_it_fits(model, *wanted)
            if session is None:
                yield None
                return
            self.busy = True
            try:
                yield session
            finally:
                self.busy = False

    def _session_if_it_fits(self, model: nn.Module, *wanted: Any) -> Session | None:
        try:
            return self.session(model, *wanted)
        except torch.OutOfMemoryError as error:
            self.sessions.clear()
            self.last_reason = "no memory for the cache of the decode runtime"
            logger.warning("generate runs Transformers' own loop: %s (%s)", self.last_reason, error)
            return None

    def session(self, model: nn.Module, rows: int, length: int, processors: Any, do_sample: bool) -> Session:
        """For `rows` sequences of up to `length` tokens: one from before, if the model is still what it was."""
        if self.state != self.state_of_sessions:
            self.sessions.clear()
            self.state_of_sessions = self.state
        capacity = SMALLEST_CAPACITY
        while capacity < length:
            capacity *= 2
        key = (rows, capacity, do_sample, _signature(processors))
        found = self.sessions.pop(key, None)
        if found is None:
            while len(self.sessions) >= MAX_SESSIONS:
                self.sessions.popitem(last=False)
            found = Session(model, rows, capacity, processors, do_sample)
        self.sessions[key] = found
        return found


def _signature(processors: LogitsProcessorList) -> tuple:
    """Tells lists of processors apart that a graph can't share."""
    kept = [p for p in processors if type(p) not in MINIMUM_LENGTHS]
    return tuple((type(p).__name__, *sorted((k, repr(v)) for k, v in vars(p).items())) for p in kept)


def generate(
    session: Session,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> torch.Tensor:
    """generate's sampling loop; returns input_ids with the new tokens, as it does."""
    mask = model_kwargs.get("attention_mask")
    starts = [0] * len(input_ids) if mask is None else (mask != 0).long().argmax(-1).tolist()
    logits = session.start(input_ids, starts, processors)
    scores = processors(input_ids, logits.to(torch.float32, copy=True))
    session.put(choose(scores, session.do_sample))

    rows = _Rows(input_ids, criteria, config)
    for tokens in _tokens(session, rows.room):
        shown = rows.add(tokens)
        if streamer is not None:
            streamer.put(shown)
        if rows.done:
            break
    if streamer is not None:
        streamer.end()
    return rows.result()


def _tokens(session: Session, most: int) -> Iterator[torch.Tensor]:
    """The rows' tokens on the host, step after step, with the GPU up to AHEAD bursts ahead."""
    under_way = deque([session.send()])
    asked = 1
    while under_way:
        while asked < most and len(under_way) <= AHEAD:
            steps = BURST if most - asked >= BURST else 1
            session.step(steps)
            under_way.append(session.send())
            asked += steps
        yield from under_way.popleft()().unbind(1)


class _Rows:
    """The sequences as the host knows them: which have ended, and what they hold."""

    def __init__(self, input_ids: torch.Tensor, criteria: StoppingCriteriaList, config: GenerationConfig) -> None:
        self.input_ids, self.new = input_ids, []
        self.room = max(1, criteria.max_length - input_ids.shape[1])
        self.unfinished = torch.ones(len(input_ids), dtype=torch.long)
        ends = [item.eos_token_id for item in criteria if hasattr(item, "eos_token_id")]
        self.ends = torch.cat([e.flatten().cpu() for e in ends]) if ends else None
        self.pad = int(config._pad_token_tensor) if ends else None
        self.deadlines = [c.initial_timestamp + c.max_time for c in criteria if type(c) is MaxTimeCriteria]
        self.strings = [c for c in criteria if type(c) is StopStringCriteria]
        self.seen = input_ids.cpu() if self.strings else None

    def add(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes one token a row; returns them with those of finished rows replaced by padding."""
        if self.ends is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.new.append(tokens)
        over = torch.zeros(len(tokens), dtype=torch.bool)
        if self.ends is not None:
            over |= torch.isin(tokens, self.ends)
        if self.strings:
            self.seen = torch.cat([self.seen, tokens[:, None]], dim=1)
            for item in self.strings:
                over |= item(self.seen, None)
        if any(time.time() > deadline for deadline in self.deadlines):
            over[:] = True
        self.unfinished &= ~over
        return tokens

    @property
    def done(self) -> bool:
        return len(self.new) >= self.room or not self.unfinished.any()

    def result(self) -> torch.Tensor:
        new = torch.stack(self.new, dim=1).to(self.input_ids.device)
        return torch.cat([self.input_ids, new], dim=1)

"""The decode runtime: generate's sampling loop over a session, whose GPU, if it has one, may be a few tokens ahead."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from .calls import Call, reason_against_call
from .captured import CapturedSession
from .models import Weights, buffers_of, reason_against_config, reason_against_model, state_of
from .sampling import choose, kept_by_graphs
from .session import SMALLEST_ROOM, Session, room_for

logger = logging.getLogger("qwen_patch")
SESSIONS = {"cuda": CapturedSession, "cpu": Session}  # by the type of the device
# They hand tokens on, and wait for nobody.
STREAMERS = (type(None), TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer)
MAX_SESSIONS = 2  # kept between calls: each has a cache of keys and values
NO_MEMORY = "no memory for the decode runtime"
NOT_STARTED = "the decode runtime could not start"
NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch has no class of error for it


_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _forked() -> None:
    for runtime in _RUNTIMES:
        runtime.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Known(NamedTuple):
    """A model's state, what holds its buffers' addresses, and what follows from it."""

    state: list[Any]
    buffers: list[torch.Tensor]
    reason: str | None
    weights: Weights | None  # where there is no reason


class Runtime:
    """What one model's generate keeps between calls."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[Any, Session] = OrderedDict()
        self.known: Known | None = None  # of the model that the sessions are of
        self.turns = threading.Condition()
        self.caller: int | None = None  # the thread whose call is under way
        self.may_wait = False  # that call, for its streamer
        self.finished: torch.cuda.Event | None = None  # the GPU's work for the last call
        self.last_reason: str | None = None
        self.told: set[str] = set()
        _RUNTIMES.add(self)

    def forked(self) -> None:
        """In a new process, of one thread: whichever other one had the turn is not in it."""
        self.turns, self.caller = threading.Condition(), None

    def release(self) -> None:
        """Frees buffers and graphs; a call under way in another thread keeps its own until it ends."""
        self._wait()
        self.sessions.clear()

    def _wait(self) -> None:
        """For steps beyond the end of the last call, which may be under way on a stream that the allocator does not
        know of: memory must not be another's while they write into it."""
        if self.finished is not None:
            self.finished.synchronize()

    def tell(self, reason: str) -> None:
        """Why a call was not the runtime's: for `explain`, and once for the log."""
        self.last_reason = reason
        if reason not in self.told:
            self.told.add(reason)
            logger.info("generate runs Transformers' own loop: %s", reason)

    def run(self, model: nn.Module, call: Call) -> torch.Tensor | None:
        """What generate's sampling loop returns; None where Transformers' own is to run, for `last_reason`."""
        reason = reason_against_config(model) or reason_against_call(call)
        if reason is None:
            with self._turn(call) as reason:
                if reason is None:
                    rows = _Rows(call)  # what it asks the GPU for would later wait for the prompt
                    session, reason = self._started(model, call)
                    if session is not None:
                        self.last_reason = None
                        return _decode(session, rows, call.streamer, self.known.weights)
        self.tell(reason)
        return None

    @contextmanager
    def _turn(self, call: Call) -> Iterator[str | None]:
        """The turn of one call, with its device made the current one; or why it has none.

        A second thread waits for it: the buffers are one batch's. It does not where the call under way has a streamer
        of somebody's own, which may wait in turn, for that thread even.
        """
        me, free = threading.get_ident(), False
        on_gpu = call.input_ids.device.type == "cuda"
        try:
            with self.turns:
                self.turns.wait_for(lambda: self.caller in (None, me) or self.may_wait)
                free = self.caller is None
                if free:
                    self.caller, self.may_wait = me, type(call.streamer) not in STREAMERS
                    self.turns.notify_all()
                reason = "it was called by a call under way" if self.caller == me else "a streamer's call is under way"
            if not free:
                yield reason
                return
            with torch.cuda.device(call.input_ids.device) if on_gpu else nullcontext():
                try:
                    if self.finished is not None:  # on another stream, it may be, with steps beyond the end under way
                        torch.cuda.current_stream().wait_event(self.finished)
                    yield None
                finally:
                    if on_gpu:
                        self.finished = torch.cuda.current_stream().record_event()
        finally:
            if free:
                with self.turns:
                    self.caller = None
                    self.turns.notify_all()

    def _started(self, model: nn.Module, call: Call) -> tuple[Session | None, str | None]:
        """A session that has taken the prompt and chosen the first tokens; or why there is none."""
        try:
            # The GPU takes the prompt while the host looks whether the model is still what it was. If it is not, the
            # sessions are gone, and what this one has computed.
            ready = self._ready(call)
            logits = None if ready is None else ready.start(call.input_ids, call.starts, call.processors)
            if (reason := self._reason_against(model, call)) is not None:
                return None, reason
            session = self._session(model, call)
            if session is not ready:
                logits = session.start(call.input_ids, call.starts, call.processors)
            if call.processors or call.config.do_sample:
                logits = call.processors(call.input_ids, logits.to(torch.float32, copy=True))
            session.put(choose(logits, call.config.do_sample))
            return session, None
        except RuntimeError as error:  # a driver that refuses a launch or a capture too; what is the call's fault, or
            # has broken the device, meets Transformers' own loop as well, which raises it then
            self.release()
            no_memory = isinstance(error, torch.OutOfMemoryError) or NO_CPU_MEMORY in str(error)
            reason = NO_MEMORY if no_memory else NOT_STARTED
            if reason not in self.told:
                self.told.add(reason)
                logger.warning("generate runs Transformers' own loop: %s (%s)", reason, str(error).partition("\n")[0])
            return None, reason

    def _ready(self, call: Call) -> Session | None:
        """The call's session, if it is there and has a graph for the prompt whose weights are still where they were."""
        session = self.sessions.get(_key(call))
        if (
            session is None
            or not session.replays(call.input_ids.shape[1] - min(call.starts))
            or session.tokens.device != call.input_ids.device
        ):
            return None
        return session if self.known.weights.held() else None

    def _reason_against(self, model: nn.Module, call: Call) -> str | None:
        """Why the runtime can't run this model; where it has changed, its sessions end."""
        state = state_of(model)
        if self.known is None or state != self.known.state:
            self.release()
            reason = reason_against_model(model)
            self.known = Known(state, buffers_of(model), reason, None if reason else Weights(model))
        if self.known.reason is not None:
            return self.known.reason
        positions = model.config.max_position_embeddings
        if (capacity := _key(call)[1]) > max(2 * positions, SMALLEST_ROOM):
            return f"room for {capacity} tokens is asked for, of a model for {positions}"
        device = model.get_input_embeddings().weight.device
        if device != call.input_ids.device:
            return f"the prompt is on {call.input_ids.device}, the model on {device}"
        return None

    def _session(self, model: nn.Module, call: Call) -> Session:
        """Of the call's rows, with room for its tokens: one from before, or a new one."""
        key = _key(call)
        found = self.sessions.pop(key, None)
        if found is None:
            while len(self.sessions) >= MAX_SESSIONS:
                self._wait()
                with suppress(KeyError):  # released meanwhile, by another thread
                    self.sessions.popitem(last=False)
            session = SESSIONS[call.input_ids.device.type]
            found = session(model, key[0], key[1], call.processors, call.config.do_sample)
        self.sessions[key] = found
        return found


def _key(call: Call) -> tuple:
    """Calls of one key can share a session: its rows, its capacity, its captured choice of tokens."""
    rows, width = call.input_ids.shape
    capacity = room_for(max(call.criteria.max_length, width + 1))
    return rows, capacity, call.config.do_sample, _signature(call)


def _signature(call: Call) -> tuple:
    """Tells lists of processors apart that a graph can't share."""
    kept = kept_by_graphs(call.processors)
    return tuple((type(p), *sorted((k, repr(v)) for k, v in vars(p).items())) for p in kept)


def _decode(session: Session, rows: _Rows, streamer: Any, weights: Weights) -> torch.Tensor:
    """The rest of generate's sampling loop: returns input_ids with the new tokens, as it does."""
    for tokens in _tokens(session, rows.room, weights):
        shown = rows.add(tokens)
        if streamer is not None:
            streamer.put(shown.clone())  # which may write into it
        if rows.done:
            break
    if streamer is not None:
        streamer.end()
    return rows.result()


def _tokens(session: Session, most: int, weights: Weights) -> Iterator[torch.Tensor]:
    """The rows' tokens on the host, step after step, with the session up to `ahead` bursts ahead."""
    under_way = deque([session.send()])
    asked, held = 1, None
    while under_way or asked < most:
        while asked < most and len(under_way) <= session.ahead:
            steps = session.burst if most - asked >= session.burst else 1
            session.step(steps, weights.held)
            under_way.append(session.send())
            asked += steps
        if held is None and most > 1:  # now that the GPU has work; where this is all, it is waited for below
            # `decode_step` and graphs have addresses only: a streamer, or another thread, may give the model other
            # weights. These stay until the answer is complete.
            held = weights.hold()
        yield from under_way.popleft()().unbind(1)


class _Rows:
    """The sequences as the host knows them: which have ended, and what they hold."""

    def __init__(self, call: Call) -> None:
        self.input_ids, self.new = call.input_ids, []
        self.room = max(1, call.criteria.max_length - call.input_ids.shape[1])
        self.unfinished = torch.ones(len(call.input_ids), dtype=torch.long, device="cpu")
        ends = [item.eos_token_id for item in call.criteria if hasattr(item, "eos_token_id")]
        self.ends = torch.cat([e.flatten().cpu() for e in ends]) if ends else None
        self.pad = int(call.config._pad_token_tensor) if ends else None
        self.deadlines = [c.initial_timestamp + c.max_time for c in call.criteria if type(c) is MaxTimeCriteria]
        self.strings = [c for c in call.criteria if type(c) is StopStringCriteria]
        self.seen = call.input_ids.cpu() if self.strings else None

    def add(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes one token a row; returns them with those of finished rows replaced by padding."""
        if self.ends is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.new.append(tokens)
        over = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
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

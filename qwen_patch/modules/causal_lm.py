"""The model with its head: `generate` through the decode runtime where it can, through Transformers' own loop else."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from ..generation.runtime import Runtime, generate
from .base import Patched

RUNTIME = "_qwen_patch_runtime"
logger = logging.getLogger("qwen_patch")


class FastGenerate(Patched):
    """Replaces the loop of greedy search and sampling. All of generate's preparation stays Transformers'."""

    wiring: ClassVar[tuple[str, ...]] = (RUNTIME,)
    transient: ClassVar[tuple[str, ...]] = (RUNTIME,)

    @property
    def last_reason(self) -> str | None:
        """Why the last call of generate was not one of the decode runtime's."""
        runtime = self.__dict__.get(RUNTIME)
        return runtime.last_reason if runtime is not None else None

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        runtime: Runtime = self.__dict__.setdefault(RUNTIME, Runtime())
        call = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, model_kwargs)
        if runtime.why_not(self, *call) is None:
            # A second thread waits: the buffers are one batch's. Tensors may be on another GPU than the current one.
            with runtime.lock, _current(input_ids.device):
                session = None
                if not runtime.busy:
                    session = self._session(runtime, input_ids, logits_processor, stopping_criteria, generation_config)
                if session is not None:
                    runtime.busy = True
                    try:
                        return generate(
                            self, session, input_ids, logits_processor, stopping_criteria, generation_config, streamer,
                            model_kwargs,
                        )  # fmt: skip
                    finally:
                        runtime.busy = False
        return super()._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )

    def _session(self, runtime: Runtime, input_ids: Any, processors: Any, criteria: Any, config: Any) -> Any:
        """None where there is no memory for one."""
        try:
            return runtime.session(self, len(input_ids), criteria.max_length, processors, config.do_sample)
        except torch.OutOfMemoryError as error:
            runtime.sessions.clear()
            runtime.last_reason = "no memory for the cache of the decode runtime"
            logger.warning("generate runs Transformers' own loop: %s (%s)", runtime.last_reason, error)
            return None


def _current(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

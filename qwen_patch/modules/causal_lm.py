"""The model with its head: `generate` through the decode runtime where it can, through Transformers' own loop else."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from transformers import GenerationMixin

from ..generation.calls import Call
from ..generation.runtime import Runtime
from .base import Patched

RUNTIME = "_qwen_patch_runtime"
ANOTHER_WAY = "it was neither greedy search nor sampling"


class FastGenerate(Patched):
    """Replaces the loop of greedy search and sampling. All of generate's preparation stays Transformers'.

    What the runtime keeps between calls goes with `release`, and when the model is moved or cast.
    """

    wiring: ClassVar[tuple[str, ...]] = (RUNTIME,)
    transient: ClassVar[tuple[str, ...]] = (RUNTIME,)

    @property
    def last_reason(self) -> str | None:
        """Why the last call of generate was not one of the decode runtime's."""
        runtime = self.__dict__.get(RUNTIME)
        return runtime.last_reason if runtime is not None else None

    def _runtime(self) -> Runtime:
        return self.__dict__.get(RUNTIME) or self.__dict__.setdefault(RUNTIME, Runtime())

    def release(self) -> None:
        """Frees what the runtime keeps; the next call makes it anew."""
        if RUNTIME in self.__dict__:
            self.__dict__[RUNTIME].release()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.release()
        return super()._apply(fn, recurse)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime()
        runtime.last_reason = ANOTHER_WAY
        found = super().generate(*args, **kwargs)
        if runtime.last_reason == ANOTHER_WAY:  # `_sample` was not asked
            runtime.tell(ANOTHER_WAY)
        return found

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
        runtime = self._runtime()
        call = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        tokens = runtime.run(self, Call(*call, model_kwargs))
        return super()._sample(*call, **model_kwargs) if tokens is None else tokens

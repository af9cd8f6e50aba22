"""The decode runtime on the CPU: its sessions run what they would capture, with the plain forward for the kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import token_ids
from transformers import PreTrainedModel

import qwen_patch
from qwen_patch.generation import models, runtime, session
from qwen_patch.generation.session import Session


class OnCPU(Session):
    """A session without a GPU, whose steps are the plain forward's, and are counted."""

    steps = 0

    def step(self, tokens: int = 1) -> None:
        self.steps += tokens
        super().step(tokens)

    def send(self) -> Callable[[], torch.Tensor]:
        new = self.history[:, self.sent : self.column].clone()
        self.sent = self.column
        return lambda: new


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the runtime take small models on the CPU, in any dtype."""
    monkeypatch.setattr(models, "_of_device", lambda model: None)
    monkeypatch.setattr(runtime, "Session", OnCPU)
    monkeypatch.setattr(session, "reason_against_kernel", lambda model, rows: "it is on the CPU")
    monkeypatch.setattr(session, "run_aside", lambda work, device: work())
    monkeypatch.setattr(session, "capture", lambda work, device, pool: SimpleNamespace(replay=work))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    ids, mask = token_ids(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
        ids[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compared(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """generate of the patched model, through the runtime, after the stock model's has been found to be the same."""
    options = {"max_new_tokens": 20, "do_sample": False} | options
    qwen_patch.unpatch_model(model)
    expected = model.generate(**inputs, **options)
    qwen_patch.patch_model(model)
    found = model.generate(**inputs, **options)
    assert model.last_reason is None
    assert torch.equal(found, expected)
    return found

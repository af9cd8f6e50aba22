"""Calls of generate through the decode runtime, and its sessions for CUDA on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import token_ids
from transformers import PreTrainedModel

import qwen_patch
from qwen_patch.generation import captured, runtime, session
from qwen_patch.generation.captured import CapturedSession


class CapturedOnCPU(CapturedSession):
    """It runs what it would capture, with the plain forward in the kernel's place."""

    def send(self) -> Callable[[], torch.Tensor]:
        return super(CapturedSession, self).send()


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runtime.SESSIONS, "cpu", CapturedOnCPU)
    monkeypatch.setattr(captured, "run_aside", lambda work, device: work())
    monkeypatch.setattr(captured, "capture", lambda work, device, pool: SimpleNamespace(replay=work))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    without_kernel(monkeypatch)


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "reason_against_kernel", lambda model, rows: "a test wants it so")


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    ids, mask = token_ids(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
        ids[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def random_batch(model: PreTrainedModel, *lengths: int) -> dict[str, torch.Tensor]:
    """Padded on the left, on the model's device; of all its tokens, other ones at each call."""
    with torch.device(model.device):
        ids = torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)))
        mask = torch.tensor([[int(i >= max(lengths) - n) for i in range(max(lengths))] for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}


# What changes a model's answers, and must not be missed between two calls.
def edit(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(-1)


def replace(model: PreTrainedModel) -> None:
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.detach().flip(0).contiguous())


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

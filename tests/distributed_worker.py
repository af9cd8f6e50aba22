"""Run by torch.distributed.run in two processes: a tensor-parallel model, stock, patched, and stock again.

distributed_worker.py MODEL_DIR cpu|cuda
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from models import answers, token_ids
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import qwen_patch


def main() -> None:
    path, device = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()
    assert dist.get_world_size() == 2
    assert model.device.type == device
    assert any(isinstance(p, DTensor) for p in model.parameters()), "nothing is split over the processes"
    ids = token_ids(2, 9, device=model.device)
    options = {"max_new_tokens": 8, "do_sample": False}
    logits, tokens = answers(model, ids).logits, model.generate(ids, **options)
    qwen_patch.patch_model(model, backend="reference")
    assert torch.equal(answers(model, ids).logits, logits), "reference: not bitwise the stock model's"
    qwen_patch.patch_model(model)
    plan = qwen_patch.explain(model)
    # From 5.24 on, Transformers sets a forward of its own on q_norm and k_norm, which are then left alone.
    theirs = "its forward has been replaced on the instance by transformers.distributed.tensor_parallel"
    assert plan.replaced, str(plan)
    assert all(d.replacement or d.reason == theirs for d in plan.decisions), str(plan)
    found = answers(model, ids).logits
    # float32, 3 layers: some tens of eps of the largest logit
    assert (found - logits).abs().max() <= 64 * 2**-23 * logits.abs().max()
    assert torch.equal(model.generate(ids, **options), tokens)
    assert torch.equal(answers(qwen_patch.unpatch_model(model), ids).logits, logits)
    dist.barrier()
    dist.destroy_process_group()
    print("as stock")


if __name__ == "__main__":
    main()

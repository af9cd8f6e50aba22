"""compute-sanitizer over every CUDA op: memcheck, racecheck, initcheck, synccheck; and a control that must be caught.

python scripts/sanitize.py OUTPUT.json        needs a GPU and compute-sanitizer; 3 minutes on an H200
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from qwen_patch import ops
from qwen_patch.benchmarks.results import environment, write_json
from qwen_patch.generation.captured import CapturedSession
from qwen_patch.loading import BUNDLED
from qwen_patch.ops.decode_step import MAX_BANNED
from qwen_patch.ops.draw_token import draw_token

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
# initcheck must see who wrote what, so it watches all kernels; its findings in other kernels than ours are not ours.
OURS_ONLY = ["--kernel-name", "kns=qwen_patch"]
WATCHED = {"memcheck": OURS_ONLY, "racecheck": OURS_ONLY, "initcheck": [], "synccheck": OURS_ONLY}
# racecheck does not see that a warp's reads are over when, after __syncwarp, one of its lanes arrives at an mbarrier:
# it reports a ring that is read so as a race, in a kernel of twenty lines too, and the same ring as none where each
# lane arrives. decode_step's ring of weights is read so. It is not run there at all: what racecheck is told to leave
# out may end in an illegal access, as int8_linear for many tokens did each time it was left out, never when looked at.
# Under initcheck decode_step, whose blocks wait for one another's words, does not end.
WITHOUT_DECODE = ["racecheck", "initcheck"]
SAMPLING = (TopKLogitsWarper(20), TopPLogitsWarper(0.8))  # what draw_token takes
FINDING_IN_OURS = re.compile(r"Uninitialized __global__ memory read.*\n=+\s+at .*qwen_patch")


def decode(rows: int, model: PreTrainedModel, *processors: LogitsProcessor) -> int:
    """Two steps of the decode kernel after a prompt, sampled where there are processors; the number of its calls, with
    the one before the capture."""
    decoded = CapturedSession(model, rows, 256, LogitsProcessorList(processors), bool(processors))
    decoded.capturing = False  # of prompts: a graph that allocates needs the cache of memory, which is off here
    ids = torch.randint(0, model.config.vocab_size, (rows, 9), device="cuda")
    logits = decoded.start(ids, list(range(rows)), LogitsProcessorList())
    decoded.put(logits.argmax(-1))
    decoded.step()
    decoded.step()
    return 3


def draw(dtype: torch.dtype) -> int:
    """draw_token on rows of its two ways: a few candidates, and more ties than it has room for; the number of calls."""
    state = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    banned = torch.tensor([9, 7, *[-1] * (MAX_BANNED - 1)], dtype=torch.int32, device="cuda")
    for vocabulary in (3000, 1003):
        scores = torch.randn(2, vocabulary, device="cuda").to(dtype)
        scores[1] = 1
        tokens, history = scores.new_zeros(2, dtype=torch.int64), scores.new_zeros(2, 4, dtype=torch.int64)
        uniform = torch.rand(2, device="cuda")
        draw_token(scores, uniform, banned, state, tokens, history, 0.7, 20, 0.8, 0.05, 1)
    return 2


def run_every_op(decoding: bool = True) -> int:
    """Each op on its samples in each dtype, draw_token, and decode_step on the bundled models; the number of calls."""
    calls = 0
    for folder in BUNDLED.values() if decoding else ():
        for dtype in (torch.bfloat16, torch.float16):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda")
            print("decode_step", dtype, flush=True)
            calls += sum(decode(rows, model, *sampling) for rows in (1, 3) for sampling in ((), SAMPLING))
            torch.cuda.synchronize()
    for dtype in ops.DTYPES:
        print("draw_token", dtype, flush=True)
        calls += draw(dtype)
        torch.cuda.synchronize()
    for op in ops.OPS.values():
        for dtype in ops.DTYPES:
            print(op.name, dtype, flush=True)  # the last of these lines tells where a run has ended
            for args in op.samples(torch.device("cuda"), dtype):
                op(*args)
                calls += 1
            torch.cuda.synchronize()
    return calls


def read_beyond_the_end() -> None:
    """The control: an input whose memory is smaller than its shape says."""
    x = torch.randn(1 << 20, device="cuda")
    x.untyped_storage().resize_(64)
    ops.silu_mul(x, x)
    torch.cuda.synchronize()


def sanitized(tool: str, what: str) -> tuple[int, str]:
    """(findings in this package's kernels, the output's last lines). Each tensor has its own memory."""
    command = ["compute-sanitizer", "--tool", tool, *WATCHED[tool], sys.executable, __file__, what]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    output = result.stdout + result.stderr
    found = SUMMARY.search(output)
    if found is None or (what != "--control" and "calls" not in output):
        said = re.findall("^=========.*", output, re.MULTILINE)
        reached = [line for line in result.stdout.splitlines() if line not in said][-1:]
        raise SystemExit("\n".join([f"{tool} did not come to its end, but to:", *reached, *said[:40]]))
    findings = len(FINDING_IN_OURS.findall(output)) if tool == "initcheck" else int(found[1])
    return findings, output[-1500:]


def main() -> None:
    if sys.argv[1] in ("--every-op", "--without-decode"):
        print(run_every_op(decoding=sys.argv[1] == "--every-op"), "calls")
        return
    if sys.argv[1] == "--control":
        read_beyond_the_end()
        return
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout
    results = {}
    for tool in WATCHED:
        start = time.time()
        findings, tail = sanitized(tool, "--without-decode" if tool in WITHOUT_DECODE else "--every-op")
        results[tool] = {"findings": findings, "seconds": round(time.time() - start)}
        print(tool, results[tool], tail if findings else "")
    control, _ = sanitized("memcheck", "--control")
    document = {
        "benchmark": "compute-sanitizer",
        "environment": environment(torch.device("cuda")),
        "compute_sanitizer": version.strip().splitlines()[-1],
        "ops": [*ops.OPS, "decode_step", "draw_token"],
        "dtypes": [str(d).removeprefix("torch.") for d in ops.DTYPES],
        "calls": run_every_op(),
        "findings": results,
        "not_watched": {tool: ["decode_step"] for tool in WITHOUT_DECODE},
        "control_findings": control,
    }
    write_json(Path(sys.argv[1]), document)
    if control == 0 or any(r["findings"] for r in results.values()):
        raise SystemExit("findings, or a control that was not caught: see the lines above")


if __name__ == "__main__":
    main()

"""The commands, as a person runs them: what they print, what they write and how they exit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from qwen_patch.cli import app
from qwen_patch.loading import BUNDLED

runner = CliRunner()


def run(*args: str):
    return runner.invoke(app, list(args))


def test_validate_writes_json_and_exits_0(tmp_path):
    file = tmp_path / "report.json"
    args = ["--model", "tiny-qwen3", "--fusion", "rms", "--device", "cpu", "--dtype", "float32", "--new-tokens", "8"]
    result = run("validate", *args, "--prompt", "The sea was calm", "--oracle", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.output
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert report["quantize"] is None
    assert (report["model"], report["fusion"], report["dtype"]) == ("tiny-qwen3", "rms", "float32")
    assert report["oracle"]["patched_mean_abs_error"] > 0
    assert report["environment"]["torch"] == torch.__version__


def test_validate_reads_prompts_and_exits_1_on_a_wrong_kernel(tmp_path, monkeypatch):
    from qwen_patch.modules import base

    monkeypatch.setitem(base.BACKENDS, "auto", base.BACKENDS["auto"]._replace(silu_mul=lambda gate, up: gate * up))
    base.patched_class.cache_clear()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The king\n\nIt was a dark night and\n")
    result = run("validate", "--device", "cpu", "--new-tokens", "4", "--prompts-file", str(prompts))
    base.patched_class.cache_clear()
    assert result.exit_code == 1
    assert "NOT PASSED" in result.output
    assert "model.layers.0.mlp: differs by" in result.output


@pytest.fixture(scope="module")
def unsupported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no/such-model"], "model 'no/such-model'"),
        (["--model", "UNSUPPORTED"], "is a 'gpt2': supported are qwen2, qwen3,"),
        (["--device", "cuda:7"], "device 'cuda:7' can't be used here"),
        (["--device", "moon"], "device 'moon' can't be used here"),
        (["--dtype", "int3"], "dtype 'int3' is not supported: use one of float32, bfloat16, float16"),
        (["--fusion", "all"], "unknown fusion 'all': supported are none, mlp, rms, both"),
        (["--backend", "cuda", "--device", "cpu"], "backend='cuda'"),
        (["--prompt", " "], "a prompt is empty"),
        (["--prompts-file", "/no/such/file"], "no such prompts file"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(args, message, unsupported):
    args = [str(unsupported) if a == "UNSUPPORTED" else a for a in args]
    result = run("validate", "--new-tokens", "2", *args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output + result.stderr


def damaged(folder, file, content):
    """A copy of a bundled model with one file that holds something else; a number cuts it off there."""
    shutil.copytree(BUNDLED["tiny-qwen2"], folder)
    path = folder / file
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content.encode())
    return folder


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", 40, "it does not load"),
        ("config.json", "[]", "it does not load"),
        ("config.json", '{"model_type": "qwen2", "num_hidden_layers": "two"}', "does not load"),
        ("model.safetensors", 100, "does not load: SafetensorError"),
        ("model.safetensors", 100_000, "does not load: SafetensorError"),
        ("tokenizer.json", "{}", "does not load"),
        ("tokenizer.json", 1000, "does not load"),
    ],
)
def test_a_damaged_model_is_one_line_and_exit_2(tmp_path, file, content, message):
    result = run("validate", "--device", "cpu", "--model", str(damaged(tmp_path / "model", file, content)))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: model ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_files_that_cannot_be_read_or_written_are_exit_2(tmp_path):
    noise, few = tmp_path / "noise", ["--device", "cpu", "--new-tokens", "2", "--prompt", "The king"]
    noise.write_bytes(b"The king \xff\xfe")
    result = run("validate", *few, "--prompts-file", str(noise))
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (2, 1)
    assert "noise is not a prompts file in UTF-8: invalid start byte at byte 9" in result.stderr
    result = run("perplexity", "--device", "cpu", "--text", str(noise))
    assert result.exit_code == 2
    assert "noise is not a text file in UTF-8" in result.stderr
    # Before the model runs, not after.
    for args in (["validate", "--json", str(tmp_path)], ["bench", "--output", "."], ["gemm", "--save", str(tmp_path)]):
        result = run(*args)
        assert result.exit_code == 2
        assert "isadirectory" in re.sub(r"[\s│]", "", result.stderr)  # in a box, and long paths are wrapped
    result = run("validate", *few, "--json", str(noise / "report.json"))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_plan_as_table_and_json():
    assert "FusedRMSNorm" in run("plan", "--model", "tiny-qwen2").output
    found = json.loads(run("plan", "--model", "tiny-qwen2", "--fusion", "mlp", "--json").output)
    assert {d["replacement"] for d in found["decisions"] if d["site"] == "mlp"} == {"FusedMLP"}
    assert {d["reason"] for d in found["decisions"] if d["site"] != "mlp"} == {"not part of fusion=mlp"}


def test_bench_and_its_usage_errors(tmp_path):
    args = [
        "bench",
        "--device",
        "cpu",
        "--prompt-lengths",
        "4",
        "--new-tokens",
        "3",
        "--rounds",
        "2",
        "--fusion",
        "both,both",
    ]
    result = run(*args, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert {p.name for p in tmp_path.iterdir()} == {"out.json", "out.md", "out.png"}
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["decoding"] == "greedy"
    result = run(*args, "--sample", "--output", str(tmp_path / "sampled"))
    assert result.exit_code == 0, result.output
    assert "sampling with temperature 0.7, top_k 20, top_p 0.8" in (tmp_path / "sampled.md").read_text()
    for extra, message in [
        (["--fusion", "everything"], "unknown fusion 'everything'"),
        (["--prompt-lengths", "4,x"], "'4,x' is not a list of numbers"),
        (["--prompt-lengths", "5000"], "5003 tokens are more than the 2048"),
        (["--model", "random:Qwen9"], "unknown shape 'Qwen9'"),
    ]:
        result = run(*args, *extra)
        assert result.exit_code == 2
        assert message in result.stderr


def test_doctor():
    result = run("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    found = json.loads(run("doctor", "--json").output)
    assert found["libraries"]["cpu"].startswith("in use")
    assert found["advice"] == []


def test_doctor_says_what_to_do_about_a_missing_library(monkeypatch):
    from qwen_patch.ops import LIBRARIES

    monkeypatch.setattr(LIBRARIES["cpu"], "loaded", False)
    monkeypatch.setattr(LIBRARIES["cpu"], "reason", "it was not built")
    monkeypatch.setattr(LIBRARIES["cpu"], "remedy", "install g++")
    found = json.loads(run("doctor", "--json").output)
    assert found["libraries"]["cpu"] == "not in use: it was not built"
    assert found["advice"] == ["cpu ops run their slower PyTorch reference: install g++"]


WITHOUT_LIBRARY = """
import warnings, torch
import qwen_patch
from qwen_patch.loading import load_model
from qwen_patch import ops
assert not ops.LIBRARIES["cpu"].loaded
model, tokenizer = load_model("tiny-qwen2", torch.device("cpu"), torch.float32)
ids = tokenizer("The king", return_tensors="pt").input_ids
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    expected = model(ids).logits
    assert torch.equal(qwen_patch.patch_model(model)(ids).logits, expected)
assert len([w for w in caught if "slower PyTorch reference" in str(w.message)]) == 1, [str(w.message) for w in caught]
try:
    qwen_patch.patch_model(model, backend="cpu")
except qwen_patch.PatchError as error:
    assert "backend='cpu' is not available: it was not built" in str(error)
else:
    raise AssertionError("backend='cpu' without its library")
"""


def test_without_a_library_ops_say_so_once_and_use_the_reference():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY],
        env=os.environ | {"QWEN_PATCH_NATIVE_DIR": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr

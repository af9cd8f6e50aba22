"""What can go wrong between the source and a loaded library: each ends in a working fallback and one clear line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import setuptools
import torch
from models import answers, small_model, token_ids

import qwen_patch
from qwen_patch import PatchError, ops
from qwen_patch.modules import Patched

ROOT = Path(__file__).resolve().parent.parent
CPU = "qwen_patch/_native/libqwen_patch_cpu.so"
USE = """
import torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import qwen_patch
    from qwen_patch import ops
    x, w = torch.randn(4, 64), torch.rand(64)
    for _ in range(2):
        assert torch.allclose(ops.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (64,), w, 1e-6), atol=1e-5)
        ops.silu_mul(x, x)
print(ops.LIBRARIES["cpu"].loaded, *[str(c.message) for c in caught if "qwen_patch" in str(c.message)], sep="|")
"""


def python(*args: str, **env: str) -> subprocess.CompletedProcess:
    command, environment = [sys.executable, *args], os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def use(folder: Path) -> tuple[bool, list[str]]:
    """Whether a fresh process loads the CPU library in this folder, and the warnings that using the ops gave."""
    result = python("-c", USE, QWEN_PATCH_NATIVE_DIR=str(folder))
    assert result.returncode == 0, result.stderr
    loaded, *warnings = result.stdout.strip().split("|")
    return loaded == "True", warnings


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of what a build needs, with no library in it."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "qwen_patch/_native").mkdir(parents=True)
    shutil.copy(ROOT / "qwen_patch/__init__.py", tmp_path / "qwen_patch")
    return tmp_path


def start_build(source: Path, **env: str) -> subprocess.Popen:
    """In place, without the CUDA library, which takes longer and comes about in the same way."""
    environment = os.environ | {"CUDA_HOME": "/nowhere"} | env
    environment.pop("QWEN_PATCH_REQUIRE_NATIVE", None)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=source, env=environment, **options)


def said(build: subprocess.Popen) -> list[str]:
    """What a build that ended well said about our libraries."""
    _, output = build.communicate(timeout=300)
    assert build.returncode == 0, output
    return [line for line in output.splitlines() if line.startswith("qwen_patch:")]


def leftovers(source: Path) -> list[str]:
    return [p.name for p in source.rglob("*.so*") if not p.name.startswith("libqwen_patch_")]


@pytest.mark.slow
def test_two_builds_at_once(source):
    builds = [start_build(source), start_build(source)]
    reason = "no nvcc found in CUDA_HOME=/nowhere: install the CUDA toolkit or set CUDA_HOME"
    assert [said(build) for build in builds] == 2 * [[f"qwen_patch: the cuda library was not built: {reason}"]]
    assert use((source / CPU).parent) == (True, [])
    assert not leftovers(source)


@pytest.mark.slow
def test_a_killed_build_leaves_what_was_there_and_the_next_one_works(source):
    shutil.copy(ROOT / CPU, source / CPU)
    before = (source / CPU).read_bytes()
    build = start_build(source)
    time.sleep(3)  # it takes some 10 seconds
    os.killpg(build.pid, signal.SIGKILL)
    build.communicate()
    assert build.returncode != 0, "it was done before it was killed: the test proved nothing"
    assert (source / CPU).read_bytes() == before
    assert use((source / CPU).parent) == (True, [])
    said(start_build(source))
    assert use((source / CPU).parent) == (True, [])
    assert not leftovers(source)


def test_no_compiler(source):
    (line, _) = said(start_build(source, CXX="/nowhere/g++"))
    assert line == (
        "qwen_patch: the cpu library was not built: no C++ compiler found at CXX=/nowhere/g++: install g++ (12 or "
        "newer) or set CXX"
    )
    loaded, (warning,) = use(source / "qwen_patch/_native")
    assert not loaded
    assert "it was not built" in warning
    assert "with a C++ compiler installed" in warning


def test_a_compiler_that_fails_leaves_no_older_library(source):
    """... which would be one of another source."""
    shutil.copy(ROOT / CPU, source / CPU)
    (source / "csrc/cpu/silu_mul.cpp").write_text("#error no such thing\n")
    (line, _) = said(start_build(source))
    assert line.startswith("qwen_patch: the cpu library was not built: ")
    assert "error: #error no such thing" in line
    assert not (source / CPU).exists()


def test_an_nvcc_of_another_version(source, tmp_path):
    """One that does not know sm_90a, as CUDA 11's: said in one line, and the CPU library is built all the same."""
    home = tmp_path / "cuda-11"
    (home / "bin").mkdir(parents=True)
    complaint = "nvcc fatal   : Unsupported gpu architecture 'compute_90a'"
    (home / "bin/nvcc").write_text(f'#!/bin/sh\necho "{complaint}" >&2\nexit 1\n')
    (home / "bin/nvcc").chmod(0o755)
    (line,) = said(start_build(source, CUDA_HOME=str(home)))
    reason = f"{home}/bin/nvcc failed: {complaint} (QWEN_PATCH_REQUIRE_NATIVE=1 shows all of it)"
    assert line == f"qwen_patch: the cuda library was not built: {reason}"
    assert (source / CPU).exists()


@pytest.mark.parametrize("kind", ["empty", "cut", "another machine's"])
def test_a_library_that_does_not_load(kind, tmp_path):
    library, broken = (ROOT / CPU).read_bytes(), tmp_path / Path(CPU).name
    if kind == "empty":
        broken.write_bytes(b"")
    elif kind == "cut":
        broken.write_bytes(library[: len(library) // 2])  # loading it would end the process
    else:
        broken.write_bytes(library[:18] + b"\xb7\x00" + library[20:])  # e_machine: AArch64
    loaded, (warning,) = use(tmp_path)
    assert not loaded
    assert ("its file is not whole" if kind == "cut" else "it does not load") in warning
    assert "ops on cpu run their slower PyTorch reference" in warning


def test_importing_at_once_writes_nothing(tmp_path):
    """There is no cache to write to, to lock or to find read-only."""
    installed = tmp_path / "qwen_patch"
    shutil.copytree(ROOT / "qwen_patch", installed, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(p for p in tmp_path.rglob("*"))
    command = [
        sys.executable,
        "-B",
        "-c",
        f"import qwen_patch; assert qwen_patch.__file__.startswith({str(tmp_path)!r})",
    ]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere"}
    processes = [subprocess.Popen(command, env=env, cwd=tmp_path) for _ in range(3)]
    assert [p.wait(timeout=120) for p in processes] == [0, 0, 0]
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_a_library_for_other_cards(monkeypatch, device):
    """It loads, and can't run on the model's device: the reference runs, and the plan says why."""
    model, ids = small_model("qwen2", device=device), token_ids(1, 5, device=device)
    expected = answers(model, ids).logits
    problem = "it can't run on this card: no code for it"
    monkeypatch.setattr(ops.NativeLibrary, "problem", lambda library, device: problem)
    with pytest.raises(PatchError, match=f"is not available: {problem}; use backend="):
        qwen_patch.patch_model(model, backend=device.type)
    assert not any(isinstance(m, Patched) for m in model.modules())
    qwen_patch.patch_model(model)
    assert problem in qwen_patch.explain(model).notes[0]
    assert {m.backend for m in model.modules() if isinstance(m, Patched)} == {"reference"}
    assert (answers(model, ids).logits == expected).all()


def test_an_op_called_on_another_card_than_its_library_is_for(monkeypatch, device):
    monkeypatch.setattr(ops.NativeLibrary, "problem", lambda library, device: "it can't run on this card")
    monkeypatch.setattr(ops.LIBRARIES[device.type], "warned", False)
    gate = torch.randn(3, 5, device=device)
    with pytest.warns(UserWarning, match=f"it can't run on this card.*ops on {device.type} run their slower") as caught:
        found = [ops.silu_mul(gate, gate) for _ in range(2)]
    assert len(caught) == 1
    assert torch.equal(found[0], torch.nn.functional.silu(gate) * gate)
    assert torch.equal(*found)


@pytest.mark.cuda
def test_the_cuda_library_runs_on_this_card(device):
    assert ops.LIBRARIES[device.type].problem(device) is None


FIND_TORCH = """
import runpy, setuptools
setuptools.setup = lambda **options: None
print(runpy.run_path("setup.py")["torch_folder"]())
"""


def test_an_isolated_build_finds_a_users_torch(tmp_path):
    """pip hides all but what a build asks for; the torch it is for may be the user's, or of the environment around."""
    venv.create(tmp_path / "env", system_site_packages=True)
    command = [str(tmp_path / "env/bin/python"), "-c"]
    env = os.environ | {"PYTHONUSERBASE": str(tmp_path / "user")}
    env.pop("PYTHONNOUSERSITE", None)
    ask = [*command, "import site; print(site.getusersitepackages())"]
    torch_folder = Path(
        subprocess.run(ask, capture_output=True, text=True, check=True, env=env).stdout.strip(), "torch"
    )
    header = torch_folder / "include/torch/csrc/stable/ops.h"
    header.parent.mkdir(parents=True)
    for file in (header, torch_folder / "__init__.py"):
        file.touch()
    (tmp_path / "isolated").mkdir()
    (tmp_path / "isolated/setuptools").symlink_to(Path(setuptools.__file__).parent)
    env |= {"PYTHONNOUSERSITE": "1", "PYTHONPATH": str(tmp_path / "isolated")}
    found = subprocess.run([*command, FIND_TORCH], capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert found.stdout.strip() == str(torch_folder), found.stderr


def test_another_transformers_is_said_in_the_error_of_the_import():
    """4.57 lacks modules that are imported; what is missing says nothing to a user."""
    missing = "import sys, transformers; sys.modules['transformers.core_model_loading'] = None; "
    result = python("-c", missing + "transformers.__version__ = '4.57.1'; import qwen_patch")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: transformers 4.57.1 is not supported: this version of qwen_patch is tested with >="
    )
    # A supported one that does not load, for whatever reason, says so itself.
    result = python("-c", missing + "import qwen_patch")
    assert result.returncode == 1
    assert "is not supported" not in result.stderr

"""`qwen-patch gemm`: right linears pass and are timed, wrong ones are found, saved results are compared to the bit."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qwen_patch.benchmarks import gemm, timing
from qwen_patch.benchmarks.gemm_candidates import Weights, candidates, shares_of_bound
from qwen_patch.cli import app
from qwen_patch.ops import OPS

SMALL = ["-m", "1,17", "-n", "40", "-k", "72", "--rounds", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    """What is timed does not matter here: shorter samples, of fewer copies of the weight, and no copy to measure."""
    monkeypatch.setattr(gemm, "COPIES", 3)
    monkeypatch.setattr(gemm, "SAMPLE_US", 1)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: timing.Spread(20.0, 19.0, 21.0))


def run(*args: str):
    return CliRunner().invoke(app, ["gemm", *SMALL, *args])


def rows_of(path) -> dict[tuple[str, str, int], dict]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["type"], row["candidate"], row["shape"][0]): row for row in rows}


def replace_int8_linear(monkeypatch, change) -> None:
    original = OPS["int8_linear"]
    changed = SimpleNamespace(no_grad=lambda *args: change(original.no_grad(*args)), has_kernel=original.has_kernel)
    monkeypatch.setitem(OPS, "int8_linear", changed)


def test_every_linear_is_right_and_timed(tmp_path):
    result = run("--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output + result.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"out.json", "out.md"}
    rows = rows_of(tmp_path / "out.json")
    right = {key for key, row in rows.items() if row["correct"]}
    ours = {("fp32", "small_linear", 1), ("bf16", "small_linear", 1)}
    ours |= {(kind, "int8_linear", M) for kind in ("w8a16", "w8a8") for M in (1, 17)}
    assert {key for key, row in rows.items() if row["ours"]} == ours
    assert ours <= right
    assert {(kind, "torch linear", M) for kind in ("fp32", "bf16") for M in (1, 17)} <= right
    for key in right:
        row = rows[key]
        assert row["us"] > 0
        assert row["us_quartiles"][0] <= row["us"] <= row["us_quartiles"][1]
        assert row["gbps"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["share_of_copy"] == pytest.approx(row["gbps"] / 20)
        assert row["tflops"] == pytest.approx(2 * key[2] * 40 * 72 / row["us"] / 1e6)
        assert row["vs_torch_bf16"] == pytest.approx(rows["bf16", "torch linear", key[2]]["us"] / row["us"])
    assert rows["w8a8", "int8_linear", 17]["bytes"] == 40 * 72 + 40 * 2 * 4 + 17 * 72 * 2 + 17 * 40 * 2
    assert rows["fp32", "torch linear", 1]["bytes"] == (40 * 72 + 72 + 40) * 4
    assert (tmp_path / "out.md").read_text().count("| 17 | 40 | 72 |") == 8


def test_on_every_device(tmp_path, device):
    """Every op of ours is right, or has a note why it is not there; graphs are captured where there are any."""
    result = run("-m", "1,32", "--device", str(device), "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output + result.stderr
    rows = rows_of(tmp_path / "out.json")
    for kind, name in [("bf16", "torch linear"), ("w8a16", "int8_linear"), ("w8a8", "int8_linear")]:
        for M in (1, 32):
            assert rows[kind, name, M]["correct"]
            assert rows[kind, name, M]["us"] > 0
    assert rows["w8a8", "torch._int_mm, no scales", 32]["error_of_bound"] == 0
    for row in rows.values():
        assert row["correct"] or row["note"]
        assert not row["note"].startswith("fails")


def test_torchs_bf16_is_measured_in_any_case(tmp_path):
    run("--types", "w8a8", "--output", str(tmp_path / "out"))
    found = {(kind, name) for kind, name, _ in rows_of(tmp_path / "out.json")}
    assert ("bf16", "torch linear") in found
    assert ("bf16", "small_linear") not in found
    assert {kind for kind, _ in found} == {"bf16", "w8a8"}


def one_product_lost(result: torch.Tensor) -> torch.Tensor:
    """A product of two normal numbers less, in the last result."""
    result = result.clone()
    result[-1, -1] -= 0.6
    return result


@pytest.mark.parametrize(
    "change",
    [
        one_product_lost,
        lambda result: result * 1.01,  # a scale off by one part in a hundred
        lambda result: result.index_fill(-1, torch.tensor([3]), math.nan),
        lambda result: result[:, :-1],
    ],
    ids=["a lost product", "a wrong scale", "a NaN", "a wrong shape"],
)
def test_a_wrong_op_is_wrong_and_not_timed(tmp_path, monkeypatch, change):
    replace_int8_linear(monkeypatch, change)
    result = run("--output", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.output
    assert "WRONG" in (tmp_path / "out.md").read_text()
    for (_, name, _), row in rows_of(tmp_path / "out.json").items():
        if name == "int8_linear":
            assert row["correct"] is False
            assert row["us"] is None
        elif row["correct"] is not None:
            assert row["correct"] is True
            assert row["us"] > 0


def test_an_op_that_raises_is_wrong(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setitem(OPS, "int8_linear", SimpleNamespace(no_grad=broken, has_kernel=lambda device: True))
    result = run("--output", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "w8a8 int8_linear: fails: no such tile" in result.output
    assert rows_of(tmp_path / "out.json")["w8a8", "int8_linear", 1]["correct"] is False


def test_the_bound_lets_pass_what_float32_sums_give_and_no_more():
    """Also with a large K: of the two numbers around an exact result the farther is outside, and so is TF32."""
    x, weight = torch.randn(3, 4096), torch.randn(24, 4096)
    for c in candidates(x, Weights(weight, ("fp32", "bf16", "w8a16", "w8a8"))):
        if c.call is None:
            continue
        result = c.call(c.x, *c.weights)
        assert shares_of_bound([(c, result)])[c.key] <= 1
        if result.dtype == torch.int32:
            assert shares_of_bound([(c, result + 1)])[c.key] == math.inf
        elif c.roundings == 1 and result.dtype == torch.bfloat16:
            exact = c.truth.states() @ c.truth.weight(slice(0, 24)).T
            farther = torch.nextafter(result, ((exact - result) * math.inf).bfloat16())
            assert shares_of_bound([(c, farther)])[c.key] > 1
        elif result.dtype == torch.float32:
            tf32 = [(t.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for t in (x, weight)]
            assert shares_of_bound([(c, torch.nn.functional.linear(*tf32))])[c.key] > 1


def test_inputs_are_the_same_for_a_seed_whatever_else_is_measured(tmp_path):
    a, b, other = (tmp_path / name for name in "abc")
    assert run("--save", str(a)).exit_code == 0
    args = ["gemm", "-m", "17", "-n", "40", "-k", "72", "--rounds", "2", "--device", "cpu"]
    CliRunner().invoke(app, [*args, "--types", "w8a8", "--save", str(b)])
    CliRunner().invoke(app, [*args, "--types", "w8a8", "--seed", "1", "--save", str(other)])
    a, b, other = (load_file(path.with_suffix(".safetensors"))["w8a8/int8_linear/17x40x72"] for path in (a, b, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)


def test_a_baseline_of_the_same_code_differs_nowhere(tmp_path):
    file = tmp_path / "base.json"
    assert run("--save", str(file)).exit_code == 0
    assert {p.name for p in tmp_path.iterdir()} == {"base.json", "base.safetensors"}
    result = run("--baseline", str(file), "--exact", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    before, after = rows_of(file), rows_of(tmp_path / "out.json")
    for key, row in after.items():
        if row["correct"]:
            found = row["baseline"]
            assert (found["differing"], found["elements"], found["largest_difference"]) == (0, key[2] * 40, 0)
            assert found["times_faster"] == pytest.approx(before[key]["us"] / row["us"])


def test_one_flipped_bit_is_found(tmp_path):
    run("--save", str(tmp_path / "base"))
    tensors = load_file(tmp_path / "base.safetensors")
    bits = tensors["w8a16/int8_linear/17x40x72"].view(torch.int16)
    bits[3, 5] ^= 1
    save_file(tensors, tmp_path / "base.safetensors")
    common = ["--baseline", str(tmp_path / "base"), "--output", str(tmp_path / "out")]
    assert run(*common).exit_code == 0  # another order of summing is no error: the result is still right
    assert run(*common, "--exact").exit_code == 1
    for key, row in rows_of(tmp_path / "out.json").items():
        if row["correct"]:
            assert row["baseline"]["differing"] == (key == ("w8a16", "int8_linear", 17))
    value = tensors["w8a16/int8_linear/17x40x72"][3, 5].item()
    ulp = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    assert rows_of(tmp_path / "out.json")["w8a16", "int8_linear", 17]["baseline"]["largest_difference"] == ulp


def test_exact_fails_where_the_baseline_lacks_an_op_of_ours(tmp_path):
    run("--save", str(tmp_path / "base"))
    tensors = load_file(tmp_path / "base.safetensors")
    del tensors["w8a8/int8_linear/1x40x72"]
    save_file(tensors, tmp_path / "base.safetensors")
    assert run("--baseline", str(tmp_path / "base")).exit_code == 0
    assert run("--baseline", str(tmp_path / "base"), "--exact").exit_code == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-k", "60"], "K 60 is not a multiple of 8, which int8 needs"),
        (["-m", "0"], "every number must be at least 1"),
        (["-n", "x"], "'x' is not a list of numbers"),
        (["--types", "bf16,fp8"], "unknown type 'fp8': supported are fp32, bf16, w8a16, w8a8"),
        (["--shapes", "Qwen3-8B"], "give --shapes, or -n and -k, not both"),
        (["--exact"], "--exact compares with a run that --baseline names"),
        (["--device", "moon"], "device 'moon' can't be used here"),
        (["--baseline", "MISSING"], "no such baseline file"),
        (["--baseline", "BROKEN"], "is not a run that `qwen-patch gemm --save` wrote"),
        (["--baseline", "CUT"], "is not a run that `qwen-patch gemm --save` wrote"),
        (["--baseline", "BASE", "-m", "2"], "the baseline has no shape 2x40x72: its own are 1x40x72, 17x40x72"),
        (["--baseline", "BASE", "--seed", "7"], "the baseline has no seed 7: its own are 0"),
        (["--baseline", "BASE", "--types", "fp32"], "the baseline has no type fp32: its own are w8a8"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(tmp_path, args, message):
    if "BASE" in args or "CUT" in args:
        assert run("--types", "w8a8", "--save", str(tmp_path / "BASE")).exit_code == 0
    if "CUT" in args:
        whole = (tmp_path / "BASE.safetensors").read_bytes()
        (tmp_path / "CUT.safetensors").write_bytes(whole[:-10])
        (tmp_path / "CUT.json").write_text((tmp_path / "BASE.json").read_text())
    (tmp_path / "BROKEN.json").write_text("{}")
    (tmp_path / "BROKEN.safetensors").write_bytes(b"")
    kinds = ["--types", "w8a8"] if "BASE" in args else []
    result = run(*kinds, *[str(tmp_path / a) if a in ("BASE", "BROKEN", "CUT", "MISSING") else a for a in args])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_sizes_that_are_not_multiples_of_8_without_int8():
    result = run("-k", "61", "--types", "fp32,bf16")
    assert result.exit_code == 0, result.output


def test_the_sets_have_the_official_sizes():
    sizes = {layer.names: (layer.N, layer.K) for layer in gemm.layers_of("Qwen3-8B", None, None, None)}
    assert sizes == {
        "q o": (4096, 4096),
        "k v": (1024, 4096),
        "qkv": (6144, 4096),
        "gate up": (12288, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
        "lm_head": (151936, 4096),
    }
    small = {layer.names: layer for layer in gemm.layers_of("Qwen3-0.6B", None, None, None)}
    assert (small["q"].N, small["q"].K, small["o"].N, small["o"].K) == (2048, 1024, 1024, 2048)
    assert small["q"].tokens == (1, 8, 16, 128, 512, 1734, 2048)
    assert small["lm_head"].tokens == (1, 8, 16, 128)  # a prompt asks for its last position
    assert gemm.layers_of("Qwen2.5-7B", [5, 5], None, None)[-1] == ("lm_head", 152064, 3584, (5,))
    assert gemm.layers_of(None, None, None, None) == [("", 4096, 4096, (1472,))]


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    from qwen_patch.benchmarks import gemm_outputs

    assert run("--save", str(tmp_path / "base")).exit_code == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted(tensors, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm_outputs, "save_file", interrupted)
    run("--save", str(tmp_path / "base"))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before

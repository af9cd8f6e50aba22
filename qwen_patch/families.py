"""DATA: which classes of which model families are which site. A new family is one entry, and a golden plan in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RMS_NORM, MLP, DECODER_LAYER = "rms_norm", "mlp", "decoder_layer"
CAUSAL_LM = "causal_lm"  # whose generate the decode runtime takes over
SITES = (RMS_NORM, MLP, DECODER_LAYER)
LINEAR, LM_HEAD = "linear", "lm_head"  # what int8 is for


@dataclass(frozen=True)
class Family:
    """The stock classes of one `config.model_type`, and where in a decoder layer they sit."""

    model_type: str
    module: str
    rms_norm: str
    mlp: str
    decoder_layer: str
    attention_norms: tuple[str, ...] = ()  # RMSNorms inside the attention, as attributes of it
    causal_lm: str | None = None  # the class with the head, where the decode runtime knows the model
    experts: str | None = None  # the class of a sparse block of experts, which may stand where an MLP does

    # The parts of a decoder layer, and of the model that holds the layers; all families supported so far agree.
    input_norm = "input_layernorm"
    attention = "self_attn"
    post_attention_norm = "post_attention_layernorm"
    mlp_name = "mlp"
    layers = "layers"
    final_norm = "norm"
    linears = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down"))
    head = "lm_head"

    def site_classes(self) -> dict[tuple[str, str], str]:
        """(module, class) of each stock class -> its site."""
        names = {self.rms_norm: RMS_NORM, self.mlp: MLP, self.decoder_layer: DECODER_LAYER}
        return {(self.module, name): site for name, site in names.items()}


def _family(model_type: str, prefix: str, **differing: Any) -> Family:
    names = {"rms_norm": f"{prefix}RMSNorm", "mlp": f"{prefix}MLP", "decoder_layer": f"{prefix}DecoderLayer"}
    module = f"transformers.models.{model_type}.modeling_{model_type}"
    return Family(model_type=model_type, module=module, **(names | differing))


QK_NORMS = ("q_norm", "k_norm")
FAMILIES = {
    family.model_type: family
    for family in (
        _family("qwen2", "Qwen2", causal_lm="Qwen2ForCausalLM"),  # Qwen2 and Qwen2.5
        _family("qwen3", "Qwen3", attention_norms=QK_NORMS, causal_lm="Qwen3ForCausalLM"),
        _family("qwen3_moe", "Qwen3Moe", attention_norms=QK_NORMS, experts="Qwen3MoeSparseMoeBlock"),
        _family("qwen2_5_vl", "Qwen2_5_VL", mlp="Qwen2MLP"),  # the text tower; its norms stand in the vision tower too
        _family("qwen3_vl", "Qwen3VLText", attention_norms=QK_NORMS),  # the text tower
        _family("llama", "Llama", causal_lm="LlamaForCausalLM"),
        _family("mistral", "Mistral", causal_lm="MistralForCausalLM"),
    )
}

# What the forward of every decoder layer above takes after hidden_states, in the versions supported: past_key_values is
# cache from 5.24 on. A layer whose forward takes anything else is of another version or somebody's own: left alone.
DECODER_LAYER_PARAMETERS = tuple(
    frozenset(f"attention_mask position_ids {cache} use_cache position_embeddings kwargs".split())
    for cache in ("past_key_values", "cache")
)

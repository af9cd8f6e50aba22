"""DATA: which classes of which model families are which site. A new family is one entry, and a golden plan in tests."""

from __future__ import annotations

from dataclasses import dataclass

RMS_NORM, MLP, DECODER_LAYER = "rms_norm", "mlp", "decoder_layer"
SITES = (RMS_NORM, MLP, DECODER_LAYER)


@dataclass(frozen=True)
class Family:
    """The stock classes of one `config.model_type`, and where in a decoder layer they sit."""

    model_type: str
    module: str
    rms_norm: str
    mlp: str
    decoder_layer: str
    attention_norms: tuple[str, ...] = ()  # RMSNorms inside the attention, as attributes of it

    # The parts of a decoder layer, and of the model that holds the layers; all families supported so far agree.
    input_norm = "input_layernorm"
    attention = "self_attn"
    post_attention_norm = "post_attention_layernorm"
    mlp_name = "mlp"
    layers = "layers"
    final_norm = "norm"

    def site_classes(self) -> dict[tuple[str, str], str]:
        """(module, class) of each stock class -> its site."""
        names = {self.rms_norm: RMS_NORM, self.mlp: MLP, self.decoder_layer: DECODER_LAYER}
        return {(self.module, name): site for name, site in names.items()}


def _family(model_type: str, prefix: str, **extra: tuple[str, ...]) -> Family:
    return Family(
        model_type=model_type,
        module=f"transformers.models.{model_type}.modeling_{model_type}",
        rms_norm=f"{prefix}RMSNorm",
        mlp=f"{prefix}MLP",
        decoder_layer=f"{prefix}DecoderLayer",
        **extra,
    )


FAMILIES = {
    family.model_type: family
    for family in (
        _family("qwen2", "Qwen2"),  # Qwen2 and Qwen2.5
        _family("qwen3", "Qwen3", attention_norms=("q_norm", "k_norm")),
        _family("llama", "Llama"),
    )
}

# The forward of every decoder layer above, in the versions supported: past_key_values is cache in 5.24. A layer whose
# forward takes other parameters is of another Transformers version or somebody's own, and is left alone.
DECODER_LAYER_PARAMETERS = tuple(
    f"self hidden_states attention_mask position_ids {cache} use_cache position_embeddings kwargs".split()
    for cache in ("past_key_values", "cache")
)

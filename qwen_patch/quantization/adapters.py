"""LoRA adapters over int8 linears: `peft.get_peft_model(model, over_int8(LoraConfig(...)))`.

PEFT picks an adapter's class by the class of the linear, and takes new pairs of the two from the config alone, which
doesn't save them. To load an adapter: `config = over_int8(LoraConfig.from_pretrained(path))`, and then
`PeftModel.from_pretrained(model, path, config=config)`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from peft import LoraConfig
from peft.tuners import lora

from ..modules import Int8Linear

NO_MERGE = (
    "an adapter can't be merged into int8 weights, which have no room for it: keep it beside them, or merge it into "
    "the 16-bit model and quantize that"
)


class Int8LoraLinear(lora.Linear):
    """base(x) + B A x * scaling, in any dtype of the adapter's. The int8 weights are read only."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None}  # the others need the weights themselves

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        base = getattr(module, "base_layer", module)
        return base.in_features, base.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        raise ValueError(NO_MERGE)

    def unmerge(self) -> NoReturn:
        raise ValueError(NO_MERGE)


def over_int8(config: LoraConfig) -> LoraConfig:
    """Makes `config` know int8 linears; returns the same object. `target_modules` must name them, "all-linear" does not
    see them."""
    config._register_custom_module({Int8Linear: Int8LoraLinear})
    return config

"""qwen_patch: `patch_model(model)`, and the same Qwen model answers the same, faster."""

from .patcher import explain, patch_model, patched, release, unpatch_model
from .plan import PatchError, Plan, make_plan
from .quantization.quantizer import QwenPatchInt8Config

__version__ = "0.1.0"
__all__ = [
    "PatchError",
    "Plan",
    "QwenPatchInt8Config",
    "__version__",
    "explain",
    "make_plan",
    "patch_model",
    "patched",
    "release",
    "unpatch_model",
]

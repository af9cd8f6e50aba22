"""qwen_patch: `patch_model(model)`, and the same Qwen model answers the same, faster."""

from .requirements import problem_with_transformers

try:
    from .patcher import explain, patch_model, patched, release, unpatch_model
    from .plan import PatchError, Plan, make_plan
    from .quantization.quantizer import QwenPatchInt8Config
except ImportError as error:  # of what another version of Transformers does not have
    if (problem := problem_with_transformers()) is None:
        raise
    raise ImportError(problem) from error

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

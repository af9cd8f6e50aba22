"""qwen_patch: `patch_model(model)`, and the same Qwen model answers the same, faster."""

__version__ = "0.1.0"

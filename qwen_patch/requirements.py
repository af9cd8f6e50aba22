"""The versions of Transformers that this version of qwen_patch is for. Nothing else of the package is imported here."""

from __future__ import annotations

import transformers
from packaging.version import Version

# The oldest and the first untested one: the decoder layer's forward is re-written here.
TRANSFORMERS_FROM, TRANSFORMERS_BEFORE = Version("5.17"), Version("5.25")


def problem_with_transformers() -> str | None:
    """One line, where the installed one is not supported."""
    found = Version(transformers.__version__)
    if TRANSFORMERS_FROM <= Version(found.base_version) < TRANSFORMERS_BEFORE:
        return None
    return (
        f"transformers {found} is not supported: this version of qwen_patch is tested with >={TRANSFORMERS_FROM},"
        f"<{TRANSFORMERS_BEFORE}; install one of those"
    )

"""The fused ops, one file each, registered as `torch.ops.qwen_patch.*`; and the backends that a patch may choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ._registry import DTYPES, LIBRARIES, OPS, Cost, NativeLibrary, Op, fusable, load_libraries

load_libraries()

from .add_rms_norm import add_rms_norm  # noqa: E402
from .decode_step import decode_step  # noqa: E402
from .int8_linear import int8_linear  # noqa: E402
from .rms_norm import rms_norm  # noqa: E402
from .rope_kv_write import rope_kv_write  # noqa: E402
from .rotated_int8_linear import rotated_int8_linear  # noqa: E402
from .silu_and_mul import silu_and_mul  # noqa: E402
from .silu_mul import silu_mul  # noqa: E402
from .small_linear import small_linear  # noqa: E402


class OpTable(NamedTuple):
    """The functions that the patched modules call."""

    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    silu_mul: Callable[..., Any]


# An OpOverload's own C++ callable: its Python wrapper would add 1.8 us to a call of 4.5 us. Compilers must see the
# wrapper, but the patched modules show them the stock expressions anyway.
_NATIVE = OpTable(*(OPS[name].no_grad._op for name in OpTable._fields))
_REFERENCE = OpTable(*(OPS[name].reference for name in OpTable._fields))

# "auto" follows the tensors: a call goes to its device's kernel, or to the reference where there is none. "cuda" and
# "cpu" are the same functions; the patcher has made sure that this library is loaded and the model is there.
BACKENDS = {"auto": _NATIVE, "cuda": _NATIVE, "cpu": _NATIVE, "reference": _REFERENCE}

__all__ = [
    "BACKENDS",
    "DTYPES",
    "LIBRARIES",
    "OPS",
    "Cost",
    "NativeLibrary",
    "Op",
    "OpTable",
    "add_rms_norm",
    "decode_step",
    "fusable",
    "int8_linear",
    "rms_norm",
    "rope_kv_write",
    "rotated_int8_linear",
    "silu_and_mul",
    "silu_mul",
    "small_linear",
]

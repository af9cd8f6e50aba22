"""How an op reaches PyTorch: its schema, its native kernels or the reference in their place, its fake, its gradients.

An op has two overloads with one kernel. `torch.ops.qwen_patch.<name>` is differentiable; registering that in Python
makes every call pass through Python once more, 8 us of a 12 us call on the CPU it was measured on. `.no_grad` leaves
it out, and is what the patched modules call, after `fusable` has said that no gradient is wanted. An op that writes
into its arguments has `.no_grad` only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

# QWEN_PATCH_NATIVE_DIR names another folder, for libraries built elsewhere.
NATIVE_FOLDER = Path(os.environ.get("QWEN_PATCH_NATIVE_DIR") or Path(__file__).resolve().parent.parent / "_native")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cost(NamedTuple):
    """What a call must at least do: bytes of memory read and written, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Op:
    """One op, as its file in this package declares it.

    `schema` is what follows the name. `reference` is the stock model's expression in PyTorch, and the contract. `fake`
    gives the outputs' shapes. `samples(device, dtype)` yields argument tuples for tests and benchmarks. `cost(*args)`
    gives the bytes and flops that a call can't avoid. `mutates` has the places of the arguments that it writes into.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterator[tuple]]
    cost: Callable[..., Cost]
    mutates: tuple[int, ...] = ()
    max_ulp: int = 0  # the largest difference from the reference that the contract allows, in units in the last place
    of_row: bool = False  # ... of the row's largest element, where the result is a sum that may cancel
    tipped: float = 1e-3  # the share of 16-bit results that another order of summing may round to their neighbour
    cuda_major: int | None = None  # the one compute capability that its CUDA kernel is for; others run the reference

    @property
    def differentiable(self) -> Any:
        return getattr(torch.ops.qwen_patch, self.name).default

    @property
    def no_grad(self) -> Any:
        return getattr(torch.ops.qwen_patch, self.name).no_grad

    def has_kernel(self, device: torch.device) -> bool:
        """Whether a native kernel for `device` is loaded, and one that can run on this card."""
        library = LIBRARIES.get(device.type)
        if library is None or not library.loaded or library.problem(device):
            return False
        return _has_kernel(self.name, self.cuda_major, device.type, device.index)

    def __call__(self, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            return self.reference(*args)
        tensors = [t for t in leaves_of(args) if isinstance(t, torch.Tensor)]
        library = LIBRARIES.get(tensors[0].device.type)
        if library is not None and library.loaded and (problem := library.problem(tensors[0].device)):
            library.warn_once(problem, tensors[0].device)
            return self.reference(*args)
        if self.cuda_major is not None and not self.has_kernel(tensors[0].device):
            return self.reference(*args)
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants_grad and self.mutates:
            return self.reference(*args)
        return (self.differentiable if wants_grad else self.no_grad)(*args)


@dataclass
class NativeLibrary:
    """One of the two shared libraries: where it is, whether it is loaded, and if not, why and what to do."""

    kind: str
    loaded: bool = False
    reason: str = ""
    remedy: str = ""
    warned: bool = field(default=False, repr=False)

    @property
    def path(self) -> Path:
        return NATIVE_FOLDER / f"libqwen_patch_{self.kind}.so"

    def problem(self, device: torch.device) -> str | None:
        """Why the library, loaded as it is, can't run on this device: built for other cards, or an older driver.

        Not asked at import, because the answer starts CUDA.
        """
        if self.kind != "cuda":
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        return _cuda_problem(index)

    def warn_once(self, reason: str, device: torch.device) -> None:
        if not self.warned:
            self.warned = True
            what_to_do = f"; {self.remedy}" if self.remedy else ""
            warnings.warn(
                f"qwen_patch: the {self.kind} library is not in use ({reason}), ops on {device.type} run their slower "
                f"PyTorch reference{what_to_do}",
                stacklevel=3,
            )


# Asked while a compiler traces, these two answer once and for all: it can't look into them, and they don't change.
@torch.compiler.assume_constant_result
def _has_kernel(name: str, cuda_major: int | None, kind: str, index: int | None) -> bool:
    return _answer_of_dispatcher(name, cuda_major, kind, index)


@functools.cache
def _answer_of_dispatcher(name: str, cuda_major: int | None, kind: str, index: int | None) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(kind)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"qwen_patch::{name}.no_grad", key):
        return False
    return kind == "cpu" or cuda_major is None or torch.cuda.get_device_capability(index)[0] == cuda_major


@torch.compiler.assume_constant_result
def _cuda_problem(index: int) -> str | None:
    return _answer_of_cuda(index)


@functools.cache
def _answer_of_cuda(index: int) -> str | None:
    ask = ctypes.CDLL(str(LIBRARIES["cuda"].path)).qwen_patch_cuda_problem
    ask.restype = ctypes.c_char_p
    answer = ask(index)
    return None if answer is None else f"it can't run on {torch.cuda.get_device_name(index)}: {answer.decode()}"


REBUILD = "in the source folder run: pip install --force-reinstall --no-deps ."
LIBRARIES = {kind: NativeLibrary(kind) for kind in ("cpu", "cuda")}
OPS: dict[str, Op] = {}
_TORCH_LIBRARY = torch.library.Library("qwen_patch", "DEF")


def load_libraries() -> None:
    """Loads what was built for this machine. A library that is missing or broken leaves its reason in LIBRARIES."""
    for library in LIBRARIES.values():
        if library.kind == "cuda" and torch.version.cuda is None:
            library.reason, library.remedy = "this torch is built without CUDA", "install a CUDA build of torch"
        elif not library.path.exists():
            needs = "a C++ compiler" if library.kind == "cpu" else "nvcc"
            library.reason, library.remedy = "it was not built", f"with {needs} installed, {REBUILD}"
        elif _is_cut(library.path):
            library.reason, library.remedy = "its file is not whole", REBUILD
        else:
            try:
                torch.ops.load_library(str(library.path))
                library.loaded = True
            except OSError as error:
                library.reason, library.remedy = f"it does not load: {error}", REBUILD


def _is_cut(path: Path) -> bool:
    """Whether an ELF file ends before its last part, the table of sections: loading such a one kills the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # the loader will say what it is
    offset, size, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return path.stat().st_size < offset + size * count


def _with_reference_notice(op: Op) -> Callable[..., Any]:
    """The reference, standing in for a missing kernel: says so, once a library."""

    def fallback(*args: Any) -> Any:
        device = next(a for a in leaves_of(args) if isinstance(a, torch.Tensor)).device
        library = LIBRARIES.get(device.type)
        if library is not None and not library.loaded:
            library.warn_once(library.reason, device)
        return op.reference(*args)

    return fallback


def leaves_of(args: Any) -> list[Any]:
    """The arguments in their order, those of lists one by one."""
    return [leaf for a in args for leaf in (a if isinstance(a, list | tuple) else (a,))]


def _in_place_of(args: tuple, leaves: list[Any]) -> list[Any]:
    """The leaves in the form of the arguments that they are of."""
    found = iter(leaves)
    return [[next(found) for _ in a] if isinstance(a, list | tuple) else next(found) for a in args]


def _gradients(op: Op, ctx: Any, *grads: torch.Tensor) -> tuple:
    """The reference's gradients at the saved inputs, so that they are the stock expression's."""
    needed = leaves_of(ctx.needs_input_grad)
    with torch.enable_grad():
        leaves = leaves_of(ctx.others)
        inputs = []
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            leaves[position] = tensor.detach().requires_grad_(needed[position])
            inputs.append(leaves[position])
        outputs = op.reference(*_in_place_of(ctx.others, leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    result: list[Any] = [None] * len(leaves)
    for position, tensor in zip(ctx.positions, inputs, strict=True):
        result[position] = next(found) if tensor.requires_grad else None
    return tuple(_in_place_of(ctx.others, result))


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    leaves = leaves_of(inputs)
    ctx.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    ctx.others = _in_place_of(inputs, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    ctx.save_for_backward(*[leaves[i] for i in ctx.positions])


def register(op: Op) -> Op:
    """Makes `op` known to PyTorch and to this package. Native kernels, where loaded, come before the reference."""
    for overload in (".no_grad",) if op.mutates else ("", ".no_grad"):
        name = f"qwen_patch::{op.name}{overload}"
        _TORCH_LIBRARY.define(f"{op.name}{overload}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _TORCH_LIBRARY.impl(f"{op.name}{overload}", _with_reference_notice(op), "CompositeExplicitAutograd")
        torch.library.register_fake(name, op.fake, lib=_TORCH_LIBRARY)
    if not op.mutates:
        torch.library.register_autograd(
            f"qwen_patch::{op.name}",
            lambda ctx, *grads: _gradients(op, ctx, *grads),
            setup_context=_save_inputs,
            lib=_TORCH_LIBRARY,
        )
    OPS[op.name] = op
    return op


_SUPPORTED = frozenset(DTYPES)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def fusable(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> bool:
    """Whether a kernel may stand in for the stock expression on these inputs.

    It needs plain tensors (no DTensor, no subclass with ways of its own) of one supported dtype, and no gradient, of
    either mode: where one is wanted, the stock expression itself runs, so that training is exactly stock. Written out
    rather than looped over, because it runs for every op of every token: 0.5 us against 1.7 us.
    """
    if forward_ad._current_level >= 0:
        return False
    dtype = a.dtype
    if b.dtype is not dtype or dtype not in _SUPPORTED or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if c is not None and (c.dtype is not dtype or type(c) not in _PLAIN):
        return False
    if not torch.is_grad_enabled():
        return True
    return not (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad))

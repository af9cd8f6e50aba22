"""How a module is replaced: its class becomes a subclass of its stock class, and nothing else about it changes.

The object, its parameters, buffers, hooks and state_dict stay what they are; `isinstance` and class-name checks (output
recording, `_no_split_modules`) still hold; deepcopy and pickle give a patched copy with its own weights; and the class
can be set back. A forward set on the instance would lose all of that.

Decode in eager mode is bound by the work on the host, so the replacement forwards read `self._modules[...]` and
`self._parameters[...]` where the stock ones go through `nn.Module.__getattr__`: 0.15 us against 1.6 us a read.

In training mode they hand over to the stock forward, so that a training step is exactly stock, under any kind of
gradient checkpointing. So they do under torch.compile and torch.export: a compiler fuses the stock expressions itself,
and could not see into an op of ours. A forward that somebody has wrapped in one of their own, and kept beyond the undo,
finds a stock object then, and is the stock forward.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..ops import BACKENDS, OpTable


class Patched(nn.Module):
    """Base of the replacement forwards. They hold no parameters, and no state that outlives a forward."""

    replacement: ClassVar[type[Patched]]  # the class in this package
    stock: ClassVar[type[nn.Module]]  # the class that undo gives back
    backend: ClassVar[str]
    ops: ClassVar[OpTable]
    wiring: ClassVar[tuple[str, ...]] = ()  # keys of __dict__ that the patch adds, and undo takes away
    transient: ClassVar[tuple[str, ...]] = ()  # of these, the ones that live within a forward only

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """`type(model)(config)` and `type(model).from_pretrained(...)` make stock objects: one instance is patched.
        Without arguments, which all stock modules need, it is torch that makes a replica of one."""
        return cls.stock(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def _replicate_for_data_parallel(self) -> nn.Module:
        replica = super()._replicate_for_data_parallel()
        for key in self.wiring:  # to modules that are not replicas
            replica.__dict__.pop(key, None)
        return replica

    def __reduce_ex__(self, protocol: Any) -> tuple:
        state = {key: value for key, value in self.__dict__.items() if key not in self.transient}
        return _new, (self.replacement, self.stock, self.backend), state

    def _get_name(self) -> str:
        return f"{self.stock.__name__}[{self.replacement.__name__}]"


@functools.cache
def patched_class(replacement: type[Patched], stock: type[nn.Module], backend: str) -> type[Patched]:
    """The subclass of `stock` with `replacement`'s forward. It keeps the stock name, which Transformers matches."""
    attributes = {
        "replacement": replacement,
        "stock": stock,
        "backend": backend,
        "ops": BACKENDS[backend],
        "__module__": stock.__module__,
        "__doc__": replacement.__doc__,
    }
    return type(stock.__name__, (replacement, stock), attributes)


def _new(replacement: type[Patched], stock: type[nn.Module], backend: str) -> Patched:
    cls = patched_class(replacement, stock, backend)
    return object.__new__(cls)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module without our patch."""
    return module.stock if isinstance(module, Patched) else type(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody's hooks watch calls of this module, so that the call must not be left out."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_global_hooks()


def has_global_hooks() -> bool:
    """Whether somebody's hooks watch the calls of all modules."""
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)


def version_of(tensor: torch.Tensor) -> int | None:
    """Changes with every in-place edit of the tensor; None for inference tensors, which don't count them."""
    return None if tensor.is_inference() else tensor._version

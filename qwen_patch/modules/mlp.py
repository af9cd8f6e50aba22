"""The MLP site: silu(gate) * up in one kernel between the linears."""

from __future__ import annotations

import torch

from ..ops import fusable
from .base import Patched, is_hooked


class FusedMLP(Patched):
    """down(silu(gate(x)) * up(x)). The linears are called as modules, so adapters and hooks on them work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, Patched):
            return type(self).forward(self, x)
        modules = self._modules
        act = modules["act_fn"]
        if self.training or torch.compiler.is_compiling() or is_hooked(act):
            return super().forward(x)
        gate, up = modules["gate_proj"](x), modules["up_proj"](x)
        if fusable(gate, up) and gate.shape == up.shape:
            return modules["down_proj"](self.ops.silu_mul(gate, up))
        return modules["down_proj"](act(gate) * up)

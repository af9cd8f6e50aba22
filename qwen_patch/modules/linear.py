"""The linear in int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..ops import OPS, Op
from ..ops.rotated_int8_linear import LARGEST_K
from ..quantization.format import GROUP, quantize

ACTIVATIONS = ("auto", "w8a16", "w8a8")
GROUPED, ROTATED = OPS["int8_linear"], OPS["rotated_int8_linear"]
# W8A8 of so many rows goes through ROTATED, where that has a kernel. It writes the weight anew at each call, where
# GROUPED reads it once: no way for a few tokens.
ROTATED_FROM_ROWS = 17
# With "auto", the activations are quantized too from this many rows on, by the op that W8A8 goes through and the type
# of the device. Where there is no entry W8A16 is the faster one, or nothing has been measured yet.
W8A8_FROM_ROWS = {(ROTATED.name, "cuda"): 512}


class Int8Linear(nn.Module):
    """x @ W.T + bias, with W in int8: `values` [N, K] and one float32 scale for each row and 64 values along K.

    state_dict: `weight` int8 [N, K/8, 8], `scales` float32 [N, ceil(K/64)] and, where there is one, `bias` [N].

    The weight has three dimensions so that no nn.Linear takes it: a checkpoint that is loaded where this package is not
    imported fails, and its codes are never read as weights. For the same reason this is no subclass of nn.Linear, whose
    weights PEFT would merge adapters into. The codes are a parameter rather than a buffer because accelerate offloads
    parameters only. Scales stay float32, whatever dtype the model is cast to.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activations: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Without values yet: `from_linear` brings them, or a checkpoint. `dtype` is the bias's."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.activations = activations
        self.backend = "auto"
        codes = torch.empty(out_features, in_features // 8, 8, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        groups = -(-in_features // GROUP)
        self.register_buffer("scales", torch.empty(out_features, groups, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, activations: str = "auto") -> Int8Linear:
        """The int8 form of `linear`, on its device; the bias shares its memory. Raises what `quantize` raises."""
        values, scales = quantize(linear.weight.detach())
        made = cls(linear.in_features, linear.out_features, False, activations, device="meta")
        made.weight = nn.Parameter(as_stored(values), requires_grad=False)
        made.scales = scales
        if linear.bias is not None:
            made.bias = nn.Parameter(linear.bias.detach(), requires_grad=linear.bias.requires_grad)
        return made.train(linear.training)

    @property
    def values(self) -> torch.Tensor:
        """The codes as int8 [N, K], in the weight's own memory."""
        return self.weight.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        op, quantized = self.way_of(x.numel() // self.in_features, x.device)
        if self.activations == "auto" and torch.is_grad_enabled() and x.requires_grad:
            op, quantized = GROUPED, False  # in training, a gradient straight through a rounding is for who asks for it
        call = op.reference if self.backend == "reference" else op
        if op is ROTATED:
            return call(x, *_of([self]))
        return call(x, self.values, self.scales, self.bias, quantized)

    def quantizes(self, tokens: int, device: torch.device) -> bool:
        """Whether the activations of so many tokens go through int8 too."""
        return self.way_of(tokens, device)[1]

    def way_of(self, tokens: int, device: torch.device) -> tuple[Op, bool]:
        """The op that so many tokens go through, and whether their activations are quantized too.

        The tokens are looked at last: where they do not matter, a trace with any number of them stays one.
        """
        if self.activations == "w8a16":
            return GROUPED, False
        rotates = self.in_features <= LARGEST_K and ROTATED.has_kernel(device) and tokens >= ROTATED_FROM_ROWS
        op = ROTATED if rotates else GROUPED
        if self.activations == "auto":
            rows = W8A8_FROM_ROWS.get((op.name, device.type))
            if rows is None or tokens < rows:
                return GROUPED, False
        return op, True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves follow, casts do not: the scales are the format's, not the model's."""
        codes, scales = self.weight.data, self.scales
        super()._apply(fn, recurse)
        if self.weight.dtype != torch.int8:
            self.weight = nn.Parameter(codes.to(self.weight.device), requires_grad=False)
        if self.scales.dtype != torch.float32:
            self.scales = scales.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, activations={self.activations}"


def side_by_side(linears: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor | None:
    """The results of all of them in one tensor [..., sum of N], where ROTATED takes them; else None."""
    tokens = x.numel() // x.shape[-1]
    for linear in linears:
        if type(linear) is not Int8Linear or linear.backend == "reference":
            return None
        if linear.way_of(tokens, x.device)[0] is not ROTATED:
            return None
    return ROTATED(x, *_of(linears))


def _of(linears: Sequence[Int8Linear]) -> tuple[list[torch.Tensor], ...]:
    """ROTATED's values, scales and biases; an empty bias is none."""
    biases = [m.scales[0, :0] if m.bias is None else m.bias for m in linears]
    return [m.values for m in linears], [m.scales for m in linears], biases


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] in the shape that a checkpoint has them in, [N, K/8, 8]."""
    return values.unflatten(1, (-1, 8))

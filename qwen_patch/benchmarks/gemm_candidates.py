"""What `qwen-patch gemm` compares: the linears of each type, what each must give, and how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from ..ops import OPS
from ..ops.small_linear import MAX_TOKENS
from ..quantization.format import dequantize, quantize, quantize_rows
from ..quantization.rotation import quantize_rotated, rotate

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "w8a16": torch.bfloat16, "w8a8": torch.bfloat16}  # of x
BASELINE = ("bf16", "torch linear")  # what ratios are to
# Errors and terms of random signs add up as a walk does. Hoeffding's bound: a sum of c_k e_k, every e_k independent and
# in [-1, 1], is beyond DEVIATIONS times the norm of c with a chance of at most 2 exp(-DEVIATIONS^2 / 2); of uniform e_k
# that is 6.9 standard deviations away, and no result of millions comes there by chance.
DEVIATIONS = 4
CHUNK = 1 << 26  # elements of a weight that are in float64 at a time


@dataclass(eq=False)
class Truth:
    """The operands of a product as numbers: float64 [M, K], and float64 [rows, K] of the weight's rows."""

    states: Callable[[], torch.Tensor]
    weight: Callable[[slice], torch.Tensor]


@dataclass(eq=False)
class Candidate:
    """One linear: call(x, *weights) -> [M, N].

    Its result may be off by the error of a sum in float32 (`summed`), by `roundings` roundings to the result's dtype,
    and by what a peer rounds on its way: `of_terms` times the norm of the sum's terms, `of_norms` times the token's
    largest |x| and the norm of the weight's row. One that can't run here has `note` and no call; one that a CUDA graph
    can't capture is not `capturable`.
    """

    type: str
    name: str
    call: Callable[..., torch.Tensor] | None = None
    x: torch.Tensor | None = None
    weights: tuple[torch.Tensor, ...] = ()
    weight_bytes: int = 0
    truth: Truth | None = None
    ours: bool = False
    summed: bool = True
    roundings: int = 1
    of_terms: float = 0.0
    of_norms: float = 0.0
    capturable: bool = True
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.type, self.name


class Weights:
    """A float32 weight [N, K] in what the types need of it."""

    def __init__(self, weight: torch.Tensor, types: tuple[str, ...]) -> None:
        self.shape, self.types = weight.shape, types
        self.float32 = weight if "fp32" in types else None
        self.bfloat16 = weight.bfloat16()
        self.int8 = quantize(self.bfloat16) if {"w8a16", "w8a8"} & {*types} else None
        self.torchao = {t: _torchao_weight(self.bfloat16, t) for t in ("w8a16", "w8a8") if t in types}


def _torchao_weight(weight: torch.Tensor, kind: str) -> Any:
    """torchao's int8 form of the weight, one scale a row; or why there is none."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

        config = Int8WeightOnlyConfig if kind == "w8a16" else Int8DynamicActivationInt8WeightConfig
        module = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=weight.dtype)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(module, config(set_inductor_config=False))
        found = module.weight.detach()
        found[:1].dequantize(torch.float32)  # what the check needs of it
        return found
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # whatever a version of it that we don't know does: it is a peer, and optional
        return f"fails: {type(error).__name__} {error}".splitlines()[0]


def candidates(x: torch.Tensor, weights: Weights) -> Iterator[Candidate]:
    """All linears of the wanted types, and torch's in bf16 in any case. x float32 [M, K]."""
    x16 = x.bfloat16()
    if "fp32" in weights.types:
        yield from _plain("fp32", x, weights.float32)
    yield from _plain("bf16", x16, weights.bfloat16, ours="bf16" in weights.types)
    if "w8a16" in weights.types:
        yield _int8(x16, weights, "w8a16")
        yield _torchao(x16, weights, "w8a16")
    if "w8a8" in weights.types:
        yield _int8(x16, weights, "w8a8")
        yield _rotated(x16, weights)
        yield _int_mm(x16, weights)
        yield _torchao(x16, weights, "w8a8")


def _split_rounding(x: torch.Tensor) -> float:
    """of_terms of torch's 16-bit linears: on CUDA the partial sums of a split K may be rounded to 16 bits.

    `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` allows it and is on by default. The norm of the
    parts is about that of all terms.
    """
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return 0.0
    return DEVIATIONS * torch.finfo(x.dtype).eps / 2


def _plain(kind: str, x: torch.Tensor, weight: torch.Tensor, ours: bool = True) -> Iterator[Candidate]:
    truth = Truth(x.double, lambda rows: weight[rows].double())
    common = {"x": x, "weights": (weight,), "weight_bytes": weight.nbytes, "truth": truth}
    yield Candidate(kind, "torch linear", linear, **common, of_terms=_split_rounding(x))
    if ours and x.shape[0] <= MAX_TOKENS:
        if OPS["small_linear"].has_kernel(x.device):
            small = OPS["small_linear"].no_grad
            yield Candidate(kind, "small_linear", lambda x, w: small(x, w, None), **common, ours=True)
        else:
            yield Candidate(kind, "small_linear", note=f"no {x.device.type} kernel")


def _int8(x: torch.Tensor, weights: Weights, kind: str) -> Candidate:
    quantized, op = kind == "w8a8", OPS["int8_linear"].no_grad

    def states() -> torch.Tensor:
        return dequantize(*quantize_rows(x.float()), torch.float64) if quantized else x.double()

    values, scales = weights.int8
    return Candidate(
        kind,
        "int8_linear",
        lambda x, values, scales: op(x, values, scales, None, quantized),
        x=x,
        weights=weights.int8,
        weight_bytes=values.nbytes + scales.nbytes,
        truth=Truth(states, lambda rows: dequantize(values[rows], scales[rows], torch.float64)),
        ours=True,
        note="" if OPS["int8_linear"].has_kernel(x.device) else f"the reference: no {x.device.type} kernel",
    )


def _rotated(x: torch.Tensor, weights: Weights) -> Candidate:
    op = OPS["rotated_int8_linear"]
    if not op.has_kernel(x.device):
        return Candidate("w8a8", op.name, note=f"no kernel for this {x.device.type}")

    def restored(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        codes, of_rows = quantize_rotated(rotate(rows.float()), scales)
        return codes.double() * of_rows.double()

    values, scales = weights.int8
    return Candidate(
        "w8a8",
        op.name,
        lambda x, values, scales: op.no_grad(x, [values], [scales], [scales[0, :0]]),
        x=x,
        weights=weights.int8,
        weight_bytes=values.nbytes + scales.nbytes,
        truth=Truth(lambda: restored(x, None), lambda rows: restored(values[rows], scales[rows])),
        ours=True,
    )


def _int_mm(x: torch.Tensor, weights: Weights) -> Candidate:
    """The library's int8 product alone: int32 sums of the values, which are exact."""
    name, (N, K), (states, _) = "torch._int_mm, no scales", weights.shape, quantize_rows(x.float())
    if x.device.type == "cuda" and (x.shape[0] <= 16 or N % 8 or K % 8):
        return Candidate("w8a8", name, note="takes M > 16, N and K multiples of 8")
    values = weights.int8[0]
    return Candidate(
        "w8a8",
        name,
        lambda x, values: torch._int_mm(x, values.t()),
        x=states,
        weights=(values,),
        weight_bytes=values.nbytes,
        truth=Truth(states.double, lambda rows: values[rows].double()),
        summed=False,
        roundings=0,
        note="int32 sums",
    )


def _torchao(x: torch.Tensor, weights: Weights, kind: str) -> Candidate:
    """torchao in eager mode. It rounds the sum to x's dtype, and that times the row's scale again; of w8a8 its int8
    activations can't be seen, so half a step of theirs, max|x| / 127, counts as rounding."""
    weight, name = weights.torchao[kind], "torchao int8"
    if isinstance(weight, str):
        return Candidate(kind, name, note=weight)
    return Candidate(
        kind,
        name,
        linear,
        x=x,
        weights=(weight,),
        weight_bytes=weight.numel() + 4 * weight.shape[0],
        truth=Truth(x.double, lambda rows: weight[rows].dequantize(torch.float32).double()),
        roundings=2,
        of_terms=_split_rounding(x),
        of_norms=DEVIATIONS / 254 if kind == "w8a8" else 0.0,
        capturable=kind == "w8a16",  # w8a8 prints its input on the way (torchao 0.18)
        note="eager" if kind == "w8a16" else "eager, called from Python",
    )


def shares_of_bound(found: list[tuple[Candidate, torch.Tensor]]) -> dict[tuple[str, str], float]:
    """Each result's largest error against float64, as a share of what its candidate may be off: right is up to 1.

    `_limit` has the bound. A result of another shape, or with a NaN, is off by infinity.
    """
    worst = {c.key: 0.0 for c, _ in found}
    for truth in dict.fromkeys(c.truth for c, _ in found):
        states = truth.states()
        largest, K = states.abs().amax(-1, keepdim=True), states.shape[1]
        checked = [(c, out) for c, out in found if c.truth is truth]
        N = checked[0][0].weights[0].shape[0]
        for first in range(0, N, max(1, CHUNK // K)):
            rows = slice(first, min(N, first + max(1, CHUNK // K)))
            weight = truth.weight(rows)
            exact, terms = states @ weight.T, (states.square() @ weight.square().T).sqrt()
            norms = largest * weight.norm(dim=-1)
            for c, out in checked:
                if out.shape != (states.shape[0], N):
                    worst[c.key] = math.inf
                    continue
                error = (out[:, rows].double() - exact).abs()
                share = torch.where(error == 0, 0.0, error / _limit(c, out.dtype, exact, terms, norms, K))
                worst[c.key] = max(worst[c.key], share.nan_to_num(nan=math.inf, posinf=math.inf).max().item())
    return worst


def _limit(
    c: Candidate, dtype: torch.dtype, exact: torch.Tensor, terms: torch.Tensor, norms: torch.Tensor, K: int
) -> torch.Tensor:
    """How far each result may be off. `terms` is the norm over k of x_k w_k; the x and w are random and independent.

    In any order a partial sum is then at most DEVIATIONS * terms, and each of the K steps rounds by at most 2^-24 of
    it, which makes DEVIATIONS^2 sqrt(K) 2^-24 terms; a scale's product and its own rounding count as two steps more.
    That plus a peer's own is what the final roundings, half an eps of the dtype each, are applied to; and below the
    smallest normal number a result may count as zero.
    """
    summed = DEVIATIONS**2 * (math.sqrt(K) + 2) * 2**-24 if c.summed else 0.0
    error = (summed + c.of_terms) * terms + c.of_norms * norms
    if not c.roundings:
        return error
    growth = (1 + torch.finfo(dtype).eps / 2) ** c.roundings
    return error * growth + exact.abs() * (growth - 1) + torch.finfo(dtype).smallest_normal

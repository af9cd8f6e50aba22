"""What a patch would do to a model, decided before anything is written to it."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .families import CAUSAL_LM, DECODER_LAYER, DECODER_LAYER_PARAMETERS, FAMILIES, MLP, RMS_NORM, SITES, Family
from .modules import stock_class
from .modules.linear import ACTIVATIONS, Int8Linear
from .ops import BACKENDS, DTYPES, LIBRARIES
from .quantization.linears import RECORD, WIDE, find_linears
from .recipes import QUANTIZED, RECIPES
from .requirements import problem_with_transformers

GENERATIONS = ("auto", "stock")
STOCK_ASKED = "generation=stock"  # why a plan leaves the loop of generate alone, where that was asked for
SILU_CLASSES = ("SiLUActivation", "SiLU")


class PatchError(ValueError):
    """A model can't be patched: one line with what was found, what is supported and what to do."""


@dataclass(frozen=True)
class Decision:
    """One module that was looked at. Exactly one of `replacement` and `reason` is set."""

    name: str
    site: str
    replacement: str | None
    reason: str | None
    next_norm: str | None = None  # decoder layers: the norm that reads this layer's output
    next_layer: str | None = None  # ... and the layer that calls it, None for the final norm


@dataclass(frozen=True)
class Plan:
    """The decisions for one model. `str(plan)` is a table, `plan.to_dict()` is for JSON."""

    model: str
    family: str
    fusion: str
    backend: str
    decisions: tuple[Decision, ...]
    generation: Decision  # of the loop of `generate`
    notes: tuple[str, ...] = ()
    quantize: str | None = None
    activations: str = "auto"
    lm_head: bool = False

    @property
    def replaced(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.replacement is not None)

    @property
    def options(self) -> dict[str, Any]:
        """What `make_plan` and `patch_model` are given to make this plan again."""
        generation = "stock" if self.generation.reason == STOCK_ASKED else "auto"
        options = {"fusion": self.fusion, "backend": self.backend, "generation": generation}
        return options | {"quantize": self.quantize, "activations": self.activations, "lm_head": self.lm_head}

    @property
    def title(self) -> str:
        quantize = "" if self.quantize is None else f", quantize={self.quantize} ({self.activations})"
        return f"{self.model} ({self.family}), fusion={self.fusion}, backend={self.backend}{quantize}"

    @property
    def generation_line(self) -> str:
        """What runs the loop of `generate`, for people."""
        if self.generation.replacement is None:
            return f"Transformers' own loop ({self.generation.reason})"
        return f"{self.generation.replacement}, the decode runtime"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> list[tuple[str, str, str, int]]:
        """(site, what happens, why not, how many), one row for each kind of decision."""
        rows = Counter((d.site, d.replacement or "left as it is", d.reason or "") for d in self.decisions)
        return [(*row, count) for row, count in rows.items()]

    def __str__(self) -> str:
        head = f"{self.title}: {len(self.replaced)} of {len(self.decisions)} modules replaced"
        rows = [f"  {count:4d} x {site:14s} {what:20s} {why}".rstrip() for site, what, why, count in self.summary()]
        rows += [f"  generate: {self.generation_line}"]
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__


def make_plan(
    model: nn.Module,
    fusion: str = "both",
    backend: str = "auto",
    generation: str = "auto",
    quantize: str | None = None,
    activations: str = "auto",
    lm_head: bool = False,
) -> Plan:
    """Looks at every module of `model` that is, or stands where, a supported site is. Writes nothing.

    A model that is patched already is planned as if it were stock. Raises PatchError where the arguments are unknown,
    the family or the Transformers version is not supported, the backend is not there, or nothing would be replaced.
    """
    for name, value, known in (
        ("fusion", fusion, RECIPES),
        ("backend", backend, BACKENDS),
        ("generation", generation, GENERATIONS),
        ("quantize", quantize, (None, *QUANTIZED)),
        ("activations", activations, ACTIVATIONS),
    ):
        if value not in known:
            raise PatchError(f"unknown {name} {value!r}: supported are {', '.join(map(str, known))}")
    if quantize is None and (activations, lm_head) != ("auto", False):
        raise PatchError("activations and lm_head are settings of quantize='int8'")
    if (problem := problem_with_transformers()) is not None:
        raise PatchError(problem)
    family = find_family(model)
    backend, notes = _choose_backend(model, backend)
    if model.training:
        notes += ("the model is in training mode: the stock forwards run, at stock speed, until model.eval()",)
    recipe = RECIPES[fusion]
    decisions: dict[str, Decision] = {}
    for name, module, site in _sites(model, family):
        reason = _why_not(module, site, family) or (None if site in recipe else f"not part of fusion={fusion}")
        replacement = None if reason else recipe[site].__name__
        decisions[name] = Decision(name, site, replacement, reason)
    _check_dtypes(model, decisions)
    _connect_layers(family, decisions)
    if quantize is not None:
        decisions |= _quantized(model, family, QUANTIZED[quantize], lm_head)
    loop = _generation(model, family, recipe, backend, generation)
    found = (type(model).__name__, family.model_type, fusion, backend, tuple(decisions.values()), loop, notes)
    plan = Plan(*found, quantize, activations, lm_head)
    if recipe and not plan.replaced:
        reasons = "; ".join(sorted({f"{d.site}: {d.reason}" for d in plan.decisions}))
        raise PatchError(f"nothing to replace in this {plan.model} with fusion={fusion}: {reasons}")
    return plan


def _quantized(model: nn.Module, family: Family, recipe: dict, lm_head: bool) -> dict[str, Decision]:
    """A decision for every linear. Raises where int8 is not for this model at all, or for none of them."""
    by_a_patch = any(RECORD in m.__dict__ for m in model.modules())
    if not by_a_patch and any(m.__dict__.get("is_quantized", False) for m in model.modules()):
        method = next(m.quantization_method for m in model.modules() if m.__dict__.get("is_quantized", False))
        raise PatchError(f"the model is quantized already ({method}): patch it without quantize")
    found = find_linears(model, family, lm_head)
    chosen = [f for f in found if f.reason is None]
    if any(f.module.weight.dtype == WIDE for f in chosen):
        raise PatchError(
            "quantize='int8' is for bfloat16 and float16 models, and the linears of this one are float32: load it with "
            "dtype=torch.bfloat16"
        )
    if not chosen:
        raise PatchError(f"no linear to quantize: {'; '.join(sorted({f.reason for f in found}))}")
    return {f.name: Decision(f.name, f.site, None if f.reason else recipe[f.site].__name__, f.reason) for f in found}


def _generation(model: nn.Module, family: Family, recipe: dict, backend: str, asked: str) -> Decision:
    """Whether `generate` may go through the decode runtime. Which call does is decided at the call."""
    wanted = (family.module, family.causal_lm)
    classes = ((name, m, stock_class(m)) for name, m in model.named_modules())
    name, module = next(((n, m) for n, m, cls in classes if (cls.__module__, cls.__name__) == wanted), ("", None))
    reason = None
    if asked == "stock":
        reason = STOCK_ASKED
    elif module is None:
        reason = f"the runtime does not know {family.model_type} with a head"
    elif set(recipe) != set(SITES):
        reason = "the runtime does the work of all fusions: not part of an ablation"
    elif backend == "reference":
        reason = "backend=reference"
    elif "forward" in module.__dict__:
        reason = "its forward has been replaced on the instance"
    return Decision(name, CAUSAL_LM, None if reason else "FastGenerate", reason)


def find_family(model: nn.Module) -> Family:
    classes = {(stock_class(m).__module__, stock_class(m).__name__) for m in model.modules()}
    for family in FAMILIES.values():
        if (family.module, family.decoder_layer) in classes:
            return family
    config = getattr(model, "config", None)
    found = f"{type(model).__name__} (model_type {getattr(config, 'model_type', 'unknown')!r})"
    raise PatchError(f"{found} is not supported: it has no decoder layers of {', '.join(FAMILIES)}")


def _choose_backend(model: nn.Module, backend: str) -> tuple[str, tuple[str, ...]]:
    """The backend that will run, and notes on what will be slow. Raises where the one asked for can't."""
    if backend == "reference":
        return backend, ()
    devices = {p.device for p in model.parameters() if p.device.type != "meta"}
    kinds = sorted({d.type for d in devices})
    if backend == "auto":
        missing = [LIBRARIES[kind] for kind in kinds if kind in LIBRARIES and not LIBRARIES[kind].loaded]
        notes = tuple(f"the {lib.kind} library is not in use ({lib.reason}): {lib.remedy}" for lib in missing)
    else:
        library = LIBRARIES[backend]
        if not library.loaded:
            raise PatchError(f"backend={backend!r} is not available: {library.reason}; {library.remedy}")
        if kinds != [backend]:
            raise PatchError(f"backend={backend!r} needs the model on {backend}, it is on {', '.join(kinds)}")
        notes = ()
    loaded = [(LIBRARIES[d.type], d) for d in devices if d.type in LIBRARIES and LIBRARIES[d.type].loaded]
    problems = sorted({found for library, d in loaded if (found := library.problem(d))})
    if not problems:
        return backend, notes
    if backend != "auto":
        raise PatchError(f"backend={backend!r} is not available: {'; '.join(problems)}; use backend='reference'")
    return "reference", (*notes, *(f"the cuda library is not in use ({problem})" for problem in problems))


def _sites(model: nn.Module, family: Family) -> list[tuple[str, nn.Module, str]]:
    """(name, module, site) in the model's order: each stock class, and each place where one would be expected."""
    classes = family.site_classes()
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name, module in modules.items():
        cls = stock_class(module)
        site = classes.get((cls.__module__, cls.__name__))
        if site is not None:
            found[name] = site
        if site == DECODER_LAYER:
            expected = {family.input_norm: RMS_NORM, family.post_attention_norm: RMS_NORM, family.mlp_name: MLP}
            expected |= {f"{family.attention}.{norm}": RMS_NORM for norm in family.attention_norms}
            for path, kind in expected.items():
                if f"{name}.{path}" in modules:
                    found.setdefault(f"{name}.{path}", kind)
    return [(name, modules[name], found[name]) for name in modules if name in found]


def _why_not(module: nn.Module, site: str, family: Family) -> str | None:
    cls = stock_class(module)
    expected = {RMS_NORM: family.rms_norm, MLP: family.mlp, DECODER_LAYER: family.decoder_layer}[site]
    if cls.__name__ == family.experts:
        return f"it is a block of experts ({cls.__name__}), which runs as stock"
    if (cls.__module__, cls.__name__) != (family.module, expected):
        return f"it is a {cls.__module__}.{cls.__name__}, not the stock {expected}"
    if inspect.unwrap(cls.forward).__module__ != cls.__module__:
        return f"the forward of {cls.__name__} has been replaced by {cls.forward.__module__}"
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
        origin = getattr(module.__dict__["forward"], "__module__", None) or "somebody else"
        return f"its forward has been replaced on the instance by {origin}"
    return {RMS_NORM: _why_not_norm, MLP: _why_not_mlp, DECODER_LAYER: _why_not_layer}[site](module)


def _why_not_norm(module: nn.Module) -> str | None:
    extra = [name for name, _ in module.named_parameters(recurse=False) if name != "weight"]
    if extra:
        return f"it has a parameter besides the weight: {', '.join(extra)}"
    weight = module.weight
    if weight.device.type == "meta" and not hasattr(module, "_hf_hook"):
        return "its weight is on the meta device: load the model's weights first"
    return None if weight.dtype in DTYPES else f"its weight is {weight.dtype}"


def _why_not_mlp(module: nn.Module) -> str | None:
    act = type(module.act_fn).__name__
    return None if act in SILU_CLASSES else f"its activation is {act}, not SiLU"


def _why_not_layer(module: nn.Module) -> str | None:
    found = list(inspect.signature(stock_class(module).forward).parameters)[1:]
    if found[:1] == ["hidden_states"] and frozenset(found[1:]) in DECODER_LAYER_PARAMETERS:
        return None
    return f"its forward takes other parameters: {', '.join(found)}"


def _compute_dtype(layer: nn.Module) -> torch.dtype | None:
    """The dtype of the layer's linears, None where they are quantized."""
    if any(isinstance(m, Int8Linear) for m in layer.modules()):
        return None  # adapters over them are plain linears of a dtype of their own
    dtypes = [p.dtype for m in layer.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)]
    return next((d for d in dtypes if d.is_floating_point), None)


def _check_dtypes(model: nn.Module, decisions: dict[str, Decision]) -> None:
    """Leaves a norm alone whose weight is of another dtype than its layer's linears."""
    for name in [d.name for d in decisions.values() if d.site == DECODER_LAYER]:
        dtype = _compute_dtype(model.get_submodule(name))
        for norm in [d for d in decisions.values() if d.site == RMS_NORM and d.name.startswith(f"{name}.")]:
            if norm.replacement is None or dtype is None:
                continue
            weight = model.get_submodule(norm.name).weight
            if weight.dtype != dtype:
                reason = f"mixed dtypes: its weight is {weight.dtype}, the layer's linears are {dtype}"
                decisions[norm.name] = Decision(norm.name, RMS_NORM, None, reason)


def _connect_layers(family: Family, decisions: dict[str, Decision]) -> None:
    """Which norm reads which layer's output; a layer whose own norms are not replaced is left alone."""
    layers = [d.name for d in decisions.values() if d.site == DECODER_LAYER]
    for i, name in enumerate(layers):
        layer = decisions[name]
        if layer.replacement is None:
            continue
        for norm in (family.input_norm, family.post_attention_norm):
            own = decisions.get(f"{name}.{norm}")
            if own is None or own.replacement is None:
                decisions[name] = Decision(name, DECODER_LAYER, None, f"its {norm} is not replaced")
                break
        else:
            stack = name.rpartition(".")[0]
            following = layers[i + 1] if i + 1 < len(layers) and layers[i + 1].rpartition(".")[0] == stack else None
            parent = stack.removesuffix(family.layers)
            next_norm = f"{following}.{family.input_norm}" if following else f"{parent}{family.final_norm}"
            readable = next_norm in decisions and decisions[next_norm].replacement is not None
            decisions[name] = Decision(
                name, DECODER_LAYER, layer.replacement, None, next_norm if readable else None, following
            )

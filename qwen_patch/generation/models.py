"""Which models the decode runtime takes, and which of them its kernel; and how it tells that a model has changed."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from ..families import FAMILIES
from ..modules.base import has_global_hooks, is_hooked, stock_class, version_of
from ..modules.linear import Int8Linear
from ..ops import DTYPES, LIBRARIES
from ..ops.decode_step import (
    AS_EMBEDDING,
    HEAD_DIMS,
    HEAD_DIMS_OF_INT8,
    MAX_BATCH,
    MAX_GROUP,
    MAX_HIDDEN,
    MAX_ROWS_A_BLOCK,
    MIN_SLOTS,
    W8A8,
    W8A16,
    slots_that_fit,
)
from ..quantization.format import GROUP, groups

RUNTIME_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": DTYPES}  # by the type of the device
# Rotary embeddings that depend on the position only, not on how long the sequence has become.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
# Exact classes, for the runtime stands for all of their forwards at once: these, and the family's own.
PLAIN = ("Linear", "Embedding", "ModuleList", "SiLU", "SiLUActivation")
OF_A_FAMILY = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
MAX_HEAD_DIM = 256  # of rope_kv_write
RECORDER = "transformers.utils.output_capturing"
# What may be put on a model, or a layer, and would be used in the stock loop.
NUMBERS = (
    "variance_epsilon", "scaling", "attention_scaling", "rope_type", "head_dim", "num_key_value_groups",
    "activations", "backend", "max_norm", "is_causal",
)  # fmt: skip
METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")


class Sizes(NamedTuple):
    """Of a decoder, as its first layer's weights have them: `_of_shapes` sees to it that the others are alike."""

    layers: int
    hidden: int
    inner: int  # of the MLP
    heads: int
    kv_heads: int
    head_dim: int


def sizes_of(decoder: nn.Module) -> Sizes:
    layers, first = decoder.layers, decoder.layers[0]
    attention, head_dim = first.self_attn, first.self_attn.head_dim
    inner, hidden = first.mlp.gate_proj.weight.flatten(1).shape
    heads, kv_heads = (projection.weight.shape[0] // head_dim for projection in (attention.q_proj, attention.k_proj))
    return Sizes(len(layers), hidden, inner, heads, kv_heads, head_dim)


def state_of(model: nn.Module) -> list[Any]:
    """What may change in a model between two calls of generate, and that `reason_against_model` or a graph depends on:
    where weights and buffers lie, classes and their forwards, hooks, what is put on instances, the numbers of layers.

    As long as it is equal to an earlier one, so are the reason and what a graph computes. It is taken at every call,
    before the first token: 0.4 ms for 28 layers on a slow CPU, where the reason itself takes 5.
    """
    state: list[Any] = [has_global_hooks(), *map(model.__dict__.get, METHODS)]
    numbers: dict[type, list[str]] = {}
    modules, parameter = [model], nn.Parameter
    for module in modules:  # which grows
        if module is None:
            continue
        own, cls = module.__dict__, type(module)
        if cls not in numbers:  # a number that a class uses is on all of its instances
            numbers[cls] = [name for name in NUMBERS if name in own or hasattr(cls, name)]
        state += (cls, module.training, "forward" in own, "_hf_hook" in own)
        if names := numbers[cls]:
            state += map(own.get, names)
        if children := own.get("_modules"):
            modules += children.values()
        if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
            state.append((tuple(own["_forward_hooks"]), tuple(own["_forward_pre_hooks"])))
        if parameters := own.get("_parameters"):
            for tensor in parameters.values():
                if type(tensor) is parameter:
                    state += (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                elif tensor is not None:
                    state += (type(tensor), id(tensor))
        if buffers := own.get("_buffers"):
            for tensor in buffers.values():
                if type(tensor) is torch.Tensor:
                    state += (tensor.data_ptr(), version_of(tensor), tensor.dtype, tensor.shape, tensor.stride())
    state.append({getattr(cls, "stock", cls).forward for cls in numbers})
    return state


class Weights:
    """Where a model's weights lie, told without keeping them.

    By weak references to the modules: torch swaps no parameter to which there is one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places = [
            (weakref.ref(module), name, parameter.data_ptr())
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]

    def held(self) -> bool:
        """Whether a parameter of the same module still lies there: a graph may read it."""
        for reference, name, at in self.places:
            module = reference()
            weight = None if module is None else module._parameters.get(name)
            if weight is None or weight.data_ptr() != at:
                return False
        return True

    def hold(self) -> list[torch.UntypedStorage]:
        """What the parameters are now, which stays as long as the list does."""
        modules = ((reference(), name) for reference, name, _ in self.places)
        weights = (module._parameters.get(name) for module, name in modules if module is not None)
        return [weight.untyped_storage() for weight in weights if weight is not None]


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """To be kept with a state: while their memory is held, no other buffer gets its address."""
    return [buffer.detach() for buffer in model.buffers()]


def reason_against_config(model: nn.Module) -> str | None:
    """Why the runtime can't run this model as its config is now."""
    config = model.config
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "some layers have a sliding window"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        return "its attention has a sliding window"
    if config._attn_implementation not in ATTENTION:
        return f"its attention is {config._attn_implementation!r}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    if config.output_attentions or config.output_hidden_states:
        return "its config asks for attentions or hidden states"
    if config.num_hidden_layers < len(model.model.layers):
        return "its config asks for a part of its layers"
    return None


def reason_against_model(model: nn.Module) -> str | None:
    """Why the runtime can't run this model as its modules are now; None if it can."""
    return _of_modules(model) or _of_device(model) or _of_shapes(model)


def _of_modules(model: nn.Module) -> str | None:
    for name in METHODS:
        put = model.__dict__.get(name)
        if put is not None and (getattr(put, "__func__", None), getattr(put, "__self__", None)) != (
            getattr(type(model), name, None),
            model,
        ):
            return f"{name} has been replaced on the instance"
    cls = stock_class(model)
    family = next(f for f in FAMILIES.values() if (f.module, f.causal_lm) == (cls.__module__, cls.__name__))
    prefix = family.rms_norm.removesuffix("RMSNorm")
    own = {prefix + part for part in OF_A_FAMILY}
    for name, module in model.named_modules():
        where = name or "the model"
        if _is_watched(module):
            return f"{where} has hooks"
        if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
            return f"the forward of {where} has been replaced on the instance"
        if module.training:
            return "the model is in training mode"
        if getattr(module, "is_causal", True) is not True:
            return f"the attention of {where} is not causal"
        cls = stock_class(module)
        at_home = cls.__module__.startswith(("torch.nn.modules.", "transformers.activations"))
        known = (cls.__module__ == family.module and cls.__name__ in own) or (at_home and cls.__name__ in PLAIN)
        if not (known or cls is Int8Linear):
            return f"{where} is a {cls.__module__}.{cls.__name__}"
        if hasattr(cls, "forward") and inspect.unwrap(cls.forward).__module__ not in (
            cls.__module__,
            nn.Module.__module__,
        ):
            return f"the forward of {cls.__name__} has been replaced by {cls.forward.__module__}"
    rope = model.model.rotary_emb
    if getattr(rope, "rope_type", None) not in ROPE_TYPES:
        return f"its rotary embedding is of type {getattr(rope, 'rope_type', 'unknown')!r}"
    return None


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody's hooks watch the module. Transformers' own, which it leaves there after it has once returned
    hidden states or attentions, do nothing unless it is asked for them again."""
    if not is_hooked(module):
        return False
    others = [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") != RECORDER]
    return bool(others or module._forward_pre_hooks or has_global_hooks())


def _of_device(model: nn.Module) -> str | None:
    weight = model.get_input_embeddings().weight
    kind = weight.device.type
    if kind not in RUNTIME_DTYPES:
        return f"the model is on {kind}, and the runtime is for {' and '.join(RUNTIME_DTYPES)}"
    if weight.dtype not in RUNTIME_DTYPES[kind]:
        return f"its weights are {weight.dtype}, not {' or '.join(str(d) for d in RUNTIME_DTYPES[kind])}"
    library = LIBRARIES[kind]
    if not library.loaded or (problem := library.problem(weight.device)):
        return f"the {kind} library is not in use: {library.reason if not library.loaded else problem}"
    return None


def _of_shapes(model: nn.Module) -> str | None:
    """All layers must be alike, and of the shapes that the first one's projections give: addresses carry no sizes."""
    weight, first = model.get_input_embeddings().weight, model.model.layers[0]
    int8 = {name: module for name, module in model.named_modules() if type(module) is Int8Linear}
    for name, parameter in model.named_parameters():
        codes = name.removesuffix(".weight") in int8
        if (
            parameter.dtype != (torch.int8 if codes else weight.dtype)
            or parameter.device != weight.device
            or type(parameter) is not nn.Parameter
        ):
            return f"{name} is a {type(parameter).__name__} of {parameter.dtype} on {parameter.device}"
        if not parameter.is_contiguous():
            return f"{name} is not contiguous"
    for name, module in int8.items():
        (N, K), scales = module.values.shape, module.scales
        if scales.dtype != torch.float32 or scales.device != weight.device or scales.shape != (N, groups(K)):
            return f"{name}.scales is {list(scales.shape)} of {scales.dtype} on {scales.device}"
        if not scales.is_contiguous():
            return f"{name}.scales is not contiguous"
    hidden, head_dim, attention = weight.shape[1], first.self_attn.head_dim, first.self_attn
    q, kv, inner = (m.weight.shape[0] for m in (attention.q_proj, attention.k_proj, first.mlp.gate_proj))
    needed = {f"self_attn.{n}_proj.weight": (size, hidden) for n, size in (("q", q), ("k", kv), ("v", kv))}
    needed |= {"self_attn.o_proj.weight": (hidden, q), "mlp.down_proj.weight": (hidden, inner)}
    needed |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    needed |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    optional = {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    optional |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    shapes = [
        {name: tuple(p.shape if p.dim() == 1 else p.flatten(1).shape) for name, p in layer.named_parameters()}
        for layer in model.model.layers
    ]
    for number, found in enumerate(shapes):
        if missing := needed.keys() - found.keys():
            return f"layer {number} has no {min(missing)}"
        for name, shape in found.items():
            if shape != (needed | optional).get(name) or name not in shapes[0]:
                return f"layer {number} has a {name} of shape {list(shape)}"
        if len(found) != len(shapes[0]):
            return f"layer {number} is not like the first"
    if model.model.norm.weight.shape != (hidden,) or model.lm_head.weight.flatten(1).shape[1] != hidden:
        return f"its final norm or lm_head is not for a hidden size of {hidden}"
    if getattr(model.lm_head, "bias", None) is not None:
        return "its lm_head has a bias"
    if len({m.variance_epsilon for m in model.modules() if hasattr(m, "variance_epsilon")}) > 1:
        return "its norms have more than one epsilon"
    attentions = [layer.self_attn for layer in model.model.layers]
    if len({(a.scaling, a.head_dim, a.num_key_value_groups) for a in attentions}) > 1:
        return "its attentions are not alike"
    if model.get_input_embeddings().max_norm is not None:
        return "its embedding has a maximal norm"
    if head_dim > MAX_HEAD_DIM:
        return f"its head_dim is {head_dim}: the runtime takes up to {MAX_HEAD_DIM}"
    if q % head_dim or kv % head_dim or q != kv * attention.num_key_value_groups:
        return f"its {q} query and {kv} key features are not heads of {head_dim}"
    if 2 * model.model.rotary_emb.inv_freq.numel() != head_dim:
        return "its rotary embedding turns a part of the head only"
    return None


def weights_of(model: nn.Module, rows: int) -> int | None:
    """`decode_step`'s `weights` for `rows` tokens at a time; None where the linears are not alike, or not the kernels'.

    The head may be in the embedding's dtype where the layers are in int8.
    """

    def of(module: nn.Module) -> int | None:
        if type(module) is not Int8Linear:
            return AS_EMBEDDING
        if module.backend == "reference":
            return None
        return W8A8 if module.quantizes(rows, module.weight.device) else W8A16

    found = {of(module) for module in model.model.layers.modules() if isinstance(module, nn.Linear | Int8Linear)}
    if (head := of(model.lm_head)) != AS_EMBEDDING:
        found.add(head)
    return found.pop() if len(found) == 1 else None


def reason_against_kernel(model: nn.Module, rows: int) -> str | None:
    """Why `decode_step` can't decode `rows` sequences of a model that the runtime takes; None if it can."""
    if (weights := weights_of(model, rows)) is None:
        return "its linears are not all alike: plain, or int8 by the kernels, with activations of one kind"
    if model.get_input_embeddings().weight.device.type == "cpu":
        return None
    return _against_cuda_kernel(model, rows, weights)


def _against_cuda_kernel(model: nn.Module, rows: int, weights: int) -> str | None:
    if weights == W8A8:
        return "its linears quantize activations: the kernel takes them as they are"
    if rows > MAX_BATCH:
        return f"{rows} sequences at once: the kernel takes up to {MAX_BATCH}"
    embedding, sizes = model.get_input_embeddings().weight, sizes_of(model.model)
    major, minor = torch.cuda.get_device_capability(embedding.device)
    if major < 8:
        return f"the GPU is of sm_{major}{minor}, not sm_80 or later"
    blocks = torch.cuda.get_device_properties(embedding.device).multi_processor_count
    layers, hidden, inner, heads, kv_heads, head_dim = sizes
    wide = {"hidden_size": hidden, "intermediate_size": inner, "heads x head_dim": heads * head_dim}
    multiple = 32 if weights == AS_EMBEDDING else GROUP
    for name, size in wide.items():
        if size % multiple or size < blocks:
            return f"{name} is {size}: the kernel needs a multiple of {multiple} from {blocks} up"
    if hidden > min(MAX_HIDDEN, MAX_ROWS_A_BLOCK * blocks):
        return f"hidden_size is {hidden}: the kernel takes up to {min(MAX_HIDDEN, MAX_ROWS_A_BLOCK * blocks)}"
    if embedding.shape[0] < blocks:
        return f"the vocabulary is of {embedding.shape[0]} tokens: the kernel needs {blocks}"
    if head_dim not in (HEAD_DIMS if weights == AS_EMBEDDING else HEAD_DIMS_OF_INT8) or heads > MAX_GROUP * kv_heads:
        return f"head_dim {head_dim} with {heads // kv_heads} query heads a key-value head is not supported"
    if rows * kv_heads > blocks:
        return f"{rows} sequences of {kv_heads} key-value heads are more than the {blocks} multiprocessors"
    if unaligned := [name for name, weight in model.named_parameters() if weight.data_ptr() % 16]:
        return f"{unaligned[0]} is not aligned to 16 bytes"
    if (head := model.lm_head.weight.flatten(1)).shape != embedding.shape:
        return f"its lm_head is {list(head.shape)}, its embedding {list(embedding.shape)}"
    slots = slots_that_fit(embedding, layers, heads, kv_heads, head_dim, inner, rows)
    if slots < MIN_SLOTS:
        return f"the GPU's shared memory has room for {slots} slots of weights: the kernel needs {MIN_SLOTS}"
    return None

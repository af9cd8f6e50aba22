"""Which models and calls of generate the decode runtime takes, and its kernel; for the others, why not, in one line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process, stopping_criteria

from ..modules.base import has_global_hooks, is_hooked, stock_class, version_of
from ..ops import LIBRARIES
from ..ops.decode_step import HEAD_DIMS, MAX_BANNED, MAX_BATCH, MAX_GROUP, MAX_HIDDEN, MAX_ROWS_A_BLOCK

# Processors that work on the scores of the GPU alone, so that a graph can hold them. Exact classes: a subclass may do
# anything.
MINIMUM_LENGTHS = (logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor)
PROCESSORS = (
    *MINIMUM_LENGTHS,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
)
CRITERIA = (
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
)
# Rotary embeddings that depend on the position only, not on how long the sequence has become.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
MAX_ROWS = 64  # sequences at once
MAX_HEAD_DIM = 256  # of rope_kv_write
NUMBERS = ("variance_epsilon", "scaling", "attention_scaling", "rope_type", "head_dim", "num_key_value_groups")
RECORDER = "transformers.utils.output_capturing"
# What generate may hand to the model beside the tokens: the runtime needs no more than the mask.
CACHE_NAMES = ("past_key_values", "cache")  # before and from transformers 5.24 on
MODEL_KWARGS = {
    *CACHE_NAMES,
    "attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep", "tokenizer",
}  # fmt: skip


def reason_against_model(model: nn.Module) -> str | None:
    """Why the runtime can't run this model as it is now; None if it can. Depends on `state_of` alone."""
    return _of_device(model) or _of_modules(model) or _of_shapes(model)


def state_of(model: nn.Module) -> list[Any]:
    """All of the model that may change between two calls of generate and that the runtime, or a graph, depends on:
    where weights and buffers lie, classes, hooks, forwards put on instances, the numbers that layers hold.

    As long as it is equal to an earlier one, so are `reason_against_model` and what a graph would compute. It is taken
    at every call, before the first token: 0.5 ms for 36 layers, where the reasons themselves take 3.5.
    """
    state: list[Any] = [has_global_hooks()]
    modules = [model]
    while modules:
        module = modules.pop()
        own = module.__dict__
        modules.extend(child for child in own["_modules"].values() if child is not None)
        state.append((type(module), module.training, "forward" in own, "_hf_hook" in own, *map(own.get, NUMBERS)))
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            state.append((tuple(own["_forward_hooks"]), tuple(own["_forward_pre_hooks"])))
        for tensor in own["_parameters"].values():
            if type(tensor) is nn.Parameter:
                state.append((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))
            elif tensor is not None:
                state.append((type(tensor), id(tensor)))
        for tensor in own["_buffers"].values():
            if type(tensor) is torch.Tensor:
                state.append((tensor.data_ptr(), version_of(tensor)))
    return state


def _of_device(model: nn.Module) -> str | None:
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cuda":
        return f"the model is on {weight.device.type}, and the runtime is for CUDA"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"its weights are {weight.dtype}, not bfloat16 or float16"
    library = LIBRARIES["cuda"]
    if not library.loaded or (problem := library.problem(weight.device)):
        return f"the cuda library is not in use: {library.reason if not library.loaded else problem}"
    return None


def reason_against_config(config: Any) -> str | None:
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
    return None


def _of_modules(model: nn.Module) -> str | None:
    """The runtime stands for every module at once, so none may do more than its stock class."""
    for name, module in model.named_modules():
        if _is_watched(module):
            return f"{name or 'the model'} has hooks"
        if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
            return f"the forward of {name or 'the model'} has been replaced on the instance"
        if module.training:
            return "the model is in training mode"
        cls = stock_class(module)
        if cls not in PLAIN and not cls.__module__.startswith(("transformers.models.", "transformers.activations")):
            return f"{name} is a {cls.__module__}.{cls.__name__}"
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


def _of_shapes(model: nn.Module) -> str | None:
    weight, layer = model.get_input_embeddings().weight, model.model.layers[0]
    for name, parameter in model.named_parameters():
        if parameter.dtype != weight.dtype or parameter.device != weight.device or type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__} of {parameter.dtype} on {parameter.device}"
        if not parameter.is_contiguous():
            return f"{name} is not contiguous"
    others = {"lm_head": model.lm_head, "o_proj": layer.self_attn.o_proj, **dict(layer.mlp.named_children())}
    if biased := [name for name, module in others.items() if getattr(module, "bias", None) is not None]:
        return f"its {biased[0]} has a bias"
    if len({m.variance_epsilon for m in model.modules() if hasattr(m, "variance_epsilon")}) > 1:
        return "its norms have more than one epsilon"
    head_dim = layer.self_attn.head_dim
    if head_dim > MAX_HEAD_DIM:
        return f"its head_dim is {head_dim}: the runtime takes up to {MAX_HEAD_DIM}"
    if 2 * model.model.rotary_emb.inv_freq.numel() != head_dim:
        return "its rotary embedding turns a part of the head only"
    return None


def kernel_reason(model: nn.Module, rows: int) -> str | None:
    """Why `decode_step` can't decode `rows` sequences of a model that the runtime takes; None if it can."""
    if rows > MAX_BATCH:
        return f"{rows} sequences at once: the kernel takes up to {MAX_BATCH}"
    embedding, layer = model.get_input_embeddings().weight, model.model.layers[0]
    major, minor = torch.cuda.get_device_capability(embedding.device)
    if major < 8:
        return f"the GPU is of sm_{major}{minor}, not sm_80 or later"
    blocks = torch.cuda.get_device_properties(embedding.device).multi_processor_count
    hidden = embedding.shape[1]
    head_dim, group = layer.self_attn.head_dim, layer.self_attn.num_key_value_groups
    sizes = {"hidden_size": hidden, "intermediate_size": layer.mlp.gate_proj.weight.shape[0]}
    sizes["heads x head_dim"] = layer.self_attn.q_proj.weight.shape[0]
    for name, size in sizes.items():
        if size % 32 or size < blocks:
            return f"{name} is {size}: the kernel needs a multiple of 32 from {blocks} up"
    if hidden > min(MAX_HIDDEN, MAX_ROWS_A_BLOCK * blocks):
        return f"hidden_size is {hidden}: the kernel takes up to {min(MAX_HIDDEN, MAX_ROWS_A_BLOCK * blocks)}"
    if head_dim not in HEAD_DIMS or group > MAX_GROUP:
        return f"head_dim {head_dim} with {group} query heads a key-value head is not supported"
    if unaligned := [name for name, weight in model.named_parameters() if weight.data_ptr() % 16]:
        return f"{unaligned[0]} is not aligned to 16 bytes"
    if model.lm_head.weight.shape != embedding.shape:
        return f"its lm_head is {list(model.lm_head.weight.shape)}, its embedding {list(embedding.shape)}"
    return None


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    return next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


def _against_padding(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> str | None:
    """The runtime leaves padding on the left out, and counts positions from the first token on."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None and positions is None:
        return None
    if mask is not None and mask.shape != input_ids.shape:
        return f"the attention mask is of shape {list(mask.shape)}, the prompt of {list(input_ids.shape)}"
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    wrong = (seen[:, 1:] < seen[:, :-1]).any() | ~seen[:, -1:].all()
    if positions is not None:
        wrong |= (positions[..., -1] != seen.sum(-1) - 1).any()
    return "the attention mask or the positions are not those of padding on the left" if bool(wrong) else None


def reason_against_call(
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the runtime can't take this call of generate's sampling loop; None if it can."""
    if len(input_ids) > MAX_ROWS:
        return f"{len(input_ids)} sequences at once: the runtime takes up to {MAX_ROWS}"
    if input_ids.shape[1] == 0:
        return "the prompt is empty"
    if synced_gpus:
        return "several GPUs generate in step"
    if config.return_dict_in_generate:
        return "return_dict_in_generate is set"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size is set"
    if config.is_assistant:
        return "the model assists another one"
    for kind, found, known in (
        ("logits processor", processors, PROCESSORS),
        ("stopping criterion", criteria, CRITERIA),
    ):
        other = next((type(item).__name__ for item in found if type(item) not in known), None)
        if other is not None:
            return f"the {kind} {other} needs the host at every token"
    ends = max((p.eos_token_id.numel() for p in processors if type(p) in MINIMUM_LENGTHS), default=0)
    if ends > MAX_BANNED:
        return f"a minimal length holds {ends} ends of text back: the kernel knows {MAX_BANNED}"
    cache = cache_of(model_kwargs)
    if type(cache) is not DynamicCache or cache.offloading or {type(layer) for layer in cache.layers} - {DynamicLayer}:
        return f"the cache is a {type(cache).__name__}, not the default one"
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0:
        return "a cache was given"
    if (reason := _against_padding(input_ids, model_kwargs)) is not None:
        return reason
    other = next((k for k, v in model_kwargs.items() if k not in MODEL_KWARGS and v is not None), None)
    if other is not None:
        return f"{other} was given"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    return None

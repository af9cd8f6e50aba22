"""decode_step: one new token for each of a few sequences, the whole decoder as one op.

Unlike the other ops it works on a session's buffers, in place, and returns nothing. On CUDA (csrc/cuda/decode/) it is
one kernel, meant to be captured in a graph and replayed: bfloat16 or float16, sm_80 or later, 1 to 8 sequences of what
generation/models.py lists. On a CPU (csrc/cpu/decode/) it is one parallel region: float32 too, 1 to 64 sequences.
"""

from __future__ import annotations

import torch

from ._registry import _TORCH_LIBRARY

# A layer's row in the table of pointers; 0 where a family has none. csrc/cuda/decode/program.cuh has the same order.
LAYER_WEIGHTS = (
    "input_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "post_norm", "gate", "up", "down",
    "q_scales", "k_scales", "v_scales", "o_scales", "gate_scales", "up_scales", "down_scales",
)  # fmt: skip
# How the linears of the layers hold their weights: in the embedding's dtype; or in int8 (quantization/format.py), with
# activations as they are, or in int8 too.
AS_EMBEDDING, W8A16, W8A8 = range(3)
MAX_BATCH = 8
MAX_BANNED = 8  # tokens that may not come yet: ends of text before a minimal length
MAX_GROUP = 8  # query heads that share a key-value head
HEAD_DIMS, HEAD_DIMS_OF_INT8 = (32, 64, 96, 128), (64, 128)
MAX_HIDDEN = 8192
MAX_ROWS_A_BLOCK = 64  # of the hidden size
MIN_SLOTS = 2  # of the ring of weights in shared memory
# Slots of weights that a multiprocessor waits for at a time: Qwen3-8B takes 3,816 us with 3, 4,074 with 4. One sequence
# and a hidden size up to 1,024: Qwen3-0.6B takes 590 us with 2, 604 with 3; 1.7B, of 2,048, is slower with 2.
IN_FLIGHT = 3
IN_FLIGHT_OF_ONE_SMALL_ROW = 2

_TORCH_LIBRARY.define(
    "decode_step(Tensor layers, Tensor embedding, Tensor final_norm, Tensor lm_head, "
    "Tensor? lm_head_scales, Tensor cos, Tensor sin, Tensor(a!) tokens, Tensor(b!) cache, Tensor(c!) exchange, "
    "Tensor(d!) state, Tensor(e!) history, Tensor banned, Tensor(f!) logits, int heads, int intermediate, int weights, "
    "float eps, float scale, bool greedy, int max_splits, int split_keys, int slots, int in_flight) -> ()"
)

_TORCH_LIBRARY.define(
    "decode_step_slots(Tensor embedding, int layers, int heads, int kv_heads, int head_dim, int intermediate, "
    "int rows) -> int"
)
_TORCH_LIBRARY.define(
    "decode_step_exchange(Tensor embedding, int heads, int kv_heads, int head_dim, int intermediate, int rows, "
    "int max_splits) -> int"
)


def slots_that_fit(
    embedding: torch.Tensor, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, rows: int
) -> int:
    """How many slots the ring of weights has at least, whatever they are kept as, on the GPU of embedding [V, H]; it
    needs MIN_SLOTS."""
    return torch.ops.qwen_patch.decode_step_slots(embedding, layers, heads, kv_heads, head_dim, intermediate, rows)


def exchange_words(
    embedding: torch.Tensor, heads: int, kv_heads: int, head_dim: int, intermediate: int, rows: int, max_splits: int
) -> int:
    """Size of the `exchange` buffer, in int32: what the multiprocessors of the GPU of embedding [V, H] hand each other.
    It must start as zeros."""
    return torch.ops.qwen_patch.decode_step_exchange(
        embedding, heads, kv_heads, head_dim, intermediate, rows, max_splits
    )


def decode_step(
    layers: torch.Tensor,
    embedding: torch.Tensor,
    final_norm: torch.Tensor,
    lm_head: torch.Tensor,
    lm_head_scales: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tokens: torch.Tensor,
    cache: torch.Tensor,
    exchange: torch.Tensor,
    state: torch.Tensor,
    history: torch.Tensor,
    banned: torch.Tensor,
    logits: torch.Tensor,
    *,
    heads: int,
    intermediate: int,
    weights: int,
    eps: float,
    scale: float,
    greedy: bool,
    max_splits: int = 1,
    split_keys: int = 1,
    slots: int = 0,
    in_flight: int | None = None,
) -> None:
    """One step. B sequences, L layers, H hidden, D head_dim, V vocabulary; weights and cache of one dtype.

    layers: [L, len(LAYER_WEIGHTS)] int64, addresses in LAYER_WEIGHTS' order. weights: AS_EMBEDDING; or W8A16 or W8A8,
    where the linears are int8 [N, K] with float32 scales [N, ceil(K / 64)]. embedding, lm_head: [V, H]; with
    lm_head_scales lm_head is int8 too. cos, sin: [positions, D]. tokens: [B] int64, the tokens to read; with `greedy`
    the next ones take their place, and column state[1] of history [B, N]. cache: [L, 2, B, kv_heads, capacity, D]: the
    new keys and values are written at state[2 + b]. exchange: see `exchange_words`. state: int32 [2 + B]: {round,
    column, length of each sequence}; the step adds 1 to all. banned: int32 [1 + MAX_BANNED], {column, token ids,
    -1 ...}: not chosen before that column. logits: [B, V], written. scale: of q.k.

    Read on CUDA only: exchange; max_splits, split_keys: at most so many parts a context is cut into, of at least so
    many keys; slots: of the ring of weights; in_flight: of them, asked for at a time. 0 means as many as fit, None what
    was fastest.

    Rounding is the stock model's at every point; sums are fp32, in another order.
    """
    if in_flight is None:
        small = len(tokens) == 1 and embedding.shape[1] <= 1024
        in_flight = IN_FLIGHT_OF_ONE_SMALL_ROW if small else IN_FLIGHT
    torch.ops.qwen_patch.decode_step(
        layers, embedding, final_norm, lm_head, lm_head_scales, cos, sin, tokens, cache, exchange, state,
        history, banned, logits, heads, intermediate, weights, eps, scale, greedy, max_splits, split_keys, slots,
        in_flight,
    )  # fmt: skip

"""rope_kv_write: what an attention does between its projections and its scores, in one pass: the norms of queries and
keys where a model has them, the rotary embedding, and the write of keys and values into the cache.

It is the decode runtime's, for prompts and where `decode_step` does not fit. On a CPU the reference runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._registry import Cost, Op, register
from .rms_norm import reference as rms_norm


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """rotated = round(round(x * cos) + round(rotate_half(x) * sin)), of x = q and x = k, after rms_norm where given.

    The expression of transformers' apply_rotary_pos_emb (RoPE, Su et al. 2021, arXiv:2104.09864).
    """
    (batch, tokens, _), (_, _, capacity, head_dim) = q.shape, keys.shape
    q, k, v = (x.unflatten(-1, (x.shape[-1] // head_dim, head_dim)) for x in (q, k, v))
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    limit = min(capacity, len(cos))
    positions = first[:, None] + torch.arange(tokens, device=q.device)
    known = ((positions >= 0) & (positions < limit))[..., None, None]
    cos, sin = (table[positions.clamp(0, limit - 1), None] for table in (cos, sin))
    q, k = (x * cos + torch.cat((-x[..., head_dim // 2 :], x[..., : head_dim // 2]), dim=-1) * sin for x in (q, k))
    # As many slots of a row as there are tokens, all in the cache: none is written twice, and nothing waits for a GPU.
    count = min(tokens, capacity)
    slots = first[:, None].clamp(0, capacity - count) + torch.arange(count, device=q.device)
    came = slots - first[:, None]  # the token that belongs into each slot
    written = ((came >= 0) & (came < tokens) & (slots < limit))[..., None, None]
    row, token = torch.arange(batch, device=q.device)[:, None], came.clamp(0, max(0, tokens - 1))
    for cache, states in ((keys, k), (values, v)):
        cache[row, :, slots] = torch.where(written, states[row, token], cache[row, :, slots])
    return torch.where(known, q, 0)


def fake(q, k, v, q_norm, k_norm, eps, cos, sin, first, keys, values) -> torch.Tensor:
    head_dim = keys.shape[-1]
    return q.new_empty((*q.shape[:2], q.shape[2] // head_dim, head_dim))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """Prompts and single tokens, with norms and without; heads of two elements, odd halves, and of the supported
    models; views with gaps and unaligned ones; rows at different positions, some beyond the cache; no tokens at all."""

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def sample(batch, tokens, heads, kv_heads, head_dim, *, norms, first, capacity=24, positions=24, gap=0) -> tuple:
        width, kv_width = heads * head_dim, kv_heads * head_dim
        packed = rand(batch, tokens, gap + width + 2 * kv_width + gap)
        q, k, v = packed[..., gap : packed.shape[-1] - gap].split([width, kv_width, kv_width], dim=-1)
        if not gap:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        angles = 3 * rand(positions, head_dim)
        cache = rand(2, batch, kv_heads, capacity + gap, head_dim + gap)[..., gap:, gap:]
        weights = (rand(head_dim), rand(head_dim)) if norms else (None, None)
        where = torch.tensor(first, device=device)
        return q, k, v, *weights, 1e-6, angles.cos(), angles.sin(), where, cache[0], cache[1]

    yield sample(1, 7, 14, 2, 64, norms=False, first=[0])
    yield sample(2, 17, 4, 2, 128, norms=True, first=[0, 0])
    yield sample(3, 1, 6, 3, 96, norms=True, first=[4, 23, 11])
    yield sample(1, 3, 1, 1, 2, norms=False, first=[5])
    yield sample(2, 5, 3, 1, 64, norms=True, first=[3, 0], gap=1)
    yield sample(2, 4, 3, 1, 80, norms=False, first=[0, 9], gap=8)
    yield sample(1, 5, 2, 1, 256, norms=True, first=[2])
    yield sample(1, 5, 2, 2, 130, norms=True, first=[2])
    yield sample(4, 6, 2, 1, 32, norms=True, first=[20, -2, 24, 0], positions=22)
    yield sample(2, 0, 2, 1, 32, norms=True, first=[0, 0])


def cost(q, k, v, q_norm, k_norm, eps, cos, sin, first, keys, values) -> Cost:
    moved = q.numel() + k.numel() + v.numel()
    turned = (q.numel() + k.numel()) * (7 if q_norm is not None else 3)
    tables = 2 * q.shape[1] * keys.shape[-1]
    return Cost(bytes=(2 * moved + tables) * q.element_size() + 8 * first.numel(), flops=turned)


OP = register(
    Op(
        name="rope_kv_write",
        schema="(Tensor q, Tensor k, Tensor v, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, "
        "Tensor first, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
        reference=reference,
        fake=fake,
        samples=samples,
        cost=cost,
        mutates=(9, 10),
        max_ulp=4,  # each of the two terms is within 2, as rms_norm's results are; bit-equal without the norms
        of_row=True,  # ... of the terms, whose sum may be close to zero
    )
)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Returns the rotated queries [B, T, heads, D]; writes the rotated keys, and the values, into the cache.

    q [B, T, heads * D], k and v [B, T, kv_heads * D], any strides; q_norm and k_norm [D]: weights of an RMSNorm over
    each head, or None. Token t of row b is at position first[b] + t (first: int64 [B]): turned by that row of cos and
    sin [positions, D], and written to that slot of keys and values [B, kv_heads, capacity, D], which are changed in
    place, and may be views whose last dimension has no gaps. A token beyond the slots or the tables is not written, and
    its queries are zero. float32, bfloat16 or float16, of one dtype and on one device; D even, up to 256. Rounds where
    the stock model does (see `reference`): bit-equal to it without the norms, within rms_norm's contract with them.
    Where a gradient is wanted, the reference itself runs. Raises RuntimeError on other input.
    """
    return OP(q, k, v, q_norm, k_norm, eps, cos, sin, first, keys, values)

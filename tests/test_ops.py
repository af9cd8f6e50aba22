"""Every op, on every device and dtype, with the samples that the op's own file declares."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from qwen_patch import ops
from qwen_patch.benchmarks.ops import FLOAT32_ULP, largest_error
from qwen_patch.modules import Int8Linear

DTYPES = pytest.mark.parametrize("dtype", ops.DTYPES, ids=lambda d: str(d).removeprefix("torch."))
EVERY_OP = pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
DIFFERENTIABLE = pytest.mark.parametrize(
    "op", [op for op in ops.OPS.values() if not op.mutates], ids=lambda op: op.name
)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def outcome(op, function, args):
    """What a call gives back, and what it makes of the arguments that it writes into, which are then put back."""
    before = [args[i].clone() for i in op.mutates]
    outputs = as_tuple(function(*args))
    changed = tuple(args[i].clone(memory_format=torch.contiguous_format) for i in op.mutates)
    for i, kept in zip(op.mutates, before, strict=True):
        args[i].copy_(kept)
    return outputs + changed


def of_floats(change, args):
    return tree_map(lambda a: change(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, list(args))


def in_double(args):
    return of_floats(torch.Tensor.double, args)


def wanting_gradients(args):
    return of_floats(lambda a: a.clone().requires_grad_(), args)


@EVERY_OP
@DTYPES
def test_matches_reference(op, device, dtype):
    assert ops.LIBRARIES[device.type].loaded, ops.LIBRARIES[device.type].reason
    differing = total = 0
    for args in op.samples(device, dtype):
        found, expected = outcome(op, op, args), outcome(op, op.reference, args)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert a.is_contiguous()
            if b.numel() == 0:
                continue
            allowed = FLOAT32_ULP if dtype == torch.float32 else op.max_ulp
            assert largest_error(a, b, op.of_row) <= allowed, [getattr(x, "shape", x) for x in args]
            if b.shape[-1] <= 8192:  # a longer row's mean, summed in two orders, differs by more than its last bit
                differing += (a != b).sum().item()
                total += b.numel()
    if dtype != torch.float32:
        # The contract: only where a sum's last bit tips a rounding, under 0.1% of the elements where the sum is a mean
        # of squares, more where its terms cancel; silu_mul nowhere.
        assert differing <= (total * op.tipped if op.max_ulp else 0)


@EVERY_OP
@DTYPES
def test_against_float64(op, device, dtype):
    """Over all samples, the kernel is as close to the truth as the stock expression is, within 10%."""
    ours = stock = 0.0
    for args in op.samples(device, dtype):
        exact = outcome(op, op.reference, in_double(args))
        for a, b, truth in zip(outcome(op, op, args), outcome(op, op.reference, args), exact, strict=True):
            if truth.numel():
                scale = truth.abs().mean().clamp_min(1e-30)
                ours += ((a.double() - truth).abs().mean() / scale).item()
                stock += ((b.double() - truth).abs().mean() / scale).item()
    # In float32 a row's one scale is off by up to half an eps on either side, by luck: 13 samples of luck come on top.
    luck = 13 * 0.5 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    assert 0 < ours <= 1.1 * stock + luck


@EVERY_OP
def test_opcheck(op, device):
    for i, args in enumerate(op.samples(device, torch.float32)):
        if i % 4 == 0:  # every fourth: plain, strided and empty ones are among them, and each takes half a second
            torch.library.opcheck(op.no_grad, args)
            if op.mutates:
                continue
            torch.library.opcheck(op.differentiable, wanting_gradients(args))


@EVERY_OP
def test_a_reference_waits_for_nothing(op):
    """So that a CUDA graph can hold it: with tensors that have no values, whoever asks for one gets an error."""
    fake = FakeTensorMode()
    for args in op.samples(torch.device("cpu"), torch.bfloat16):
        valueless = tree_map(lambda a: fake.from_tensor(a) if isinstance(a, torch.Tensor) else a, args)
        with fake:
            op.reference(*valueless)


@DIFFERENTIABLE
@DTYPES
def test_gradients_are_those_of_the_reference(op, device, dtype):
    args = next(args for args in op.samples(device, dtype) if args[0].shape[0] in (16, 17))
    results = []
    for function in (op, op.reference):
        leaves = wanting_gradients(args)
        outputs = as_tuple(function(*leaves))
        torch.manual_seed(1)
        sum((o.float() * torch.randn_like(o).float()).sum() for o in outputs).backward()
        results.append([leaf.grad for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor)])
    assert results[0][0] is not None
    for found, expected in zip(*results, strict=True):  # the scales of int8_linear have none on either side
        assert found is expected is None or torch.equal(found, expected)


def test_gradient_of_one_output_only(device):
    x, residual, weight, eps = next(iter(ops.OPS["add_rms_norm"].samples(device, torch.float32)))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    ops.add_rms_norm(found, residual, weight, eps)[1].sum().backward()
    (residual + expected).sum().backward()
    assert torch.equal(found.grad, expected.grad)


@DTYPES
def test_rope_kv_write_is_what_transformers_computes(device, dtype):
    """Bitwise, through its own functions; and the slots that no token belongs to keep what they held."""
    norms = [Qwen3RMSNorm(64).to(device, dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    q, k, v = (torch.randn(2, 5, n * 64, device=device, dtype=dtype) for n in (6, 2, 2))
    angles, cache = torch.randn(16, 32, device=device).repeat(1, 2), torch.randn(2, 2, 2, 12, 64, device=device)
    cos, sin, cache = angles.cos().to(dtype), angles.sin().to(dtype), cache.to(dtype)
    expected, first = cache.clone(), torch.tensor([3, 9], device=device)
    heads = [x.view(2, 5, -1, 64).transpose(1, 2) for x in (q, k, v)]
    for normed in (False, True):
        states = [norm(x) for norm, x in zip(norms, heads, strict=False)] if normed else heads[:2]
        for row, at in enumerate((3, 9)):
            turned = [x[row : row + 1] for x in states]
            turned = apply_rotary_pos_emb(*turned, cos[None, at : at + 5], sin[None, at : at + 5])
            kept = min(5, 12 - at)
            expected[0, row, :, at : at + kept] = turned[1][0, :, :kept]
            expected[1, row, :, at : at + kept] = heads[2][row, :, :kept]
            weights = [norm.weight.detach() for norm in norms] if normed else [None, None]
            found = ops.rope_kv_write(q, k, v, *weights, 1e-6, cos, sin, first, *cache)[row].transpose(0, 1)
            limit = {"rtol": 0, "atol": 0}
            if normed and device.type == "cuda":  # the mean's other order of summing: see the op's max_ulp
                limit = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps * float(turned[0].detach().abs().max())}
            torch.testing.assert_close(found[:, :kept], turned[0][0, :, :kept], **limit)
            assert not found[:, kept:].any()
        torch.testing.assert_close(cache, expected, **limit)


def test_the_reference_of_rope_kv_write_touches_what_it_writes_only():
    """Not the whole cache, whose room may be a hundred times what an answer takes, in memory that is not there yet."""
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            tensors = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
            made = [t for t in tensors if t.untyped_storage().data_ptr() not in given]
            largest = max([largest, *(t.numel() for t in made)])
            return found

    q, k, v = torch.randn(1, 3, 64), torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    cache, cos, sin = torch.zeros(2, 1, 2, 4096, 16), torch.randn(4096, 16), torch.randn(4096, 16)
    given = {t.untyped_storage().data_ptr() for t in (cache, cos, sin)}
    with Largest():
        ops.OPS["rope_kv_write"].reference(q, k, v, None, None, 1e-6, cos, sin, torch.tensor([7]), *cache)
    assert cache[:, :, :, 7:10].all()
    assert cache.count_nonzero() == cache[:, :, :, 7:10].numel()
    assert largest < 4096


def test_rope_kv_write_with_gradients(device):
    q, k, v, *others = next(iter(ops.OPS["rope_kv_write"].samples(device, torch.float32)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rotated = ops.rope_kv_write(*leaves, *others)
    (rotated.sum() + others[-2].sum() + others[-1].sum()).backward()
    assert all(leaf.grad.abs().sum() > 0 for leaf in leaves)
    assert torch.equal(leaves[2].grad, torch.ones_like(v))  # each value stands in the cache once


@DTYPES
def test_silu_of_every_16_bit_value(device, dtype):
    """All 65,536 bit patterns: NaN, infinities, subnormals and both zeros are among them."""
    if dtype == torch.float32:
        gate = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 200.0, -200.0, 88.8, -88.8, 104.5, -104.5])
        gate = torch.cat([gate, torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38])]).to(device)
    else:
        gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    up = torch.full_like(gate, 1.5)
    torch.testing.assert_close(
        ops.silu_mul(gate, up), ops.OPS["silu_mul"].reference(gate, up), rtol=0, atol=0, equal_nan=True
    )


@DTYPES
def test_norm_of_extreme_values(device, dtype):
    """inf, NaN, overflow of the sum in float16, subnormals and zeros give what the reference gives."""
    big = torch.finfo(dtype).max
    rows = [[float("inf"), 1, 2, 3], [float("nan"), 1, 2, 3], [big, big, -big, 1], [0, 0, 0, 0], [1e-7, -1e-7, 0, 0]]
    x = torch.tensor(rows, dtype=dtype, device=device).repeat(1, 16)
    weight = torch.randn(64, device=device, dtype=dtype)
    for args, op in [((x, weight, 1e-6), "rms_norm"), ((x, x, weight, 1e-6), "add_rms_norm")]:
        for a, b in zip(as_tuple(ops.OPS[op](*args)), as_tuple(ops.OPS[op].reference(*args)), strict=True):
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: ops.rms_norm(t(2, 8), t(9), 1e-6), r"weight \[H\].*\[2, 8\] float32.*\[9\] float32"),
        (lambda t: ops.rms_norm(t(2, 8), t(8).bfloat16(), 1e-6), r"one dtype.*float32.*bfloat16"),
        (lambda t: ops.rms_norm(t(2, 8).double(), t(8).double(), 1e-6), r"float32, bfloat16 and float16.*float64"),
        (lambda t: ops.add_rms_norm(t(2, 8), t(1, 8), t(8), 1e-6), r"one shape.*\[2, 8\].*\[1, 8\]"),
        (lambda t: ops.silu_mul(t(2, 8), t(2, 9)), r"one shape.*\[2, 8\].*\[2, 9\]"),
        (lambda t: ops.silu_and_mul(t(2, 7)), r"\[\.\.\., 2I\].*\[2, 7\]"),
        (lambda t: ops.silu_mul(t(2).int(), t(2).int()), r"supports float32.*\[2\]"),
    ],
)
def test_bad_input_is_refused_with_its_shape(device, call, message):
    with pytest.raises(RuntimeError, match=message):
        call(lambda *size: torch.randn(size, device=device))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: (1, 7, 15)}, r"q \[B, T, heads \* D\].*\[1, 7, 15\]"),
        ({1: (1, 6, 128), 2: (1, 6, 128)}, r"k and v \[B, T, kv_heads \* D\].*\[1, 6, 128\]"),
        ({3: (32,)}, r"norms \[64\].*\[32\]"),
        ({6: (24, 32), 7: (24, 32)}, r"cos and sin \[positions, 64\].*\[24, 32\]"),
        ({8: (1,)}, r"first \[1\] int64.*\[1\] float32"),
        ({9: (1, 2, 24, 63), 10: (1, 2, 24, 63)}, r"even head size.*\[1, 2, 24, 63\]"),
    ],
    ids=lambda value: str(min(value)) if isinstance(value, dict) else None,
)
def test_bad_input_of_rope_kv_write_is_refused(changed, message):
    args = list(next(iter(ops.OPS["rope_kv_write"].samples(torch.device("cuda"), torch.float32))))
    for i, shape in changed.items():
        args[i] = torch.randn(shape, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        ops.rope_kv_write(*args)


@pytest.mark.cuda
def test_mixed_devices_are_refused():
    with pytest.raises(RuntimeError, match=r"one device|same device"):
        ops.rms_norm(torch.randn(2, 8, device="cuda"), torch.randn(8), 1e-6)


def test_compiles_without_a_graph_break(device):
    def f(x, residual, weight, gate):
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        return (
            ops.rms_norm(total, weight, 1e-6) + ops.silu_mul(normed, gate) + ops.silu_and_mul(torch.cat([gate, x], -1))
        )

    args = [torch.randn(5, 64, device=device), torch.randn(5, 64, device=device), torch.randn(64, device=device)]
    args.append(torch.randn(5, 64, device=device))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), f(*args), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [3, 20])
def test_int8_linear_compiles_without_a_graph_break(device, rows):
    """Which op it calls depends on the rows and on the kernels that there are."""
    linear = Int8Linear.from_linear(torch.nn.Linear(72, 24, device=device, dtype=torch.bfloat16), "w8a8")
    x = torch.randn(rows, 72, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), linear(x), rtol=0, atol=0)


@pytest.mark.cuda
def test_more_than_two_billion_elements():
    """Offsets beyond 2^31 elements, checked at both ends of the tensor."""
    rows, width = 2**31 // 4096 + 2, 4096
    row = torch.randn(1, width, device="cuda").bfloat16()
    x = row.expand(rows, width).contiguous()
    expected = ops.OPS["silu_mul"].reference(row, row)[0]
    for out, first in [
        (ops.silu_mul(x, x), expected),
        (ops.rms_norm(x, row[0], 1e-6), ops.rms_norm(row, row[0], 1e-6)[0]),
    ]:
        assert torch.equal(out[0], first)
        assert torch.equal(out[-1], first)

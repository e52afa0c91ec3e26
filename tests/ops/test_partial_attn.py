# SPDX-License-Identifier: BSD-3-Clause
"""The parts of context parallelism: attention over some of the keys in float32, its gradients, and
results that are merged into existing ones; and the limit of SMs."""

import json
import math

import pytest
import torch
from conftest import generator, randn, reference

import torch_gpukern as gk
from torch_gpukern import distributed as gd

ops = torch.ops.gpukern
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (heads, lengths, head dims, rules): tiles and tails, several heads per tile, split keys, every
# kernel family
CASES = (
    ((4, 2), (65, 65), (32, 24), dict(is_causal=True)),
    ((2, 2), (300, 300), (128, 128), dict()),
    ((4, 1), (260, 520), (64, 64), dict(is_causal=True, diagonal=260)),
    ((8, 1), (3, 1100), (128, 128), dict()),
    ((2, 1), (130, 257), (96, 40), dict(window_left=70, window_right=9, diagonal=3)),
    ((2, 1), (140, 140), (128, 128), dict(is_causal=True, softcap=5.0)),
    ((2, 2), (140, 100), (192, 128), dict(is_causal=True)),
    ((2, 1), (70, 90), (256, 256), dict()),
)
TINY = CASES[:1] + CASES[4:5]


def tensors(seed, case, dtype, device, tokens_first=False):
    (hq, hkv), (sq, sk), (d, dv), _ = case
    gen = generator("partial", seed)
    shapes = (2, hq, sq, d), (2, hkv, sk, d), (2, hkv, sk, dv), (2, hq, sq, dv)
    x = [randn(gen, *shape, dtype=dtype).to(device) for shape in shapes]
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x] if tokens_first else x


def cases(device):
    """All cases on a GPU; two on a CPU, which has only one kernel."""
    return CASES if device == "cuda" else TINY


def wide(x):
    return x.detach().double().cpu()


def rms(x, want):
    return ((wide(x) - want).square().mean() / want.square().mean()).sqrt().item()


def whole(q, k, v, grad, rules):
    """out, lse, dq, dk, dv of the same inputs in float64."""
    leaves = [wide(x).requires_grad_() for x in (q, k, v)]
    out, lse = reference.flash_attn(*leaves, **rules, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad((out * wide(grad)).sum(), leaves)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_float32_results_of_16_bits_are_not_rounded(dtype, device):
    for seed, case in enumerate(cases(device)):
        q, k, v, grad = tensors(seed, case, dtype, device, tokens_first=seed % 2 == 1)
        rules = case[3]
        want = whole(q, k, v, grad, rules)
        out, lse = ops.flash_attn_fwd(q, k, v, **rules)
        out32, lse32 = ops.flash_attn_fwd(q, k, v, **rules, out_dtype=F32)
        assert out32.dtype == F32 and out32.stride() == out.stride(), case
        assert rms(out32, want[0]) < 0.9 * rms(out, want[0]), case
        torch.testing.assert_close(lse32, lse, atol=2e-6, rtol=2e-6)
        for deterministic in (False, True):
            given = grad, q, k, v, out, lse
            grads = ops.flash_attn_bwd(*given, **rules, deterministic=deterministic)[:3]
            grads32 = ops.flash_attn_bwd(
                *given, **rules, deterministic=deterministic, grad_dtype=F32
            )[:3]
            for name, a, b, ref in zip(("dq", "dk", "dv"), grads32, grads, want[2:], strict=True):
                assert a.dtype == F32 and a.stride() == b.stride(), (case, name)
                assert rms(a, ref) < 0.98 * rms(b, ref), (case, name, rms(a, ref), rms(b, ref))


@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=str)
def test_what_is_not_finite_stays_when_parts_are_merged(dtype, device):
    """NaN and infinities of the keys of either part come out as from attn_merge."""
    gen = generator("partial nan")
    q, k, v = (randn(gen, 1, 2, 70, 32, dtype=dtype).to(device) for _ in range(3))
    parts = slice(0, 40), slice(40, 70)
    like = {"out_dtype": F64 if dtype == F64 else F32}
    for part, bad in ((p, b) for p in (0, 1) for b in (math.nan, math.inf, -math.inf)):
        for name in ("k", "v"):
            mine = {"k": k.clone(), "v": v.clone()}
            mine[name][0, 1, parts[part].start + 5, 3] = bad
            given = [(mine["k"][:, :, s], mine["v"][:, :, s]) for s in parts]
            want = gk.attn_merge(*(x for kv in given for x in ops.flash_attn_fwd(q, *kv, **like)))
            out, lse = ops.flash_attn_fwd(q, *given[0], **like)
            ops.flash_attn_accumulate(q, *given[1], out, lse)
            what = f"{name} of part {part} with {bad}"
            assert not wide(out)[0, 1].isfinite().all() and wide(out)[0, 0].isfinite().all(), what
            for got, ref in zip((out, lse), want, strict=True):
                torch.testing.assert_close(
                    got,
                    ref,
                    atol=2e-6,
                    rtol=2e-5,
                    equal_nan=True,
                    msg=lambda m, w=what: f"{w}: {m}",
                )
    # and beside rows that see no key of the second part
    k[0, 1, 5, 3] = math.nan
    out, lse = ops.flash_attn_fwd(q, k[:, :, :40], v[:, :, :40], **like)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    ops.flash_attn_accumulate(q, k[:, :, 40:], v[:, :, 40:], out, lse, kv_end=none)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan().all()
    assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all()


def test_float32_results_of_packed_calls(device):
    """Packed calls in float32. Tokens of no sequence have out 0 and lse -inf."""
    gen, cu = (
        generator("partial packed"),
        torch.tensor([0, 70, 70, 200], dtype=torch.int32, device=device),
    )
    q, k, v, grad = (randn(gen, 210, h, 64, dtype=BF16).to(device) for h in (4, 2, 2, 4))
    given = q, k, v, cu, cu, 130, 130
    out, lse = ops.flash_attn_varlen_fwd(*given, True)
    out32, lse32 = ops.flash_attn_varlen_fwd(*given, True, out_dtype=F32)
    want, _ = reference.flash_attn_varlen(
        *(wide(x) for x in (q, k, v)), cu.cpu(), cu.cpu(), 130, 130, is_causal=True, return_lse=True
    )
    assert rms(out32, want) < 0.9 * rms(out, want)
    torch.testing.assert_close(lse32, lse, atol=2e-6, rtol=2e-6)
    assert not out32[200:].any() and (lse32[200:] == -torch.inf).all()
    for deterministic in (False, True):
        grads = [
            ops.flash_attn_varlen_bwd(
                grad,
                q,
                k,
                v,
                out,
                lse,
                cu,
                cu,
                130,
                130,
                is_causal=True,
                deterministic=deterministic,
                grad_dtype=dtype,
            )[:3]
            for dtype in (F32, None)
        ]
        for a, b in zip(*grads, strict=True):
            assert a.dtype == F32 and not a[200:].any()
            torch.testing.assert_close(a, b.float(), atol=2e-2, rtol=2e-2)


def test_float32_results_of_rows_that_no_copy_of_16_bytes_takes(device):
    """Strides of 17 elements and dropout use the plain kernels."""
    case = ((2, 1), (20, 33), (8, 8), dict(is_causal=True))
    q, k, v, grad = (
        torch.nn.functional.pad(x, (0, 9))[..., :8] for x in tensors(90, case, BF16, device)
    )
    want = whole(q, k, v, grad, case[3])
    out, lse = ops.flash_attn_fwd(q, k, v, **case[3])
    out32, _ = ops.flash_attn_fwd(q, k, v, **case[3], out_dtype=F32)
    assert rms(out32, want[0]) < 0.9 * rms(out, want[0])
    grads = ops.flash_attn_bwd(grad, q, k, v, out, lse, **case[3], grad_dtype=F32)
    for a, ref in zip(grads[:3], want[2:], strict=True):
        assert rms(a, ref) < 4e-3
    drop = dict(dropout_p=0.25, dropout_seed=torch.tensor([3, 4], device=device))
    kept = ops.flash_attn_fwd(q, k, v, **case[3], **drop)
    wider = ops.flash_attn_fwd(q, k, v, **case[3], **drop, out_dtype=F32)
    torch.testing.assert_close(wider[0].to(BF16), kept[0], atol=1e-2, rtol=1e-2)
    shares = [
        ops.flash_attn_bwd(grad, q, k, v, *kept, **case[3], **drop, grad_dtype=t)[:3]
        for t in (F32, None)
    ]
    for a, b in zip(*shares, strict=True):
        torch.testing.assert_close(a, b.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
@pytest.mark.parametrize(
    "arch, dims, rules, forward, backward",
    (
        (
            "sm_90",
            128,
            dict(is_causal=True),
            "fwd_partial_sm90a_bf16_d128",
            "bwd_partial_sm90a_bf16_d128",
        ),
        ("sm_90", 64, dict(), "fwd_partial_sm90a_bf16_d64", "bwd_partial_sm90a_bf16_d64"),
        (
            "sm_90",
            128,
            dict(softcap=9.0),
            "fwd_sm90a_bf16_d128_score",
            "bwd_partial_sm80_bf16_d128",
        ),
        ("sm_90", 256, dict(), "fwd_sm90a_bf16_d256", "bwd_partial_plain_bf16"),
        ("sm_80", 128, dict(), "fwd_sm80_bf16_d128", "bwd_partial_sm80_bf16_d128"),
        ("sm_89", 64, dict(), "fwd_sm80_bf16_d64", "bwd_partial_sm80_bf16_d128"),
    ),
)
def test_which_kernels_serve(arch, dims, rules, forward, backward):
    q, stats = torch.empty(1, 64, 2048, dims, dtype=BF16), torch.empty(1, 64, 2048)
    found = gk.explain("flash_attn", q, q, q, **rules, out_dtype=F32, arch=arch)
    assert found["instance"] == f"flash_attn_{forward}"
    found = gk.explain("flash_attn_bwd", q, q, q, q, q, stats, **rules, grad_dtype=F32, arch=arch)
    assert found["instance"] == f"flash_attn_{backward}"


# ---- results merged into existing ones -----------------------------------------------------------


def joined(q, k, v, rules, cuts, sinks, strides):
    """Attention over all keys, part by part. Rows that have seen no key contain NaN before."""
    first, *others = rules.pop("diagonal", 0), *cuts
    shape = (*q.shape[:3], v.shape[3])
    dtype = F64 if q.dtype == F64 else F32
    out = torch.full(shape, math.nan, dtype=dtype, device=q.device)
    if strides:  # rows of a larger tensor, as for a shard of the sequence
        out = torch.full(
            (shape[0], shape[2], shape[1], shape[3] + 6), math.nan, dtype=dtype, device=q.device
        )
        out = out.transpose(1, 2)[..., : shape[3]]
    lse = torch.full(shape[:3], -math.inf, dtype=dtype, device=q.device)
    for i, (start, end) in enumerate(zip((0, *others), (*others, k.shape[2]), strict=True)):
        part = k[:, :, start:end], v[:, :, start:end]
        sink = sinks if i == 0 else None
        ops.flash_attn_accumulate(q, *part, out, lse, diagonal=first - start, sinks=sink, **rules)
    return out, lse


@pytest.mark.parametrize("dtype", (BF16, F16, F32, F64), ids=str)
def test_accumulate_joins_the_attention_over_other_keys(dtype, device):
    for seed, case in enumerate(cases(device)):
        q, k, v, _ = tensors(seed, case, dtype, device, tokens_first=seed % 3 == 1)
        sinks = (
            torch.linspace(-2, 2, q.shape[1], device=device, dtype=F64 if dtype == F64 else F32)
            if seed % 2
            else None
        )
        n = k.shape[2]
        want, want_lse = reference.flash_attn(
            *map(wide, (q, k, v)),
            **case[3],
            return_lse=True,
            sinks=None if sinks is None else wide(sinks),
        )
        out, lse = joined(
            q, k, v, dict(case[3]), (n // 3, n // 3, n - 1), sinks, strides=seed % 2 == 0
        )
        bound = {BF16: 4e-3, F16: 6e-4, F32: 2e-6, F64: 1e-12}[dtype]
        assert rms(out, want) < bound, (case, rms(out, want))
        torch.testing.assert_close(wide(lse), want_lse, atol=1e-5, rtol=1e-5)


def test_accumulate_of_nothing_leaves_what_is_held(device):
    q, k, v, _ = tensors(7, CASES[1], BF16, device)
    held, lse = ops.flash_attn_fwd(q, k, v, out_dtype=F32)
    held[:, :, 5], lse[:, :, 5] = math.nan, -math.inf  # these rows see nothing now, either
    out, out_lse = held.clone(), lse.clone()
    empty = torch.zeros(2, dtype=torch.int32, device=device)
    ops.flash_attn_accumulate(q, k, v, out, out_lse, kv_end=empty)
    rest = torch.ones(out.shape[2], dtype=torch.bool, device=device)
    rest[5] = False
    torch.testing.assert_close(out[:, :, rest], held[:, :, rest], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out_lse, lse)
    assert not out[:, :, 5].any()


def test_accumulate_says_what_it_does_not_take():
    q, k, v, _ = tensors(1, TINY[0], BF16, "cpu")
    out, lse = ops.flash_attn_fwd(q, k, v, out_dtype=F32)
    for change, text in (
        (dict(out=out.to(BF16)), "out must be float32 where q is bfloat16, got bfloat16"),
        (dict(out=out[:, :, 1:]), r"out must have shape \[2, 4, 65, 24\], got \[2, 4, 64, 24\]"),
        (dict(lse=lse.double()), "lse must be float32, got float64"),
        (dict(lse=lse[:, :1]), r"lse must have shape \[2, 4, 65\], got \[2, 1, 65\]"),
        (dict(lse=out.flatten()[:520].view(2, 4, 65)), "lse shares memory with out"),
        (dict(softcap=-1.0), "softcap must"),
    ):
        given = dict(q=q, k=k, v=v, out=out, lse=lse) | change
        with pytest.raises(ValueError, match=f"gpukern::flash_attn_accumulate: {text}"):
            ops.flash_attn_accumulate(**given)
    q32 = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="out shares memory with q"):
        ops.flash_attn_accumulate(q32, q32, q32, q32, torch.zeros(1, 1, 4))
    with pytest.raises(NotImplementedError, match="flash_attn_accumulate: it has no backward"):
        ops.flash_attn_accumulate(q.requires_grad_(), k, v, out, lse)
    held, before = out.clone(), out._version
    with torch.no_grad():
        ops.flash_attn_accumulate(q, k, v, out, lse)
    assert out._version > before and not torch.equal(out, torch.zeros_like(held))


def test_accumulate_opcheck(device):
    q, k, v, _ = tensors(2, TINY[0], BF16, device)
    out, lse = ops.flash_attn_fwd(q, k, v, out_dtype=F32)
    torch.library.opcheck(
        ops.flash_attn_accumulate.default, (q, k, v, out, lse), dict(is_causal=True)
    )


# ---- results in given memory ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (BF16, F32, F64), ids=str)
def test_into_writes_rows_of_a_larger_tensor(dtype, device):
    for seed, case in enumerate(cases(device)):
        q, k, v, _ = tensors(seed, case, dtype, device, tokens_first=seed % 3 == 1)
        want, want_lse = ops.flash_attn_fwd(q, k, v, **case[3])
        batch, heads, rows, dim = want.shape
        held = torch.full((batch, heads, rows + 5, dim), math.nan, dtype=dtype, device=device)
        if seed % 2:
            held = held.transpose(1, 2).contiguous().transpose(1, 2)
        lse = torch.full(want_lse.shape, math.nan, dtype=want_lse.dtype, device=device)
        ops.flash_attn_into(q, k, v, held[:, :, 3 : 3 + rows], lse, **case[3])
        assert torch.equal(held[:, :, 3 : 3 + rows], want) and torch.equal(lse, want_lse), case
        assert held[:, :, :3].isnan().all() and held[:, :, 3 + rows :].isnan().all()


@pytest.mark.parametrize("dtype", (BF16, F32, F64), ids=str)
def test_into_and_accumulate_under_a_softcap_that_no_kernel_is_given(dtype, device):
    """If no score comes near the softcap, kernels get another one. The call's other arguments must
    be kept."""
    stats = F64 if dtype == F64 else F32
    q, k, v, _ = tensors(1, CASES[0], dtype, device)
    for rules in (
        dict(softcap=3.0, scale=0.0),
        dict(softcap=1e38),
        dict(softcap=1e-300, scale=0.5),
    ):
        want, want_lse = ops.flash_attn_fwd(q, k, v, **rules)
        out, lse = torch.full_like(want, 7.0), torch.full_like(want_lse, 7.0)
        ops.flash_attn_into(q, k, v, out, lse, **rules)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), rules
        held, held_lse = ops.flash_attn_fwd(q, k[:, :, :20], v[:, :, :20], **rules, out_dtype=stats)
        ops.flash_attn_accumulate(q, k[:, :, 20:], v[:, :, 20:], held, held_lse, **rules)
        wide, _ = ops.flash_attn_fwd(q, k, v, **rules, out_dtype=stats)
        # tiles and pairs round P, beside another maximum in each part
        near = 4e-3 if dtype == BF16 else 2e-5
        torch.testing.assert_close(held, wide, atol=near, rtol=near)
        torch.testing.assert_close(held_lse, want_lse, atol=2e-5, rtol=2e-5)


def test_into_says_what_it_does_not_take(device):
    q, k, v, _ = tensors(1, TINY[0], BF16, device)
    out, lse = ops.flash_attn_fwd(q, k, v)
    for change, text in (
        (dict(out=out.to(F16)), "out_dtype must be bfloat16 .as q. or float32, got float16"),
        (dict(out=out[:, :, 1:]), r"out must have shape \[2, 4, 65, 24\], got \[2, 4, 64, 24\]"),
        (dict(lse=lse.double()), "lse must be float32, got float64"),
        (dict(out=q), "out shares memory with q|out must have shape"),
    ):
        given = dict(q=q, k=k, v=v, out=out, lse=lse) | change
        with pytest.raises(ValueError, match=f"gpukern::flash_attn_into: {text}"):
            ops.flash_attn_into(**given)
    torch.library.opcheck(ops.flash_attn_into.default, (q, k, v, out, lse), dict(is_causal=True))
    with pytest.raises(NotImplementedError, match="flash_attn_into: it has no backward"):
        ops.flash_attn_into(q.requires_grad_(), k, v, out, lse)


# ---- the limit of SMs ----------------------------------------------------------------------------


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
def test_the_limit_of_sms_is_the_planners():
    a = torch.empty(4096, 4096, dtype=BF16)
    q = torch.empty(2, 16, 4096, 128, dtype=BF16)
    calls = dict(
        gemm=lambda: gk.explain("gemm", a, a, arch="sm_90"),
        flash_attn=lambda: gk.explain("flash_attn", q, q, q, arch="sm_90"),
    )
    for name, call in calls.items():
        before = call()
        with gd.sm_limit(66):
            with gd.sm_limit(0):
                assert call() == before
            half = call()
        assert 1.6 * before["waves"] < half["waves"] < 3 * before["waves"], (
            name
        )  # leaving the inner limit restores the outer one
        assert call() == before
    with pytest.raises(ValueError, match="sms must be 0"), gd.sm_limit(-1):
        pass


@pytest.mark.gpu
def test_the_limit_of_sms_is_the_grids(tmp_path):
    """The profiler's number of launched blocks follows the limit, and results differ only by how k
    and keys are split."""
    gen = generator("limit")
    a, b = (randn(gen, 2048, 2048, dtype=BF16).cuda() for _ in range(2))
    q = randn(gen, 1, 16, 2048, 128, dtype=BF16).cuda()
    calls = lambda: (gk.gemm(a, b), gk.flash_attn(q, q, q, is_causal=True))  # noqa: E731
    want = calls()
    with gd.sm_limit(40):
        calls()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            got = calls()
            torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    grids = {e["name"]: math.prod(e["args"]["grid"]) for e in events if "grid" in e.get("args", {})}
    assert len(grids) >= 2 and all(blocks <= 40 for blocks in grids.values()), grids
    exact = (
        a.double() @ b.double(),
        reference.flash_attn(*(x.double() for x in (q, q, q)), is_causal=True),
    )
    for x, y, ref in zip(got, want, exact, strict=True):
        assert rms(x, wide(ref)) < 1.1 * rms(y, wide(ref))

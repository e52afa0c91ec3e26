# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn and flash_attn_varlen of float8_e4m3fn q, k, v: every form against float64 over the
same codes. Data with a mean, values of one sign, a scale for each 128 tokens, heads of zeros, NaN;
quantize_attn; compilers; refused calls.
"""

import math

import pytest
import torch
from conftest import generator, ops, reference, torch_gpukern

E4M3, BF16, F16, F32, F64 = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
gk = torch_gpukern

# The relative error allowed beside the rounding of the result. It comes from P in 16 bits ("cuda"),
# or in 8 bits in Hopper's kernel ("fp8").
ERROR = {"cpu": 1e-5, "cuda": 2e-3, "fp8": 4e-2}


def tokens(gen, device, *shape, mean=0.0, std=1.0):
    return (torch.randn(*shape, generator=gen) * std + mean).to(device)


def made(
    key,
    device,
    batch=2,
    heads=(4, 2),
    lengths=(200, 333),
    dims=(64, 64),
    mean=(0.3, -0.2, 1.0),
    **how,
):
    """quantize_attn applied to normal q, k, v with a mean."""
    gen = generator("fp8", key)
    shapes = (
        (heads[0], lengths[0], dims[0]),
        (heads[1], lengths[1], dims[0]),
        (heads[1], lengths[1], dims[1]),
    )
    return gk.quantize_attn(
        *(tokens(gen, device, batch, *s, mean=m) for s, m in zip(shapes, mean, strict=True)), **how
    )


def of_reference(x, name="flash_attn", extra=(), on="cpu", **how):
    """The float64 reference over the codes, computed on the device `on` and returned on the CPU."""
    there = {n: t.to(on) if isinstance(t, torch.Tensor) else t for n, t in (x | how).items()}
    args = [there.pop(n) for n in ("q", "k", "v")] + [
        e.to(on) if isinstance(e, torch.Tensor) else e for e in extra
    ]
    if there.get("sinks") is not None:
        there["sinks"] = there["sinks"].double()
    results = getattr(reference, name)(*args, **there | dict(out_dtype=F64, return_lse=True))
    return [t.cpu() for t in results]


def relative(got, want):
    return ((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-30)).item()


def tolerance(row, device, out_dtype=F32):
    kind = "cpu" if device == "cpu" else "fp8" if "sm90a" in row else "cuda"
    return ERROR[kind] + {BF16: 2e-3, F16: 3e-4, F32: 0}[out_dtype]


def check(x, device, name="flash_attn", extra=(), out_dtype=F32, reference_on="cpu", **how):
    x = x._asdict() if hasattr(x, "_asdict") else x
    call = getattr(gk, name)
    out, lse = call(
        x["q"],
        x["k"],
        x["v"],
        *extra,
        **{n: t for n, t in x.items() if n not in "qkv"},
        out_dtype=out_dtype,
        return_lse=True,
        **how,
    )
    want, want_lse = of_reference(
        x, name, extra, reference_on, **{n: y for n, y in how.items() if n != "accumulate"}
    )
    row = gk.explain(
        name, x["q"], x["k"], x["v"], *extra, **{n: t for n, t in x.items() if n not in "qkv"} | how
    )["instance"]
    assert out.dtype is out_dtype and lse.dtype is F32 and out.shape == want.shape
    assert relative(out, want) < tolerance(row, device, out_dtype), row
    empty = want_lse == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, empty) and not out.cpu()[empty].any()
    # on CUDA q times its scale is rounded to float16 in long calls: by 2^-11 of scores
    bound = 1e-3 + (0 if device == "cpu" else 1e-3) * want_lse[~empty].abs()
    assert ((lse.cpu().double() - want_lse)[~empty].abs() <= bound).all()
    return out


FORMS = {
    "full": dict(),
    "causal": dict(is_causal=True, diagonal=133),
    "causal from the first": dict(is_causal=True),
    "window": dict(window_left=40, window_right=3, diagonal=100),
    "left of the keys": dict(is_causal=True, diagonal=-50),
    "softcap": dict(softcap=3.0, is_causal=True, diagonal=133),
    "scale": dict(scale=-0.05),
}


@pytest.mark.parametrize("accumulate", ("fast", "precise"))
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, accumulate, device):
    for dims in ((64, 64), (128, 128), (256, 256)):
        x = made(form, device, dims=dims, batch=1 if device == "cpu" else 2)
        check(x, device, accumulate=accumulate, **FORMS[form])


def test_modifiers(device):
    gen = generator("fp8 modifiers")
    slopes = torch.rand(2, 4, generator=gen).to(device)
    sinks = torch.tensor([0.5, -math.inf, 3.0, -2.0], device=device)
    starts, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((5, 0), (300, 77)))
    x = made("modifiers", device, dims=(64, 72), per="block")
    check(x, device, alibi_slopes=slopes, sinks=sinks, kv_start=starts, kv_end=ends)
    check(x, device, sinks=sinks.to(BF16), q_start=ends, is_causal=True, out_dtype=BF16)
    # the sink takes all: v_mean too is 0
    check(x, device, sinks=sinks, kv_end=torch.zeros_like(ends), out_dtype=F16)


@pytest.mark.parametrize("per", ("tensor", "head", "block"))
def test_scales(per, device):
    """Scales of blocks that differ by 2^12, with heads of zeros; and each shape that a scale may
    have."""
    gen = generator("fp8 scales", per)
    q, k, v = (
        tokens(gen, device, 2, h, n, d) for h, n, d in ((4, 150, 64), (2, 400, 64), (2, 400, 80))
    )
    steps = torch.exp2(torch.randint(-6, 7, (2, 2, 4, 1, 1), generator=gen).float()).to(device)
    v *= steps.repeat(1, 1, 1, 128, 1).flatten(2, 3)[:, :, :400]
    k *= steps.flip(2).clamp(0.1, 4).repeat(1, 1, 1, 128, 1).flatten(2, 3)[:, :, :400]
    q[0, 1], k[1, 0], v[0, 1] = 0, 0, 0
    for center in (True, False):
        x = gk.quantize_attn(q, k, v, per=per, center_v=center)
        assert (x.v_mean is None) is not center
        check(x, device)
        check(x, device, is_causal=True, diagonal=250, out_dtype=BF16)
    if per == "head":
        y = x._asdict()
        check(
            y | dict(q_scale=y["q_scale"][0], k_scale=y["k_scale"][0, :1].reshape(1), v_scale=None),
            device,
        )
        mean = torch.randn(2, 80, generator=gen).to(device)
        check(y | dict(v_mean=mean, v_scale=y["v_scale"].t().contiguous().t()), device)


LONG = {
    "full": dict(),
    "causal": dict(is_causal=True, diagonal=340),
    "window": dict(window_left=200, window_right=0, diagonal=300, softcap=5.0),
    "sinks": dict(sinks=True, is_causal=True, diagonal=-60),
}


@pytest.mark.parametrize("form", LONG)
def test_more_keys(form, device):
    """Calls for the kernels for long sequences: scales of blocks, groups of heads, different
    head_dims, results of each dtype."""
    how = dict(LONG[form])
    if "sinks" in how:
        how["sinks"] = torch.tensor([0.5, -math.inf, 6.0, -2.0], device=device)
    for dims, out_dtype in (
        ((64, 64), F32),
        ((128, 128), BF16),
        ((128, 72), F16),
        ((256, 256), BF16),
    ):
        for per in ("head", "block"):
            x = made(f"long {form} {dims}", device, batch=1, lengths=(260, 600), dims=dims, per=per)
            check(x, device, out_dtype=out_dtype, **how)
    zero = x._asdict() | {n: torch.zeros_like(getattr(x, n)) for n in ("v", "v_mean")}
    assert not gk.flash_attn(**zero).any()


def test_any_head_dim_stride_and_place(device):
    dims = ((8, 16), (40, 8), (136, 200), (64, 256)) + (
        ((3, 5), (33, 1)) if device == "cpu" else ()
    )
    for d, dv in dims:
        x = made(f"{d} {dv}", device, batch=1, lengths=(35, 70), dims=(d, dv))._asdict()
        check(x, device)
        for n in "qkv":  # rows that begin at any byte; stored [B, S, H, D]
            whole = torch.full((x[n].numel() + 3,), 0x7F, dtype=torch.uint8, device=device)
            whole[3:] = x[n].view(torch.uint8).transpose(1, 2).flatten()
            b, h, s, e = x[n].shape
            x[n] = whole[3:].view(b, s, h, e).view(E4M3).transpose(1, 2)
        out = check(x, device)
        assert out.stride(1) < out.stride(2)
        wide = x | {
            n: torch.stack([x[n].view(torch.uint8)] * 2, -1).view(E4M3)[..., 0] for n in "kv"
        }
        check(wide, device)  # the last dimension is not dense


@pytest.mark.parametrize("accumulate", ("auto", "precise"))
@pytest.mark.parametrize("form", ("mean", "one sign"))
def test_values_that_add_up(form, accumulate, device):
    """Thousands of keys whose values have a mean or one sign: with v_mean, and with
    accumulate="precise" without it."""
    n = 2000 if device == "cpu" else 30000
    gen = generator("fp8 long", form)
    for d in (64,) if device == "cpu" else (64, 128, 256):
        values_that_add_up(form, accumulate, device, gen, n, d)


def values_that_add_up(form, accumulate, device, gen, n, d):
    q, k = (tokens(gen, device, 1, 1, s, d) for s in (32, n))
    v = (
        tokens(gen, device, 1, 1, n, d, mean=1.0)
        if form == "mean"
        else tokens(gen, device, 1, 1, n, d).abs()
    )
    want = reference.flash_attn(q.cpu().double(), k.cpu().double(), v.cpu().double())
    for center in (True, False):
        x = gk.quantize_attn(q, k, v, center_v=center)._asdict()
        check(x, device, accumulate=accumulate)
        out = gk.flash_attn(**x, accumulate=accumulate, out_dtype=F32)
        assert relative(out, want) < 1e-2


def test_nan(device):
    """A NaN code or scale of q, k or v shows in exactly the rows that see it. Keys that no query
    sees may contain NaN."""
    x = {
        n: t.clone() if t is not None else None
        for n, t in made("nan", device, batch=1, heads=(2, 2))._asdict().items()
    }
    clean = gk.flash_attn(**x, is_causal=True)
    for n, rows in (("q", [150]), ("k", range(150, 200)), ("v", range(150, 200))):
        y = x | {n: x[n].clone()}
        y[n].view(torch.uint8)[0, 1, 150, 3] = 0x7F if n != "k" else 0xFF
        out = gk.flash_attn(**y, is_causal=True)
        seen = out[0, 1].isnan().any(-1).nonzero().flatten().tolist()
        assert [r for r in seen if r >= 150] == [*rows]
        assert torch.equal(out[0, 0], clean[0, 0]) and not out[0, 1, :128].isnan().any()
    for n in "kv":
        y = x | {n: x[n].clone()}
        y[n].view(torch.uint8)[:, :, 200:] = 0x7F
        assert torch.equal(gk.flash_attn(**y, is_causal=True), clean)
    y = x | dict(v_scale=torch.tensor([[1.0, math.nan]], device=device))
    out = gk.flash_attn(**y)
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()


def test_varlen(device):
    """Empty sequences, tokens of no sequence, a scale for each block of a sequence; results have
    the bits of a dense call."""
    cu_q, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ((0, 40, 40, 190, 191), (0, 130, 200, 467, 467))
    )
    extra = (cu_q, cu_k, 150, 267)
    gen = generator("fp8 varlen")
    for d in (64, 128) if device == "cpu" else (64, 128, 192, 256):
        q, k, v = (
            tokens(gen, device, n, h, d, mean=0.5) for n, h in ((200, 4), (480, 2), (480, 2))
        )
        for how in (dict(), dict(is_causal=True), dict(window_left=30, window_right=0)):
            x = gk.quantize_attn(q, k, v)._asdict()
            assert x["q_scale"].shape == (4,) and x["v_mean"].shape == (2, d)
            out = check(x, device, "flash_attn_varlen", extra, **how)
            assert not out[191:].any()
        long = torch.tensor((0, 700, 1330), dtype=torch.int32, device=device)
        for how in (dict(), dict(is_causal=True, out_dtype=BF16)):
            more = gk.quantize_attn(*(tokens(gen, device, 1400, h, d, mean=0.5) for h in (4, 2, 2)))
            out = check(more, device, "flash_attn_varlen", (long, long, 700, 700), **how)
            assert not out[1330:].any()
        block = {
            f"{n}_scale": torch.rand(4, h, m, generator=gen).to(device) / 64
            for n, h, m in (("q", 4, 2), ("k", 2, 3), ("v", 2, 3))
        }
        check(
            x | block | dict(v_mean=torch.randn(4, 2, d, generator=gen).to(device)),
            device,
            "flash_attn_varlen",
            extra,
            is_causal=True,
            alibi_slopes=torch.rand(4, generator=gen).to(device),
            sinks=torch.randn(4, generator=gen).to(device),
        )


@pytest.mark.gpu
def test_blocks_of_many_tiles():
    """More tiles than SMs, so that a block has several, with and without masks; and few tiles,
    whose keys are split. On one core of the host the reference would take minutes."""
    tiles = (
        ((128, 128), (700, 700)),
        ((64, 56), (700, 515)),
        ((112, 128), (400, 1300)),
        ((192, 160), (700, 515)),
    )
    for dims, lengths in (
        *tiles,
        ((256, 256), (700, 700)),
        ((200, 256), (400, 1300)),
        ((32, 256), (130, 130)),
    ):
        for how in (dict(), dict(is_causal=True, diagonal=lengths[1] - lengths[0], out_dtype=BF16)):
            x = made(
                f"tiles {dims}",
                "cuda",
                batch=3,
                heads=(16, 8),
                lengths=lengths,
                dims=dims,
                mean=(0, 0, 2),
            )
            check(x, "cuda", accumulate="fast", reference_on="cuda", **how)
    sinks = torch.tensor([0.5, -math.inf], device="cuda")
    for dims in ((64, 64), (128, 128), (192, 192), (256, 256)):
        for per in ("head", "block"):
            x = made(
                "splits", "cuda", batch=1, heads=(2, 2), lengths=(150, 9000), dims=dims, per=per
            )
            rules = dict(sinks=sinks, is_causal=True, diagonal=8850)
            check(x, "cuda", accumulate="fast", reference_on="cuda", **rules)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (128, 192, 256))
@pytest.mark.parametrize("per", ("head", "block"))
def test_scores_that_grow(per, head_dim):
    """Growing keys, so that a row's reference maximum is exceeded in one or every block of keys;
    and a scale that is 0 or negative."""
    gen = generator("fp8 grow", per, head_dim)
    for steps in ((1, 1, 1, 6, 1, 1, 20), range(1, 8), (1, 300, 1, 1, 1, 1, 2)):
        q, k, v = (tokens(gen, "cuda", 1, 2, n, head_dim) for n in (200, 896, 896))
        k *= torch.tensor(steps, device="cuda").float().repeat_interleave(128)[:, None]
        x = gk.quantize_attn(q, k, v, per=per)._asdict()
        check(x, "cuda", accumulate="fast")
        check(x, "cuda", accumulate="fast", is_causal=True, diagonal=696)
        check(
            x | dict(q_scale=-x["q_scale"]), "cuda", accumulate="fast", is_causal=True, diagonal=696
        )
        check(
            x | dict(k_scale=torch.zeros_like(x["k_scale"])),
            "cuda",
            accumulate="fast",
            is_causal=True,
        )


def test_rows_of_the_table():
    """The instances that Hopper would run. Its FP8 kernels serve fast sums. Other kernels serve
    precise sums, softcap and scales of blocks that do not fit the tiles."""
    if not gk._ops.cuda_kernels.default():
        pytest.skip("the library is built without CUDA kernels")

    def row(dims=(128, 128), accumulate="auto", per=2, batch=2, heads=4, length=600, **how):
        q, k, v = (t(batch, heads, length, d) for d in (*dims[:1], *dims))
        scales = {
            f"{n}_scale": t(batch, heads, -(-length // 128), dtype=F32)[
                ..., 0 if per == 2 else slice(None)
            ]
            for n in "qkv"
        }
        how |= scales | dict(v_mean=t(heads, dims[1], dtype=F32), accumulate=accumulate)
        return gk.explain("flash_attn", q, k, v, arch="sm_90", **how)["instance"].removeprefix(
            "flash_attn_fp8_"
        )

    # the choice depends on what fills 132 SMs
    assert row() == "sm90a_d128" and row(batch=8, heads=16, length=1536) == "sm90a_d128_wide"
    assert row((64, 64)) == "sm90a_d64" and row((48, 64), per=3, length=576) == "sm90a_d64_block"
    # 768 rows in tiles of 192, and no scale behind row 640
    assert row((64, 64), per=3) == "sm90a_d128_block"
    assert row(per=3) == row((128, 64), per=3, is_causal=True, window_right=5) == "sm90a_d128_block"
    assert row((192, 128)) == "sm90a_d192" and row((256, 256)) == row((64, 208)) == "sm90a_d256"
    assert row((256, 256), per=3) == row((192, 192), per=3) == "sm90a_d256_block"
    for other in (
        row(accumulate="precise"),
        row((256, 256), accumulate="precise"),
        row((256, 256), softcap=2.0),
        row(softcap=2.0),
        row(per=3, window_left=50),
    ):
        assert other == "decoded"
    assert row(accumulate="precise", length=100) == "sm80_d128"


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_passes_over_more_tiles_than_a_grid_holds_are_not_planned(arch):
    """2^31 tiles of 128 rows from a million packed sequences. A grid of that many blocks cannot be
    launched, and a count of 2^32 would wrap to 0, so no kernel takes such calls."""
    if not gk._ops.cuda_kernels.default():
        pytest.skip("the library is built without CUDA kernels")
    q, kv = t(1024, 256, 16), t(1024, 1, 16)
    starts = torch.zeros((1 << 20) + 1, dtype=torch.int32)

    def row(batch, accumulate="precise"):
        ends = starts[: batch + 1]
        how = dict(accumulate=accumulate, arch=arch)
        return gk.explain("flash_attn_varlen", q, kv, kv, ends, ends, 1024, 1024, **how)["instance"]

    assert row(1 << 10) == "flash_attn_fp8_decoded"
    with pytest.raises(ValueError, match="no kernel for float8_e4m3fn on .* use smaller ones"):
        row(1 << 20)


@pytest.mark.parametrize("per", ("tensor", "head", "block"))
def test_quantize_attn(per, device):
    """quantize_attn gives the codes and scales of the reference. A rotation does not change
    scores."""
    gen = generator("quantize_attn", per)
    q, k, v = (
        tokens(gen, device, 2, h, n, d, mean=0.5)
        for h, n, d in ((4, 129, 48), (2, 260, 48), (2, 260, 32))
    )
    q[0, 0] = 0
    for center in (True, False):
        got = gk.quantize_attn(q, k, v, per=per, center_v=center)
        want = reference.quantize_attn(q.cpu(), k.cpu(), v.cpu(), per=per, center_v=center)
        for name, x, y in zip(got._fields, got, want, strict=True):
            if y is None:
                assert x is None
                continue
            assert x.shape == y.shape and x.dtype is y.dtype and x.is_contiguous()
            differ = (x.cpu().float() != y.float()).float().mean()
            assert torch.allclose(
                x.cpu().float(), y.float(), rtol=1e-6 if y.dtype is F32 else 0.13, atol=2e-2
            ), name
            # a mean may differ in its last bit
            assert differ < (1 if y.dtype is F32 else 2e-3), name
    plain, rotated = (gk.quantize_attn(q, k, v, per=per, hadamard=h) for h in (False, True))
    scores = [reference.flash_attn(*(t.cpu().double() for t in (q, k, v)), return_lse=True)[1]]
    for x in (plain, rotated):
        scores.append(gk.flash_attn(**x._asdict(), return_lse=True)[1].cpu().double())
    assert (scores[1] - scores[0]).abs().max() < 0.2 and (scores[2] - scores[0]).abs().max() < 0.2
    assert (rotated.q.float() != plain.q.float()).any()


def test_a_rotation_spreads_outliers(device):
    """One in a thousand elements of q and k is ten times as large; the rotation reduces their
    effect."""
    gen = generator("fp8 outliers")
    q, k, v = (tokens(gen, device, 1, 2, 512, 64) for _ in range(3))
    for x in (q, k):
        x += tokens(gen, device, *x.shape, std=10) * (torch.rand(x.shape, generator=gen) < 1e-3).to(
            device
        )
    want = reference.flash_attn(*(t.cpu().double() for t in (q, k, v)))
    error = [
        relative(
            gk.flash_attn(**gk.quantize_attn(q, k, v, hadamard=h)._asdict(), out_dtype=F32), want
        )
        for h in (False, True)
    ]
    assert error[1] < 0.9 * error[0]


def step(q, k, v, accumulate):
    x = gk.quantize_attn(q, k, v, hadamard=True)
    return gk.flash_attn(**x._asdict(), is_causal=True, accumulate=accumulate, return_lse=True)


def test_compile(device):
    """quantize_attn and attention compile into one graph, also with symbolic sizes. Autocast
    changes nothing. Fake results have the right form."""
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 57):
        q, k, v = (tokens(generator("fp8 compile", n, h), device, 2, h, n, 32) for h in (4, 2, 2))
        want = step(q, k, v, "auto")
        for x, y in zip(compiled(q, k, v, "auto"), want, strict=True):
            assert (
                x.dtype is y.dtype
                and x.stride() == y.stride()
                and torch.allclose(x.float(), y.float(), atol=2e-2)
            )
    x = gk.quantize_attn(q, k, v)._asdict()
    with torch.autocast(device, BF16):
        assert torch.equal(gk.flash_attn(**x), gk.flash_attn(**x))
        assert gk.flash_attn(**x, out_dtype=F16).dtype is F16
    assert torch.equal(
        gk.flash_attn(**x), torch.compile(gk.flash_attn, fullgraph=True, backend="aot_eager")(**x)
    )


def opcheck(op, call):
    """opcheck without test_schema, which multiplies inputs by numbers; torch cannot do that for
    float8_e4m3fn."""
    torch.library.opcheck(
        op,
        (),
        call,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_opcheck(device):
    x = made("opcheck", device, batch=1, lengths=(9, 12), dims=(16, 8))._asdict()
    opcheck(ops.flash_attn_fp8.default, x)
    opcheck(ops.flash_attn_fp8_fwd.default, x | dict(out_dtype=F32, is_causal=True))
    cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (9, 12)]
    packed = gk.quantize_attn(*(x[n].float()[0].transpose(0, 1) for n in "qkv"))._asdict()
    packed |= dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=9, max_seqlen_k=12)
    opcheck(ops.flash_attn_varlen_fp8.default, packed)


def test_flops(device):
    x = made("flops", device, batch=1, lengths=(9, 12), dims=(16, 8))._asdict()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        gk.flash_attn(**x)
    assert counter.get_total_flops() == 2 * 4 * 9 * 12 * (16 + 8)


def test_no_gradient(device):
    x = made("gradient", device, batch=1, lengths=(9, 12), dims=(16, 8))._asdict()
    x["v_mean"].requires_grad_()
    with pytest.raises(
        NotImplementedError,
        match="gpukern::flash_attn: it has no backward where q, k and v are float8_e4m3fn",
    ):
        gk.flash_attn(**x, out_dtype=F32).sum().backward()
    q, k, v = (torch.randn(1, 2, 4, 8, device=device, requires_grad=True) for _ in range(3))
    with pytest.raises(
        NotImplementedError, match="gpukern::(quantize|flash_attn): it has no backward"
    ):
        gk.flash_attn(**gk.quantize_attn(q, k, v)._asdict()).sum().backward()


def t(*shape, dtype=E4M3):
    return torch.zeros(shape, dtype=dtype)


GOOD = dict(q=(1, 4, 5, 8), k=(1, 2, 6, 8), v=(1, 2, 6, 16))
REFUSED = (
    (
        dict(k=t(1, 2, 6, 8, dtype=BF16)),
        "k has dtype bfloat16, q has float8_e4m3fn; they must match",
    ),
    (
        dict(q_scale=t(3, dtype=F32)),
        "q_scale must have shape [], [4], [1, 4] or [1, 4, 1], got [3]",
    ),
    (
        dict(k_scale=t(1, 2, 2, dtype=F32)),
        "k_scale must have shape [], [2], [1, 2] or [1, 2, 1], got [1, 2, 2]",
    ),
    (dict(v_scale=t(2, dtype=BF16)), "v_scale must be float32, got bfloat16"),
    (dict(v_mean=t(16, dtype=F32)), "v_mean must have shape [2, 16] or [1, 2, 16], got [16]"),
    (
        dict(v_mean=t(2, 2, 16, dtype=F32)),
        "v_mean must have shape [2, 16] or [1, 2, 16], got [2, 2, 16]",
    ),
    (dict(accumulate="slow"), "accumulate must be auto, fast or precise, got 'slow'"),
    (
        dict(out_dtype=F64),
        "out_dtype must be bfloat16, float16 or float32 where q is float8_e4m3fn, got float64",
    ),
    (dict(sinks=t(4)), "sinks must be float32 or bfloat16, got float8_e4m3fn"),
    (dict(scale=math.nan), "scale must be finite, got nan"),
)


@pytest.mark.parametrize("change,text", REFUSED)
def test_refused(change, text):
    call = {n: t(*s) for n, s in GOOD.items()} | change
    with pytest.raises(ValueError) as error:
        gk.flash_attn(**call)
    assert str(error.value) == f"gpukern::flash_attn: {text}"


def test_scales_go_with_codes():
    x = {n: t(*s, dtype=F32) for n, s in GOOD.items()}
    for n in ("q_scale", "k_scale", "v_scale", "v_mean"):
        with pytest.raises(
            ValueError, match=f"gpukern::flash_attn: {n} goes with a float8_e4m3fn q, got float32"
        ):
            gk.flash_attn(**x, **{n: t(dtype=F32)})
    with pytest.raises(ValueError, match="accumulate must be auto, fast or precise, got 'slow'"):
        gk.flash_attn(**x, accumulate="slow")
    for change, text in (
        (dict(per="row"), "per must be tensor, head or block, got 'row'"),
        (dict(v=t(2, 6, 16, dtype=F32)), "v must have 4 dimensions, as q, got 3"),
    ):
        with pytest.raises(ValueError, match=text):
            gk.quantize_attn(**x | change)


def test_explain_says_how_sums_are_kept():
    x = made("explain", "cpu", lengths=(9, 12))._asdict()
    assert gk.explain("flash_attn", **x)["accumulate"] == "fast"
    assert gk.explain("flash_attn", **x | dict(v_mean=None))["accumulate"] == "precise"
    assert gk.explain("flash_attn", **x, accumulate="precise")["accumulate"] == "precise"


def test_quantize_attn_refuses_shapes_that_do_not_fit():
    x = torch.zeros
    for q, k, v, text in [
        (x(1, 4, 5, 8), x(1, 2, 5, 8), x(1, 2, 6, 8), "v must have the tokens and heads of k"),
        (x(1, 4, 5, 8), x(1, 2, 5, 8), x(1, 4, 5, 8), "v must have the tokens and heads of k"),
        (x(5, 4, 8), x(5, 2, 8), x(6, 2, 8), "v must have the tokens and heads of k"),
        (x(1, 4, 5, 8), x(2, 2, 5, 8), x(2, 2, 5, 8), "k has batch 2, q has 1"),
        (
            x(1, 3, 5, 8),
            x(1, 2, 5, 8),
            x(1, 2, 5, 8),
            "q must have a multiple of k's 2 heads, got 3",
        ),
    ]:
        with pytest.raises(ValueError, match=f"gpukern::quantize_attn: {text}"):
            torch_gpukern.quantize_attn(q, k, v)


@pytest.mark.parametrize(
    "q_code, k_code, scales", [(0, 0, 1e30), (0, 1, 1e30), (2**-9, 2**-9, 1e20)]
)
def test_scales_whose_product_is_infinite(q_code, k_code, scales, device):
    """Scales meet codes, never each other: zeros stay zeros, and 2^-9 x 1e20 is a finite number."""
    q, k, v = (
        torch.full((1, 1, 4, 16), float(x), device=device).to(E4M3) for x in (q_code, k_code, 1)
    )
    s = torch.tensor(scales, device=device)
    out, lse = gk.flash_attn(q, k, v, q_scale=s, k_scale=s, return_lse=True, accumulate="precise")
    want = 16**0.5 * (q_code * scales) * (k_code * scales) + math.log(4)
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, want))


@pytest.mark.parametrize("q_scale, k_scale", [(1e37, 1e-37), (1e-37, 1e37)])
def test_codes_times_scales_beyond_float32(q_scale, k_scale, device):
    """448 x 1e37 overflows float32, but the score and the result do not."""
    q, k, v = (torch.full((1, 2, 4, 16), 448.0, device=device).to(E4M3) for _ in range(3))
    k[:, :, 1:] = 0
    v[:, :, :, ::2] = 2**-9
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (q_scale, k_scale, 1e36), strict=True))
    scales = {n: torch.tensor([1.0, x], device=device) for n, x in scales.items()}
    out, lse = gk.flash_attn(
        q, k, v, **scales, scale=2**-21, return_lse=True, out_dtype=F32, accumulate="precise"
    )
    score = 2**-21 * 448.0**2 * 16
    for head in range(2):
        scale = (1.0, q_scale * k_scale)[head]
        want = math.log(math.exp(score * scale) + 3)
        assert lse[0, head].sub(want).abs().max() < 1e-5
    want = v.double() * scales["v_scale"].double()[:, None, None]
    small = out.double()[..., ::2] / want[..., ::2]
    assert small.sub(1).abs().max() < (1e-6 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("accumulate", ("fast", "precise"))
@pytest.mark.parametrize("tokens", (4, 300))
@pytest.mark.parametrize("per", ("tensor", "block"))
def test_large_scales_of_zeros(per, tokens, accumulate, device):
    """All codes are 0, and the product of the scales is infinite: every key has the same weight."""
    q, k = (torch.zeros(1, 2, tokens, 64, device=device).to(E4M3) for _ in range(2))
    v = torch.randn(1, 2, tokens, 64, generator=generator("zeros")).to(device).to(E4M3)
    shape = () if per == "tensor" else (1, 2, -(-tokens // 128))
    scale = torch.full(shape, 1e30, device=device)
    out, lse = gk.flash_attn(
        q,
        k,
        v,
        q_scale=scale,
        k_scale=scale,
        return_lse=True,
        out_dtype=F32,
        accumulate=accumulate,
    )
    assert lse.sub(math.log(tokens)).abs().max() < 1e-5
    want = v.double().mean(-2, keepdim=True).expand_as(out)
    assert out.double().sub(want).abs().max() < (1e-5 if device == "cpu" else 2e-2)


def test_scores_that_float16_does_not_hold(device):
    """q times both scales reaches 448 x 1000, beyond float16's 65504: one key has all weight."""
    q = torch.full((1, 1, 200, 64), 448.0, device=device).to(E4M3)
    k = torch.zeros(1, 1, 200, 64, device=device)
    k[:, :, 7] = 1
    v = torch.randn(1, 1, 200, 64, generator=generator("far")).to(device).to(E4M3)
    out = gk.flash_attn(
        q,
        k.to(E4M3),
        v,
        q_scale=torch.tensor(1000.0, device=device),
        accumulate="precise",
        out_dtype=F32,
    )
    assert torch.equal(out, v[:, :, 7:8].float().expand_as(out))

# SPDX-License-Identifier: BSD-3-Clause
"""The bits of a sequence or row must not depend on the others of the call (docs/numerics.md)."""

import random

import pytest
import torch
from conftest import generator, randn

import torch_gpukern as gk
from torch_gpukern.ops import switches

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def batch_of(gen, lengths, tokens, heads, head_dim, page, dtype, code, device):
    """q, caches, block table and lengths of sequences whose pages are consecutive."""
    heads_q, heads_kv = heads
    blocks = [-(-n // page) for n in lengths]
    caches = [
        randn(gen, sum(blocks), page, heads_kv, head_dim, dtype=torch.float32, device=device)
        .mul(4 if code == torch.int8 else 1)
        .to(code or dtype)
        for _ in range(2)
    ]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    pages = torch.arange(sum(blocks), dtype=torch.int32, device=device)
    for row, own in zip(table, pages.split(blocks)):
        row[: len(own)] = own
    q = randn(gen, len(lengths) * tokens, heads_q, head_dim, dtype=dtype, device=device)
    return q, *caches, table, torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", (1, 3, 20))
def test_paged_attn(tokens, dtype, device):
    draw = random.Random(f"{tokens} {dtype}")
    gen = generator("batch invariant", tokens, dtype)
    for code in (None, torch.float8_e4m3fn) if dtype != torch.float64 else (None,):
        lengths = [draw.randint(tokens, draw.choice((60, 400, 2500))) for _ in range(7)]
        heads, head_dim = draw.choice((((8, 2), 64), ((4, 1), 128), ((3, 3), 32)))
        page = draw.choice((16, 64))
        q, k_cache, v_cache, table, lens = batch_of(
            gen, lengths, tokens, heads, head_dim, page, dtype, code, device
        )
        with gk.batch_invariant():
            out, lse = gk.paged_attn(q, k_cache, v_cache, table, lens, return_lse=True)
        for b, n in enumerate(lengths):
            its = slice(b * tokens, (b + 1) * tokens)
            alone, alone_lse = gk.paged_attn(
                q[its],
                k_cache,
                v_cache,
                table[b : b + 1, : -(-n // page)],
                lens[b : b + 1],
                batch_invariant=True,
                return_lse=True,
            )
            assert torch.equal(alone, out[its])
            assert torch.equal(alone_lse, lse[its])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_paged_attn_beside_longer_ones(dtype):
    """On the CPU a sequence with few tokens beside one with many, and the same alone."""
    gen = generator("beside longer ones", dtype)
    for heads, tokens in (((8, 2), 2), ((8, 2), 3), ((16, 2), 7), ((2, 2), 5)):
        q, *caches, table, lens = batch_of(gen, [70, 200], 40, heads, 80, 16, dtype, None, "cpu")
        q, starts = q[: tokens + 40], torch.tensor([0, tokens, tokens + 40], dtype=torch.int32)
        how = {"cu_seqlens_q": starts, "max_seqlen_q": 40, "batch_invariant": True}
        out = gk.paged_attn(q, *caches, table, lens, **how)
        alone = gk.paged_attn(q[:tokens], *caches, table[:1], lens[:1], batch_invariant=True)
        assert torch.equal(alone, out[:tokens])


def test_paged_attn_in_a_large_table():
    """On the CPU chunks of a context keep their length in an invariant call, however many keys the
    table has room for."""
    gen = generator("large table")
    q, *caches, table, lens = batch_of(
        gen, [3000, 900], 1, (4, 2), 64, 16, torch.float32, None, "cpu"
    )
    wide = torch.zeros(2, 300_000, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    plain = gk.paged_attn(q, *caches, table, lens)
    assert torch.equal(gk.paged_attn(q, *caches, wide, lens, batch_invariant=True), plain)
    assert not torch.equal(gk.paged_attn(q, *caches, wide, lens), plain)


def test_paged_attn_of_many_sequences(device):
    """More sequences than a dimension of a CUDA grid has blocks."""
    gen, many = generator("many sequences"), 65535 + 3
    q = randn(gen, many, 1, 64, dtype=torch.bfloat16, device=device)
    cache = randn(gen, 9, 16, 1, 64, dtype=torch.bfloat16, device=device)
    table = (torch.arange(2 * many, dtype=torch.int32, device=device) % 9).view(many, 2)
    lens = (torch.arange(many, dtype=torch.int32, device=device) % 32) + 1
    out, lse = gk.paged_attn(q, cache, cache, table, lens, return_lse=True, batch_invariant=True)
    for b in (0, 1, 65534, 65535, many - 1):
        its = slice(b, b + 1)
        alone, alone_lse = gk.paged_attn(
            q[its],
            cache,
            cache,
            table[its],
            lens[its],
            return_lse=True,
            batch_invariant=True,
        )
        assert torch.equal(alone, out[its])
        assert torch.equal(alone_lse, lse[its])


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", ("rms_norm", "layer_norm", "softmax", "log_softmax", "swiglu"))
def test_rows(name, dtype):
    """On the CPU a row of these ops has the same bits in every batch."""
    gen = generator("rows", name, dtype)
    for rows, cols in ((2, 64), (33, 768), (200, 4096)):
        x = randn(gen, rows, cols, dtype=dtype)
        weight = randn(gen, cols, dtype=dtype)
        weights = {"rms_norm": (weight,), "layer_norm": (weight, weight)}.get(name, ())
        whole = getattr(gk, name)(x, *weights)
        for row in {0, 1, rows // 2, rows - 1}:
            assert torch.equal(getattr(gk, name)(x[row : row + 1], *weights)[0], whole[row])


PRODUCTS = ("gemm", "gemm_nt", "gemm_tn", "linear", "int4", "mxfp4", "int8")


def product_of(name, gen, k, n, dtype):
    """A function of a [M, k] that multiplies it by one and the same matrix."""
    if name in ("int4", "mxfp4", "int8"):
        k_groups = k // 64 if name != "mxfp4" else k // 32
        low, high = {"int4": (-8, 8), "mxfp4": (0, 16), "int8": (-127, 128)}[name]
        codes = torch.randint(low, high, (n, k), generator=gen)
        packed = gk.pack_weight(codes.to(torch.uint8 if name == "mxfp4" else torch.int8), name)
        scale = torch.rand(k_groups, n, generator=gen) + 0.1
        scale = scale.log2().floor().exp2() if name == "mxfp4" else scale.to(dtype)
        return lambda a: gk.weight_gemm(a, packed, scale, n, name)
    b = randn(gen, k, n, dtype=dtype)
    if name == "linear":
        weight, bias = b.t().contiguous(), randn(gen, n, dtype=dtype)
        return lambda a: gk.linear(a, weight, bias, activation="gelu")
    if name == "gemm_nt":
        b = b.t().contiguous().t()
    if name == "gemm_tn":
        return lambda a: gk.gemm(a.t().contiguous().t(), b)
    return lambda a: gk.gemm(a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_the_cpu(name, dtype):
    """With the switch on, a row has the same bits alone and in batches of every kind of plan: read
    in place, small, packed, with a shared b."""
    if name in PRODUCTS[4:] and dtype not in FLOATS[1:3]:
        pytest.skip("weight_gemm takes 16-bit a")
    gen, draw = generator("products", name, dtype), random.Random(name)
    differ = 0
    for rows, k, n in ((40, 64, 96), (300, 2048, 160), (130, 1088, 1), (400, 1344, 520)):
        f, a = product_of(name, gen, k, n, dtype), randn(gen, rows, k, dtype=dtype)
        with gk.batch_invariant():
            whole = f(a)
        for size in (1, 2, 5, 9, 20, 70, 129):
            low = draw.randint(0, max(rows - size, 0))
            part = a[low : low + size]
            with gk.batch_invariant():
                assert torch.equal(f(part), whole[low : low + size]), (rows, k, n, size)
            differ += not torch.equal(f(part), f(a)[low : low + size])
    # without the switch they do differ; 16 bits round most of it away
    assert differ or dtype != torch.float32


def test_switch():
    assert not switches.is_batch_invariant
    gk.batch_invariant(True)
    try:
        with gk.batch_invariant(False):
            assert not switches.is_batch_invariant
        assert switches.is_batch_invariant
    finally:
        gk.batch_invariant(False)
    with pytest.raises(TypeError, match="batch_invariant: on is expected to be a bool, got int"):
        gk.batch_invariant(1)


# ---- products on CUDA ----------------------------------------------------------------------------
# Rows of a call, around the limits of every plan.
BATCHES = (1, 2, 8, 9, 16, 17, 33, 64, 65, 97, 129, 150, 257, 300, 520)
MOST_ROWS = 640


def randn_16(gen, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


def gemm_on_cuda(name, gen, k, n):
    """A function of a [M, k], and its a."""
    dtype, *words = name.split()
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}.get(
        dtype, torch.float32
    )
    a, b = (randn_16(gen, *shape, dtype=dtype) for shape in ((MOST_ROWS, k), (k, n)))
    bias = randn_16(gen, n, dtype=dtype)
    if "NT" in words:
        b = b.t().contiguous().t()
    how = {"out_dtype": torch.float32} if "wide" in words else {}
    if name.startswith("tf32"):
        how["fp32_precision"] = "tf32"
    if "gelu" in words:
        weight = b.t().contiguous()
        return lambda a: gk.linear(a, weight, bias, activation="gelu"), (a,)
    if "TN" in words:
        return lambda a: gk.gemm(a.t().contiguous().t(), b, **how), (a,)
    if "c" in words:
        how = {"alpha": 1.3, "beta": 0.7, "activation": "silu"}
        c = randn_16(gen, MOST_ROWS, n, dtype=dtype)
        return lambda a, c: gk.gemm(a, b, bias, c=c, **how), (a, c)
    return lambda a: gk.gemm(a, b, **how), (a,)


def weight_on_cuda(name, gen, k, n):
    """The same for weight_gemm. Without a group in the name, the format's own."""
    words = name.split()
    form, dtype = words[1], torch.float16 if "f16" in words else torch.bfloat16
    group = {"mxfp4": 32, "nvfp4": 16}.get(form, 128)
    low, high = {"int4": (-8, 8), "int8": (-127, 128)}.get(form, (0, 16))
    codes = torch.randint(low, high, (n, k), generator=gen, device="cuda")
    if form == "e4m3":
        codes = torch.randn(n, k, generator=gen, device="cuda").to(torch.float8_e4m3fn)
    else:
        codes = codes.to(torch.int8 if form in ("int4", "int8") else torch.uint8)
    scale = torch.rand(k // group, n, generator=gen, device="cuda") + 0.1
    if form in ("mxfp4", "nvfp4"):
        scale = scale.to(torch.float8_e8m0fnu if form == "mxfp4" else torch.float8_e4m3fn)
    elif "wide" not in words:
        scale = scale.to(dtype)
    more = {}
    if form == "uint4":
        more["zero"] = torch.randint(
            0, 16, (k // group, n), generator=gen, device="cuda", dtype=torch.uint8
        )
    packed = gk.pack_weight(codes, form)
    a = randn_16(gen, MOST_ROWS, k, dtype=dtype)
    if "gelu" in words:
        more["activation"] = "gelu"
    return lambda a: gk.weight_gemm(a, packed, scale, n, form, **more), (a,)


def scaled_on_cuda(name, gen, k, n):
    _, form, *words = name.split()
    code = torch.int8 if form == "int8" else torch.float8_e4m3fn
    blocks = {"1x128": ("1x128", "128x128"), "1x32": ("1x32", "1x32")}.get(form, ("row", "row"))
    x = randn_16(gen, MOST_ROWS, k)
    x[3::7] = 0  # the product of such a row's scale and b's is subnormal
    a, scale_a = gk.quantize(x, code, blocks[0])
    b, scale_b = gk.quantize(randn_16(gen, n, k), code, blocks[1])
    how = {"accumulate": "fast"} if "fast" in words else {}
    if "wide" in words:
        how["out_dtype"] = torch.float32
    if "silu" in words:
        how["activation"] = "silu"
    if "columns" in words:  # scales of single columns for 128 of k
        scale_b = scale_b.repeat_interleave(128, 0)[:n].contiguous()
    return lambda a, s: gk.scaled_gemm(a, b.t(), s, scale_b.t(), **how), (a, scale_a)


def sparse_on_cuda(name, gen, k, n):
    form = name.split()[1]
    kept = torch.rand(n, k // 4, 4, generator=gen, device="cuda").argsort(-1) < 2
    w, a = (torch.randn(rows, k, generator=gen, device="cuda") for rows in (n, MOST_ROWS))
    w = w * kept.flatten(1)
    how = {"activation": "gelu_tanh"} if "gelu" in name else {}
    if form == "bf16":
        values, meta = gk.sparse_pack(w.bfloat16())
        return lambda a: gk.sparse_gemm(a, values, meta, **how), (a.bfloat16(),)
    code = torch.int8 if form == "int8" else torch.float8_e4m3fn
    codes, scale_b = gk.quantize(w, code, "row")
    values, meta = gk.sparse_pack(codes)
    a, scale_a = gk.quantize(a, code, "row")
    return (
        lambda a, s: gk.sparse_gemm(a, values, meta, scale_a=s, scale_b=scale_b.t(), **how),
        (a, scale_a),
    )


def grouped_on_cuda(name, gen, k, n):
    """Three experts; a row's expert follows from its last argument, by which rows are sorted."""
    form = name.split()[1]
    b = randn_16(gen, 3, n, k)
    a, owner = randn_16(gen, MOST_ROWS, k), torch.arange(MOST_ROWS, device="cuda") % 3
    if form == "bf16":
        given, how = (a, owner), {}
    else:
        a[3::7] = 0
        blocks = ("1x128", "128x128") if "1x128" in name else ("row", "row")
        code = torch.int8 if form == "int8" else torch.float8_e4m3fn
        given = (*gk.quantize(a, code, blocks[0]), owner)
        b, scale_b = gk.quantize(b, code, blocks[1])
        how = {"scale_b": scale_b.mT}

    def of(*args):
        *rows, owner = args
        order = owner.argsort(stable=True)
        offs = torch.stack([(owner <= g).sum() for g in range(3)]).int()
        more = {"scale_a": rows[1][order], **how} if how else {}
        if "silu" in name:
            more["activation"] = "silu"
        out = gk.grouped_gemm(rows[0][order], b.mT, offs, **more)
        return out[order.argsort()]

    return of, given


MAKERS = {
    "weight": weight_on_cuda,
    "scaled": scaled_on_cuda,
    "sparse": sparse_on_cuda,
    "grouped": grouped_on_cuda,
}
ON_CUDA = (
    "bf16 NN, bf16 NT, f16 TN, bf16 gelu, bf16 c, f16 NT wide, f32 NN, f32 NT, f64 NN, "
    "tf32 NN, tf32 NT, tf32 TN, "
    "weight int4, weight uint4, weight mxfp4, weight nvfp4, weight int8 f16, weight e4m3, "
    "weight int4 wide, scaled row, scaled row fast, scaled row wide, scaled 1x128, "
    "scaled 1x128 columns, scaled 1x32, scaled int8, sparse bf16, sparse int8, sparse e4m3, "
    "grouped bf16, grouped e4m3, grouped e4m3 1x128, grouped int8, "
    # two results may share a reciprocal, which must be of one row
    "weight int4 gelu, scaled row silu, scaled 1x128 silu, scaled 1x128 columns silu, "
    "scaled 1x32 silu, sparse bf16 gelu, sparse int8 gelu, sparse e4m3 gelu, grouped bf16 silu"
).split(", ")


def differing(f, rows, draw):
    """The batches in which some row has other bits than in the batch of all rows."""
    whole, wrong = f(*rows), []
    for size in BATCHES:
        at = torch.randperm(MOST_ROWS, generator=draw)[:size].cuda()
        if not torch.equal(f(*(x[at] for x in rows)), whole[at]):
            wrong.append(size)
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
def test_products_on_cuda(name):
    """With the switch on, rows have the same bits in batches of every size and order."""
    gen = torch.Generator("cuda").manual_seed(0)
    for k, n in ((512, 256), (4096, 1024), (1664, 136), (8192, 4096)):
        f, rows = MAKERS.get(name.split()[0], gemm_on_cuda)(name, gen, k, n)
        with gk.batch_invariant():
            wrong = differing(f, rows, torch.Generator().manual_seed(k))
            # a row that is not copied first
            assert torch.equal(f(*(x[5:6] for x in rows))[0], f(*rows)[5]), (k, n)
        assert not wrong, (k, n, wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize(
    "name", ("rms_norm", "layer_norm", "softmax", "log_softmax", "swiglu", "rms_norm_quantize")
)
def test_rows_on_cuda(name, dtype):
    """With the switch on, rows have the same bits in batches of every size and order."""
    gen = torch.Generator("cuda").manual_seed(1)
    for rows, cols in ((1200, 64), (1200, 768), (1200, 5120), (700, 14336), (300, 40960)):
        x, weight = randn_16(gen, rows, cols, dtype=dtype), randn_16(gen, cols, dtype=dtype)
        weights = {"layer_norm": (weight, weight)}.get(name, (weight,) if "norm" in name else ())

        def f(x, weights=weights):
            with gk.batch_invariant():
                out = getattr(gk, name)(x, *weights)
            both = [y.view(torch.uint8) for y in out] if isinstance(out, tuple) else [out]
            return torch.cat(both, 1)

        whole = f(x)
        for size in (1, 2, 7, 64, 200, 513, 1000):
            at = torch.randperm(rows)[:size].cuda()
            assert torch.equal(f(x[at]), whole[at]), (rows, cols, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
def test_flash_attn_on_cuda(head_dim, dtype):
    """With the switch on, a sequence has the bits that it has alone."""
    gen = torch.Generator("cuda").manual_seed(2)
    for heads, seq_q, seq_k, causal in (
        ((8, 2), 1, 3000, False),
        ((4, 4), 40, 2500, True),
        ((8, 1), 300, 1100, True),
        ((2, 2), 1000, 1000, True),
    ):
        q, k, v = (
            randn_16(gen, 9, h, s, head_dim, dtype=dtype)
            for h, s in ((heads[0], seq_q), (heads[1], seq_k), (heads[1], seq_k))
        )
        with gk.batch_invariant():
            whole = gk.flash_attn(q, k, v, is_causal=causal)
            for at in ([0], [8], [3, 1], [2, 4, 6, 7], list(range(9))[::-1]):
                out = gk.flash_attn(q[at], k[at], v[at], is_causal=causal)
                assert torch.equal(out, whole[at]), (heads, seq_q, seq_k, at)


def empty_calls(m, n, k):
    """Calls of products with m rows, whose plans are asked for."""
    code, e8 = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def of(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    wide = (of(m, k, dtype=torch.float32), of(k, n, dtype=torch.float32))
    codes = (of(m, k, dtype=code), of(n, k, dtype=code).t())
    packed = of(-(-n // 64), k // 64, 2048, dtype=torch.uint8)
    f32 = torch.float32
    return {
        "16 bits": ("gemm", (of(m, k), of(n, k).t()), {}),
        "not aligned": ("gemm", (of(m, k + 1)[:, :k], of(n, k + 1)[:, :k].t()), {}),
        "float32": ("gemm", wide, {"fp32_precision": "ieee"}),
        "tf32": ("gemm", wide, {"fp32_precision": "tf32"}),
        "float64": ("gemm", tuple(x.double() for x in wide), {}),
        "int4": ("weight_gemm", (of(m, k), packed, of(k // 128, n), n, "int4"), {}),
        "wide scales": (
            "weight_gemm",
            (of(m, k), packed, of(k // 128, n, dtype=f32), n, "int4"),
            {},
        ),
        "row": ("scaled_gemm", (*codes, of(m, 1, dtype=f32), of(1, n, dtype=f32)), {}),
        "block": (
            "scaled_gemm",
            (*codes, of(m, k // 128, dtype=f32), of(k // 128, -(-n // 128), dtype=f32)),
            {},
        ),
        "columns": (
            "scaled_gemm",
            (*codes, of(m, k // 128, dtype=f32), of(k // 128, n, dtype=f32)),
            {},
        ),
        "mx": ("scaled_gemm", (*codes, of(m, k // 32, dtype=e8), of(k // 32, n, dtype=e8)), {}),
        "sparse": ("sparse_gemm", (of(m, k), of(n, k // 2), of(n, k // 8, dtype=torch.uint8)), {}),
    }


@pytest.mark.skipif(
    not torch.ops.gpukern.cuda_kernels.default(), reason="a build without CUDA kernels"
)
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
@pytest.mark.parametrize("n, k", ((4096, 4096), (136, 1664)))
def test_plans_on_cuda(n, k, arch):
    """With the switch on, k is split alike for every number of rows, by instances without a split
    of their own, and those for a small M alone are left out. Without it, M decides."""
    chunks, rows, before = {}, {}, {}
    for m in (1, 7, 16, 17, 64, 65, 150, 512, 4096):
        for name, (op, args, how) in empty_calls(m, n, k).items():
            with gk.batch_invariant():
                told = gk.explain(op, *args, **how, arch=arch)
            chunks.setdefault(name, set()).add(told["chunks"])
            rows.setdefault(name, set()).add(told["instance"])
            before.setdefault(name, set()).add(gk.explain(op, *args, **how, arch=arch)["instance"])
    assert all(len(found) == 1 for found in chunks.values()), chunks
    for name, found in rows.items():
        for word in ("_k2", "_k4", "skinny", "gemm_mma", "scaled_gemm_decoded"):
            assert not any(word in row for row in found), (name, found)
    assert len(rows["float32"]) == len(rows["float64"]) == len(rows["wide scales"]) == 1
    assert all(len(before[name]) > 1 for name in ("16 bits", "int4", "row"))

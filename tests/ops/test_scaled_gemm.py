# SPDX-License-Identifier: BSD-3-Clause
"""scaled_gemm with every form of scales: exact comparisons if sums can be exact, otherwise against
float64."""

import itertools

import pytest
import torch
from conftest import ACTIVATIONS, assert_bits, generator, ops, randn, reference, torch_gpukern

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FORMS_A = {
    "tensor": lambda m, k: (),
    "one": lambda m, k: (1,),
    "row": lambda m, k: (m, 1),
    "k": lambda m, k: (1, -(-k // 128)),
    "1x128": lambda m, k: (m, -(-k // 128)),
    "128x128": lambda m, k: (-(-m // 128), -(-k // 128)),
    "128 rows": lambda m, k: (-(-m // 128), 1),
    "1x32": lambda m, k: (m, -(-k // 32)),
}


def powers(gen, shape, device, span=3):
    """Scales that are powers of two, distinct as far as possible."""
    x = torch.arange(max(1, torch.Size(shape).numel())) % (2 * span + 1) - span
    return torch.exp2(x[torch.randperm(len(x), generator=gen)].float()).reshape(shape).to(device)


def whole(gen, shape, dtype, device, most=2):
    """Random integers from -most to most."""
    return (
        torch.randint(-most, most + 1, shape, generator=gen).to(torch.float32).to(dtype).to(device)
    )


@pytest.mark.parametrize("form_b", FORMS_A)
@pytest.mark.parametrize("form_a", FORMS_A)
def test_small_integers_are_exact_with_any_scales(form_a, form_b, device):
    """A misplaced or transposed scale changes a result by a factor of two. K / 128 from 1 to 9, and
    sizes between."""
    gen = generator("scaled", form_a, form_b)
    for i, (m, n, k) in enumerate(
        [
            (1, 1, 1),
            (5, 130, 128),
            (130, 7, 200),
            (3, 257, 384),
            (129, 64, 512),
            (64, 128, 640),
            (2, 33, 777),
            (66, 129, 896),
            (16, 16, 1024),
            (31, 65, 1152),
        ]
    ):
        a_dtype, b_dtype = [(E4M3, E4M3), (I8, I8), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)][i % 5]
        a, b = whole(gen, (m, k), a_dtype, device), whole(gen, (k, n), b_dtype, device)
        scale_a = powers(gen, FORMS_A[form_a](m, k), device)
        transposed = FORMS_A[form_b](n, k)
        scale_b = powers(gen, transposed, device)
        scale_b = scale_b.mT if len(transposed) == 2 else scale_b
        got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        assert_bits(got, reference.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32))


# (value of a, value of b, scale of a, scale of b), where the product of the two scales overflows or
# underflows in float32
FAR_SCALES = [
    (0, 0, 1e30, 1e30),
    (2.0**-9, 2.0**-9, 1e20, 1e20),
    (448.0, 448.0, 1e-20, 1e-20),
]
# scales of a [3, 256] and b [256, 5]
FAR_FORMS = [
    ((), ()),
    ((3, 1), (1, 5)),
    ((3, 2), (2, 5)),
    ((3, 2), (2, 1)),
    ((3, 8), (8, 5)),
    ((3, 1), (2, 1)),
]


def far_product(op, a, b, scale_a, scale_b, out_dtype=torch.float32):
    """a b with scales, by scaled_gemm or by grouped_gemm with one group."""
    if op == "scaled":
        return torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, out_dtype=out_dtype)
    ends = torch.tensor([a.shape[0]], dtype=torch.int32, device=a.device)
    scale_b = scale_b[None] if scale_b.dim() == 2 else scale_b
    return torch_gpukern.grouped_gemm(
        a, b[None], ends, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype
    )


def far_sparse_product(a, b, scale_a, scale_b):
    """a b with scales by sparse_gemm, where half of b's rows are set to 0."""
    w = b.mT.contiguous().float()
    w[:, 0::4] = 0
    w[:, 1::4] = 0
    pair = torch_gpukern.sparse_pack(w.to(b.dtype))
    return torch_gpukern.sparse_gemm(
        a, *pair, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32
    )


FAR_CASES = [(op, dtype) for op in ("scaled", "grouped", "sparse") for dtype in (E4M3, E5M2, I8)]


@pytest.mark.parametrize(("op", "dtype"), FAR_CASES)
def test_scales_whose_product_float32_does_not_hold(op, dtype, device):
    """The expected value is x y k scale_a scale_b in Python's floats; sparse_gemm sums half of
    k."""
    along_k = [(fa, fb) for fa, fb in FAR_FORMS if fa and (fa[1] > 1 or fb[0] > 1)]
    forms = [form for form in FAR_FORMS if op != "sparse" or form not in along_k]
    for (x, y, sa, sb), (form_a, form_b) in itertools.product(FAR_SCALES, forms):
        if dtype is I8:
            x, y = round(min(x, 127)), round(min(y, 127))
        a = torch.full((3, 256), x, dtype=torch.float32, device=device).to(dtype)
        b = torch.full((256, 5), y, dtype=torch.float32, device=device).to(dtype)
        scale_a = torch.full(form_a, sa, device=device)
        scale_b = torch.full(form_b, sb, device=device)
        if op == "sparse":
            got, terms = far_sparse_product(a, b, scale_a, scale_b), 128
        else:
            got, terms = far_product(op, a, b, scale_a, scale_b), 256
        codes = float(a[0, 0].float()) * float(b[0, 0].float()) * terms
        # the scales are float32: their values, not those of the literals
        want = codes * float(torch.tensor(sa)) * float(torch.tensor(sb))
        error = got.double().sub(want).abs().max()
        assert error <= 1e-6 * want + 2.0**-149, (x, y, sa, sb, form_a, form_b)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("op", ("scaled", "grouped"))
def test_wide_products_with_a_few_such_scales(op, dtype, device):
    """Tiles of 128 rows multiply the two scales of a block of k with each other first, and then the
    sums. Here the product of the two scales leaves float32 in every third row, for the first 128
    columns."""
    for x, y, sa, sb in FAR_SCALES:
        a = torch.zeros(300, 512, device=device)
        a[:, 128:256] = x
        b = torch.full((512, 256), y, device=device)
        scale_a, scale_b = torch.ones(300, 4, device=device), torch.ones(4, 2, device=device)
        scale_a[::3, 1] = sa
        scale_b[1, 0] = sb
        got = far_product(op, a.to(E4M3), b.to(E4M3), scale_a, scale_b, dtype)
        columns = scale_b[1].double().repeat_interleave(128)
        want = x * y * 128 * scale_a[:, 1].double()[:, None] * columns
        bound = 2 * torch.finfo(dtype).eps * want + 2.0**-133
        assert ((got.double() - want).abs() <= bound).all(), (x, y, sa, sb)


@pytest.mark.parametrize("sizes", ((1e35, 1e-35), (1e-35, 1e35)))
def test_scales_that_undo_each_other(sizes):
    """On the CPU, sums of 448 x 448 times 1e35 and then 1e-35 stay finite, in either order, for
    scales with and without blocks of k."""
    a, b = torch.full((3, 256), 448.0).to(E4M3), torch.full((256, 5), 448.0).to(E4M3)
    for form_a, form_b in FAR_FORMS:
        scale_a, scale_b = torch.full(form_a, sizes[0]), torch.full(form_b, sizes[1])
        for op in ("scaled", "grouped"):
            torch.testing.assert_close(
                far_product(op, a, b, scale_a, scale_b), torch.full((3, 5), 448.0**2 * 256)
            )


# rows of a on both sides of the sizes at which Hopper changes kernels
MX_SHAPES = [
    (1, 48, 128),
    (40, 130, 320),
    (16, 64, 384),
    (64, 96, 512),
    (70, 33, 640),
    (130, 257, 768),
    (33, 40, 904),
    (600, 130, 1024),
    (520, 72, 1152),
]


@pytest.mark.parametrize("kinds", ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2), (I8, I8)), ids=str)
def test_scales_that_are_powers_in_one_byte(kinds, device):
    """MX scales: a power of two for each 32 of k, in a byte or as float32. K / 128 from 1 to 9;
    weights stored either way."""
    gen = generator("e8m0", kinds)
    for m, n, k in MX_SHAPES:
        a, b = whole(gen, (m, k), kinds[0], device), whole(gen, (k, n), kinds[1], device)
        scale_a, scale_b = (
            powers(gen, (m, -(-k // 32)), device),
            powers(gen, (n, -(-k // 32)), device).mT,
        )
        eight = scale_a.to(torch.float8_e8m0fnu), scale_b.to(torch.float8_e8m0fnu)
        want = reference.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        for y in (b, b.mT.contiguous().mT):
            assert_bits(torch_gpukern.scaled_gemm(a, y, *eight, out_dtype=torch.float32), want)
        assert_bits(
            torch_gpukern.scaled_gemm(a, b, eight[0], scale_b, out_dtype=torch.float32), want
        )


@pytest.mark.parametrize("m", (3, 50, 130, 600))
def test_any_contents_of_mx(m, device):
    """Blocks of zeros and of the least and largest scales, NaN scales and codes, subnormal codes;
    bias, c and activation."""
    gen = generator("mx contents", m)
    n, k = 72, 512
    a = torch.randint(0, 256, (m, k), generator=gen).to(torch.uint8)
    b = torch.randint(0, 256, (n, k), generator=gen).to(torch.uint8)
    a[(a & 127) == 127] = 1  # no NaN but those below
    b[(b & 127) == 127] = 129
    scale_a = torch.randint(117, 137, (m, k // 32), generator=gen).to(torch.uint8)
    scale_b = torch.randint(117, 137, (n, k // 32), generator=gen).to(torch.uint8)
    a[0, :64], scale_a[0, :2] = 0, torch.tensor([0, 243])  # 2^-127 and 2^116 times 0
    scale_a[1, 3], scale_a[1, 4] = 3, 12  # 2^-124: e4m3 is still exact in bfloat16
    a[2, 96:128] &= 135  # subnormal
    scale_b[5, 7], b[6, 40] = 255, 127
    a, b = a.view(E4M3).to(device), b.view(E4M3).to(device)
    scale_a, scale_b = (s.view(torch.float8_e8m0fnu).to(device) for s in (scale_a, scale_b))
    bias, c = randn(gen, n).to(device), randn(gen, m, n).to(device)
    for out in (torch.float32, torch.bfloat16):
        how = dict(bias=bias.to(out), c=c.to(out), beta=0.5, activation="silu")
        got = torch_gpukern.scaled_gemm(a, b.mT, scale_a, scale_b.mT, out_dtype=out, **how).double()
        want = reference.scaled_gemm(a, b.mT, scale_a, scale_b.mT, out_dtype=torch.float64, **how)
        assert (
            torch.equal(got.isnan(), want.isnan())
            and want.isnan()[:, 5:7].all()
            and want.isnan().sum() == 2 * m
        )
        sizes = (a.float().abs() * scale_a.float().repeat_interleave(32, 1)).double()
        sizes = sizes @ (b.float().abs() * scale_b.float().repeat_interleave(32, 1)).double().mT + 4
        # products over 32 of k differ in size: the instruction's sums keep 13 bits of the largest one
        most = (
            sizes * (2.0**-10 if device == "cuda" else 2.0**-18)
            + want.abs() * torch.finfo(out).eps / 2
        )
        kept = ~want.isnan()
        assert ((got - want).abs() <= most)[kept].all()


@pytest.mark.parametrize("dtype", (E4M3, E5M2, I8))
def test_float64_and_the_rounding_of_the_result(dtype, device):
    """Codes are exact, so the only errors are the rounding of the result, and sums in float32 or,
    on Hopper, in two levels."""
    for m, n, k, granularity in [
        (33, 65, 500, "row"),
        (130, 200, 1000, "1x128"),
        (64, 96, 4096, "tensor"),
        (70, 40, 333, "1x32"),
        (600, 40, 1000, "1x32"),
    ]:
        gen = generator("random", m, n, k)
        x, w = (randn(gen, m, k) + 0.2).to(device), (randn(gen, n, k) + 0.1).to(device)
        a, scale_a = torch_gpukern.quantize(x, dtype, granularity)
        b, scale_b = torch_gpukern.quantize(
            w, dtype, "128x128" if granularity == "1x128" else granularity
        )
        scale_b = scale_b.mT if scale_b.dim() == 2 else scale_b
        for out_dtype in (None, torch.float16, torch.float32):
            got = torch_gpukern.scaled_gemm(a, b.mT, scale_a, scale_b, out_dtype=out_dtype)
            want = reference.scaled_gemm(a, b.mT, scale_a, scale_b, out_dtype=torch.float64)
            assert got.dtype is (out_dtype or torch.bfloat16)
            eps = torch.finfo(got.dtype).eps
            if device == "cpu" or (dtype is I8 and granularity != "1x32"):
                sums = 2.0**-20
            else:
                sums = 2.0**-16 if dtype is I8 else 2.0**-12
            most = want.abs().max() * (eps / 2 * 1.01 + sums)
            assert (got.double() - want).abs().max() <= most


def test_sums_of_one_sign(device):
    """Sums by the instruction alone would err by 7e-2 at K = 4096 and 2e-1 at 16384."""
    gen = generator("one sign")
    rows = (48,) if device == "cpu" else (48, 130, 600)
    for m, k, form in itertools.product(rows, (4096, 16384), ((), (1, 1), 128, 32)):
        a = (torch.rand(m, k, generator=gen) + 0.5).to(E4M3).to(device)
        b = (torch.rand(k, 64, generator=gen) + 0.5).to(E4M3).to(device)
        scale_a = torch.ones((m, k // form) if isinstance(form, int) else form, device=device)
        scale_b = torch.ones((k // form, 64) if isinstance(form, int) else form, device=device)
        if form == 32:
            scale_a, scale_b = scale_a.to(torch.float8_e8m0fnu), scale_b.to(torch.float8_e8m0fnu)
        got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32).double()
        want = a.double() @ b.double()
        assert ((got - want).abs() / want).max() < 1.5e-3


def test_int8_sums_are_exact_as_long_as_they_fit(device):
    one = torch.ones((), device=device)
    for k in (1, 31, 1024, 1025, 65536, 131071):
        for x, y in ((-128, -128), (127, -128), (127, 127)):
            a = torch.full((3, k), x, dtype=I8, device=device)
            b = torch.full((k, 5), y, dtype=I8, device=device)
            a[0, 0], b[0, 0] = 1, 1
            got = torch_gpukern.scaled_gemm(a, b, one, one, out_dtype=torch.float32)
            want = (a.double() @ b.double()).float()
            assert_bits(got, want)
    a, b = (
        torch.ones(2, 131072, dtype=I8, device=device),
        torch.ones(131072, 2, dtype=I8, device=device),
    )
    with pytest.raises(
        ValueError,
        match="gpukern::scaled_gemm: a has 131072 columns; int8 without scales along K takes at "
        "most 131071",
    ):
        torch_gpukern.scaled_gemm(a, b, one, one)
    blocks = torch.ones(1, 1024, device=device)
    assert (torch_gpukern.scaled_gemm(a, b, blocks, one, out_dtype=torch.float32) == 131072).all()


def test_bias_c_activation_and_8_bit_results(device):
    gen = generator("epilogue")
    m, n, k = 37, 70, 160
    a, b = whole(gen, (m, k), E4M3, device, 4), whole(gen, (k, n), E4M3, device, 4)
    scale_a, scale_b = (
        torch.rand(m, 1, generator=gen).to(device) / 9,
        torch.rand(1, n, generator=gen).to(device),
    )
    for activation, out in itertools.product(ACTIVATIONS, (torch.float32, torch.bfloat16)):
        bias = randn(gen, n, dtype=out).to(device)
        for c in (
            None,
            randn(gen, m, n, dtype=out).to(device),
            randn(gen, n, dtype=out).to(device),
            randn(gen, m, 1, dtype=out).to(device),
        ):
            how = dict(bias=bias, c=c, beta=0.5, activation=activation, out_dtype=out)
            got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, **how)
            want = reference.scaled_gemm(
                a, b, scale_a, scale_b, **how | {"out_dtype": torch.float64}
            )
            most = want.abs().max() * (torch.finfo(out).eps / 2 * 1.01 + 1e-5)
            assert (got.double() - want).abs().max() <= most, (activation, out)
    out_scale = torch.tensor(0.05, device=device)
    for out, addend in itertools.product((E4M3, E5M2, I8), (torch.float32, torch.bfloat16)):
        how = dict(bias=randn(gen, n, dtype=addend).to(device), out_dtype=out, out_scale=out_scale)
        got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, **how)
        want = reference.scaled_gemm(a, b, scale_a, scale_b, **how)
        moved = got.view(torch.uint8) != want.view(torch.uint8)
        assert got.dtype is out and moved.float().mean() < 2e-3
    nan = torch.full((m, n), float("nan"), device=device)
    got = torch_gpukern.scaled_gemm(
        a, b, scale_a, scale_b, c=nan, beta=0.0, out_dtype=torch.float32
    )
    assert got.isfinite().all()


def test_layouts_and_nothing(device):
    gen = generator("layouts")
    m, n, k = 50, 70, 300
    a, b = whole(gen, (m, k), E4M3, device), whole(gen, (k, n), E4M3, device)
    scale_a, scale_b = powers(gen, (m, 3), device), powers(gen, (3, n), device)
    want = reference.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    wide = torch.full((m, 2 * k + 1), float("nan"), device=device).to(E4M3)
    apart = wide[:, 1 : 2 * k + 1 : 2]
    apart.copy_(a)
    odd = torch.full((m, k + 3), float("nan"), device=device).to(E4M3)[:, 1 : k + 1]
    odd.copy_(a)
    for x, y in itertools.product((a, a.mT.contiguous().mT, apart, odd), (b, b.mT.contiguous().mT)):
        got = torch_gpukern.scaled_gemm(
            x, y, scale_a.mT.contiguous().mT, scale_b, out_dtype=torch.float32
        )
        assert_bits(got, want)
    one, bias = (
        torch.ones((), device=device),
        torch.full((n,), -1.0, dtype=torch.bfloat16, device=device),
    )
    got = torch_gpukern.scaled_gemm(a[:, :0], b[:0], one, one, bias=bias, activation="silu")
    assert_bits(
        got, torch.nn.functional.silu(bias.double()).to(torch.bfloat16).expand(m, n).contiguous()
    )
    assert torch_gpukern.scaled_gemm(a[:0], b, one, one).shape == (0, n)
    assert torch_gpukern.scaled_gemm(a, b[:, :0], one, one).shape == (m, 0)
    scale_a[7, 1] = float("nan")
    got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b)
    assert got[7].isnan().all() and got.isnan().sum() == n


def test_scales_have_no_gradient(device):
    """registry_quantised.py has the other refusals."""
    a, b = (torch.ones(shape, device=device).to(E4M3) for shape in ((8, 256), (256, 16)))
    one = torch.ones((), device=device)
    out = torch_gpukern.scaled_gemm(a, b, one.clone().requires_grad_(), one)
    with pytest.raises(NotImplementedError, match="scaled_gemm"):
        out.float().sum().backward()


def test_opcheck_compile_and_fast(device):
    gen = generator("compiled")
    a, b = whole(gen, (33, 256), E4M3, device), whole(gen, (256, 48), E4M3, device)
    one, rows = torch.ones((), device=device), powers(gen, (33, 2), device)
    torch.library.opcheck(ops.scaled_gemm.default, (a, b, rows, one), test_utils="test_faketensor")
    eight = a.to(I8), b.to(I8), rows, one
    torch.library.opcheck(
        ops.scaled_gemm.default, eight, test_utils=("test_schema", "test_faketensor")
    )
    got = torch_gpukern.scaled_gemm(a, b, one, one, accumulate="fast", out_dtype=torch.float32)
    assert_bits(got, (a.double() @ b.double()).float())
    compiled = torch.compile(
        lambda a, s: torch_gpukern.scaled_gemm(a, b, s, one, activation="relu"),
        fullgraph=True,
        dynamic=True,
    )
    for m in (3, 5, 130):
        x, s = whole(gen, (m, 256), E4M3, device), powers(gen, (m, 1), device)
        assert_bits(compiled(x, s), torch_gpukern.scaled_gemm(x, b, s, one, activation="relu"))


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89"))
def test_kernels_of_gpus_without_wgmma(arch):
    def row(m, a_dtype, b_dtype, scale_a=(), scale_b=(), k=512):
        a, b = torch.empty(m, k).to(a_dtype), torch.empty(4096, k).to(b_dtype).mT
        told = torch_gpukern.explain(
            "scaled_gemm", a, b, torch.ones(scale_a), torch.ones(scale_b), arch=arch
        )
        return told["instance"].removeprefix("scaled_gemm_sm80_")

    for a_dtype, b_dtype, name in (
        (E4M3, E4M3, "e4m3"),
        (E4M3, E5M2, "e4m3_e5m2"),
        (E5M2, E4M3, "e5m2_e4m3"),
        (E5M2, E5M2, "e5m2"),
        (I8, I8, "i8"),
    ):
        block = name.removesuffix("_e4m3") + "_block_128x128"
        assert row(1024, a_dtype, b_dtype) == name + "_128x128"
        assert row(1024, a_dtype, b_dtype, (1024, 1), (1, 4096), k=77) == name + "_128x128"
        assert row(1024, a_dtype, b_dtype, (1024, 4), (4, 32)) == block
        assert row(1024, a_dtype, b_dtype, (1024, 16), (16, 4096)) == block
        assert row(5, a_dtype, b_dtype, (5, 16), (16, 4096)) == name.split("_")[0] + "_16x64"


def test_a_nan_code_spoils_only_its_row_and_column(device):
    """Scales per 32 of k, also with mixed dtypes. They are served by kernels that decode codes by
    arithmetic, on Hopper and on every other GPU."""
    gen = generator("nan codes")
    for m in (9, 200):
        for a_dtype, b_dtype in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)):
            a, b = whole(gen, (m, 320), a_dtype, device), whole(gen, (320, 70), b_dtype, device)
            a.view(torch.uint8)[3, 77], b.view(torch.uint8)[200, 5] = 0x7F, 0xFF
            scale_a, scale_b = powers(gen, (m, 10), device), powers(gen, (10, 70), device)
            got = torch_gpukern.scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
            want = torch.zeros(m, 70, dtype=torch.bool, device=device)
            want[3], want[:, 5] = True, True
            assert got.isnan().equal(want)


@pytest.mark.gpu
def test_several_tiles_a_block():
    """More tiles than SMs, each with more blocks of k than the ring has stages, so that scales of
    many tiles are in flight."""
    gen = generator("many tiles")
    shapes = ((1700, 2100, 1152), (700, 5000, 1300), (64, 17000, 640))
    for (m, n, k), dtype in itertools.product(shapes, (E4M3, I8)):
        a, b = whole(gen, (m, k), dtype, "cuda"), whole(gen, (k, n), dtype, "cuda")
        blocks = -(-k // 128)
        scale_a, scale_b = (
            powers(gen, (m, blocks), "cuda"),
            powers(gen, (blocks, -(-n // 128)), "cuda"),
        )
        spread = [
            s.repeat_interleave(128, d)[:k] if d == 0 else s.repeat_interleave(128, d)[:, :k]
            for s, d in ((scale_a, 1), (scale_b, 0))
        ]
        want = (a.float() * spread[0]).double() @ (
            b.float() * spread[1].repeat_interleave(128, 1)[:, :n]
        ).double()
        for x in (scale_a, scale_a.mT.contiguous().mT):
            for _ in range(4):
                assert_bits(
                    torch_gpukern.scaled_gemm(
                        a, b.mT.contiguous().mT, x, scale_b, out_dtype=torch.float32
                    ),
                    want.float(),
                )


@pytest.mark.gpu
@pytest.mark.parametrize("order", ("k", "k padded", "rows"))
def test_scales_along_k_in_any_order(order):
    """Tiles of every width, incomplete groups of four steps of k, and scales of b per block and per
    column with fewer than 128 columns."""
    gen = generator("orders", order)

    def laid(x):
        if order == "rows":
            return x.mT.contiguous().mT
        pad = -x.shape[1] % 4 if order == "k padded" else 0
        return torch.nn.functional.pad(x, (0, pad))[:, : x.shape[1]]

    for m, n, k in itertools.product((1, 16, 20, 64, 130, 300), (32, 128, 264), (256, 640, 2048)):
        a, b = whole(gen, (m, k), E4M3, "cuda"), whole(gen, (n, k), E4M3, "cuda")
        blocks = k // 128
        scale_a = laid(powers(gen, (m, blocks), "cuda"))
        spread_a = (a.float() * scale_a.repeat_interleave(128, 1)).double()
        for columns in (1, 128):
            scale_b = laid(powers(gen, (-(-n // columns), blocks), "cuda"))
            spread_b = scale_b.repeat_interleave(128, 1).repeat_interleave(columns, 0)[:n]
            want = spread_a @ (b.float() * spread_b).double().mT
            got = torch_gpukern.scaled_gemm(a, b.mT, scale_a, scale_b.mT)
            assert_bits(got, want.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("block", (32, 128))
def test_several_tiles_with_a_scale_for_each_row_of_both(block):
    """Scales for every row of a and every column of b along k, with several tiles in both
    directions."""
    gen = generator("tiles of both", block)
    for m, n, k in ((390, 2100, 1152), (130, 9000, 1300), (70, 500, 4096)):
        a, b = whole(gen, (m, k), E4M3, "cuda"), whole(gen, (k, n), E4M3, "cuda")
        blocks = -(-k // block)
        scale_a, scale_b = powers(gen, (m, blocks), "cuda"), powers(gen, (n, blocks), "cuda").mT
        want = (a.float() * scale_a.repeat_interleave(block, 1)[:, :k]).double()
        want = want @ (b.float() * scale_b.repeat_interleave(block, 0)[:k]).double()
        kinds = [(scale_a, scale_b)]
        if block == 32:
            kinds.append((scale_a.to(torch.float8_e8m0fnu), scale_b.to(torch.float8_e8m0fnu)))
        for sa, sb in kinds:
            for _ in range(2):
                got = torch_gpukern.scaled_gemm(
                    a, b.mT.contiguous().mT, sa, sb, out_dtype=torch.float32
                )
                assert_bits(got, want.float())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (E4M3, I8))
def test_more_rows_than_one_copying_grid_takes(dtype):
    """K is no multiple of 16, so a is copied first, 64 rows per block, and a grid has at most 65535
    blocks along y."""
    m, k = 64 * 65535 + 70, 24
    a = (
        (torch.arange(m * k, device="cuda", dtype=torch.int32) % 5 - 2)
        .to(torch.float32)
        .to(dtype)
        .view(m, k)
    )
    b, one = torch.ones(k, 8, device="cuda").to(dtype), torch.ones((), device="cuda")
    got = torch_gpukern.scaled_gemm(a, b, one, one, out_dtype=torch.float32)
    assert_bits(got, a.float().sum(1, keepdim=True).expand(m, 8).contiguous())

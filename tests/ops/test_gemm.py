# SPDX-License-Identifier: BSD-3-Clause
"""gemm: activation(alpha * (a @ b) + beta * c + bias), forward and backward."""

import itertools
import math
from functools import partial

import pytest
import torch
from conftest import (
    ACTIVATIONS,
    ALL,
    FLOATS,
    HALF,
    LAYOUTS,
    TORCH_ACTIVATION,
    Lazily,
    assert_close_as,
    f64,
    far_apart,
    generator,
    grid,
    integers,
    ops,
    orders,
    randn,
    reference,
    same_bits,
    shuffled,
    snapshot,
    strided,
    swap_last,
    torch_gemm,
    torch_gpukern,
    yard_dtype,
)

SIZES = [
    (1, 1, 1),
    (1, 7, 1),
    (7, 1, 9),
    (2, 3, 64),
    (1, 64, 65),
    (1, 256, 128),
    (4, 100, 33),
    (16, 48, 256),
    (64, 64, 64),
    (65, 63, 31),
    (31, 33, 129),
    (128, 127, 17),
    (13, 257, 100),
    (127, 129, 255),
    (257, 65, 127),
    (3, 511, 513),
]
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 193, 257)


def check(a, b, got=None, what="out", gen=None, **kwargs):
    """Checks gemm of a and b against the float64 reference. The error may be as large as PyTorch's
    in the same dtype, with a margin."""
    got = ops.gemm(a, b, **kwargs) if got is None else got
    out_dtype = kwargs.get("out_dtype") or a.dtype
    assert got.dtype == out_dtype and got.device == a.device and got.is_contiguous()
    ref_kwargs = {**f64(kwargs), "out_dtype": torch.float64}
    ref = reference.gemm(f64(a), f64(b), **ref_kwargs)
    dtype = yard_dtype(out_dtype)
    cast = {n: t.to(dtype) if isinstance(t, torch.Tensor) else t for n, t in kwargs.items()}
    cast["out_dtype"] = dtype
    gen = gen or generator("orders", a.shape[-1])

    def yards(draw):
        x = shuffled(gen, a, b) if draw else (a, b)
        want = reference.gemm(*f64(x), **ref_kwargs) if draw else ref
        # on CUDA PyTorch gets 16-bit operands, too: products are exact, sums are a tensor core's
        operands = x if a.is_cuda and a.dtype in HALF else (t.to(dtype) for t in x)
        # on a CPU with AMX, PyTorch's bfloat16 product reads the NaN between rows
        operands = [t.contiguous() for t in operands]
        plain = {n: t for n, t in cast.items() if n != "fp32_precision"}
        return ((torch_gemm(*operands, order=o, **plain), want) for o in orders(gen, a.shape[-1]))

    assert_close_as(yards, got, ref, what)
    return got


def make(gen, m, n, k, dtype, device, batch=()):
    return randn(gen, *batch, m, k, dtype=dtype, device=device), randn(
        gen, *batch, k, n, dtype=dtype, device=device
    )


@pytest.mark.parametrize(
    "case",
    grid(
        120,
        dtype=FLOATS,
        size=SIZES,
        activation=ACTIVATIONS,
        epilogue=("plain", "bias", "c", "both", "alpha", "all"),
        out=("same", "float32"),
        layout=("NN", "NT", "TN", "TT"),
    ),
)
def test_forward(case, device):
    gen = generator("gemm", case.id)
    m, n, k = case.size
    a, b = make(gen, m, n, k, case.dtype, device)
    a = swap_last(a) if case.layout[0] == "T" else a
    b = swap_last(b) if case.layout[1] == "T" else b
    kwargs = dict(activation=case.activation)
    if case.out == "float32":
        kwargs["out_dtype"] = torch.float32
    if case.out == "float32" and case.dtype == torch.float64:
        with pytest.raises(ValueError, match="out_dtype"):
            ops.gemm(a, b, **kwargs)
        del kwargs["out_dtype"]
    extra = kwargs.get("out_dtype", case.dtype)
    if case.epilogue in ("bias", "both", "all"):
        kwargs["bias"] = randn(gen, n, dtype=extra, device=device)
    if case.epilogue in ("c", "both", "all"):
        kwargs["c"] = randn(gen, m, n, dtype=case.dtype, device=device)
    if case.epilogue in ("alpha", "all"):
        kwargs["alpha"] = -0.75
    if case.epilogue == "all":
        kwargs["beta"] = 1.5
    unchanged = snapshot(a, b, **kwargs)
    check(a, b, gen=gen, **kwargs)
    unchanged()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_at_every_edge(dtype, device):
    """Integers make every partial sum exact, so each element must have the right bits for every odd
    size."""
    gen = generator("edges", dtype)
    cases = list(itertools.product(EDGES, EDGES, EDGES))
    cases = cases if ALL else [cases[i] for i in torch.randperm(len(cases), generator=gen)[:150]]
    big_a = integers(gen, max(EDGES), max(EDGES), low=-1, high=2, dtype=dtype)
    big_b = integers(gen, max(EDGES), max(EDGES), low=-1, high=2, dtype=dtype)
    for i, (m, n, k) in enumerate(cases):
        a, b = big_a[:m, :k].to(device), big_b[:k, :n].to(device)
        expected = (a.double() @ b.double()).to(dtype)
        if i % 4 & 1:
            a = swap_last(a)
        if i % 4 & 2:
            b = swap_last(b)
        got = ops.gemm(a, b)
        assert torch.equal(got, expected), (
            f"{(m, n, k)}: {int((got != expected).sum())} elements differ"
        )


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 5, 7), (7, 4)),
        ((2, 3, 5, 7), (7, 4)),
        ((3, 5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((5, 7), (2, 3, 7, 4)),
        ((2, 3, 5, 7), (1, 3, 7, 4)),
        ((1, 1, 7), (6, 7, 4)),
        ((4, 1, 33), (4, 33, 65)),
        ((2, 2, 2, 3, 5), (2, 1, 2, 5, 3)),
        ((6, 17, 40), (40, 70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_batch_broadcast(shapes, dtype, device):
    gen = generator("batch", shapes)
    a, b = (randn(gen, *s, dtype=dtype, device=device) for s in shapes)
    out = check(a, b, gen=gen)
    assert out.shape == torch.matmul(a, b).shape
    check(
        a,
        b,
        gen=gen,
        bias=randn(gen, shapes[1][-1], dtype=dtype, device=device),
        activation="silu",
        c=randn(gen, *out.shape, dtype=dtype, device=device),
    )


@pytest.mark.parametrize(
    "c_shape",
    [(), (1,), (4,), (5, 1), (1, 4), (5, 4), (3, 1, 1), (3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 1)],
    ids=str,
)
def test_c_broadcasts(c_shape, device):
    gen = generator("c", c_shape)
    a, b = randn(gen, 2, 3, 5, 7, device=device), randn(gen, 7, 4, device=device)
    check(a, b, c=randn(gen, *c_shape, device=device), beta=-0.5, gen=gen)


@pytest.mark.parametrize(
    "case",
    grid(
        40,
        dtype=FLOATS,
        a=tuple(LAYOUTS),
        b=tuple(LAYOUTS),
        size=((5, 6, 9), (33, 47, 65)),
        batch=((), (3,), (2, 3)),
    ),
)
def test_strides(case, device):
    """Every layout gives the result of its contiguous copy, with NaN between and around the
    elements."""
    gen = generator("strides", case.id)
    m, n, k = case.size
    a, b = make(gen, m, n, k, case.dtype, device, case.batch)
    a, b = LAYOUTS[case.a](a), LAYOUTS[case.b](b)
    bias = strided(randn(gen, n, dtype=case.dtype, device=device), step=3)
    c = LAYOUTS[case.b](randn(gen, *case.batch, m, n, dtype=case.dtype, device=device))
    check(a, b, bias=bias, c=c, gen=gen)


UNALIGNED = {
    "offset": lambda x: strided(x, offset=1),
    "odd rows": lambda x: strided(x, pad=1 + x.shape[-1] % 2, offset=8),
    "columns, offset": lambda x: strided(
        x, (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2), offset=1
    ),
    "odd columns": lambda x: strided(
        x, (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2), pad=1 + x.shape[-2] % 2
    ),
    "every second": lambda x: strided(x, step=2),
    "one row": lambda x: strided(x[..., :1, :], offset=1).expand_as(x),
    "one column": lambda x: strided(x[..., :1], offset=1).expand_as(x),
}


@pytest.mark.parametrize(
    "case",
    grid(
        48,
        dtype=(*HALF, torch.float32),
        how=tuple(UNALIGNED),
        which=("a", "b", "both"),
        size=(
            (130, 200, 264),
            (131, 203, 137),
            (65, 1025, 65),
            (257, 129, 8),
            (16, 256, 515),
            (16, 1601, 523),
            (40, 3073, 259),
        ),
        batch=("none", "both", "a", "b", "four"),
    ),
)
def test_unaligned(case, device):
    """Misaligned rows surrounded by NaN. Kernels that read 16 bytes at a time must copy such
    operands."""
    gen = generator("unaligned", case.id)
    m, n, k = case.size
    batch = {"none": ((), ()), "both": ((3,), (3,)), "a": ((2, 3), (3,)), "b": ((3, 1), (2,)),
             "four": ((2, 1, 2, 2), (1, 2, 2, 2))}[case.batch]  # fmt: skip
    a = randn(gen, *batch[0], m, k, dtype=case.dtype, device=device)
    b = randn(gen, *batch[1], k, n, dtype=case.dtype, device=device)
    a = UNALIGNED[case.how](a) if case.which != "b" else a
    b = UNALIGNED[case.how](b) if case.which != "a" else b
    unchanged = snapshot(a, b)
    check(a, b, gen=gen)
    c = randn(gen, m, n, dtype=case.dtype, device=device)
    check(
        a,
        b,
        gen=gen,
        bias=randn(gen, n, dtype=case.dtype, device=device),
        c=strided(c, pad=1),
        activation="gelu",
    )
    unchanged()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_expanded(dtype, device):
    """Stride 0 in every operand and dimension."""
    gen = generator("expanded")
    row, col = (
        randn(gen, 1, 40, dtype=dtype, device=device),
        randn(gen, 33, 1, dtype=dtype, device=device),
    )
    b = randn(gen, 40, 19, dtype=dtype, device=device)
    one = randn(gen, 1, dtype=dtype, device=device)
    check(row.expand(33, 40), b, gen=gen)
    check(col.expand(33, 40), b, gen=gen)
    check(row.expand(6, 33, 40), b.expand(6, 40, 19), gen=gen)
    check(
        row.expand(33, 40), one.expand(40, 19), bias=one.expand(19), c=one.expand(33, 19), gen=gen
    )


@pytest.mark.parametrize("batch", [4, 40])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_single_rows_of_a_batch_are_one_product(batch, dtype, device):
    """The last token of each sequence, x[:, -1:], is a batch of single rows. The stride of a
    dimension of size 1 has no meaning, so they form one product, as their contiguous copy does."""
    gen = generator("single rows", batch, dtype)
    x = randn(gen, batch, 3, 64, dtype=dtype, device=device)[:, -1:]
    w = randn(gen, 64, 48, dtype=dtype, device=device)
    dense = x.contiguous()
    assert torch_gpukern.explain("gemm", x, w) == torch_gpukern.explain("gemm", dense, w)
    assert same_bits(ops.gemm(x, w), ops.gemm(dense, w))


@pytest.mark.parametrize(
    "which", ("a rows", "a columns", "b rows", "b columns", "b batch", "c rows")
)
def test_far_strides(which):
    """Offsets beyond 2**31 elements."""
    gen = generator("far", which)
    a, b = make(gen, 3, 5, 2, torch.bfloat16, "cpu", (2,))
    c = randn(gen, 3, 5, dtype=torch.bfloat16)
    expected = ops.gemm(a, b, c=c)
    if which.startswith("a"):
        a = far_apart(a, 1 if which == "a rows" else 2)
    elif which.startswith("b"):
        b = far_apart(b, {"b rows": 1, "b columns": 2, "b batch": 0}[which])
    else:
        c = far_apart(c, 0)
    assert same_bits(ops.gemm(a, b, c=c), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("m", (1, 2, 4, 5, 8, 16, 64))
def test_skinny(m, dtype, device):
    """Small M times a wide matrix, which has kernels of its own."""
    gen = generator("skinny", m, dtype)
    a, b = make(gen, m, 515, 1030, dtype, device)
    check(a, b, gen=gen)
    check(
        a,
        swap_last(b),
        gen=gen,
        bias=randn(gen, 515, dtype=dtype, device=device),
        activation="gelu",
    )


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (0, 0, 0), (0, 3, 0)], ids=str)
def test_empty_result(size, device):
    m, n, k = size
    out = ops.gemm(
        torch.ones(m, k, device=device),
        torch.ones(k, n, device=device),
        bias=torch.ones(n, device=device),
    )
    assert out.shape == (m, n) and out.dtype == torch.float32
    assert ops.gemm(torch.ones(0, 4, 5, device=device), torch.ones(5, 6, device=device)).shape == (
        0,
        4,
        6,
    )
    assert ops.gemm(
        torch.ones(2, 0, 4, 5, device=device), torch.ones(5, 6, device=device)
    ).shape == (2, 0, 4, 6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_inner_dimension(dtype, activation, device):
    """K = 0: activation(beta * c + bias)."""
    gen = generator("k0", dtype, activation)
    a, b = (
        torch.ones(5, 0, dtype=dtype, device=device),
        torch.ones(0, 4, dtype=dtype, device=device),
    )
    assert torch.equal(
        ops.gemm(a, b, activation=activation), torch.zeros(5, 4, dtype=dtype, device=device)
    )
    bias = randn(gen, 4, dtype=dtype, device=device)
    c = randn(gen, 5, 4, dtype=dtype, device=device)
    check(a, b, bias=bias, c=c, beta=0.5, activation=activation, gen=gen)


def test_no_inner_dimension_gradients(device):
    a = torch.ones(5, 0, device=device, requires_grad=True)
    b = torch.ones(0, 4, device=device, requires_grad=True)
    bias = torch.zeros(4, device=device, requires_grad=True)
    ops.gemm(a, b, bias=bias).sum().backward()
    assert a.grad.shape == (5, 0) and b.grad.shape == (0, 4)
    assert torch.equal(bias.grad, torch.full((4,), 5.0, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_beta_zero_does_not_read_c(dtype, device):
    gen = generator("beta0", dtype)
    a, b = make(gen, 19, 35, 22, dtype, device)
    c = torch.full((19, 35), math.nan, dtype=dtype, device=device)
    assert same_bits(ops.gemm(a, b, c=c, beta=0.0), ops.gemm(a, b))
    none = torch.ones(4, 0, dtype=dtype, device=device)
    assert torch.equal(
        ops.gemm(none, none.T, c=c[:4, :4], beta=0.0), torch.zeros(4, 4, dtype=dtype, device=device)
    )


def test_alpha_zero_is_not_a_shortcut_past_c(device):
    gen = generator("alpha0")
    a, b = make(gen, 9, 11, 13, torch.float32, device)
    c = randn(gen, 9, 11, device=device)
    assert torch.equal(ops.gemm(a, b, c=c, alpha=0.0), c)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_nan_and_inf_stay_in_their_row_and_column(dtype, value, device):
    gen = generator("nan", dtype)
    a, b = make(gen, 35, 37, 41, dtype, device)
    clean = ops.gemm(a, b)
    a[17, 5] = value
    row = ops.gemm(a, b)
    assert not row[17].isfinite().any()
    keep = [i for i in range(35) if i != 17]
    assert same_bits(row[keep], clean[keep])
    a[17, 5], b[3, 30] = 1.0, value
    col = ops.gemm(a, b)
    assert not col[:, 30].isfinite().any()
    keep = [j for j in range(37) if j != 30]
    assert col[:, keep].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activation_over_its_whole_range(activation, dtype, device):
    """Inputs cover the whole range of values, so that an inaccurate exp or erf would show."""
    x = torch.cat(
        [torch.linspace(-30, 30, 2001), torch.linspace(-1e-3, 1e-3, 101), torch.tensor([1e4, -1e4])]
    )
    x = x.to(dtype).to(device)[:, None]
    one = torch.ones(1, 1, dtype=dtype, device=device)
    dtype64 = {"out_dtype": torch.float64}
    ref = reference.gemm(f64(x), f64(one), activation=activation, **dtype64)
    assert_close_as(
        TORCH_ACTIVATION[activation](x.to(yard_dtype(dtype))),
        ops.gemm(x, one, activation=activation),
        ref,
    )
    small = (slice(None),) if activation in ("none", "relu") else x[:, 0].abs() < 8
    y = x[small]
    ref = reference.gemm(f64(y), f64(one), activation=activation, **dtype64)
    assert_close_as(
        TORCH_ACTIVATION[activation](y.to(yard_dtype(dtype))),
        ops.gemm(y, one, activation=activation),
        ref,
    )
    ends = torch.tensor([[math.inf], [-math.inf], [math.nan]], dtype=dtype, device=device)
    got = ops.gemm(ends, one, activation=activation).flatten().tolist()
    assert got[0] == math.inf and math.isnan(got[2])
    assert got[1] == {"none": -math.inf}.get(activation, 0.0) or (
        activation not in ("none", "relu") and (math.isnan(got[1]) or -1e-15 < got[1] < 0)
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_activation_of_a_neighbour(activation, dtype, device):
    """NaN, inf and huge values affect only their own element, in a size for the fastest kernels."""
    wild = torch.tensor([math.nan, math.inf, -math.inf, 6e4, -6e4, 1.0, -1.0, 0.5], device=device)
    bias = torch.full((256,), 0.5, dtype=dtype, device=device)
    alone = ops.gemm(
        *(torch.zeros(128, 128, dtype=dtype, device=device),) * 2, bias[:128], activation=activation
    )
    for shift in range(8):
        bias[:8] = wild.roll(shift).to(dtype)
        a, b = (torch.zeros(n, dtype=dtype, device=device) for n in ((128, 128), (128, 256)))
        out = ops.gemm(a, b, bias, activation=activation)
        assert torch.equal(out[:, 8:], alone[:, :1].expand(128, 248))
        got = out[5, :8].roll(-shift).double()
        assert got[0].isnan() and got[1] == math.inf and (got[2].isnan() or -1e-15 < got[2] <= 0)
        want = TORCH_ACTIVATION[activation](wild[3:].double())
        torch.testing.assert_close(got[3:], want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradient_of_a_neighbour(activation, dtype, device):
    """The same for derivatives. On CUDA, the fast functions process whole vectors of 16 bytes."""
    wild = torch.tensor([math.nan, math.inf, -math.inf, 6e4, -6e4, 1.0, -1.0, 0.5], device=device)
    x = wild[5:].double().requires_grad_()
    (want,) = torch.autograd.grad(TORCH_ACTIVATION[activation](x).sum(), x)
    for shift in range(8):
        saved = wild.roll(shift).to(dtype).repeat(4)
        got = ops.gemm_act_bwd(torch.ones_like(saved), saved, activation)
        got = got.reshape(4, 8).roll(-shift, 1).double()
        assert got[:, 0].isnan().all() and got[:, 1:5].tolist() == [[1.0, 0.0, 1.0, 0.0]] * 4
        torch.testing.assert_close(got[:, 5:], want.expand(4, 3), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_one_rounding(dtype, device):
    """alpha, c, bias and the activation are applied in float32, and out is rounded once."""
    gen = generator("rounding", dtype)
    a, b = make(gen, 65, 70, 40, dtype, device)
    bias, c = (
        randn(gen, 70, dtype=dtype, device=device),
        randn(gen, 65, 70, dtype=dtype, device=device),
    )
    kwargs = dict(bias=bias, c=c, alpha=0.37, beta=1.3, activation="silu")
    ref = reference.gemm(f64(a), f64(b), **f64(kwargs))
    got = ops.gemm(a, b, **kwargs)
    half_ulp = torch.finfo(dtype).eps / 2
    near = torch.nextafter(ref.float().abs(), torch.tensor(math.inf, device=device)).double()
    floor = torch.finfo(dtype).tiny * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    assert ((got.double() - ref).abs() <= near * half_ulp * 1.01 + floor).all()
    wide = ops.gemm(a, b, **kwargs, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), got)


@pytest.mark.parametrize("bias_wide", (False, True))
@pytest.mark.parametrize("c_wide", (False, True))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_bias_and_c_in_either_dtype(dtype, bias_wide, c_wide, device):
    gen = generator("wide", dtype)
    a, b = make(gen, 20, 30, 40, dtype, device)
    bias = randn(gen, 30, dtype=torch.float32 if bias_wide else dtype, device=device)
    c = randn(gen, 20, 30, dtype=torch.float32 if c_wide else dtype, device=device)
    check(a, b, bias=bias, c=c, out_dtype=torch.float32, gen=gen)
    check(a, b, bias=bias.to(dtype), c=c, gen=gen)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_float32_c_is_rounded_with_the_product(dtype, device):
    """c + a b, with gradients, on every schedule. c alone is not representable in 16 bits."""
    gen = generator("wide c")
    for m, n, k in ((1, 300, 64), (40, 520, 96), (256, 512, 128), (300, 257, 64)):
        a, b = (
            randn(gen, m, k, dtype=dtype, device=device),
            randn(gen, k, n, dtype=dtype, device=device),
        )
        c = randn(gen, m, n, device=device) * 100
        want = (f64(c) + f64(ops.gemm(a, b, out_dtype=torch.float32))).to(dtype)
        got = ops.gemm(a, b, c=c)
        # ties of the float32 sum may round differently
        assert (got != want).float().mean() < 0.01 and torch.allclose(
            got.float(), want.float(), rtol=1e-2, atol=1e-2
        )
    leaves = [x.requires_grad_() for x in (a, b, c)]
    grads = torch.autograd.grad(torch_gpukern.gemm(a, b, c=c).float().sum(), leaves)
    assert grads[2].dtype == torch.float32 and torch.equal(grads[2], torch.ones_like(c))
    with pytest.raises(
        ValueError, match="c must be (b?float16|bfloat16) .as a. or float32, got float64"
    ):
        ops.gemm(a.detach(), b.detach(), c=c.detach().double())


def test_fp32_precision(device):
    gen = generator("tf32")
    a, b = make(gen, 40, 50, 60, torch.float32, device)
    ieee = ops.gemm(a, b, fp32_precision="ieee")
    assert same_bits(ieee, ops.gemm(a, b))
    if device == "cpu":
        assert same_bits(ieee, ops.gemm(a, b, fp32_precision="tf32"))


def test_public_function_is_the_op(device):
    gen = generator("public")
    a, b = make(gen, 12, 20, 30, torch.float32, device)
    bias, c = randn(gen, 20, device=device), randn(gen, 12, 20, device=device)
    got = torch_gpukern.gemm(
        a, b, bias, c=c, alpha=2.0, beta=0.5, activation="gelu", out_dtype=torch.float32
    )
    assert same_bits(got, ops.gemm(a, b, bias, c, 2.0, 0.5, "gelu", torch.float32, "ieee"))
    with torch.no_grad():
        assert same_bits(
            got, torch_gpukern.gemm(a, b, bias, c=c, alpha=2.0, beta=0.5, activation="gelu")
        )


# --------------------------------------------------------------------------------------------------
# raw ops


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_raw_forward(activation, dtype, device):
    gen = generator("raw", activation)
    a, b = make(gen, 21, 33, 14, dtype, device)
    bias = randn(gen, 33, dtype=dtype, device=device)
    out, preact = ops.gemm_fwd(a, b, bias, activation=activation)
    assert same_bits(out, ops.gemm(a, b, bias, activation=activation))
    if activation in ("none", "relu"):
        assert preact.shape == (0,) and preact.dtype == out.dtype and preact.device == out.device
    else:
        assert preact.dtype == out.dtype and preact.is_contiguous()
        assert same_bits(preact, ops.gemm(a, b, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_raw_activation_gradient(activation, dtype, device):
    gen = generator("act_bwd", activation, dtype)
    x = torch.cat([randn(gen, 500, std=2.0), torch.linspace(-12, 12, 401)]).to(dtype).to(device)
    grad = randn(gen, x.numel(), dtype=dtype, device=device)
    x, grad = strided(x.view(17, 53), (1, 0)), strided(grad.view(17, 53), pad=2)
    saved = TORCH_ACTIVATION[activation](x) if activation == "relu" else x

    def bwd(dtype):
        leaf = x.detach().to(dtype).clone().requires_grad_()
        TORCH_ACTIVATION[activation](leaf).backward(grad.to(dtype))
        return leaf.grad

    assert_close_as(
        bwd(yard_dtype(dtype)),
        ops.gemm_act_bwd(grad, saved, activation),
        bwd(torch.float64),
        "grad_in",
    )


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
@pytest.mark.parametrize("begin", (-6, -4, -2, 0, 2, 4))
def test_slope_of_an_activation(begin, activation, device):
    """Derivatives below 0 are small, so the rounding error of 1 - tanh(u)^2 would dominate them."""
    x = torch.linspace(begin, begin + 2, 20001, device=device)

    def slope(dtype):
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(TORCH_ACTIVATION[activation](leaf).sum(), leaf)[0]

    assert_close_as(
        slope(torch.float32),
        ops.gemm_act_bwd(torch.ones_like(x), x, activation),
        slope(torch.float64),
    )


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activation_gradient_at_the_ends(activation, dtype, device):
    """For very negative and very large inputs the derivative is 0 and 1, even if the saved value or
    its powers overflow. NaN stays NaN."""
    top = torch.finfo(dtype).max
    ends = [-math.inf, -top, -top / 8, -1e30, -1e14, -6e4, -1001.0, -1000.0]
    saved = torch.tensor(
        [x for x in ends if abs(x) <= top or math.isinf(x)], dtype=dtype, device=device
    )
    got = ops.gemm_act_bwd(torch.ones_like(saved), saved, activation)
    assert torch.equal(got, torch.zeros_like(got))
    got = ops.gemm_act_bwd(torch.full_like(saved, 3), -saved, activation)
    assert torch.equal(got, torch.full_like(got, 3))
    nan = torch.full((3,), math.nan, dtype=dtype, device=device)
    assert ops.gemm_act_bwd(torch.ones_like(nan), nan, activation).isnan().all()


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_of_a_product_that_its_dtype_does_not_hold(activation, dtype, device):
    """The saved value is infinite in float16. The gradient must be 0 at -inf and unchanged at
    +inf."""
    size = 300.0 if dtype == torch.float16 else 1e4
    a = torch.full((8, 8), size, dtype=dtype, device=device, requires_grad=True)
    for sign, want in ((-1, 0.0), (1, 8.0)):
        b = torch.full((8, 8), sign * size, dtype=dtype, device=device)
        bias = torch.zeros(8, dtype=dtype, device=device, requires_grad=True)
        out = ops.gemm(a, b, bias, activation=activation)
        assert torch.equal(out, torch.zeros_like(out)) or sign > 0
        da, dbias = torch.autograd.grad(out, (a, bias), torch.ones_like(out))
        assert torch.equal(dbias, torch.full_like(dbias, want)) and torch.equal(
            da, torch.full_like(da, want * size)
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_relu_gradient_is_torchs_everywhere(dtype, device):
    """The gradient passes at NaN. Where relu is 0, even an infinite gradient gives 0."""
    saved = torch.tensor(
        [math.nan, -0.0, 0.0, 1.0, math.inf, 1e-7, -1.0], dtype=dtype, device=device
    )
    for grad in (1.0, -2.0, math.inf, math.nan):
        grads = torch.full_like(saved, grad)
        want = torch.ops.aten.threshold_backward(grads, saved, 0)
        got = ops.gemm_act_bwd(grads, saved, "relu")
        assert torch.equal(got.nan_to_num(77.0), want.nan_to_num(77.0))
    one = torch.ones(1, 1, dtype=dtype, device=device)
    x = torch.tensor([[math.nan], [2.0], [-2.0]], dtype=dtype, device=device, requires_grad=True)
    y = x.detach().requires_grad_()
    ops.gemm(x, one, activation="relu").sum().backward()
    torch.relu(y @ one).sum().backward()
    assert torch.equal(x.grad, y.grad)


# --------------------------------------------------------------------------------------------------
# gradients


def gradients(run, tensors, grad_out):
    """run(**leaves).backward(grad_out) with every tensor a leaf of its own dtype and strides;
    returns out and grads."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = run(**leaves)
    out.backward(grad_out.to(out.dtype))
    return out, {name: t.grad for name, t in leaves.items()}


@pytest.mark.parametrize(
    "case",
    grid(
        60,
        dtype=FLOATS,
        activation=ACTIVATIONS,
        shapes=(
            ((5, 7), (7, 9)),
            ((33, 65), (65, 40)),
            ((2, 3, 17, 8), (8, 11)),
            ((4, 6, 5), (4, 5, 7)),
            ((2, 1, 9, 5), (3, 5, 6)),
            ((130, 70), (70, 129)),
        ),
        epilogue=("plain", "bias", "c", "c_row", "all"),
        layout=("dense", "transposed"),
        grad=("dense", "expanded", "strided"),
    ),
)
def test_backward(case, device):
    gen = generator("gemm backward", case.id)
    a, b = (
        LAYOUTS[case.layout](randn(gen, *s, dtype=case.dtype, device=device)) for s in case.shapes
    )
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1])
    tensors = dict(a=a, b=b)
    kwargs = dict(activation=case.activation)
    if case.epilogue in ("bias", "all"):
        tensors["bias"] = randn(gen, shape[-1], dtype=case.dtype, device=device)
    if case.epilogue in ("c", "c_row", "all"):
        c_shape = (shape[-1],) if case.epilogue == "c_row" else shape
        tensors["c"] = randn(gen, *c_shape, dtype=case.dtype, device=device)
    if case.epilogue == "all":
        kwargs.update(alpha=0.5, beta=-2.0)
    grad = randn(gen, *shape, dtype=case.dtype, device=device)
    if case.grad == "expanded":
        grad = randn(gen, dtype=case.dtype, device=device).expand(shape)
    elif case.grad == "strided":
        grad = strided(grad, step=2)
    out, got = gradients(lambda **t: ops.gemm(**t, **kwargs), tensors, grad)
    dtype = yard_dtype(case.dtype)

    def draw_of(inputs):
        _, want = gradients(lambda **t: reference.gemm(**t, **kwargs), f64(inputs), f64(grad))
        cast = {name: t.to(dtype) for name, t in inputs.items()}
        return want, cast, [gradients(lambda **t: torch_gemm(**t, **kwargs), cast, grad)[1]]

    ref, cast, plain = draw_of(tensors)
    # Permuting the problem, and the gradients back, gives other orders of the sums over rows and
    # columns.
    permuted = [[torch.randperm(n, generator=gen) for n in shape[-2:]] for _ in range(3)]

    def each():
        yield from plain
        for rows, cols in permuted:
            mixed = {"a": cast["a"][..., rows, :], "b": cast["b"][..., cols]}
            if "bias" in cast:
                mixed["bias"] = cast["bias"][cols]
            if "c" in cast:
                c = cast["c"][..., cols]
                mixed["c"] = c if c.dim() == 1 else c[..., rows, :]
            back = gradients(
                lambda **t: torch_gemm(**t, **kwargs), mixed, grad[..., rows, :][..., cols]
            )[1]
            undo_rows, undo_cols = rows.argsort(), cols.argsort()
            back["a"], back["b"] = back["a"][..., undo_rows, :], back["b"][..., undo_cols]
            if "bias" in back:
                back["bias"] = back["bias"][undo_cols]
            if "c" in back:
                c = back["c"][..., undo_cols]
                back["c"] = c if c.dim() == 1 else c[..., undo_rows, :]
            yield back

    draws = [(ref, cast, Lazily(each()))]

    def yards_of(draw, name):
        if draw == len(draws):
            draws.append(draw_of(dict(zip(tensors, shuffled(gen, *tensors.values())))))
        want, _, found = draws[draw]
        return ((y[name], want[name]) for y in found)

    assert out.dtype == case.dtype
    for name, t in tensors.items():
        assert got[name].dtype == t.dtype and got[name].shape == t.shape
        assert_close_as(partial(yards_of, name=name), got[name], ref[name], f"grad of {name}")


@pytest.mark.parametrize(
    "wanted", [("a",), ("b",), ("bias",), ("c",), ("a", "bias"), ("b", "c")], ids=str
)
@pytest.mark.parametrize("activation", ("none", "silu", "relu"))
def test_only_the_wanted_gradients(wanted, activation, device):
    gen = generator("wanted", wanted)
    t = dict(a=randn(gen, 6, 7), b=randn(gen, 7, 8), bias=randn(gen, 8), c=randn(gen, 6, 8))
    t = {name: x.to(device) for name, x in t.items()}
    full = {name: x.clone().requires_grad_() for name, x in t.items()}
    part = {name: x.clone().requires_grad_(name in wanted) for name, x in t.items()}
    ops.gemm(**full, activation=activation).square().sum().backward()
    ops.gemm(**part, activation=activation).square().sum().backward()
    for name, x in part.items():
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or same_bits(x.grad, full[name].grad)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_have_their_inputs_dtype(dtype, device):
    gen = generator("grad dtype")
    a, b = (t.requires_grad_() for t in make(gen, 6, 8, 7, dtype, device))
    bias = randn(gen, 8, device=device).requires_grad_()
    c = randn(gen, 6, 8, dtype=dtype, device=device).requires_grad_()
    ops.gemm(a, b, bias, c, out_dtype=torch.float32).sum().backward()
    assert [t.grad.dtype for t in (a, b, bias, c)] == [dtype, dtype, torch.float32, dtype]


def test_broadcast_gradients_sum_in_float32(device):
    """A sum of 4096 ones in bfloat16, one by one, would stop at 256."""
    a = torch.ones(4096, 1, 1, dtype=torch.bfloat16, device=device)
    b = torch.ones(1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    bias = torch.ones(1, dtype=torch.bfloat16, device=device, requires_grad=True)
    c = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    ops.gemm(a, b, bias, c).sum().backward()
    assert b.grad.item() == bias.grad.item() == c.grad.item() == 4096


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, device, one_thread):
    gen = generator("gradcheck", activation)
    shapes = dict(a=(2, 3, 4), b=(4, 5), bias=(5,), c=(3, 1))
    t = [
        randn(gen, *s, dtype=torch.float64, device=device).requires_grad_() for s in shapes.values()
    ]
    run = lambda a, b, bias, c: ops.gemm(a, b, bias, c, 0.7, -1.3, activation)  # noqa: E731
    assert torch.autograd.gradcheck(run, t)
    assert torch.autograd.gradcheck(lambda a, b: ops.gemm(a, b, activation=activation), t[:2])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("activation", ("none", "gelu", "relu"))
def test_opcheck_of_the_activation_backward(dtype, activation, device):
    a = randn(generator("opcheck"), 2, 4, 6, dtype=dtype, device=device)
    torch.library.opcheck(ops.gemm_act_bwd.default, (strided(a, step=2), a, activation))

# SPDX-License-Identifier: BSD-3-Clause
"""moe_unpermute and its gradients against the formula in float64, on both devices."""

import math

import pytest
import torch
from conftest import generator, randn
from torch.autograd import gradcheck, gradgradcheck

import torch_gpukern as gk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}
# rows, columns, tokens, choices of a token: vectors of every kernel and rests, more than 8 and more
# than 32 choices, rows without a place and rows with several
SHAPES = (
    (6, 8, 4, 2),
    (40, 64, 20, 2),
    (33, 30, 11, 3),
    (1, 1, 5, 4),
    (64, 2048, 8, 8),
    (20, 4100, 3, 9),
    (70, 257, 9, 40),
    (5, 7168, 1, 1),
)


def drawn(shape, dtype, device, distinct=False, wide_weight=True):
    """rows, place, weight. Rows that no place names hold NaN, and so do weights of dropped
    tokens."""
    (r, h, t, j), gen = shape, generator("moe_unpermute", shape)
    rows = randn(gen, r, h, device=device).to(dtype)
    weight = torch.rand(t, j, generator=gen).to(device)
    weight = weight.to(torch.promote_types(dtype, torch.float32) if wide_weight else dtype)
    if distinct:
        place = torch.randperm(max(r, t * j), generator=gen)[: t * j].reshape(t, j)
        place[place >= r] = -1
    else:
        place = torch.randint(-1, r, (t, j), generator=gen)
    place = place.to(device)
    named = torch.zeros(r, dtype=torch.bool, device=device)
    named[place[place >= 0]] = True
    rows[~named] = math.nan
    weight[place < 0] = math.nan
    return rows, place, weight


def formula(rows, place, weight):
    """The sum in float64, and the sum of the terms' magnitudes."""
    kept = place >= 0
    picked = torch.where(kept[..., None], rows.double()[place.clamp(min=0)], 0.0)
    by = torch.where(kept, weight.double(), 0.0)[..., None]
    return (picked * by).sum(1), (picked * by).abs().sum(1)


def within(name, got, want, size, terms):
    """Each element errs by one rounding to its dtype and by float32 sums of so many terms."""
    sums = UNIT[torch.float64 if got.dtype is torch.float64 else torch.float32]
    least = 2**-24 if got.dtype is torch.float16 else 0  # half of the smallest number
    allowed = UNIT[got.dtype] * want.abs() + 2 * (terms + 1) * sums * size + least
    worst = ((got.double() - want).abs() - allowed).max() if got.numel() else torch.tensor(0.0)
    assert worst <= 0, f"{name}: {worst:.3g} more than allowed"


@pytest.mark.parametrize("wide_weight", (True, False))
@pytest.mark.parametrize("distinct", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moe_unpermute(shape, dtype, distinct, wide_weight, device):
    (_, h, t, j) = shape
    rows, place, weight = drawn(shape, dtype, device, distinct, wide_weight)
    want, size = formula(rows, place, weight)
    for index in (torch.int32, torch.int64):
        out = gk.moe_unpermute(rows, place.to(index), weight)
        assert out.shape == (t, h) and out.dtype is dtype
        within("out", out, want, size, j)
        assert torch.equal(out, gk.moe_unpermute(rows, place.to(index), weight))


@pytest.mark.parametrize("distinct", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, dtype, distinct, device):
    (r, h, t, j) = shape
    rows, place, weight = drawn(shape, dtype, device, distinct)
    grad = randn(generator("moe_unpermute grad", shape), t, h, device=device).to(dtype)
    rows.requires_grad_()
    weight.requires_grad_()
    out = gk.moe_unpermute(rows, place, weight)
    drows, dweight = torch.autograd.grad(out, (rows, weight), grad)
    assert drows.dtype is dtype and dweight.dtype is weight.dtype
    kept = place >= 0
    at, g = place[kept], grad.double()
    terms = weight.detach().double()[..., None] * g[:, None]
    want = torch.zeros(r, h, dtype=torch.float64, device=device)
    size = want.index_add(0, at, terms[kept].abs())
    within("drows", drows, want.index_add(0, at, terms[kept]), size, t * j)
    named = torch.zeros(r, dtype=torch.bool, device=device)
    named[at] = True
    assert (drows[~named] == 0).all()
    products = torch.where(
        kept[..., None], g[:, None] * rows.detach().double()[place.clamp(min=0)], 0.0
    )
    within("dweight", dweight, products.sum(-1), products.abs().sum(-1), h)
    assert (dweight[~kept] == 0).all()
    again = torch.ops.gpukern.moe_unpermute_bwd(grad, rows, place, weight, True, True)
    assert torch.equal(again[0], drows) and torch.equal(again[1], dweight)
    for needs in ((True, False), (False, True), (False, False)):
        part = torch.ops.gpukern.moe_unpermute_bwd(grad, rows, place, weight, *needs)
        for got, whole, needed in zip(part, again, needs, strict=True):
            assert torch.equal(got, whole) if needed else got.numel() == 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_strides(dtype, device):
    rows, place, weight = drawn((30, 64, 7, 3), dtype, device)
    want = gk.moe_unpermute(rows, place, weight)
    padded = torch.full((30, 2, 66), math.nan, dtype=dtype, device=device)
    for columns in (slice(0, 64), slice(1, 65)):
        padded[:, 0, columns] = rows
        assert torch.equal(gk.moe_unpermute(padded[:, 0, columns], place, weight), want)
    assert torch.equal(gk.moe_unpermute(rows.mT.contiguous().mT, place, weight), want)
    apart = torch.stack((place, place + 100), -1)[..., 0], weight.mT.contiguous().mT
    assert torch.equal(gk.moe_unpermute(rows, *apart), want)
    one = weight.new_tensor(0.5).expand(weight.shape)
    assert torch.equal(
        gk.moe_unpermute(rows, place, one), gk.moe_unpermute(rows, place, one.contiguous())
    )


def test_sums_have_the_order_of_the_choices(device):
    """In float32, 1 + 2^24 - 2^24 is 0 or 1: it depends on the order."""
    rows = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]], device=device).expand(3, 8)
    ones = torch.ones(1, 3, device=device)
    for order, want in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0), ((1, 0, 2), 0.0)):
        place = torch.tensor([order], device=device)
        assert (gk.moe_unpermute(rows, place, ones) == want).all(), order
    grad = torch.tensor([1.0, 2.0**24, -(2.0**24)], device=device)
    for order, want in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0)):
        given = grad[list(order)][:, None].expand(3, 8).contiguous()
        place = torch.zeros(3, 1, dtype=torch.int64, device=device)
        drows = torch.ops.gpukern.moe_unpermute_bwd(given, rows[:1], place, ones.mT, True, False)[0]
        assert (drows == want).all(), order


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_empty(dtype, device):
    rows, weight = torch.ones(3, 8, dtype=dtype, device=device), torch.ones(4, 2, device=device)
    place = torch.full((4, 2), -1, device=device)
    assert (gk.moe_unpermute(rows[:0], place, weight) == 0).all()
    assert (gk.moe_unpermute(rows, place[:, :0], weight[:, :0]) == 0).all()
    assert gk.moe_unpermute(rows, place[:0], weight[:0]).shape == (0, 8)
    assert gk.moe_unpermute(rows[:, :0], place, weight).shape == (4, 0)
    for given, chosen, by in (
        (rows, place[:0], weight[:0]),
        (rows[:0], place, weight),
        (rows, place[:, :0], weight[:, :0]),
        (rows[:, :0], place, weight),
    ):
        leaves = given.clone().requires_grad_(), by.clone().requires_grad_()
        out = gk.moe_unpermute(leaves[0], chosen, leaves[1])
        for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
            assert grad.shape == leaf.shape and (grad == 0).all()


def test_a_place_that_is_no_row(device):
    rows, weight = torch.ones(3, 8, device=device), torch.ones(2, 2, device=device)
    place = torch.tensor([[0, 3], [1, 2]], device=device)
    grad = torch.ones(2, 8, device=device)
    calls = (
        lambda: gk.moe_unpermute(rows, place, weight),
        lambda: torch.ops.gpukern.moe_unpermute_bwd(grad, rows, place, weight, True, True),
    )
    for call in calls:
        if device == "cpu":
            with pytest.raises(IndexError, match=r"place is expected to hold rows, below 3"):
                call()
            continue
        made = call()
        torch.cuda.synchronize()
        with pytest.raises(IndexError):
            gk.check_errors()
        if isinstance(made, torch.Tensor):
            assert (made[0] == 1).all() and (made[1] == 2).all()
        else:
            assert (made[0] == 1).all() and made[1].tolist() == [[8, 0], [8, 8]]


def test_gradcheck_of_both_orders(device):
    gen = generator("moe_unpermute", "gradcheck")
    rows = randn(gen, 5, 3, dtype=torch.float64, device=device).requires_grad_()
    weight = randn(gen, 4, 2, dtype=torch.float64, device=device).requires_grad_()
    place = torch.tensor([[0, 3], [-1, 3], [4, 0], [2, -5]], device=device)

    def call(rows, weight):
        return gk.moe_unpermute(rows, place, weight)

    assert gradcheck(call, (rows, weight)) and gradgradcheck(call, (rows, weight))


@pytest.mark.parametrize("batched", ("rows", "place", "weight", "rows and place", "all"))
def test_vmap(batched, device):
    rows, place, weight = drawn((6, 8, 4, 2), torch.float32, device)
    names = ("rows", "place", "weight") if batched == "all" else batched.split(" and ")
    given = {"rows": rows.nan_to_num(0.0), "place": place, "weight": weight.nan_to_num(0.0)}
    many = {
        name: torch.stack([x, x.flip(0), x.flip(0).roll(1, 0)]) if name in names else x
        for name, x in given.items()
    }
    dims = tuple(0 if name in names else None for name in many)
    slices = [
        tuple(x[i] if d == 0 else x for x, d in zip(many.values(), dims, strict=True))
        for i in range(3)
    ]
    got = torch.vmap(gk.moe_unpermute, in_dims=dims)(*many.values())
    assert torch.equal(got, torch.stack([gk.moe_unpermute(*s) for s in slices]))

    def gradients(rows, place, weight):
        def loss(rows, weight):
            return gk.moe_unpermute(rows, place, weight).square().sum()

        return torch.func.grad(loss, argnums=(0, 1))(rows, weight)

    got = torch.vmap(gradients, in_dims=dims)(*many.values())
    for i, one in enumerate(slices):
        for a, b in zip(got, gradients(*one), strict=True):
            torch.testing.assert_close(a[i], b)


def test_vmap_keeps_a_place_that_is_no_row_out_of_other_slices():
    rows = torch.ones(2, 3, 8)
    place = torch.tensor([[[0, 3]], [[1, 2]]])
    with pytest.raises(IndexError, match="place is expected to hold rows"):
        torch.vmap(gk.moe_unpermute)(rows, place, torch.ones(2, 1, 2))


def test_compiled(device):
    def step(rows, place, weight):
        return gk.moe_unpermute(rows, place, weight).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((6, 8, 4, 2), (40, 64, 20, 3)):
        rows, place, weight = drawn(shape, torch.float32, device)
        leaves = rows.requires_grad_(), weight.requires_grad_()
        out = compiled(rows, place, weight)
        want = step(rows, place, weight)
        assert torch.equal(out, want)
        for got, ref in zip(
            torch.autograd.grad(out.sum(), leaves),
            torch.autograd.grad(want.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(got, ref)


def test_flops_and_cost():
    rows, place, weight = drawn((40, 64, 20, 2), torch.bfloat16, "cpu")
    rows.requires_grad_()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out = gk.moe_unpermute(rows, place, weight)
    assert counter.get_total_flops() == 2 * 20 * 2 * 64
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 20 * 2 * 64
    found = gk.explain("moe_unpermute", rows, place, weight)
    assert found["flops"] == 2 * 20 * 2 * 64
    assert found["bytes"] == (20 * 2 * 64 + 20 * 64) * 2 + 20 * 2 * (8 + 4)


@pytest.mark.gpu
def test_captured(device):
    if device == "cpu":
        pytest.skip("a CUDA graph")
    rows, place, weight = drawn((64, 2048, 8, 8), torch.bfloat16, device)
    grad = torch.ones(8, 2048, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gk.moe_unpermute(rows, place, weight)
        made = torch.ops.gpukern.moe_unpermute_bwd(grad, rows, place, weight, True, True)
    other = place.flip(0)
    rows.nan_to_num_(0.5)
    weight.nan_to_num_(0.5)
    place.copy_(other)
    graph.replay()
    assert torch.equal(out, gk.moe_unpermute(rows, other, weight))
    for got, want in zip(
        made,
        torch.ops.gpukern.moe_unpermute_bwd(grad, rows, other, weight, True, True),
        strict=True,
    ):
        assert torch.equal(got, want)

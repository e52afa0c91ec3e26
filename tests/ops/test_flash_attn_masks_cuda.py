# SPDX-License-Identifier: BSD-3-Clause
"""Masks and biases of flash_attn on CUDA: the builder against the CPU's; attention and its gradients
against the reference in float64 on the CPU."""

import math

import pytest
import torch

import torch_gpukern as gk
from torch_gpukern import reference
from torch_gpukern.ops.attn_mask import Layout

pytestmark = pytest.mark.gpu
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {BF16: 8e-3, F16: 2e-3, F32: 2e-5, F64: 1e-11}


def draw(shape, dtype=F32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(dtype)


def bools(*shape, share=0.5, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=gen) < share


def near(got, expected, dtype):
    got, expected = got.double().cpu(), expected.double()
    assert torch.equal(got == -math.inf, expected == -math.inf)
    finite = expected.isfinite()
    error = (got[finite] - expected[finite]).norm()
    assert error <= TOLERANCE[dtype] * max(expected[finite].norm(), 1.0)


def lists_of(mask):
    """The parts of a stored mask that kernels read besides its bits: the tiles in their order, with
    their lists."""
    at, data, found = Layout(mask.store, mask.seq_q, mask.seq_k, False), mask.data.cpu(), []
    n, m = at.tiles_q, at.tiles_k
    tiles = data[..., at.tiles : at.tiles + 4 * n].unflatten(-1, (n, 4)).flatten(0, 1)
    entries = data[..., at.lists : at.words].contiguous().view(torch.int16)[..., : n * m]
    for own, of in zip(tiles.tolist(), entries.unflatten(-1, (n, m)).flatten(0, 1), strict=True):
        found += [(tile, full, of[tile, :count].tolist()) for count, full, tile, _ in own]
    return found


def masks(seq_q, seq_k):
    """Yields (name, the function that makes the mask, its arguments, its keywords)."""
    gen = torch.Generator().manual_seed(1)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32)

    key = torch.arange(seq_k, dtype=torch.int32)
    yield "bools", gk.attn_mask_of, (bools(2, 1, seq_q, seq_k),), {}
    yield "few", gk.attn_mask_of, (bools(2, 4, seq_q, seq_k, share=0.003),), {}
    yield "nothing", gk.attn_mask_of, (torch.zeros(1, 1, seq_q, seq_k, dtype=torch.bool),), {}
    yield "ranges", gk.attn_mask_ranges, (integers(-9, seq_k + 9, 1, 4, seq_q, 4), seq_k), {}
    columns = torch.stack([key + integers(0, 300, seq_k), key + integers(0, 600, seq_k)], -1)
    yield "columns", gk.attn_mask_columns, (columns[None, None], seq_q), {"is_causal": True}


@pytest.mark.parametrize("lengths", [(640, 640), (333, 1291), (37, 200)])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_masks(lengths, which, dtype):
    name, make, args, options = list(masks(*lengths))[which]
    here = make(*args, **options)
    there = make(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in args), **options)
    assert torch.equal(here.dense(), there.dense().cpu()), name
    assert lists_of(here) == lists_of(there), name
    q, k, v = (
        draw((2, h, n, 128), dtype, seed)
        for seed, (h, n) in enumerate([(4, lengths[0]), (2, lengths[1])] + [(2, lengths[1])])
    )
    out, lse = gk.flash_attn(q.cuda(), k.cuda(), v.cuda(), attn_mask=there, return_lse=True)
    expected, expected_lse = reference.flash_attn(
        q.double(), k.double(), v.double(), attn_mask=here, return_lse=True
    )
    near(out, expected, dtype)
    near(lse, expected_lse, dtype)


# ---- head_dim above 128: steps of 64 keys ----
WIDE = [(192, 192), (256, 256), (192, 128), (136, 200), (128, 256)]  # of q and of v


def packed_bits(mask):
    """bool [.., Sk] as uint8 [.., ceil(Sk / 8)]."""
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)


def block_lists(mask):
    """FlexAttention's lists of the partial and of the full blocks of a bool mask [1, 1, Sq, Sk]."""
    seq_q, seq_k = mask.shape[2:]
    pad = (0, -seq_k % 128, 0, -seq_q % 128)
    blocks = [
        torch.nn.functional.pad(mask, pad, value=value)
        .unflatten(3, (-1, 128))
        .unflatten(2, (-1, 128))
        .transpose(3, 4)
        .flatten(4)
        for value in (False, True)
    ]
    full = blocks[1].all(-1)
    found = []
    for kind in (blocks[0].any(-1) & ~full, full):
        found += [kind.sum(-1).to(torch.int32), kind.int().argsort(-1, descending=True).int()]
    return found


def windows(seq_q, seq_k):
    """Ranges: a window of 150 keys, and 70 first keys that all queries see. Queries 40 to 60 see
    nothing, and no query sees keys from 65 before the last one on."""
    i = torch.arange(seq_q) + max(seq_k - seq_q, 0)
    end = (i + 1).clamp(max=max(seq_k - 65, 1))
    rows = torch.stack([(i - 149).clamp(min=70), end, 0 * i, end.clamp(max=70)], -1)
    rows[40:60] = 0
    return rows.to(torch.int32)


LENGTHS = [(640, 640), (333, 1291), (300, 1236), (37, 200), (130, 64), (1, 65), (257, 512)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_masks_of_wide_heads(dims, lengths, dtype):
    """Every source of a mask against float64, with sinks, groups of heads, lse, and NaN in keys that
    no query sees."""
    seq_q, seq_k = lengths
    kinds = [(make, args, options) for _, make, args, options in masks(*lengths)]
    kinds.append((gk.attn_mask_ranges, (windows(*lengths)[None, None], seq_k), {}))
    q = draw((2, 4, seq_q, dims[0]), dtype, 0).cuda()
    k, v = (draw((2, 2, seq_k, n), dtype, seed).cuda() for seed, n in enumerate(dims, 1))
    sinks = draw((4,), F32, 7).cuda()
    for make, args, options in kinds:
        given = (x.cuda() if isinstance(x, torch.Tensor) else x for x in args)
        mask = make(*given, **options)
        seen = mask.dense().any(2).flatten(0, 1).any(0)[:, None]
        poisoned = [torch.where(seen, x, math.nan) for x in (k, v)]
        wide = [torch.where(seen, x, 0).double() for x in (k, v)]
        for own in ({}, {"sinks": sinks}):
            rules = {"attn_mask": mask, "return_lse": True}
            got = gk.flash_attn(q, *poisoned, **rules, **own)
            own = {name: x.double() for name, x in own.items()}
            want = reference.flash_attn(q.double(), *wide, **rules, **own)
            for x, y in zip(got, want, strict=True):
                near(x, y.cpu(), dtype)


@pytest.mark.parametrize("lengths", [(640, 640), (300, 1236), (333, 1291)])
@pytest.mark.parametrize("dims", WIDE)
def test_forms_of_a_wide_mask_give_the_same_bits(dims, lengths):
    """bool, bits, ranges and FlexAttention's lists of one mask; with and without a bias."""
    seq_q, seq_k = lengths
    ranges = gk.attn_mask_ranges(windows(*lengths).cuda(), seq_k)
    dense = ranges.dense()[:1, :1].cpu()
    num, list_of, num_full, full = (x.cuda() for x in block_lists(dense))
    forms = [
        ranges,
        dense.cuda(),
        gk.attn_mask_of(packed_bits(dense).cuda(), seq_k=seq_k),
        gk.attn_mask_blocks(
            num, list_of, num_full, full, mask=dense.cuda(), seq_q=seq_q, seq_k=seq_k
        ),
    ]
    q = draw((1, 4, seq_q, dims[0]), BF16, 0).cuda()
    k, v = (draw((1, 2, seq_k, n), BF16, seed).cuda() for seed, n in enumerate(dims, 1))
    bias = draw((1, 1, seq_q, (seq_k + 7) // 8 * 8), BF16, 4).cuda()[..., :seq_k]
    for more in ({}, {"bias": bias}):
        results = [gk.flash_attn(q, k, v, attn_mask=mask, **more) for mask in forms]
        wide = {name: x.double() for name, x in more.items()}
        want = reference.flash_attn(
            *(x.double() for x in (q, k, v)), attn_mask=dense.cuda(), **wide
        )
        near(results[0], want.cpu(), BF16)
        for other in results[1:]:
            assert torch.equal(results[0], other)


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("lengths", [(300, 384), (300, 328), (140, 584)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_biases_of_wide_heads(dims, lengths, dtype):
    """Every form of a bias, alone, beside causal, a window or a mask, against float64."""
    seq_q, seq_k = lengths
    q = draw((2, 4, seq_q, dims[0]), dtype, 0).cuda()
    k, v = (draw((2, 2, seq_k, n), dtype, seed).cuda() for seed, n in enumerate(dims, 1))
    least = torch.finfo(dtype).min
    full = 3 * draw((1, 4, seq_q, seq_k), dtype, 9).cuda()
    full[..., ::3] = -math.inf
    full[..., 1::7] = least
    keys = 3 * draw((2, 1, 1, seq_k), dtype, 10).cuda()
    keys[..., ::5] = -math.inf
    distance = draw((4, seq_q + seq_k - 1), F32, 11).cuda()
    for given in ({"bias": full}, {"bias": keys}, {"distance_bias": distance}):
        wide = {n: torch.where(x <= least, -math.inf, x.double()) for n, x in given.items()}
        rules = [
            {},
            {"is_causal": True, "diagonal": seq_k - seq_q},
            {"window_left": 90, "window_right": 20},
        ]
        if given.get("bias") is full:
            rules.append({"attn_mask": bools(1, 4, seq_q, seq_k).cuda()})
        for more in rules:
            got = gk.flash_attn(q, k, v, **given, **more, return_lse=True)
            want = reference.flash_attn(
                *(x.double() for x in (q, k, v)), **wide, **more, return_lse=True
            )
            for x, y in zip(got, want, strict=True):
                near(x, y.cpu(), dtype)


REPEATED = [
    "words",
    "ranges",
    "columns",
    "bias",
    "mask and bias",
    "keys",
    "distance",
    "causal distance",
]
HEADS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


@pytest.mark.parametrize("kind", REPEATED)
@pytest.mark.parametrize("dims", HEADS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_fifty_calls_give_the_same_bits(kind, dims, dtype):
    """Copies refill the stages that words of masks, biases and distances are read from. A stage that
    is refilled too soon changes some values of some calls. Each thread block takes several tiles.
    Columns 0 to 15 of V tell blocks of 64 keys apart, so that no error is averaged away."""
    batch, heads, seq = 4, 16, 1000
    leaves = [
        draw((batch, heads if n == 0 else 4, seq, dims[n == 2]), dtype, n).cuda() for n in range(3)
    ]
    block = torch.arange(seq).cuda()[:, None] // 64
    leaves[2][..., :16] = (block == torch.arange(16).cuda()).to(dtype)
    i = torch.arange(seq)
    window = torch.stack([(i - 200).clamp(min=70), i + 1, 0 * i, (i + 1).clamp(max=70)], -1).int()
    end = (i // 300 * 300 + 350).int()[None, None, :, None]
    mask = {
        "words": lambda: gk.attn_mask_of(bools(1, 1, seq, seq).cuda()),
        "mask and bias": lambda: gk.attn_mask_of(bools(1, 1, seq, seq).cuda()),
        "ranges": lambda: gk.attn_mask_ranges(window.cuda(), seq),
        "columns": lambda: gk.attn_mask_columns(end.cuda(), seq, is_causal=True),
    }
    given = {"attn_mask": mask[kind]()} if kind in mask else {}
    if "bias" in kind:
        given["bias"] = draw((1, heads, seq, seq), dtype, 9).cuda()
    if kind == "keys":
        given["bias"] = draw((batch, 1, 1, seq), dtype, 10).cuda()
    if "distance" in kind:
        given["distance_bias"] = draw((heads, 2 * seq - 1), F32, 11).cuda()
        given["is_causal"] = kind.startswith("causal")
    q, k, v = (x.requires_grad_() for x in leaves)
    out = gk.flash_attn(q, k, v, **given)
    for _ in range(50):
        assert torch.equal(gk.flash_attn(q, k, v, **given), out)
    wide = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in given.items()
    }
    if kind == "keys":
        wide["bias"] = wide["bias"][:1]
    want = reference.flash_attn(*(x.detach()[:1].double() for x in (q, k, v)), **wide)
    near(out.detach()[:1], want.cpu(), dtype)
    # other gradients are added up in any order
    if kind in mask or kind == "bias" or max(dims) > 128:
        inner = [k, v]
        if kind == "bias" and max(dims) > 128:
            # each element of it is of one pair
            given["bias"] = draw((batch, heads, seq, seq), dtype, 9).cuda().requires_grad_()
            inner.append(given["bias"])
            out = gk.flash_attn(q, k, v, **given)
        grad = draw(tuple(out.shape), dtype, 5).cuda()
        first = torch.autograd.grad(out, inner, grad, retain_graph=True)
        for _ in range(50):
            again = torch.autograd.grad(out, inner, grad, retain_graph=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def wide_biases(seq_q, seq_k, dtype):
    """The biases of 2 sequences and 4 heads, by name, with keys that they hide."""
    least = torch.finfo(dtype).min
    shapes = {
        "each": (2, 4, seq_q, seq_k),
        "shared by sequences": (1, 4, seq_q, seq_k),
        "shared by all": (1, 1, seq_q, seq_k),
        "keys": (2, 1, 1, seq_k),
        "keys of heads": (2, 4, 1, seq_k),
    }
    for seed, (name, shape) in enumerate(shapes.items(), 9):
        bias = 2 * draw(shape, dtype, seed)
        bias[..., ::5] = -math.inf
        bias[..., 1::7] = least
        yield name, {"bias": bias}
    for heads in (1, 4):
        distance = 2 * draw((heads, seq_q + seq_k - 1), F32, 20 + heads)
        distance[:, ::11] = -math.inf
        distance[:, 1::13] = torch.finfo(F32).min
        yield f"distance, {heads} heads", {"distance_bias": distance}


@pytest.mark.parametrize("lengths", [(300, 384), (257, 520), (128, 64), (70, 1000), (1, 72)])
@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_of_biases_of_wide_heads(dims, lengths, dtype):
    """Every form of a bias and its gradient, alone and beside causal, a window, sinks, softcap or a
    mask, against float64. NaN in keys that no query sees; dk and dv have the same bits twice."""
    seq_q, seq_k = lengths
    leaves = {
        "q": draw((2, 4, seq_q, dims[0]), dtype, 0),
        "k": draw((2, 2, seq_k, dims[0]), dtype, 1),
        "v": draw((2, 2, seq_k, dims[1]), dtype, 2) + 0.25,
    }
    grad = draw((2, 4, seq_q, dims[1]), dtype, 5).cuda()
    sinks = {"sinks": draw((4,), F32, 7)}
    end = 40 if seq_k > 100 else 8  # keys that no query sees
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    seen[:, -end:] = False
    mask = bools(1, 4, seq_q, seq_k) & seen
    rules = [
        ({}, {"attn_mask": seen[None, None]}),
        ({}, {}),
        ({"is_causal": True, "diagonal": seq_k - seq_q - end}, {}),
        ({"window_left": 90, "window_right": 20, **sinks}, {}),
        ({"softcap": 4.0}, {}),
        (sinks, {"attn_mask": mask}),
    ]
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)[None]
    for name, given in wide_biases(seq_q, seq_k, dtype):
        for rule, masked in rules:
            if name.startswith("distance") and masked and rule:
                continue
            sees = masked.get("attn_mask", torch.ones(1, 1, seq_q, seq_k, dtype=torch.bool))
            if "diagonal" in rule:
                sees = sees & (j <= i + rule["diagonal"])
            if "window_left" in rule:
                sees = sees & (j >= i - 90) & (j <= i + 20)
            least = torch.finfo(F32 if "distance_bias" in given else dtype).min
            if "bias" in given:
                sees = sees & (given["bias"] > least)
            else:
                sees = sees & (given["distance_bias"][:, (j - i + seq_q - 1)] > least)[None]
            sees = sees.expand(2, 4, seq_q, seq_k)
            keys = sees.unflatten(1, (2, 2)).any(3).any(2)[..., None].cuda()

            def gradients(
                attend, value, wide, given=given, rule=rule, masked=masked, keys=keys, least=least
            ):
                own = leaves | given | {n: x for n, x in rule.items() if n == "sinks"}
                own = {n: x.cuda().double() if wide else x.cuda() for n, x in own.items()}
                for n in ("k", "v"):
                    own[n] = torch.where(keys, own[n], value)
                for n in given if wide else ():
                    own[n] = torch.where(own[n] <= least, -math.inf, own[n])
                for x in own.values():
                    x.requires_grad_()
                hidden = {n: x.cuda() for n, x in masked.items()}
                more = {n: x for n, x in rule.items() if n != "sinks"}
                out = attend(**own, **more, **hidden)
                grads = torch.autograd.grad(out, list(own.values()), grad.to(out.dtype))
                return dict(zip(own, grads, strict=True))

            got = gradients(gk.flash_attn, math.nan, False)
            want = gradients(reference.flash_attn, 0.0, True)
            limit = {BF16: 2e-2, F16: 8e-3}[dtype]
            for n, y in want.items():
                assert got[n].isfinite().all(), (name, rule, n)
                error = (got[n].double() - y).norm()
                # dsinks sums delta, whose rounding does not become smaller where its terms cancel
                floor = (5e-2 if n == "sinks" else 1e-2) * y.numel() ** 0.5
                assert error <= limit * max(y.norm(), floor), (name, rule, n)
            if not rule:
                again = gradients(gk.flash_attn, math.nan, False)
                assert all(torch.equal(got[n], again[n]) for n in ("k", "v"))


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_of_a_row_with_a_bias_stand_alone(dims, dtype):
    """What other queries see changes neither the bits of a bias's gradient nor, in keys that they
    do not see, those of dk and dv."""
    q, k, v = (draw((1, 2, 384, d), dtype, i).cuda() for i, d in enumerate((dims[0], *dims)))
    grad = draw((1, 2, 384, dims[1]), dtype, 8).cuda()
    bias = draw((1, 2, 384, 384), dtype, 3).cuda()
    sees = torch.ones(384, 384, dtype=torch.bool, device="cuda")
    sees[1::2, 200:] = False
    runs = []
    for share in (0.5, 0.02):
        sees[1::2, :200] = bools(192, 200, share=share).cuda()
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
        out = gk.flash_attn(*leaves[:3], bias=leaves[3], attn_mask=sees.clone())
        runs.append(torch.autograd.grad(out, leaves, grad))
    for i, (x, y) in enumerate(zip(*runs, strict=True)):
        if i == 3:
            assert torch.equal(x[:, :, ::2], y[:, :, ::2])
        elif i > 0:
            assert torch.equal(x[:, :, 200:], y[:, :, 200:])


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("window", [(90, 20), (33, -1), (7, 3)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_bias_beside_a_window(head_dim, window, dtype):
    """The first key of a tile is any number, where TMA wants columns in multiples of 16 bytes."""
    left, right = window
    rule = {"window_left": left, "window_right": right}
    q = draw((2, 4, 300, head_dim), dtype, 0).cuda().requires_grad_()
    k, v = (draw((2, 2, 384, head_dim), dtype, seed).cuda().requires_grad_() for seed in (1, 2))
    bias = (3 * draw((1, 4, 300, 384), dtype, 9)).cuda().requires_grad_()
    leaves = (q, k, v, bias)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = gk.flash_attn(*leaves[:3], bias=bias, **rule)
    want = reference.flash_attn(*wide[:3], bias=wide[3], **rule)
    near(out, want.detach().cpu(), dtype)
    grad = draw(tuple(out.shape), dtype, 10).cuda()
    for got, exact in zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(want, wide, grad.double()),
        strict=True,
    ):
        assert (got.double() - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize("dims", WIDE)
def test_a_row_of_a_wide_head_stands_alone(dims):
    """Rows with the same mask have the same bits, whatever their neighbours see, also where a row's
    first key is in the second half of a block."""
    q = draw((1, 4, 640, dims[0]), BF16, 0).cuda()
    k, v = (draw((1, 4, 640, n), BF16, seed).cuda() for seed, n in enumerate(dims, 1))
    k = k * torch.linspace(0.1, 30, 640).cuda()[:, None].bfloat16()  # rows redo blocks
    one, other = bools(1, 1, 640, 640).cuda(), bools(1, 1, 640, 640, share=0.02, seed=1).cuda()
    one[:, :, 5::14, :192] = False
    other[:, :, :, :128] = False
    other[:, :, 5::7] = one[:, :, 5::7]
    a, b = gk.flash_attn(q, k, v, attn_mask=one), gk.flash_attn(q, k, v, attn_mask=other)
    assert torch.equal(a[:, :, 5::7], b[:, :, 5::7])
    want = reference.flash_attn(*(x.double() for x in (q, k, v)), attn_mask=one)
    near(a, want.cpu(), BF16)


@pytest.mark.parametrize("dims", WIDE)
def test_long_lists_of_wide_heads(dims):
    """More than 32 blocks of a tile, and more tiles than thread blocks: a list with partial blocks
    in every word of marks; against the same call of one head at a time, and against float64."""
    seq = 5000
    i = torch.arange(seq)
    documents = i // 1700 * 1700
    rows = torch.stack([documents, i + 1, 0 * i, (i + 1).clamp(max=200)], -1).to(torch.int32)
    rows[::3, 0] = 0
    mask = gk.attn_mask_ranges(rows.cuda(), seq)
    q = draw((1, 8, seq, dims[0]), BF16, 0).cuda()
    k, v = (draw((1, 2, seq, n), BF16, seed).cuda() for seed, n in enumerate(dims, 1))
    out = gk.flash_attn(q, k, v, attn_mask=mask)
    again = [
        gk.flash_attn(q[:, h : h + 1], k[:, h // 4, None], v[:, h // 4, None], attn_mask=mask)
        for h in range(8)
    ]
    assert torch.equal(out, torch.cat(again, 1))
    some = torch.cat([i[:130], i[1690:1830], i[-140:]]).cuda()
    seen = mask.dense()[:, :, some]
    want = reference.flash_attn(q[:, :, some].double(), k.double(), v.double(), attn_mask=seen)
    near(out[:, :, some], want.cpu(), BF16)


@pytest.mark.parametrize(
    "shape", [(1, 4, 300, 384), (2, 1, 300, 384), (2, 4, 1, 384), (1, 1, 300, 1)]
)
@pytest.mark.parametrize("dtype", [BF16, F16, F64])
@pytest.mark.parametrize("masked", [False, True])
def test_biases(shape, dtype, masked):
    q, k, v = (
        draw((2, h, n, 64), dtype, seed)
        for seed, (h, n) in enumerate([(4, 300), (2, 384), (2, 384)])
    )
    bias = 3 * draw(shape, dtype, 9)
    if shape[3] > 1:
        bias[..., ::3] = -math.inf
        bias[..., 1::7] = torch.finfo(dtype).min
    mask = bools(1, 1, 300, 384) if masked else None
    out = gk.flash_attn(
        q.cuda(),
        k.cuda(),
        v.cuda(),
        attn_mask=None if mask is None else mask.cuda(),
        bias=bias.cuda(),
    )
    wide = torch.where(bias <= torch.finfo(dtype).min, -math.inf, bias.double())
    near(
        out,
        reference.flash_attn(q.double(), k.double(), v.double(), attn_mask=mask, bias=wide),
        dtype,
    )


def test_gradients():
    shapes = [(2, 4, 70, 32), (2, 2, 150, 32), (2, 2, 150, 32), (1, 4, 1, 150), (4, 219)]
    here = [draw(shape, F64, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    there = [x.detach().cuda().requires_grad_() for x in here]
    mask = bools(2, 4, 70, 150)
    for attend, leaves, hidden in (
        (reference.flash_attn, here, mask),
        (gk.flash_attn, there, mask.cuda()),
    ):
        q, k, v, bias, distance = leaves
        out = attend(q, k, v, attn_mask=hidden, bias=bias, distance_bias=distance, softcap=5.0)
        (out * draw(out.shape, F64, 11).to(out.device)).sum().backward()
    for x, y in zip(here, there, strict=True):
        near(y.grad, x.grad, F64)


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_hidden_keys_may_hold_nan(dim):
    q, k, v = (draw((1, 4, 300, dim), BF16, seed).cuda() for seed in range(3))
    mask = bools(1, 1, 300, 300).cuda()
    out = gk.flash_attn(q, k, v, attn_mask=mask)
    k, v = k.clone(), v.clone()
    v[:, :, 77] = math.nan
    k[:, :, 200] = math.nan
    hidden = ~mask[0, 0, :, 77] & ~mask[0, 0, :, 200]
    found = gk.flash_attn(q, k, v, attn_mask=mask)
    near(found[:, :, hidden], out[:, :, hidden].cpu(), BF16)
    assert found[:, :, mask[0, 0, :, 77]].isnan().all()


@pytest.mark.parametrize("shape", [(1, 1, 1, 304), (1, 4, 304, 304)])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_keys_that_a_bias_hides_may_hold_nan(shape, dim):
    hidden = torch.tensor([3, 77, 200])
    bias = draw(shape, BF16, 9)
    bias[..., hidden] = -math.inf
    bias[..., 200] = torch.finfo(BF16).min
    runs = []
    for value in (0.0, math.nan):
        own = [draw((1, 4, 304, dim), BF16, seed) for seed in range(3)]
        for x in own[1:]:
            x[:, :, hidden] = value
        leaves = [x.cuda().requires_grad_() for x in (*own, bias)]
        out = gk.flash_attn(*leaves[:3], bias=leaves[3])
        runs.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    for clean, found in zip(*runs, strict=True):
        near(found, clean.cpu(), BF16)


def test_a_row_stands_alone():
    q, k, v = (draw((1, 4, 640, 128), BF16, seed).cuda() for seed in range(3))
    one, other = bools(1, 1, 640, 640).cuda(), bools(1, 1, 640, 640, share=0.02, seed=1).cuda()
    other[:, :, :, :128] = False
    other[:, :, 5::7] = one[:, :, 5::7]
    a, b = gk.flash_attn(q, k, v, attn_mask=one), gk.flash_attn(q, k, v, attn_mask=other)
    assert torch.equal(a[:, :, 5::7], b[:, :, 5::7])


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), *WIDE])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_row_with_a_bias_stands_alone(dims, dtype):
    """Odd rows see no key of the first blocks, so their warps take a later block again. Even rows
    get the bits of a call in which all rows see everything."""
    q, k, v = (draw((1, 2, 384, d), dtype, i).cuda() for i, d in enumerate((dims[0], *dims)))
    bias = draw((1, 2, 384, 384), dtype, 3).cuda()
    sees = torch.ones(384, 384, dtype=torch.bool, device="cuda")
    sees[0, -1] = False  # or the mask would be full and leave its tiles without words
    call = {"bias": bias, "return_lse": True}
    want = gk.flash_attn(q, k, v, attn_mask=sees, **call)
    sees[1::2, :200] = False
    got = gk.flash_attn(q, k, v, attn_mask=sees, **call)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x[:, :, 2::2], y[:, :, 2::2])
    # nor do the odd rows' bits depend on what the even ones see
    sees[::2, :200] = False
    again = gk.flash_attn(q, k, v, attn_mask=sees, **call)
    for x, y in zip(got, again, strict=True):
        assert torch.equal(x[:, :, 1::2], y[:, :, 1::2])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_mask_of_the_cpu_has_no_tables_for_the_backward(dtype):
    here = gk.attn_mask_of(bools(300, 300))
    moved = gk.AttnMask(here.data.cuda(), here.store, here.seq_q, here.seq_k)
    q = draw((1, 2, 300, 64), dtype).cuda().requires_grad_()
    out = gk.flash_attn(q, q, q, attn_mask=moved)
    with pytest.raises(ValueError, match="attn_mask must have .* make it on q's device"):
        out.sum().backward()


@pytest.mark.parametrize("seed", range(48))
def test_random_calls(seed):
    """Any mask and bias beside any rule, forward and backward. Keys that no query sees hold NaN."""
    gen = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=gen))]

    def normal(*shape, dtype=F64):
        return (torch.randn(*shape, generator=gen, dtype=F64) + 0.25).to(dtype).cuda()

    dtype, batch, heads_kv = pick(BF16, F16), pick(1, 2), pick(1, 2)
    heads = heads_kv * pick(1, 2, 3)
    seq_q, seq_k = pick(1, 5, 130, 300, 640), pick(70, 200, 384, 517, 1100)
    dim = pick(32, 64, 72, 128, 192, 256)
    dim_v = pick(dim, dim, 64, 128)
    rules = {}
    for _ in range(pick(0, 1, 1, 2)):
        rules |= pick(
            {"is_causal": True, "diagonal": seq_k - seq_q},
            {"window_left": 90, "window_right": 60},
            {"softcap": 4.0},
            {"alibi_slopes": torch.rand(heads, generator=gen).cuda()},
            {"kv_start": torch.full((batch,), 9, dtype=torch.int32, device="cuda")},
            {"kv_end": torch.full((batch,), seq_k - 20, dtype=torch.int32, device="cuda")},
            {"dropout_p": 0.3, "dropout_seed": torch.tensor([seed, 1]).cuda()},
        )
    leaves = {
        "q": normal(batch, heads, seq_q, dim, dtype=dtype),
        "k": normal(batch, heads_kv, seq_k, dim, dtype=dtype),
        "v": normal(batch, heads_kv, seq_k, dim_v, dtype=dtype),
    }
    mask = None
    if pick(True, True, False):
        name, make, args, options = list(masks(seq_q, seq_k))[pick(0, 1, 2, 3, 4)]
        shared = [x[:1, :1] if isinstance(x, torch.Tensor) else x for x in args]
        mask = make(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in shared), **options)
    if mask is None or pick(True, False):
        shape = [pick(1, n) for n in (batch, heads, seq_q, seq_k)]
        leaves["bias"] = normal(*shape, dtype=pick(dtype, dtype, F32))
    if pick(False, False, True):
        leaves["distance_bias"] = normal(pick(1, heads), seq_q + seq_k - 1, dtype=F32)
    if pick(False, False, True):
        leaves["sinks"] = normal(heads, dtype=F32)
    grad, grad_lse = normal(batch, heads, seq_q, dim_v), normal(batch, heads, seq_q)
    seen = torch.ones(seq_k, dtype=torch.bool, device="cuda")
    if mask is not None:
        seen = mask.dense().any(2).flatten(0, 1).any(0)

    def run(attend, own, **given):
        own = {name: x.clone().requires_grad_() for name, x in own.items()}
        out, lse = attend(**own, attn_mask=mask, return_lse=True, **given)
        lse = torch.where(lse.isfinite(), lse, 0)
        ((out * grad.to(out.dtype)).sum() + (lse * grad_lse.to(lse.dtype)).sum()).backward()
        return {"out": out.detach(), "lse": lse.detach()} | {n: x.grad for n, x in own.items()}

    def poisoned(value):
        own = dict(leaves)
        for name in ("k", "v"):
            own[name] = torch.where(seen[:, None], own[name], value)
        return own

    wide = {n: x.double() for n, x in poisoned(0.0).items()}
    wide_rules = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in rules.items()
    }
    want = run(reference.flash_attn, wide, **wide_rules)
    got = run(gk.flash_attn, poisoned(math.nan), **rules)
    limit = {BF16: 2e-2, F16: 8e-3}[dtype]
    for name, ref in want.items():
        assert got[name].isfinite().all(), name
        error, size = (got[name].double() - ref).norm(), ref.norm()
        assert error <= limit * max(size, 1e-2 * ref.numel() ** 0.5), (name, error / size)


def shared_keys(kind, seq_q, seq_k, heads):
    """A window of 300 keys and some first keys that all queries see, so that the backward cuts the
    lists of these keys into parts. Queries 300 to 600 see nothing."""
    i, j = torch.arange(seq_q), torch.arange(seq_k)
    blind = (i >= 300) & (i < 600)
    if kind == "ranges":
        columns = (i - 299).clamp(min=70), i + 1, torch.zeros_like(i), (i + 1).clamp(max=70)
        rows = torch.stack(columns, -1).to(torch.int32)
        rows[blind] = 0
        return gk.attn_mask_ranges(rows.cuda(), seq_k)
    if kind == "columns":
        end = torch.where(j < 70, seq_q, j + 300).to(torch.int32)
        return gk.attn_mask_columns(end[None, None, :, None].cuda(), seq_q, is_causal=True)
    i, j, h = i[:, None], j[None, :], torch.arange(heads)[:, None, None]
    # each head has other lists, and the last one has none for the first keys
    shared = (j < 200) & (i >= 600 * h) & (h < max(heads - 1, 1))
    seen = (i >= j) & ((i - j < 300) | shared) & ~blind[:, None]
    return gk.attn_mask_of((seen & bools(heads, seq_q, seq_k, share=0.99))[None].cuda())


@pytest.mark.parametrize("lengths", [(640, 640), (333, 1291), (1236, 300), (37, 200), (257, 512)])
@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_of_wide_heads(dims, lengths, dtype):
    """Every source of a mask against float64, with sinks and groups of heads; NaN in keys that no
    query sees and in queries that see nothing; dk and dv have the same bits twice."""
    seq_q, seq_k = lengths
    kinds = [(make, args, options) for _, make, args, options in masks(*lengths)]
    kinds.append((gk.attn_mask_ranges, (windows(*lengths)[None, None], seq_k), {}))
    leaves = {
        "q": draw((2, 4, seq_q, dims[0]), dtype, 0).cuda(),
        "k": draw((2, 2, seq_k, dims[0]), dtype, 1).cuda(),
        "v": draw((2, 2, seq_k, dims[1]), dtype, 2).cuda() + 0.25,
        "sinks": draw((4,), F32, 7).cuda(),
    }
    grad = draw((2, 4, seq_q, dims[1]), dtype, 5).cuda()
    for make, args, options in kinds:
        given = (x.cuda() if isinstance(x, torch.Tensor) else x for x in args)
        mask = make(*given, **options)
        seen = mask.dense().any(2).flatten(0, 1).any(0)[:, None]
        sees = mask.dense().any(3).flatten(0, 1).any(0)[:, None]

        def gradients(attend, value, wide, seen=seen, sees=sees, mask=mask):
            own = {}
            for name, x in leaves.items():
                known = sees if name == "q" else seen
                own[name] = x.clone() if name == "sinks" else torch.where(known, x, value)
                own[name] = (own[name].double() if wide else own[name]).requires_grad_()
            out = attend(**own, attn_mask=mask)
            qkv, sinks = [own[name] for name in "qkv"], own["sinks"]
            past, known = (torch.where(sees, grad, x).to(out.dtype) for x in (value, 0.0))
            # all of a row that sees nothing goes to the sink, so NaN in its grad_out is NaN there
            inner = torch.autograd.grad(out, qkv, past, retain_graph=True)
            return *inner, *torch.autograd.grad(out, [sinks], known)

        got = gradients(gk.flash_attn, math.nan, False)
        again = gradients(gk.flash_attn, math.nan, False)
        assert torch.equal(got[1], again[1])
        assert torch.equal(got[2], again[2])
        want = gradients(reference.flash_attn, 0.0, True)
        limit = {BF16: 2e-2, F16: 8e-3}[dtype]
        for name, x, y in zip(leaves, got, want, strict=True):
            assert x.isfinite().all(), name
            tiles = [(x.double(), y)]
            if name != "sinks":
                tiles = zip(x.double().split(128, -2), y.split(128, -2), strict=True)
            for part, own in tiles:
                error, norm = (part - own).norm(), own.norm()
                assert error <= limit * max(norm, 1e-2 * own.numel() ** 0.5), (name, error / norm)


def test_wide_gradients_of_rows_with_nan():
    """A NaN in a row of grad_out reaches the keys that the row sees, and no others."""
    q, k, v = (draw((1, 2, 300, 256), BF16, seed).cuda().requires_grad_() for seed in range(3))
    mask = bools(1, 1, 300, 300).cuda()
    grad = draw((1, 2, 300, 256), BF16, 5).cuda()
    clean = torch.autograd.grad(gk.flash_attn(q, k, v, attn_mask=mask), (q, k, v), grad)
    grad[:, :, 77] = math.nan
    found = torch.autograd.grad(gk.flash_attn(q, k, v, attn_mask=mask), (q, k, v), grad)
    sees = mask[0, 0, 77]
    for x, y in zip(clean[1:], found[1:], strict=True):
        assert y[:, :, sees].isnan().all()
        near(y[:, :, ~sees], x[:, :, ~sees].cpu(), BF16)
    others = torch.arange(300).cuda() != 77
    near(found[0][:, :, others], clean[0][:, :, others].cpu(), BF16)


MANY = [
    (kind, extra, size)
    for kind in ("ranges", "columns", "bools")
    for extra in ("nothing", "sinks", "bias", "bias of keys")
    for size in ((4500, 4504, 4, 2), (700, 704, 16, 2))
] + [(kind, "nothing", (8200, 8200, 2, 2)) for kind in ("ranges", "columns")]
# wide heads with a bias go to a kernel that cuts no tiles
MANY_WIDE = [case for case in MANY if case[1] in ("nothing", "sinks")]


@pytest.mark.parametrize(
    ("dim", "kind", "extra", "size"),
    [(dim, *case) for dim in (64, 128) for case in MANY]
    + [(dim, *case) for dim in (192, 256) for case in MANY_WIDE],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients_of_keys_that_many_queries_see(kind, dim, dtype, extra, size):
    """Against float64, with NaN in keys that no query sees; dk and dv have the same bits twice."""
    seq_q, seq_k, heads, heads_kv = size
    mask = shared_keys(kind, seq_q, seq_k, heads)
    seen = mask.dense().any(2).flatten(0, 1).any(0)
    leaves = {
        "q": draw((1, heads, seq_q, dim), dtype, 0),
        "k": draw((1, heads_kv, seq_k, dim), dtype, 1),
        "v": draw((1, heads_kv, seq_k, dim), dtype, 2) + 0.25,
    }
    if extra == "sinks":
        leaves["sinks"] = draw((heads,), F32, 3)
    elif extra == "bias":
        leaves["bias"] = draw((1, heads, seq_q, seq_k), dtype, 4)
    elif extra == "bias of keys":
        leaves["bias"] = draw((1, 1, 1, seq_k), dtype, 4)
    grad = draw((1, heads, seq_q, dim), dtype, 5).cuda()

    def gradients(attend, unseen, wide):
        own = {}
        for name, x in leaves.items():
            x = x.cuda().double() if wide else x.cuda()
            own[name] = torch.where(seen[:, None], x, unseen) if name in ("k", "v") else x
            own[name].requires_grad_()
        out = attend(**own, attn_mask=mask)
        return dict(zip(own, torch.autograd.grad(out, own.values(), grad.to(out.dtype))))

    got = gradients(gk.flash_attn, math.nan, False)
    again = gradients(gk.flash_attn, math.nan, False)
    if extra != "bias of keys":  # those go to a kernel that adds up in any order
        assert torch.equal(got["k"], again["k"])
        assert torch.equal(got["v"], again["v"])
    limit = {BF16: 2e-2, F16: 8e-3}[dtype]
    for name, want in gradients(reference.flash_attn, 0.0, True).items():
        assert got[name].isfinite().all(), name
        parts = want.split(128, dim=2) if name in ("k", "v") else [want]
        found = got[name].double().split(128, dim=2) if name in ("k", "v") else [got[name].double()]
        for at, (x, y) in enumerate(zip(found, parts, strict=True)):
            error, norm = (x - y).norm(), y.norm()
            assert error <= limit * max(norm, 1e-2 * y.numel() ** 0.5), (name, at, error / norm)


def test_deterministic_gradients_of_keys_that_many_queries_see():
    mask = shared_keys("ranges", 4500, 4504, 4)
    q = draw((1, 4, 4500, 64), BF16, 0).cuda().requires_grad_()
    k, v = (draw((1, 2, 4504, 64), BF16, seed).cuda().requires_grad_() for seed in (1, 2))
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            out = gk.flash_attn(q, k, v, attn_mask=mask)
            runs.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_deterministic_gradients():
    """The same bits twice, with every bias."""
    q, k, v = (draw((2, 4, 200, 64), BF16, seed).cuda().requires_grad_() for seed in range(3))
    bias = draw((1, 4, 200, 200), BF16, 3).cuda().requires_grad_()
    distance = draw((4, 399), F32, 4).cuda().requires_grad_()
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            out = gk.flash_attn(q, k, v, bias=bias, distance_bias=distance)
            runs.append(torch.autograd.grad(out.float().square().sum(), (q, k, v, bias, distance)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_biases_of_many_sequences():
    """More sequences than dimension z of a grid has blocks, each with a bias of its own."""
    many = 65535 + 3
    own = [draw((many, 1, keys, 8), seed=seed) for seed, keys in enumerate((1, 2, 2))]
    own.append(draw((many, 1, 1, 2), seed=3))

    def gradients(device):
        q, k, v, bias = leaves = [x.to(device).requires_grad_() for x in own]
        out = gk.flash_attn(q, k, v, bias=bias)
        return torch.autograd.grad(out.square().sum(), leaves)

    for got, want in zip(gradients("cuda"), gradients("cpu"), strict=True):
        near(got[-9:], want[-9:], F32)
        near(got, want, F32)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_captured(dim):
    """Builder, forward and backward in one graph, which serves other contents of the mask."""
    q, k, v = (draw((1, 4, 300, dim), BF16, seed).cuda().requires_grad_() for seed in range(3))
    bits = bools(1, 1, 300, 300).cuda()

    def call():
        out = gk.flash_attn(q, k, v, attn_mask=bits)
        return (out, *torch.autograd.grad(out.float().sum(), (q, k, v)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = call()
    bits.copy_(bools(1, 1, 300, 300, share=0.1, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(results, call(), strict=True):
        near(got, want.cpu(), BF16)

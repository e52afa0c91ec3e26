# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn(attn_mask=): new tokens that see each other by a mask, as drafts that form a tree."""

import contextlib
import json
import math
import random
import zlib

import pytest
import torch
import torch._dynamo.testing
from attention_cases import Paged, paged_modifiers
from conftest import (
    FLOATS,
    f64,
    generator,
    grid,
    randn,
    reference,
    same_bits,
    snapshot,
    statements,
    torch_gpukern,
)

from torch_gpukern import SharedPrefix, paged_attn

# Context lengths and new tokens of each sequence.
BATCHES = {
    "verify": ([40, 70, 129], [4, 4, 4]),
    "ragged": ([1, 200, 64, 0, 33, 16], [1, 17, 10, 0, 2, 16]),
    "short": ([5, 9, 30, 12], [4, 8, 16, 3]),
    "short_even": ([5, 9, 30, 40], [5, 5, 5, 5]),
    "inactive": ([0, 40, 0, 7], [2, 2, 2, 2]),
    "decode": ([1, 15, 130], [1, 1, 1]),
    "many": ([300, 90], [40, 33]),
    "long": ([2500, 700], [6, 3]),
    "no old keys": ([5, 16, 33, 1], [5, 16, 33, 1]),
    "beyond 64": ([90, 200, 70], [70, 65, 66]),
    "rows": ([300, 97, 64], [16, 16, 16]),
}
MODIFIERS = (
    "none",
    "scale",
    "window",
    "window_zero",
    "window_wide",
    "window_right",
    "softcap",
    "alibi",
    "alibi_batch",
    "sinks",
    "sinks_own",
    "kv_start",
    "scales_head",
    "kv_start_all",
    "kv_start_alibi",
)
DIMS = ((64, 64), (32, 48), (80, 80), (128, 128))


def random_mask(draw, n, kind):
    """[n, n] bool. tree: each token has a parent before it, or none, and sees its ancestors and
    itself. any: no structure, with rows that see nothing and tokens that see later ones."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    if kind == "any":
        density = draw.choice((0.0, 0.2, 0.7))
        for i in range(n):
            for j in range(n):
                mask[i, j] = draw.random() < density
        return mask
    for i in range(n):
        parent = draw.randrange(-1, i) if i else -1
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, i] = True
    return mask


def masks_of(key, queries, form, kind, device="cpu"):
    """The masks of all sequences: [T, S], or [B, S, S] where form is "sequences". With "wide",
    columns past a sequence's own tokens are true and false at random, as they may be."""
    draw = random.Random(zlib.crc32(repr(key).encode()))
    most = max(queries) + (3 if form == "wide" else 0)
    rows = max(queries) if form == "sequences" else 0
    found = []
    for n in queries:
        noise = [[draw.random() < 0.5 for _ in range(most)] for _ in range(max(n, rows))]
        mask = torch.tensor(noise, dtype=torch.bool).reshape(-1, most)
        mask[:n, :n] = random_mask(draw, n, kind)
        found.append(mask)
    return (torch.stack if form == "sequences" else torch.cat)(found).to(device)


def packed(case):
    return {"cu_seqlens_q": case.cu_seqlens_q, "max_seqlen_q": max(case.queries)}


def even(case):
    return len(set(case.queries)) == 1


def attend(case, mask, ragged=True, **rules):
    starts = packed(case) if ragged else {}
    return paged_attn(*case.args(), **starts, **rules, attn_mask=mask, return_lse=True)


def exact(args, **rules):
    return reference.paged_attn(*f64(args), **f64(rules), return_lse=True)


def in_float64(args, **rules):
    """As `exact` but for the last bits, and much faster."""
    return statements.paged_attn(*f64(args), **f64(rules), return_lse=True)


def check(case, got, mask, args=None, ragged=True, **rules):
    """got is as close to float64 as PyTorch in q's dtype and as the plain causal call is, but for
    one rounding of the share of either part."""
    args = case.args() if args is None else args
    starts = packed(case) if ragged else {}
    want = exact(args, **starts, **rules, attn_mask=mask)
    torchs = reference.paged_attn(*args, **starts, **rules, attn_mask=mask, return_lse=True)
    plain = paged_attn(*args, **starts, **rules, return_lse=True)
    causal = (exact if args[0].dtype is torch.float64 else in_float64)(args, **starts, **rules)
    # the shares of old and new keys
    old = case.seq_lens - (case.cu_seqlens_q[1:] - case.cu_seqlens_q[:-1])
    first = rules.get("kv_start")
    later = old.clamp(min=0) if first is None else torch.maximum(old, first.to(old.dtype))
    less = {n: x for n, x in rules.items() if n not in ("sinks", "kv_start")}
    parts = (
        in_float64(args, **starts, **less, kv_start=first, attn_mask=torch.zeros_like(mask)),
        in_float64(args, **starts, **less, kv_start=later, attn_mask=mask),
    )
    shares = sum(out.abs() * (lse - want[1]).exp()[..., None].nan_to_num(0) for out, lse in parts)
    for x, yard, own, own_ref, ref, most in zip(
        got, torchs, plain, causal, want, (shares, want[1]), strict=True
    ):
        assert x.dtype == yard.dtype and x.is_contiguous() and x.shape == ref.shape
        assert not x.isnan().any()
        assert torch.equal(x.isinf(), ref.isinf())
        mine, *others = (
            z.double().sub(y).nan_to_num(0).abs().amax().item() if z.numel() else 0
            for z, y in ((x, ref), (yard, ref), (own, own_ref))
        )
        eps = torch.finfo(x.dtype).eps
        # float64's exp and log are those of the machine, as the reference's are
        largest = most[most.isfinite()].abs().max().item() if most.isfinite().any() else 0
        rounding = eps * largest * (4 if eps < 1e-10 else 1)
        assert mine <= 2 * max(others) + rounding, f"{mine}, others {others}, rounding {rounding}"


def make(key, batch, heads, dims, block_size, dtype, device, order="NHD"):
    batch = BATCHES[batch] if isinstance(batch, str) else batch
    return Paged(generator(key), *batch, *heads, *dims, block_size, dtype, device, order)


@pytest.mark.parametrize(
    "case",
    grid(
        72,
        mods=MODIFIERS,
        batch=tuple(BATCHES),
        dtype=FLOATS,
        heads=((4, 2), (3, 3), (8, 1)),
        block_size=(1, 8, 16, 5),
        dims=DIMS,
        form=("tokens", "wide", "sequences"),
        kind=("tree", "any"),
        order=("NHD", "HND", "padded", "shared"),
    ),
)
def test_values(case, device):
    gen = generator("tree", case.id)
    paged = make(
        case.id, case.batch, case.heads, case.dims, case.block_size, case.dtype, device, case.order
    )
    mask = masks_of(case.id, paged.queries, case.form, case.kind, device)
    rules = paged_modifiers(case.mods, len(paged.lengths), case.heads, gen, case.dtype, device)
    unchanged = snapshot(*paged.args(), mask, **rules)
    got = attend(paged, mask, **rules)
    unchanged()
    check(paged, got, mask, **rules)
    if even(paged):
        same = attend(paged, mask, ragged=False, **rules)
        check(paged, same, mask, ragged=False, **rules)
    out = paged_attn(*paged.args(), **packed(paged), **rules, attn_mask=mask)
    assert same_bits(out, got[0])  # where lse is not wanted


# Calls of many rows, which paged_tree_sm90a serves on Hopper in 16 bits: lengths, new tokens, heads.
MANY = {
    "one warpgroup": ([300, 97, 64, 1030], [16] * 4, (8, 2)),
    "two heads": ([200, 70, 129], [40] * 3, (8, 2)),
    "all heads": ([150, 40], [2, 2], (64, 1)),
    "splits": ([4100], [16], (8, 2)),
    "tiles": ([500, 290], [300, 290], (3, 3)),
    "ragged": ([1, 200, 64, 0, 533], [1, 170, 30, 0, 33], (4, 2)),
    "short": ([20, 33, 0, 140], [20, 33, 20, 20], (4, 2)),
    "block ends": ([128, 144, 145, 256, 257], [16] * 5, (8, 2)),
}


@pytest.mark.parametrize(
    "case",
    grid(
        24,
        batch=tuple(MANY),
        dim=(64, 128),
        dtype=(torch.bfloat16, torch.float16),
        block_size=(8, 16, 24, 64),
        mods=("none", "sinks", "kv_start"),
        form=("tokens", "wide", "sequences"),
        kind=("tree", "any"),
    ),
)
def test_many_rows(case, device):
    gen = generator("tree rows", case.id)
    lengths, queries, heads = MANY[case.batch]
    paged = make(
        case.id, (lengths, queries), heads, (case.dim,) * 2, case.block_size, case.dtype, device
    )
    mask = masks_of(case.id, queries, case.form, case.kind, device)
    rules = paged_modifiers(case.mods, len(lengths), heads, gen, case.dtype, device)
    ragged = not even(paged)
    check(paged, attend(paged, mask, ragged, **rules), mask, ragged=ragged, **rules)


def chain(n):
    return torch.ones(n, n).tril().bool()


def star(n):
    """A root whose children see it and themselves."""
    mask = torch.eye(n, dtype=torch.bool)
    mask[:, 0] = True
    return mask


def binary(n):
    """Token i has the parent (i - 1) // 2."""
    mask = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        mask[i] |= mask[(i - 1) // 2]
    return mask


@pytest.mark.parametrize("tree", (chain, star, binary), ids=lambda f: f.__name__)
@pytest.mark.parametrize("heads", ((4, 4), (8, 2), (32, 2), (40, 1)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_trees(dtype, heads, tree, device):
    """Trees of 15, 40 and 1 tokens, of groups that fill a tile of rows and of groups that do not."""
    paged = make(
        ("trees", heads), ([150, 70, 33], [15, 40, 1]), heads, (128, 128), 16, dtype, device
    )
    parts = [torch.zeros(n, 40, dtype=torch.bool) for n in paged.queries]
    for part, n in zip(parts, paged.queries):
        part[:, :n] = tree(n)
    mask = torch.cat(parts).to(device)
    check(paged, attend(paged, mask), mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", ("ragged", "no old keys", "inactive"))
@pytest.mark.parametrize("form", ("tokens", "wide"))
@pytest.mark.parametrize("mods", ("none", "window", "kv_start_all", "sinks"))
def test_the_op(mods, form, batch, dtype, device):
    """The op that serves masks on CUDA. On the CPU it is the reference of csrc."""
    gen = generator("tree op", mods, form, batch)
    paged = make(("op", batch), batch, (4, 2), (64, 64), 16, dtype, device)
    mask = masks_of(("op", form, batch), paged.queries, form, "any", device)
    rules = paged_modifiers(mods, len(paged.lengths), (4, 2), gen, dtype, device)
    op = torch.ops.gpukern.paged_attn_masked_fwd
    got = op(*paged.args(), mask.view(torch.uint8), **packed(paged), **rules)
    check(paged, got, mask, **rules)
    first = torch.ops.gpukern.paged_attn_masked(
        *paged.args(), mask.view(torch.uint8), **packed(paged), **rules
    )
    assert same_bits(first, got[0])


def test_what_the_op_refuses(device):
    paged = make("op refuses", "verify", (4, 2), (64, 64), 16, torch.float32, device)
    mask = masks_of("op refuses", paged.queries, "tokens", "tree", device).view(torch.uint8)
    square = mask.view(3, 4, 4)

    def refused(text, attn_mask=mask, **rules):
        with pytest.raises(ValueError, match=f"^gpukern::paged_attn: {text}"):
            torch.ops.gpukern.paged_attn_masked(*paged.args(), attn_mask, **rules)

    refused("attn_mask must be uint8, got bool", mask.bool())
    refused(r"attn_mask must have shape \[T, S\] or \[B, S, S\], got \[12\]", mask[:, 0])
    refused(r"attn_mask must be \[T, S\] with T = 12, got \[11, 4\]", mask[1:])
    refused("attn_mask has 3 columns, the 3 sequences have 12 tokens", mask[:, :3])
    refused("attn_mask has 3 columns, max_seqlen_q is 4", mask[:, :3], **packed(paged))
    refused(r"attn_mask must be \[B, S, S\] with B = 3, got \[2, 4, 4\]", square[1:])
    refused("attn_mask has 3 columns, the 3 sequences have 12 tokens", square[:, :3, :3])
    if device == "cuda":
        slopes = torch.ones(4, device=device)
        refused("alibi_slopes is given with attn_mask on CUDA", alibi_slopes=slopes)


@pytest.mark.parametrize(
    "case",
    grid(
        32,
        dims=((1, 7), (8, 512), (192, 128), (256, 256), (512, 512), (576, 512), (33, 100)),
        dtype=FLOATS,
        batch=("ragged", "short_even"),
        mods=("none", "kv_start_all", "kv_start_alibi"),
        heads=((4, 2), (3, 3)),
        block_size=(16, 5),
    ),
)
def test_head_dims(case, device):
    if device == "cuda" and any(d % 8 for d in case.dims):
        pytest.skip("CUDA serves multiples of 8 up to 576")
    gen = generator("tree dims", case.id)
    paged = make(case.id, case.batch, case.heads, case.dims, case.block_size, case.dtype, device)
    mask = masks_of(case.id, paged.queries, "tokens", "tree", device)
    rules = paged_modifiers(case.mods, len(paged.lengths), case.heads, gen, case.dtype, device)
    check(paged, attend(paged, mask, **rules), mask, **rules)


@pytest.mark.parametrize(
    "case",
    grid(
        36,
        code=(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
        scales=("none", "one", "head", "page"),
        mods=("none", "kv_start_all", "kv_start_alibi"),
        batch=("verify", "ragged", "short"),
        dtype=(torch.float32, torch.bfloat16, torch.float16),
        block_size=(16, 5),
    ),
)
def test_8_bit_caches(case, device):
    gen, heads = generator("tree codes", case.id), (4, 2)
    paged = make(case.id, case.batch, heads, (64, 64), case.block_size, torch.float32, device)
    size = 20 if case.code is torch.int8 else 1
    paged.k_cache, paged.v_cache = (
        (c * size).nan_to_num(0).round().clamp(-128, 127).to(case.code)
        if case.code is torch.int8
        else c.to(case.code)
        for c in (paged.k_cache, paged.v_cache)
    )
    paged.q = paged.q.to(case.dtype)
    shape = {"one": (), "head": (2,), "page": (paged.k_cache.shape[0], 2)}.get(case.scales)
    rules = paged_modifiers(case.mods, len(paged.lengths), heads, gen, case.dtype, device)
    rules = {n: x for n, x in rules.items() if n not in ("k_scale", "v_scale")}
    if shape is not None:
        rules |= {
            n: ((torch.rand(shape, generator=gen) + 0.5) / size).to(device)
            for n in ("k_scale", "v_scale")
        }
    mask = masks_of(case.id, paged.queries, "tokens", "any", device)
    check(paged, attend(paged, mask, **rules), mask, **rules)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", ("verify", "ragged", "short"))
def test_latent(batch, dtype, device):
    """v_cache is the beginning of k_cache's rows."""
    paged = make(("latent", batch), batch, (16, 1), (576, 512), 16, dtype, device)
    paged.v_cache = paged.k_cache[..., :512]
    mask = masks_of(batch, paged.queries, "tokens", "tree", device)
    check(paged, attend(paged, mask), mask)


@pytest.mark.parametrize("rules", ({}, {"window_left": 6}), ids=("none", "window"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_causal_mask_is_the_causal_rule(dtype, rules, device):
    paged = make("causal", "ragged", (4, 2), (64, 64), 16, dtype, device)
    most = max(paged.queries)
    mask = torch.cat([torch.ones(n, most).tril().bool() for n in paged.queries]).to(device)
    got, plain = (
        attend(paged, mask, **rules),
        paged_attn(*paged.args(), **packed(paged), **rules, return_lse=True),
    )
    check(paged, got, mask, **rules)
    for x, y in zip(got, plain):
        assert torch.allclose(x.double(), y.double(), atol=4 * torch.finfo(dtype).eps, rtol=1e-2)


def places(paged, b):
    """(page, row) of each new token of sequence b."""
    length, n = paged.lengths[b], paged.queries[b]
    keys = range(length - n, length)
    size = paged.block_size
    return [(int(paged.block_table[b, j // size]), j % size) for j in keys]


@pytest.mark.parametrize("mods", ("none", "kv_start_all", "alibi", "kv_start_alibi"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("new", ([6, 7, 6], [17, 40, 17]), ids=("few", "many"))
@pytest.mark.parametrize("dim", (64, 128))
def test_hidden_new_keys_never_show(dim, new, dtype, mods, device):
    """NaN and infinity in a new key show in the rows that see it, and in no others."""
    gen = generator("hidden", dtype, mods)
    batch = ([40, 5 + new[1], 170], new)
    paged = make("hidden", batch, (4, 2), (dim, dim), 8, dtype, device)
    rules = paged_modifiers(mods, 3, (4, 2), gen, dtype, device) | {"kv_start": None}
    mask = masks_of("hidden", paged.queries, "tokens", "tree", device)
    mask[:, 3] = False  # nobody sees the fourth new token
    mask[new[0] + 3] = False  # and one row sees none
    before = attend(paged, mask, **rules)
    for value in (math.nan, math.inf, -math.inf):
        for b in range(3):
            page, row = places(paged, b)[3]
            paged.k_cache[page, row], paged.v_cache[page, row] = value, value
        assert all(map(same_bits, attend(paged, mask, **rules), before))
    mask[-1, 3] = True
    after = attend(paged, mask, **rules)
    seen = rules.get("window_left", new[-1]) > new[-1] - 4
    assert after[0][-1].isnan().any() == seen
    assert all(same_bits(x[:-1], y[:-1]) for x, y in zip(after, before))


@pytest.mark.parametrize("mods", ("none", "kv_start_all", "kv_start_alibi"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_rows_do_not_depend_on_masks_of_others(dtype, mods, device):
    gen = generator("others", dtype, mods)
    paged = make("others", "many", (8, 2), (64, 64), 16, dtype, device)
    rules = paged_modifiers(mods, 2, (8, 2), gen, dtype, device)
    masks = [masks_of(("others", i), paged.queries, "wide", "any", device) for i in range(2)]
    kept = torch.arange(masks[0].shape[0], device=device) % 3 == 0
    masks[1][kept] = masks[0][kept]
    one, two = (attend(paged, mask, **rules) for mask in masks)
    for x, y in zip(one, two):
        assert same_bits(x[kept], y[kept]) and not torch.equal(x, y)


def test_rows_without_keys(device):
    """A row that sees no new token sees the old keys. Without those it gives 0 and -inf."""
    paged = make("empty rows", ([40, 4, 0], [4, 4, 4]), (4, 2), (64, 64), 16, torch.float32, device)
    mask = torch.zeros(12, 4, dtype=torch.bool, device=device)
    out, lse = attend(paged, mask, ragged=False)
    check(paged, (out, lse), mask, ragged=False)
    assert out[:4].count_nonzero() and lse[:4].isfinite().all()
    assert not out[4:].count_nonzero() and (lse[4:] == -math.inf).all()
    sinks = randn(generator("sinks"), 4, device=device)
    out, lse = attend(paged, mask, ragged=False, sinks=sinks)
    assert not out[4:].count_nonzero() and torch.allclose(lse[4:], sinks.expand(8, 4))


def test_strided_masks(device):
    paged = make("strided", "verify", (4, 2), (64, 64), 16, torch.float32, device)
    mask = masks_of("strided", paged.queries, "sequences", "tree", device)
    want = attend(paged, mask, ragged=False)
    every = torch.stack([mask, ~mask], -1)[..., 0]
    swapped = mask.transpose(1, 2).contiguous().transpose(1, 2)
    for same in (every, swapped, mask.flatten(0, 1)):
        assert all(map(same_bits, attend(paged, same, ragged=False), want))
    one = mask[:1].expand(3, -1, -1)
    for x, y in zip(attend(paged, one, ragged=False), attend(paged, one.clone(), ragged=False)):
        assert same_bits(x, y)


@pytest.mark.parametrize("mods", ("none", "window", "alibi", "kv_start"))
def test_fewer_keys_than_new_tokens(mods, device):
    """With allow_short. New tokens before the first place have no key in the cache."""
    gen = generator("allow short", mods)
    paged = make(
        "allow short", ([3, 0, 60], [5, 2, 5]), (4, 2), (64, 64), 16, torch.float32, device
    )
    mask = masks_of("allow short", paged.queries, "tokens", "any", device)
    rules = paged_modifiers(mods, 3, (4, 2), gen, torch.float32, device) | {"allow_short": True}
    check(paged, attend(paged, mask, **rules), mask, **rules)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_batch_invariant(dtype, device):
    """A sequence has the same bits alone as among others."""
    batch = ([300, 40, 9, 130], [6, 6, 6, 6])
    paged = make("invariant", batch, (8, 2), (128, 128), 16, dtype, device)
    mask = masks_of("invariant", paged.queries, "tokens", "tree", device)
    together = attend(paged, mask, ragged=False, batch_invariant=True)
    with torch_gpukern.batch_invariant():
        assert all(map(same_bits, attend(paged, mask, ragged=False), together))
    check(paged, together, mask, ragged=False)
    for b in range(4):
        rows = slice(6 * b, 6 * b + 6)
        alone = paged_attn(
            paged.q[rows],
            paged.k_cache,
            paged.v_cache,
            paged.block_table[b : b + 1],
            paged.seq_lens[b : b + 1],
            attn_mask=mask[rows],
            batch_invariant=True,
            return_lse=True,
        )
        for x, y in zip(alone, together):
            assert same_bits(x, y[rows])


# --------------------------------------------------------------------------------------------------
# refusals


def test_what_is_refused(device):
    paged = make("refused", "verify", (4, 2), (64, 64), 16, torch.float32, device)
    mask = masks_of("refused", paged.queries, "tokens", "tree", device)

    def refused(text, attn_mask=mask, ragged=False, error=ValueError, **rules):
        with pytest.raises(error, match=text):
            attend(paged, attn_mask, ragged, **rules)

    refused("attn_mask: expected bool, got torch.float32", mask.float())
    refused("attn_mask: expected bool, got torch.int64", mask.long())
    refused("attn_mask is expected to be a bool tensor", [[True]], error=TypeError)
    refused(
        "attn_mask is expected to be .*AttnMask", torch_gpukern.attn_mask_of(mask), error=TypeError
    )
    refused(r"attn_mask must have shape \[T, S\] or \[B, S, S\], got \[12\]", mask[:, 0])
    refused(r"attn_mask must be \[T, S\] with T = 12, got \[11, 4\]", mask[1:])
    refused("attn_mask has 3 columns, the 3 sequences have 12 tokens", mask[:, :3])
    refused("attn_mask has 3 columns, max_seqlen_q is 4", mask[:, :3], ragged=True)
    square = mask.view(3, 4, 4)
    refused(r"attn_mask must be \[B, S, S\] with B = 3, got \[2, 4, 4\]", square[1:])
    refused(r"attn_mask must be \[B, S, S\] with B = 3, got \[3, 4, 3\]", square[..., :3])
    refused("attn_mask has 3 columns, the 3 sequences have 12 tokens", square[:, :3, :3])
    prefix = SharedPrefix(*(torch.zeros(1, dtype=torch.int32, device=device),) * 4)
    refused("prefix is given with attn_mask", prefix=prefix)
    slopes = torch.ones(4, device=device)
    refused(
        "alibi_slopes is given with attn_mask and batch_invariant",
        alibi_slopes=slopes,
        batch_invariant=True,
    )
    refused("window_left", window_left=-2)
    refused("window_right", window_right=-2)
    refused("softcap", softcap=-1.0)
    refused("kv_start", kv_start=torch.zeros(2, dtype=torch.int32, device=device))
    refused("attn_mask must be on q's device", mask.to("meta"))
    paged = make("refused", "verify", (4, 1), (576, 512), 16, torch.float32, device)
    q = paged.q.requires_grad_()
    out = paged_attn(q, *paged.args()[1:], attn_mask=mask)
    with pytest.raises(NotImplementedError, match="paged_attn: it has no backward"):
        out.sum().backward()


WRONG = {
    "too few keys": ({"seq_lens": [40, 3, 129]}, "seq_lens is expected to count the query tokens"),
    "negative": ({"seq_lens": [40, -1, 129]}, "seq_lens"),
    "beyond the table": ({"seq_lens": [40, 70, 4000]}, "seq_lens"),
    "an old page": ({"page": (1, 0)}, "block_table is expected to hold pages"),
    "a new page": ({"page": (1, 4)}, "block_table is expected to hold pages"),
    "starts": ({"cu_seqlens_q": [0, 4, 3, 12]}, "cu_seqlens_q"),
    "too many tokens": ({"cu_seqlens_q": [0, 4, 9, 12]}, "at most max_seqlen 4 tokens"),
}


def wrong(name, device):
    paged = make("wrong", "verify", (4, 2), (64, 64), 16, torch.float32, device)
    change, text = WRONG[name]
    for argument, value in change.items():
        if argument == "page":
            paged.block_table[value] = 1000
        else:
            setattr(paged, argument, torch.tensor(value, dtype=torch.int32, device=device))
    return paged, text


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mods", ("none", "alibi"))
def test_contents_are_checked(name, mods):
    paged, text = wrong(name, "cpu")
    mask = masks_of("wrong", paged.queries, "tokens", "tree")
    rules = paged_modifiers(mods, 3, (4, 2), generator("wrong"), torch.float32, "cpu")
    with pytest.raises((IndexError, ValueError), match=text):
        attend(paged, mask, **rules)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mods", ("none", "alibi"))
def test_contents_are_reported(name, mods):
    paged, _ = wrong(name, "cuda")
    mask = masks_of("wrong", paged.queries, "tokens", "tree", "cuda")
    rules = paged_modifiers(mods, 3, (4, 2), generator("wrong"), torch.float32, "cuda")
    torch_gpukern.check_errors()

    def reported(attn_mask):
        try:
            paged_attn(*paged.args(), **packed(paged), **rules, attn_mask=attn_mask)
            torch.cuda.synchronize()
            torch_gpukern.check_errors()
        except IndexError:
            torch.cuda.synchronize()  # a call that raised may still run
            with contextlib.suppress(IndexError):
                torch_gpukern.check_errors()
            return True
        return False

    if not reported(None):
        pytest.skip("the call without attn_mask does not report it either")
    assert reported(mask)


# --------------------------------------------------------------------------------------------------
# compilers and graphs


def compiled_case(key, device, ragged, mods, dtype=torch.bfloat16, even="verify"):
    paged = make(key, "ragged" if ragged else even, (4, 2), (64, 64), 16, dtype, device)
    mask = masks_of(key, paged.queries, "tokens", "tree", device)
    rules = paged_modifiers(mods, len(paged.lengths), (4, 2), generator(key), dtype, device)
    return paged, mask, (packed(paged) if ragged else {}) | rules


@pytest.mark.parametrize("mods", ("none", "kv_start_all", "kv_start_alibi"))
@pytest.mark.parametrize("ragged", (False, True), ids=("even", "ragged"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_compile(dynamic, ragged, mods, device):
    torch._dynamo.reset()

    def call(args, mask, rules):
        return paged_attn(*args, **rules, attn_mask=mask, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    paged, mask, rules = compiled_case("compile", device, ragged, mods)
    want = call(paged.args(), mask, rules)
    assert all(map(same_bits, compiled(paged.args(), mask, rules), want))


def test_compile_serves_other_lengths(device):
    """One graph for batches of other sizes."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(args, mask):
        return paged_attn(*args, attn_mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for batch in (([40, 70, 129], [6] * 3), ([90, 30, 5, 64, 17], [5] * 5), ([17, 9], [7, 7])):
        paged = make(batch, batch, (4, 2), (64, 64), 16, torch.float32, device)
        mask = masks_of(batch, paged.queries, "tokens", "tree", device)
        assert same_bits(compiled(paged.args(), mask), call(paged.args(), mask))
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mods", ("none", "kv_start_all", "kv_start_alibi"))
@pytest.mark.parametrize("batch", ("verify", "ragged", "rows"))
def test_capture(batch, mods):
    """One captured graph serves other lengths, pages and masks."""
    paged, mask, rules = compiled_case("capture", "cuda", batch == "ragged", mods, even=batch)
    args = [x.clone() for x in paged.args()]

    def call():
        return paged_attn(*args, **rules, attn_mask=mask, return_lse=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    assert all(map(same_bits, got, call()))
    mask.copy_(masks_of("another", paged.queries, "tokens", "any", "cuda"))
    args[4].copy_(args[4] - (args[4] > 30).int() * 3)
    graph.replay()
    assert all(map(same_bits, got, call()))


def launches(call):
    """Kernels and copies on the device in one call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", (False, True), ids=("even", "ragged"))
def test_launches(ragged):
    """The kernels of the call over old keys, one before and one behind."""
    paged, mask, rules = compiled_case("launches", "cuda", ragged, "none")
    starts = {n: x for n, x in rules.items() if n in ("cu_seqlens_q", "max_seqlen_q")}
    names = launches(lambda: paged_attn(*paged.args(), **rules, attn_mask=mask))
    old = launches(lambda: paged_attn(*paged.args(), **starts, is_causal=False))
    ours = [n for n in names if "tree_" in n]
    assert len(ours) == 2 and len(names) <= len(old) + 3, names


@pytest.mark.gpu
def test_launches_of_many_rows():
    """As many as the call with the causal rule, one of them with another kernel."""
    paged, mask, _ = compiled_case("launches", "cuda", False, "none", even="rows")
    names = launches(lambda: paged_attn(*paged.args(), attn_mask=mask))
    causal = launches(lambda: paged_attn(*paged.args()))
    assert len(names) == len(causal) and sum("paged_tree_sm90a" in n for n in names) == 1, names


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, stored, dim, batch, kernel",
    (
        (torch.bfloat16, None, 128, "verify", "paged_tree_mma_bf16"),
        (torch.bfloat16, None, 128, "rows", "paged_tree_sm90a_bf16_d128"),
        (torch.float16, None, 64, "rows", "paged_tree_sm90a_f16_d64"),
        (torch.bfloat16, None, 72, "rows", "paged_tree_mma_bf16"),
        (torch.float16, None, 72, "verify", "paged_tree_mma_f16"),
        (torch.bfloat16, torch.float8_e4m3fn, 128, "rows", "paged_tree_mma_bf16"),
        (torch.bfloat16, torch.int8, 72, "verify", "paged_tree_bf16"),
        (torch.float32, None, 64, "rows", "paged_tree_f32"),
        (torch.float64, None, 64, "verify", "paged_tree_f64"),
    ),
    ids=str,
)
def test_kernel(dtype, stored, dim, batch, kernel):
    paged = make("kernel", batch, (4, 2), (dim, dim), 16, dtype, "cuda")
    if stored is not None:
        paged.k_cache, paged.v_cache = paged.k_cache.to(stored), paged.v_cache.to(stored)
    mask = masks_of("kernel", paged.queries, "tokens", "tree", "cuda").view(torch.uint8)
    told = torch.ops.gpukern.explain_paged_attn_masked(*paged.args(), mask)
    assert json.loads(told)["instance"] == kernel


def test_explain():
    """On CUDA a mask has a kernel, which explain names without a GPU. On the CPU it is several
    calls."""
    paged = make("explain", "verify", (4, 2), (64, 64), 16, torch.bfloat16, "cpu")
    mask = masks_of("explain", paged.queries, "tokens", "tree", "cpu")

    def told(attn_mask=mask, **rules):
        return torch_gpukern.explain("paged_attn", *paged.args(), attn_mask=attn_mask, **rules)

    slopes = torch.rand(4)
    for rules in ({}, {"arch": "sm_90", "alibi_slopes": slopes}):
        with pytest.raises(
            ValueError, match="^explain: paged_attn with attn_mask is several calls"
        ):
            told(**rules)
    with pytest.raises(
        ValueError, match="^paged_attn: attn_mask: expected bool, got torch.float32"
    ):
        told(mask.float(), arch="sm_90")
    assert told(None) == torch_gpukern.explain("paged_attn", *paged.args())
    if not torch.ops.gpukern.cuda_kernels.default():
        return
    with pytest.raises(ValueError, match=r"paged_attn: attn_mask must be \[T, S\] with T = 12"):
        told(mask[1:], arch="sm_90")
    assert told(arch="sm_90")["instance"] == "paged_tree_mma_bf16"
    paged.q = paged.q.to(torch.float16)
    paged.k_cache, paged.v_cache = (
        c.to(torch.float8_e4m3fn) for c in (paged.k_cache, paged.v_cache)
    )
    each = torch.ones(len(paged.k_cache), 2)
    assert told(arch="sm_90", v_scale=each)["instance"] == "paged_tree_mma_f16"


def test_autocast(device):
    paged = make("autocast", "verify", (4, 2), (64, 64), 16, torch.bfloat16, device)
    mask = masks_of("autocast", paged.queries, "tokens", "tree", device)
    wide = paged.q.float()
    for slopes in (None, torch.rand(4, generator=generator("autocast")).to(device)):
        want = attend(paged, mask, alibi_slopes=slopes)
        with torch.autocast(device, torch.bfloat16):
            out = paged_attn(wide, *paged.args()[1:], alibi_slopes=slopes, attn_mask=mask)
        assert out.dtype is torch.bfloat16
        assert torch.allclose(out.float(), want[0].float(), atol=0.05)


# ---- the mask of a tree ----


@pytest.mark.parametrize("form", ("list", "tensor", "batch"))
def test_tree_mask(form, device):
    """Beside a walk from each token to its root."""
    draw = random.Random(3)
    for size in (0, 1, 2, 3, 7, 33, 130):
        trees = [[draw.randrange(-1, max(i // w, 1)) if i else -1 for i in range(size)]
                 for w in (1, 2, 9)]  # fmt: skip
        trees.append([*range(-1, size - 1)])
        want = torch.zeros(len(trees), size, size, dtype=torch.bool)
        for mask, parents in zip(want, trees):
            for i in range(size):
                at = i
                while at >= 0:
                    mask[i, at] = True
                    at = parents[at]
        if form == "batch":
            found = torch_gpukern.tree_mask(torch.tensor(trees, device=device, dtype=torch.int32))
            assert found.device.type == device and found.dtype is torch.bool
            assert torch.equal(found.cpu(), want)
            continue
        for mask, parents in zip(want, trees):
            given = parents if form == "list" else torch.tensor(parents, dtype=torch.int64)
            found = torch_gpukern.tree_mask(given, device=device)
            assert found.device.type == device and torch.equal(found.cpu(), mask)


def test_tree_mask_is_a_mask_of_drafts(device):
    """A chain's mask gives what the causal rule gives."""
    gen = generator("tree mask")
    cache = [randn(gen, 4, 16, 2, 32, device=device) for _ in "kv"]
    q = randn(gen, 12, 4, 32, device=device)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([20, 31], dtype=torch.int32, device=device)
    chain = torch_gpukern.tree_mask([list(range(-1, 5))] * 2, device=device)
    out = paged_attn(q, *cache, table, lens, attn_mask=chain)
    torch.testing.assert_close(out, paged_attn(q, *cache, table, lens), rtol=1e-5, atol=1e-5)


def test_tree_mask_refuses_by_name():
    for parents, says in (
        ([-1, 1], r"parents is \[-1, 1\]; a parent comes before its token"),
        ([[-1, 0], [0, 0]], "a parent comes before its token"),
        ([0.5], "parents must be integers"),
        (torch.tensor([True]), "parents must be integers"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"\[S\] or \[B, S\], got \[1, 1, 1\]"),
        (torch.tensor(-1), r"got \[\]"),
    ):
        with pytest.raises(ValueError, match=says):
            torch_gpukern.tree_mask(parents)

# SPDX-License-Identifier: BSD-3-Clause
"""Pages that sequences share are read once: PagedKVCache.shared_prefix and paged_attn(prefix=)."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from attention_cases import paged_modifiers
from conftest import (
    FLOATS,
    assert_close_as,
    f64,
    generator,
    grid,
    randn,
    reference,
    same_bits,
    torch_gpukern,
)

from torch_gpukern import PagedKVCache, SharedPrefix, paged_attn
from torch_gpukern.paged import shared

SIZE = 8  # tokens of a page

# For each group: shared tokens, own tokens of each sequence, query tokens of each sequence.
BATCHES = {
    "one group": [(40, [1, 9, 30, 16], [1, 1, 1, 1])],
    "two groups": [(48, [3, 1, 70], [1, 1, 1]), (16, [8, 2], [1, 1])],
    "and others": [(0, [33], [1]), (64, [5, 1, 17], [1, 1, 1]), (0, [0, 12], [1, 1])],
    "no own keys": [(24, [0, 0, 3], [1, 1, 1])],
    "several tokens": [(56, [3, 9, 130, 4], [3, 1, 9, 2])],
    "many lanes": [(200, [40, 33], [40, 20]), (0, [7], [5])],
}
MODIFIERS = (
    "none",
    "full",
    "full_right",
    "scale",
    "softcap",
    "sinks",
    "sinks_own",
    "full_all",
)
SCALES = ("none", "one", "head", "page")
CODES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    monkeypatch.setattr(shared, "LEAST_KEYS", {"cpu": 1, "cuda": 1})


class Batch:
    """Sequences of a cache, some of them forked. Rows that nobody wrote are NaN."""

    def __init__(self, gen, groups, heads, dims, dtype, device, code=None, scales="none"):
        pages = 1 + sum(
            -(-n // SIZE) + sum(1 + -(-own // SIZE) for own in owns) for n, owns, _ in groups
        )
        shape = {"one": (), "head": heads[1:], "page": (1, pages, heads[1])}.get(scales)
        self.cache = cache = PagedKVCache(
            pages,
            SIZE,
            heads[1],
            dims[0],
            head_dim_v=dims[1],
            dtype=code or dtype,
            device=device,
            **{
                name: torch.rand(shape, generator=gen).to(device) + 0.5
                for name in ("k_scale", "v_scale")
                if shape is not None
            },
        )
        if code != torch.int8:
            cache.k.copy_(torch.full_like(cache.k, math.nan, dtype=torch.float32))
            cache.v.copy_(cache.k.new_full((), math.nan, dtype=torch.float32))

        def grow(sequence, n):
            rows = (randn(gen, n, heads[1], d, dtype=dtype, device=device) for d in dims)
            cache.append([sequence], *rows, n)

        self.sequences, self.counts = [], []
        for n, owns, counts in groups:
            first = cache.allocate()
            grow(first, n)
            for own, count in zip(owns, counts):
                its = cache.fork(first)
                grow(its, own)
                self.sequences.append(its)
                self.counts.append(count)
            cache.free(first)
        self.q = randn(gen, sum(self.counts), heads[0], dims[0], dtype=dtype, device=device)
        self.table = cache.block_table(self.sequences)
        self.lens = cache.seq_lens(self.sequences)
        starts = [0, *itertools.accumulate(self.counts)]
        self.packed = {
            "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=device),
            "max_seqlen_q": max(self.counts),
        }
        if set(self.counts) == {1}:
            self.packed = {}

    def prefix(self):
        return self.cache.shared_prefix(self.sequences, self.counts)

    def args(self, table=None):
        table = self.table if table is None else table
        return self.q, self.cache.k[0], self.cache.v[0], table, self.lens

    def attend(self, table=None, **rules):
        return paged_attn(
            *self.args(table), **self.packed, **self.cache.scales(), **rules, return_lse=True
        )

    def exact(self, *tables, **rules):
        """In float64, by the plain call: of the sequences, or of other tables."""
        args = *self.args()[:3], *(tables or self.args()[3:])
        rules = self.cache.scales() | rules
        return reference.paged_attn(*f64(args), **f64(rules), return_lse=True)


def close(batch, prefix, got, plain, rules):
    """got is as close to float64 as the plain call and PyTorch in q's dtype, but for one rounding
    of each part's share."""
    exact = batch.exact(**batch.packed, **rules)
    torchs = reference.paged_attn(
        *batch.args(), **batch.packed, **batch.cache.scales(), **rules, return_lse=True
    )
    how = {n: x for n, x in rules.items() if n in ("scale", "softcap")}
    starts = {"cu_seqlens_q": prefix.cu_seqlens_q, "max_seqlen_q": len(batch.q)}
    parts = (
        batch.exact(*prefix[:2], **starts, **how, is_causal=False),
        batch.exact(**batch.packed, **rules, kv_start=prefix.kv_start),
    )
    torch.testing.assert_close(
        reference.attn_merge(*parts[0], *parts[1]), exact, rtol=1e-12, atol=1e-12
    )
    shares = sum(out.abs() * (lse - exact[1]).exp()[..., None].nan_to_num(0) for out, lse in parts)
    for x, *yards, ref, most in zip(got, plain, torchs, exact, (shares, exact[1]), strict=True):
        assert x.dtype == yards[0].dtype and x.is_contiguous()
        assert torch.equal(x.isinf(), ref.isinf())
        mine, *own = (z.double().sub(ref).nan_to_num(0).abs().max().item() for z in (x, *yards))
        eps = torch.finfo(x.dtype).eps
        # float64's exp and log are those of the machine, as the reference's are
        rounding = eps * most[most.isfinite()].abs().max().item() * (4 if eps < 1e-10 else 1)
        assert mine <= 2 * max(own) + rounding, f"{mine}, others {own}, one rounding {rounding}"


@pytest.mark.parametrize(
    "case",
    grid(
        72,
        batch=tuple(BATCHES),
        mods=MODIFIERS,
        dtype=FLOATS,
        heads=((4, 2), (3, 3), (8, 1)),
        dims=((64, 64), (32, 48), (80, 80)),
        code=CODES,
        scales=SCALES,
    ),
)
def test_values(case, device):
    dtype, heads = case.dtype, case.heads
    coded = case.code is not None and dtype != torch.float64
    gen = generator("shared prefix", case)
    how = (case.code, case.scales) if coded else ()
    batch = Batch(gen, BATCHES[case.batch], heads, case.dims, dtype, device, *how)
    prefix = batch.prefix()
    assert prefix is not None
    rules = paged_modifiers(case.mods, 1, heads, gen, dtype, device)
    # The call must not read shared pages by the sequences' own tables.
    table = batch.table.clone()
    for row, keys in zip(table, prefix.kv_start.tolist()):
        row[: keys // SIZE] = 2_000_000_000
    got = batch.attend(table, prefix=prefix, **rules)
    close(batch, prefix, got, batch.attend(**rules), rules)


def plain_batch(device="cpu", name="one group", dtype=torch.float32):
    gen = generator("shared prefix", name, dtype)
    return Batch(gen, BATCHES[name], (4, 2), (64, 64), dtype, device)


@pytest.mark.parametrize(
    "rules",
    (
        {"window_left": 20},
        {"window_left": 0},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
        {"batch_invariant": True},
    ),
    ids=lambda rules: next(iter(rules)),
)
@pytest.mark.parametrize("name", ("one group", "several tokens"))
def test_rules_of_which_each_sequence_has_its_own(name, rules, device):
    """They read each sequence by itself, so the bits are those of the plain call."""
    batch = plain_batch(device, name)
    rules = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in rules.items()}
    for got, plain in zip(batch.attend(prefix=batch.prefix(), **rules), batch.attend(**rules)):
        assert same_bits(got, plain)
    with torch_gpukern.batch_invariant():
        got = batch.attend(prefix=batch.prefix())
        assert all(map(same_bits, got, batch.attend()))


def test_without_lse_and_under_compile(device):
    batch = plain_batch(device, "several tokens", torch.bfloat16)
    prefix = batch.prefix()
    out, lse = batch.attend(prefix=prefix)

    def call(q, k, v, table, lens, starts, prefix):
        how = {"cu_seqlens_q": starts, "max_seqlen_q": 9, "prefix": prefix}
        return paged_attn(q, k, v, table, lens, **how)

    args = *batch.args(), batch.packed["cu_seqlens_q"], prefix
    assert same_bits(call(*args), out)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    assert same_bits(compiled(*args), out)


def test_what_is_refused(device):
    batch = plain_batch(device)
    prefix = batch.prefix()
    with pytest.raises(ValueError, match="paged_attn: prefix must be a SharedPrefix, got int"):
        batch.attend(prefix=40)
    with pytest.raises(ValueError, match="paged_attn: kv_start is given with prefix"):
        batch.attend(prefix=prefix, kv_start=torch.zeros_like(batch.lens))
    q = batch.q.requires_grad_()
    out = paged_attn(q, *batch.args()[1:], prefix=prefix)
    with pytest.raises(NotImplementedError, match="paged_attn: it has no backward"):
        out.sum().backward()


def test_contents_are_checked():
    batch = plain_batch()
    prefix = batch.prefix()
    with pytest.raises(IndexError, match="block_table is expected to hold pages"):
        batch.attend(prefix=prefix._replace(block_table=prefix.block_table + 10_000))
    with pytest.raises(IndexError, match="seq_lens is expected to count the query tokens"):
        batch.attend(prefix=prefix._replace(seq_lens=torch.ones_like(prefix.seq_lens)))


def test_nothing_is_shared():
    gen = generator("nothing shared")
    lone = Batch(gen, [(0, [33, 40], [1, 1]), (16, [3], [1])], (2, 1), (8, 8), torch.float32, "cpu")
    assert lone.prefix() is None
    assert lone.cache.shared_prefix([]) is None
    cache = PagedKVCache(40, SIZE, 1, 8)
    first = cache.allocate()
    cache.extend([first], 5 * SIZE + 3)
    pair = [first, cache.fork(first)]
    cache.extend(pair)
    assert cache.shared_prefix(pair).seq_lens.tolist() == [5 * SIZE]
    # a page is shared only if every query sees all of it
    assert cache.shared_prefix(pair, 4).seq_lens.tolist() == [5 * SIZE]
    assert cache.shared_prefix(pair, [4, 6]).seq_lens.tolist() == [4 * SIZE]
    # as many shared keys as query tokens, which paged_attn asks of a group
    assert cache.shared_prefix(pair, 12).seq_lens.tolist() == [4 * SIZE]
    assert cache.shared_prefix(pair, 14) is None
    cache.release(pair, SIZE)
    assert cache.shared_prefix(pair) is None


def test_a_group_must_save_some_keys(monkeypatch):
    monkeypatch.setattr(shared, "LEAST_KEYS", {"cpu": 3 * 5 * SIZE, "cuda": 4 * 5 * SIZE})
    cache = PagedKVCache(40, SIZE, 1, 8)
    first = cache.allocate()
    cache.extend([first], 5 * SIZE)
    three = [first, cache.fork(first), cache.fork(first)]
    assert cache.shared_prefix(three) is None
    assert cache.shared_prefix([*three, cache.fork(first)]) is not None
    for sequences, device, found in ((4, "cpu", True), (4, "cuda", False), (5, "cuda", True)):
        table, pages = np.zeros((sequences, 5), np.int32), np.full(sequences, 5)
        groups = shared.groups_of(table, pages, np.ones(sequences, np.int64), SIZE, device)
        assert (groups is not None) == found


def test_by_pages():
    cache = PagedKVCache(40, SIZE, 1, 8)
    first, second = cache.allocate(), cache.allocate()
    cache.extend([first, second], [4 * SIZE, 3 * SIZE])
    forks = [cache.fork(x) for x in (first, second, first)]
    mixed = [first, second, *forks, cache.allocate()]
    order = cache.by_pages(mixed)
    assert sorted(order) == sorted(mixed)
    places = [order.index(x) for x in (first, forks[0], forks[2])]
    assert max(places) - min(places) == 2
    assert abs(order.index(second) - order.index(forks[1])) == 1


def valid(table, most, counts, groups, size):
    """Whether the groups cut the batch, and every page of a group is the same in all its rows."""
    starts, pages = groups
    assert starts[0] == 0 and starts[-1] == len(table) and (np.diff(starts) > 0).all()
    for low, high, n in zip(starts, starts[1:], pages):
        assert n <= most[low:high].min() and (table[low:high, :n] == table[low, :n]).all()
        assert n == 0 or n * size >= counts[low:high].sum()


def test_groups_of_random_tables():
    """Groups are valid, and save at least what one group of the whole batch would."""
    draw = random.Random("groups")
    found = 0
    for _ in range(400):
        n, columns = draw.randint(1, 9), draw.randint(1, 6)
        rows = [[draw.randint(0, 1) for _ in range(columns)] for _ in range(n)]
        if draw.random() < 0.7:
            rows.sort()
        table = np.array(rows, np.int32)
        most = np.array([draw.randint(0, columns) for _ in range(n)])
        counts = np.array([draw.randint(0, 2) for _ in range(n)])
        groups = shared.groups_of(table, most, counts, 2)
        whole = 0
        while whole < most.min() and (table[:, whole] == table[0, whole]).all():
            whole += 1
        if groups is None:
            assert n == 1 or whole * 2 < counts.sum() or whole == 0
            continue
        found += 1
        valid(table, most, counts, groups, 2)
        if counts.sum() <= 2:  # no group is too short for its queries
            saved = ((np.diff(groups.starts) - 1) * groups.pages).sum()
            assert saved >= whole * (n - 1)
    assert found > 100


def test_groups_within_groups():
    """One page is common to all, and four more to each half: the halves save more."""
    table = np.array(
        [[0, *range(10 * half, 10 * half + 4)] for half in (1, 1, 1, 2, 2, 2)], np.int32
    )
    groups = shared.groups_of(table, np.full(6, 5), np.ones(6, np.int64), SIZE)
    assert groups.starts.tolist() == [0, 3, 6] and groups.pages.tolist() == [5, 5]
    lone = shared.groups_of(table[[0, 1, 3]], np.full(3, 5), np.ones(3, np.int64), SIZE)
    assert lone.starts.tolist() == [0, 2, 3] and lone.pages.tolist() == [5, 0]


def empty_prefix(rows, width, device):
    sizes = (rows, width), (rows,), (rows + 1,), (rows,)
    return SharedPrefix(*(torch.full(x, -7, dtype=torch.int32, device=device) for x in sizes))


def test_tensors_that_a_graph_reads(device):
    """The same tensors serve batches that share, with inactive rows behind them, and others."""
    rows, static = 6, empty_prefix(6, 8, device)
    for name in ("one group", "and others", "two groups"):
        batch = plain_batch(device, name)
        n = len(batch.sequences)
        table = torch.zeros(rows, 40, dtype=torch.int32, device=device)
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        batch.cache.fill_(batch.sequences, table, lens)
        q = randn(generator("static"), rows, 4, 64, device=device)
        args = q, batch.cache.k[0], batch.cache.v[0], table, lens
        plain = paged_attn(*args, return_lse=True)
        assert batch.cache.fill_shared_prefix_(batch.sequences, static)
        got = paged_attn(*args, prefix=static, return_lse=True)
        exact = reference.paged_attn(*f64(args[:3]), table, lens, return_lse=True)
        for x, y, ref in zip(got, plain, exact):
            assert_close_as([y], x, ref)
        assert not got[0][n:].any()
        # sequences that share nothing: the merge is exact
        lone = batch.sequences[:1]
        assert not batch.cache.fill_shared_prefix_(lone, static)
        assert all(map(same_bits, paged_attn(*args, prefix=static, return_lse=True), plain))


def test_tensors_that_do_not_fit():
    batch = plain_batch()
    fill = batch.cache.fill_shared_prefix_
    good = empty_prefix(4, 5, "cpu")
    assert fill(batch.sequences, good)
    for bad in (
        empty_prefix(3, 5, "cpu"),
        empty_prefix(4, 4, "cpu"),
        good._replace(cu_seqlens_q=good.seq_lens),
        good._replace(kv_start=good.kv_start.long()),
    ):
        with pytest.raises(ValueError, match="PagedKVCache.fill_shared_prefix_: "):
            fill(batch.sequences, bad)

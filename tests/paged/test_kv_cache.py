# SPDX-License-Identifier: BSD-3-Clause
"""PagedKVCache, compared after each step with a model that keeps every sequence in plain tensors."""

import math

import pytest
import torch
from attention_cases import torch_attn
from conftest import (
    assert_close_as,
    f64,
    generator,
    ops,
    randn,
    reference,
    same_bits,
    torch_gpukern,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_gpukern import OutOfPages, PagedKVCache


def make(device="cpu", num_blocks=8, block_size=4, heads_kv=2, head_dim=8, **kwargs):
    cache = PagedKVCache(num_blocks, block_size, heads_kv, head_dim, device=device, **kwargs)
    cache.k.fill_(math.nan)  # a row that nobody wrote must not be read
    cache.v.fill_(math.nan)
    return cache


def tokens(gen, cache, n):
    """k [n, heads_kv, head_dim] and v [n, heads_kv, head_dim_v] of new tokens of one layer."""
    heads, d, dv = cache.k.shape[3], cache.k.shape[4], cache.v.shape[4]
    return tuple(
        randn(gen, n, heads, x, dtype=cache.k.dtype, device=cache.k.device) for x in (d, dv)
    )


def held(cache, sequence, layer=0):
    """The keys and values of a sequence as its pages hold them: [length, heads_kv, head_dim]."""
    pages, n = cache.pages(sequence), cache.length(sequence)
    return tuple(c[layer][pages].flatten(0, 1)[:n] for c in (cache.k, cache.v))


def check_pool(cache, sequences):
    """Every page is either free or owned, and the block tables agree with pages()."""
    owned = {page for s in sequences for page in cache.pages(s)}
    assert cache.free_blocks == cache.num_blocks - len(owned)
    for s in sequences:
        pages = cache.pages(s)
        assert len(pages) == len(set(pages)) == -(-cache.length(s) // cache.block_size)
    if sequences:
        table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
        assert (
            table.dtype == lens.dtype == torch.int32
            and table.device == lens.device == cache.k.device
        )
        assert lens.tolist() == [cache.length(s) for s in sequences]
        for row, s in zip(table.tolist(), sequences):
            assert row[: len(cache.pages(s))] == cache.pages(s) and set(
                row[len(cache.pages(s)) :]
            ) <= {-1}


def test_append_and_read_back(device):
    gen = generator("append")
    cache = make(device)
    a, b = cache.allocate(), cache.allocate()
    assert a != b and cache.length(a) == 0 and cache.pages(a) == [] and cache.free_blocks == 8
    wanted = {a: [], b: []}
    for counts in ((5, 1), (1, 0), (3, 9), (0, 1)):
        k, v = tokens(gen, cache, sum(counts))
        slots = cache.append([a, b], k, v, counts)
        assert (
            slots.dtype == torch.int64
            and slots.shape == (sum(counts),)
            and slots.device == cache.k.device
        )
        wanted[a].append((k[: counts[0]], v[: counts[0]]))
        wanted[b].append((k[counts[0] :], v[counts[0] :]))
        check_pool(cache, [a, b])
    for s, parts in wanted.items():
        for got, want in zip(held(cache, s), zip(*parts)):
            assert same_bits(got, torch.cat(want))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_attention_over_the_cache(dtype, device):
    """A prefill and a decode step of all sequences equal dense attention over the same keys."""
    gen = generator("attend", dtype)
    cache = make(device, num_blocks=32, layers=2, head_dim=16, head_dim_v=8, dtype=dtype)
    assert (
        cache.k.shape == (2, 32, 4, 2, 16)
        and cache.v.shape == (2, 32, 4, 2, 8)
        and cache.k.dtype == dtype
    )
    sequences = [cache.allocate() for _ in range(3)]
    dense = {s: ([], []) for s in sequences}
    for counts in ((7, 1, 20), (1, 1, 1), (1, 1, 1)):
        slots = cache.extend(sequences, list(counts))
        for layer in range(2):
            k, v = tokens(gen, cache, sum(counts))
            cache.write(k, v, slots, layer=layer)
            if layer == 1:
                start = 0
                for s, n in zip(sequences, counts):
                    dense[s][0].append(k[start : start + n])
                    dense[s][1].append(v[start : start + n])
                    start += n
        q = randn(gen, sum(counts), 4, 16, dtype=dtype, device=device)
        cu = torch.tensor(
            [0, counts[0], counts[0] + counts[1], sum(counts)], dtype=torch.int32, device=device
        )
        table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
        out = ops.paged_attn(q, cache.k[1], cache.v[1], table, lens, cu, max(counts))
        for b, s in enumerate(sequences):
            k, v = (torch.cat(x).transpose(0, 1)[None] for x in dense[s])
            mine = q[cu[b] : cu[b + 1]].transpose(0, 1)[None]
            span = dict(is_causal=True, diagonal=k.shape[2] - mine.shape[2])
            got = out[cu[b] : cu[b + 1]].transpose(0, 1)[None]
            assert_close_as(
                [torch_attn(mine, k, v, **span), reference.flash_attn(mine, k, v, **span)],
                got,
                reference.flash_attn(*f64((mine, k, v)), **span),
            )


def test_fork_shares_pages_and_copies_on_write(device):
    gen = generator("fork")
    cache = make(device)
    parent = cache.allocate()
    k, v = tokens(gen, cache, 6)
    cache.append([parent], k, v, 6)
    free = cache.free_blocks
    child = cache.fork(parent)
    assert (
        cache.free_blocks == free
        and cache.pages(child) == cache.pages(parent)
        and cache.length(child) == 6
    )
    before = cache.k.clone()
    k1, v1 = tokens(gen, cache, 1)
    cache.append([child], k1, v1)
    assert cache.pages(child)[0] == cache.pages(parent)[0], "the full page stays shared"
    assert cache.pages(child)[1] != cache.pages(parent)[1], "the partly filled one was copied"
    assert cache.free_blocks == free - 1
    for page in cache.pages(parent):
        assert same_bits(cache.k[:, page], before[:, page])
    k2, v2 = tokens(gen, cache, 1)
    cache.append([parent], k2, v2)
    assert cache.free_blocks == free - 1, "the last owner keeps its page"
    for s, more in ((child, (k1, v1)), (parent, (k2, v2))):
        for got, old, new in zip(held(cache, s), (k, v), more):
            assert same_bits(got, torch.cat([old, new]))
    check_pool(cache, [parent, child])


def test_fork_of_whole_pages_copies_nothing(device):
    gen = generator("fork whole")
    cache = make(device)
    parent = cache.allocate()
    cache.append([parent], *tokens(gen, cache, 8), 8)
    child = cache.fork(parent)
    shared = cache.pages(parent)
    cache.append([child, parent], *tokens(gen, cache, 2))
    assert cache.pages(child)[:2] == cache.pages(parent)[:2] == shared
    assert cache.pages(child)[2] != cache.pages(parent)[2]
    check_pool(cache, [parent, child])


def test_both_owners_grow_in_one_call(device):
    gen = generator("fork both")
    cache = make(device)
    parent = cache.allocate()
    k, v = tokens(gen, cache, 5)
    cache.append([parent], k, v, 5)
    family = [parent, cache.fork(parent), cache.fork(parent)]
    new_k, new_v = tokens(gen, cache, 3)
    cache.append(family, new_k, new_v)
    assert len({cache.pages(s)[1] for s in family}) == 3
    for i, s in enumerate(family):
        assert same_bits(held(cache, s)[0], torch.cat([k, new_k[i : i + 1]]))
    check_pool(cache, family)


def test_free_returns_pages(device):
    gen = generator("free")
    cache = make(device)
    a = cache.allocate()
    cache.append([a], *tokens(gen, cache, 10), 10)
    b = cache.fork(a)
    cache.append([b], *tokens(gen, cache, 1), 1)
    cache.free(a)
    check_pool(cache, [b])
    assert cache.length(b) == 11
    cache.free(b)
    assert cache.free_blocks == 8
    c = cache.allocate()
    assert c not in (a, b)
    cache.append([c], *tokens(gen, cache, 32), 32)
    assert cache.free_blocks == 0


def test_freed_and_unknown_sequences_are_refused(device):
    cache = make(device)
    a = cache.allocate()
    cache.free(a)
    for handle in (a, 99):
        for use in (cache.free, cache.fork, cache.length, cache.pages, lambda s: cache.extend([s]),
                    lambda s: cache.block_table([s]), lambda s: cache.seq_lens([s])):  # fmt: skip
            with pytest.raises(KeyError) as error:
                use(handle)
            assert error.value.args == (
                f"PagedKVCache: {handle} is not a sequence of this cache, or was freed",
            )


def state(cache, sequences):
    return (
        [(cache.pages(s), cache.length(s)) for s in sequences],
        cache.free_blocks,
        cache.k.clone(),
        cache.v.clone(),
        cache.block_table(sequences, 8),
    )


def same_state(x, y):
    return (
        x[:2] == y[:2]
        and same_bits(x[2], y[2])
        and same_bits(x[3], y[3])
        and torch.equal(x[4], y[4])
    )


def test_out_of_pages_changes_nothing(device):
    gen = generator("out of pages")
    cache = make(device)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *tokens(gen, cache, 26), [13, 13])
    c = cache.fork(a)
    before = state(cache, [a, b, c])
    k, v = tokens(gen, cache, 5)
    with pytest.raises(OutOfPages) as error:
        cache.append([a, b], k, v, [1, 4])
    assert (
        str(error.value) == "PagedKVCache.extend: 2 pages are needed for 5 tokens, 0 of 8 are free"
    )
    assert isinstance(error.value, RuntimeError)
    assert same_state(state(cache, [a, b, c]), before)
    with pytest.raises(OutOfPages):
        cache.extend([c])  # a copy of the shared page needs a page too
    assert same_state(state(cache, [a, b, c]), before)
    cache.free(c)
    cache.append([a, b], *tokens(gen, cache, 6), [3, 3])
    check_pool(cache, [a, b])


def test_bad_arguments_change_nothing(device):
    gen = generator("bad")
    cache = make(device)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a], *tokens(gen, cache, 5), 5)
    before = state(cache, [a, b])
    k, v = tokens(gen, cache, 2)
    cases = [
        (lambda: cache.extend([a, a]), "PagedKVCache.extend: a sequence is named twice"),
        (
            lambda: cache.extend([a, b], [1]),
            "PagedKVCache.extend: counts has 1 elements, sequences has 2",
        ),
        (
            lambda: cache.extend([a, b], [1, -2]),
            "PagedKVCache.extend: counts has -2; expected no negative number",
        ),
        (
            lambda: cache.block_table([a], 1),
            "PagedKVCache.block_table: width is 1, a sequence has 2 pages",
        ),
        (lambda: cache.append([a], k, v), None),
        (lambda: cache.append([a, b], k.double(), v), None),
        (lambda: cache.append([a, b], k[..., :4], v), None),
        (lambda: cache.append([a, b], k, v[:1]), None),
    ]
    for run, text in cases:
        with pytest.raises(ValueError) as error:
            run()
        assert text is None or str(error.value) == text
        assert text is not None or str(error.value).startswith("PagedKVCache.append: ")
        assert same_state(state(cache, [a, b]), before)
    for name in ("num_blocks", "block_size"):
        sizes = {"num_blocks": 4, "block_size": 4, name: 0}
        with pytest.raises(ValueError) as error:
            PagedKVCache(**sizes, heads_kv=1, head_dim=8)
        assert str(error.value) == f"PagedKVCache: {name} is 0; expected at least 1"


def test_what_no_kernel_takes_is_refused_when_the_cache_is_made():
    sizes = dict(num_blocks=4, block_size=4, heads_kv=1, head_dim=8)
    for name in (*sizes, "layers", "head_dim_v"):
        for bad in (0, -1):
            with pytest.raises(
                ValueError, match=rf"^PagedKVCache: {name} is {bad}; expected at least 1$"
            ):
                PagedKVCache(**{**sizes, name: bad})
    for dtype in (torch.uint8, torch.float8_e4m3fnuz, torch.int32, torch.complex64, torch.bool):
        with pytest.raises(
            ValueError,
            match=rf"^PagedKVCache: dtype is {dtype}; expected one of torch.float32, torch.bf",
        ):
            PagedKVCache(**sizes, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        cache = PagedKVCache(**sizes, dtype=dtype)
        a = cache.allocate()
        cache.append([a], *tokens(generator("dtypes"), cache, 3), 3)
        out = ops.paged_attn(
            cache.k[0, 0, :1], cache.k[0], cache.v[0], cache.block_table([a]), cache.seq_lens([a])
        )
        assert out.dtype == dtype


def test_block_table_width(device):
    gen = generator("width")
    cache = make(device)
    a, b = cache.allocate(), cache.allocate()
    assert cache.block_table([a, b]).shape == (2, 1)
    cache.append([b], *tokens(gen, cache, 9), 9)
    assert cache.block_table([a, b]).shape == (2, 3)
    wide = cache.block_table([b, a], 20)
    assert (
        wide.shape == (2, 20) and wide[0, :3].tolist() == cache.pages(b) and (wide[1] == -1).all()
    )
    assert cache.block_table([]).shape[0] == 0 and cache.seq_lens([]).shape == (0,)
    many = [cache.allocate() for _ in range(40)]
    assert cache.block_table([b, *many])[0].tolist() == cache.pages(b)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "append", "append", "append", "fork", "free"]),
            st.integers(0, 2**16),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_any_history(steps):
    """Random histories against a model that keeps every sequence in tensors of its own."""
    gen = generator("history")
    cache = make(num_blocks=12, block_size=3, heads_kv=1, head_dim=2)
    model = {}
    for what, pick, count in steps:
        names = sorted(model)
        if what == "allocate" or not names:
            model[cache.allocate()] = (torch.zeros(0, 1, 2), torch.zeros(0, 1, 2))
            continue
        s = names[pick % len(names)]
        if what == "fork":
            model[cache.fork(s)] = model[s]
        elif what == "free":
            cache.free(s)
            del model[s]
        else:
            chosen = [s, *([names[(pick + 1) % len(names)]] if len(names) > 1 else [])]
            counts = [count, pick % 3][: len(chosen)]
            k, v = tokens(gen, cache, sum(counts))
            try:
                cache.append(chosen, k, v, counts)
            except OutOfPages:
                pass
            else:
                start = 0
                for name, n in zip(chosen, counts):
                    mine = slice(start, start + n)
                    model[name] = tuple(
                        torch.cat([old, new[mine]]) for old, new in zip(model[name], (k, v))
                    )
                    start += n
        check_pool(cache, sorted(model))
        for name, (k, v) in model.items():
            got = held(cache, name)
            assert same_bits(got[0], k) and same_bits(got[1], v)


def test_exported(device):
    assert torch_gpukern.PagedKVCache is PagedKVCache and torch_gpukern.OutOfPages is OutOfPages
    assert repr(make(device)).startswith("PagedKVCache(0 sequences, 0 of 8 pages")


def test_a_write_that_raises_counts_nothing(device):
    """If a call raises, at any point, then lengths, pages, free pages and the rows in use stay as
    they were."""
    gen = generator("raises")
    cache = make(device, layers=2)
    a = cache.allocate()
    cache.append([a], *(x.expand(2, -1, -1, -1) for x in tokens(gen, cache, 6)), 6)
    b = cache.fork(a)
    before = state(cache, [a, b])
    k, v = (x.expand(2, -1, -1, -1) for x in tokens(gen, cache, 3))
    learned = k.clone().requires_grad_()
    with pytest.raises(NotImplementedError):
        cache.append([a, b], learned, v, [1, 2])
    with pytest.raises(NotImplementedError):
        cache.append([a, b], k, v.clone().requires_grad_(), [1, 2])
    assert same_state(state(cache, [a, b]), before)

    written = []

    def failing(k, v, slots, layer):
        written.append(layer)
        if layer == 1:
            raise MemoryError("of the device")
        PagedKVCache.write(cache, k, v, slots, layer)

    cache.write = failing
    with pytest.raises(MemoryError):
        cache.append([a, b], k, v, [1, 2])
    del cache.write
    assert written == [0, 1]
    after = state(cache, [a, b])
    assert after[:2] == before[:2] and torch.equal(after[4], before[4])
    for s in (a, b):
        assert all(same_bits(x, y) for x, y in zip(held(cache, s), held(cache, a)))
    cache.k = cache.k.requires_grad_()  # the copy of a shared page fails
    with pytest.raises(RuntimeError):
        cache.extend([a])
    cache.k = cache.k.detach()
    assert state(cache, [a, b])[:2] == before[:2]
    cache.append([a, b], k, v, [1, 2])
    check_pool(cache, [a, b])
    assert cache.length(a) == 7 and cache.length(b) == 8


def test_the_first_append_that_raises():
    cache = PagedKVCache(1, 2, 1, 1)
    a = cache.allocate()
    with pytest.raises(NotImplementedError):
        cache.append([a], torch.ones(1, 1, 1, requires_grad=True), torch.ones(1, 1, 1))
    assert cache.length(a) == 0 and cache.pages(a) == [] and cache.free_blocks == 1


def test_counts_are_copied_or_refused(device):
    numpy = pytest.importorskip("numpy")
    cache = make(device)
    a = cache.allocate()
    counts = torch.tensor([1])
    cache.extend([a], counts)
    b = cache.fork(a)
    cache.extend([b])
    counts += 5
    assert cache.length(a) == 1 and cache.length(b) == 2
    for good in (
        1,
        torch.tensor(1),
        [torch.tensor(1), 1],
        numpy.array([1, 1]),
        numpy.int64(1),
        (1, numpy.int32(1)),
        True,
        torch.tensor([1, 1], dtype=torch.int32),
        iter([1, 1]),
    ):
        cache = make(device)
        pair = [cache.allocate(), cache.allocate()]
        assert cache.extend(iter(pair), good).tolist() == [0, 4]
        assert [type(cache.length(s)) for s in pair] == [int, int] and [
            cache.length(s) for s in pair
        ] == [1, 1]
    before = state(cache, pair)
    for bad in (
        1.0,
        [1, 1.5],
        None,
        "11",
        torch.tensor([1.0, 1.0]),
        torch.tensor(2.0),
        [[1], [1]],
        [None, 1],
    ):
        for call in (
            cache.extend,
            lambda s, n: cache.append(s, *tokens(generator("bad"), cache, 2), n),
        ):
            with pytest.raises(
                ValueError,
                match=r"^PagedKVCache\.(extend|append): counts must be an integer or a seq",
            ):
                call(pair, bad)
    for bad in (torch.tensor([1]), torch.tensor([1, 1, 1]), []):
        with pytest.raises(ValueError, match="counts has . elements, sequences has 2"):
            cache.extend(pair, bad)
    assert same_state(state(cache, pair), before)


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "forward AD": torch.autograd.forward_ad.dual_level,
    "meta device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", ("inside", "outside"))
def test_modes_around_the_cache_change_nothing(mode, made, device):
    gen = generator("modes")
    cache = make(device)
    parts = [tokens(gen, cache, n) for n in (6, 1, 2)]

    def session(cache):
        """Makes every call that returns tensors or writes."""
        a = cache.allocate()
        results = [cache.append([a], *parts[0], 6)]
        b = cache.fork(a)
        results.append(cache.append([b], *parts[1]))
        results += [cache.extend([a, b], [0, 0]), cache.block_table([a, b]), cache.block_table([])]
        return a, b, [*results, cache.seq_lens([b])]

    want = session(make(device))[2]
    with MODES[mode]():
        cache = make(device) if made == "inside" else cache
        a, b, got = session(cache)
    for x, y in zip(got, want, strict=True):
        assert x.device == y.device and x.dtype == y.dtype and torch.equal(x, y)
    cache.append([b], *parts[2], 2)  # tensors made inside the mode can be used outside
    assert cache.length(b) == 9
    check_pool(cache, [a, b])
    assert same_bits(held(cache, b)[0], torch.cat([p[0] for p in parts]))


def test_a_default_device_changes_no_table():
    torch.set_default_device("meta")
    try:
        cache = PagedKVCache(4, 2, 1, 1, device="cpu")
        a = cache.allocate()
        assert cache.extend([a], 3).tolist() == [0, 1, 2] and cache.block_table([a]).tolist() == [
            [0, 1]
        ]
        assert PagedKVCache(4, 2, 1, 1).k.is_meta
    finally:
        torch.set_default_device(None)

# SPDX-License-Identifier: BSD-3-Clause
"""PagedKVCache of latents (MLA): one row holds both key and value, in the cache's dtype or in 8
bits."""

import copy
import pickle

import pytest
import torch
from conftest import generator, randn, reference, same_bits, torch_gpukern

from torch_gpukern import PagedKVCache, paged_attn

LATENT, ROPE = 512, 64
FORMS = ((512, 64), torch.float32), ((512, 64), torch.uint8), ((24, 8), torch.bfloat16)
BLOCK = 4


def made(latent, dtype, device, layers=2, blocks=9):
    return PagedKVCache(blocks, BLOCK, latent=latent, layers=layers, dtype=dtype, device=device)


def rows(gen, latent, dtype, device, tokens, layers=2):
    given = torch.bfloat16 if dtype == torch.uint8 else dtype
    return [randn(gen, layers, tokens, 1, n, dtype=given, device=device) for n in latent]


def attended(cache, sequences, layer, q):
    table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
    pages = cache.k[layer], cache.v[layer]
    return paged_attn(q, *pages, table, lens, scale=0.1, **cache.scales(layer))


def expected(c, k_pe, q, dtype):
    """float64 attention of q [H, D] over latents [L, 1, D]."""
    if dtype == torch.uint8:
        c = torch_gpukern.dequantize(
            *torch_gpukern.quantize(c[:, 0].contiguous(), torch.float8_e4m3fn, "1x128")
        )[:, None]
    k = torch.cat([c, k_pe], -1).double().cpu()
    out = reference.flash_attn(
        q[None, :, None].double().cpu(),
        k.transpose(0, 1)[None],
        c.double().cpu().transpose(0, 1)[None],
        scale=0.1,
    )
    return out[0, :, 0]


def near(out, want, dtype):
    few = torch.finfo(torch.bfloat16 if dtype == torch.uint8 else dtype).eps
    assert (out.double().cpu() - want).abs().max() < 4 * few * want.abs().max()


@pytest.mark.parametrize("latent, dtype", FORMS, ids=str)
def test_rows_are_stored_once_and_read_back(latent, dtype, device):
    gen = generator("latent cache", latent, dtype)
    cache = made(latent, dtype, device)
    assert cache.v.data_ptr() == cache.k.data_ptr() and cache.v.shape[-1] == latent[0]
    row = 656 if dtype == torch.uint8 else sum(latent) * dtype.itemsize
    assert cache.nbytes == 2 * 9 * BLOCK * row == cache.k.untyped_storage().nbytes()
    one, two = cache.allocate(), cache.allocate()
    c, k_pe = rows(gen, latent, dtype, device, 7 + 3)
    cache.append([one, two], c, k_pe, [7, 3])
    last = rows(gen, latent, dtype, device, 2)
    slots = cache.extend([one, two])
    q = randn(gen, 2, 6, sum(latent), dtype=c.dtype, device=device)
    for layer in range(2):
        cache.write(last[0][layer], last[1][layer], slots, layer)
        out = attended(cache, [one, two], layer, q)
        for i, tokens in enumerate((slice(0, 7), slice(7, 10))):
            whole = [torch.cat([x[layer, tokens], y[layer, i : i + 1]])
                     for x, y in zip((c, k_pe), last, strict=True)]  # fmt: skip
            near(out[i], expected(*whole, q[i], dtype), dtype)


@pytest.mark.parametrize("latent, dtype", FORMS, ids=str)
def test_shared_pages_are_copied_before_they_are_written(latent, dtype, device):
    """fork, copy on write, truncate, publish and match work as for keys and values."""
    gen = generator("latent shared", latent, dtype)
    cache = made(latent, dtype, device)
    one = cache.allocate()
    cache.append([one], *rows(gen, latent, dtype, device, 6), 6)
    q = randn(gen, 1, 6, sum(latent), device=device).to(
        rows(gen, latent, dtype, device, 1)[0].dtype
    )
    before = attended(cache, [one], 1, q)
    two = cache.fork(one)
    cache.append([two], *rows(gen, latent, dtype, device, 1))
    assert cache.pages(one)[0] == cache.pages(two)[0] and cache.pages(one)[1] != cache.pages(two)[1]
    assert same_bits(attended(cache, [one], 1, q), before)
    cache.truncate(two, 6)
    assert same_bits(attended(cache, [two], 1, q), before)
    tokens = list(range(6))
    cache.publish(one, tokens)
    found, length = cache.match(tokens)
    assert length == BLOCK and cache.pages(found) == cache.pages(one)[:1]


@pytest.mark.parametrize("latent, dtype", FORMS, ids=str)
def test_kept_tokens_move_once(latent, dtype, device):
    """keep moves token 7 to position 6 and token 9 to position 7. v is a view of k, so moving it, too,
    would put token 9 at position 6."""
    gen = generator("latent keep", latent, dtype)
    cache = made(latent, dtype, device)
    one, other = cache.allocate(), cache.allocate()
    c, k_pe = rows(gen, latent, dtype, device, 11)
    cache.append([one], c, k_pe, 11)
    cache.keep([one], [6], [[7, 9, 10]])
    kept = [*range(6), 7, 9, 10]
    cache.append([other], c[:, kept], k_pe[:, kept], 9)
    for layer in range(2):
        found, want = (
            cache.k[layer, cache.pages(s)].flatten(0, 1)[:9].contiguous().view(torch.uint8)
            for s in (one, other)
        )
        assert torch.equal(found, want)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))))
def test_copies_keep_values_a_view(copied, device):
    cache = made((512, 64), torch.float32, device)
    cache.k.zero_()
    other = copied(cache)
    other.k.fill_(3)
    assert other.v.data_ptr() == other.k.data_ptr() and (other.v == 3).all()
    assert (cache.k == 0).all() and other.latent == (512, 64)


def test_what_it_says():
    cache = made((512, 64), torch.uint8, "cpu")
    assert "latents 512 + 64, torch.uint8" in repr(cache)
    assert cache.scales(1) == {"latent_format": "fp8_656"}
    assert made((24, 8), torch.float32, "cpu").scales() == {}


def test_what_is_refused():
    def refuses(text, **given):
        with pytest.raises(ValueError, match=f"^PagedKVCache: {text}"):
            PagedKVCache(2, 4, **given)

    refuses("heads_kv is missing; expected a size, or latent")
    refuses("head_dim is missing", heads_kv=2)
    refuses("heads_kv is given beside latent; .*leave it out", heads_kv=2, latent=(512, 64))
    refuses("head_dim_v is given beside latent", head_dim_v=2, latent=(512, 64))
    refuses("k_scale is given beside latent", k_scale=torch.ones(()), latent=(512, 64))
    refuses("latent is 512; expected two widths", latent=512)
    refuses(r"latent\[1\] is 0; expected at least 1", latent=(512, 0))
    refuses("dtype of latents .512, 64. is torch.int8", latent=(512, 64), dtype=torch.int8)
    refuses("dtype of latents .24, 8. is torch.uint8", latent=(24, 8), dtype=torch.uint8)
    refuses("dtype is torch.uint8; expected one of", heads_kv=1, head_dim=8, dtype=torch.uint8)
    cache = made((512, 64), torch.float32, "cpu")
    x = torch.zeros(1, 1, 576)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="rope_write: the cache holds latents"):
        cache.rope_write(x, x, x, x, x, slots, slots)
    one = cache.allocate()
    with pytest.raises(ValueError, match=r"append: v is .*expected \[2, 1, 1, 64\] torch.float32"):
        cache.append([one], x[..., :512].expand(2, 1, 1, 512), x.expand(2, 1, 1, 576))
    assert cache.length(one) == 0

# SPDX-License-Identifier: BSD-3-Clause
"""Stored masks: every form that makes one against the dense mask, the tables that kernels read,
memory, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_bits, generator
from ten_masks import masks

import torch_gpukern as gk
from torch_gpukern.ops.attn_mask import COLUMNS, DENSE, KEPT, RANGES, TILE, Layout

ops = torch.ops.gpukern

SIZES = (
    (1, 1, 1, 1),
    (2, 3, 130, 200),
    (1, 2, 257, 129),
    (1, 1, 128, 128),
    (2, 1, 300, 700),
    (1, 1, 0, 5),
    (1, 1, 5, 0),
)


def bool_mask(gen, batch, heads, seq_q, seq_k):
    """Random bits with a full tile and empty ones."""
    mask = torch.rand(batch, heads, seq_q, seq_k, generator=gen) < 0.5
    mask[..., :128, :128] = True
    mask[..., 128:, :140] = False
    return mask


def bits_of(mask):
    """Packed bits, with ones in the bits to spare."""
    pad = -mask.shape[-1] % 8
    wide = torch.nn.functional.pad(mask, (0, pad), value=True).unflatten(-1, (-1, 8))
    return (wide.long() << torch.arange(8)).sum(-1).to(torch.uint8)


def seen_by_ranges(ranges, seq_k):
    key = torch.arange(seq_k)
    pairs = ranges.unflatten(-1, (-1, 2))[..., None]
    return ((pairs[..., 0, :] <= key) & (key < pairs[..., 1, :])).any(-2)


def seen_by_columns(rows, seq_q, is_causal):
    row, key = torch.arange(seq_q)[:, None], torch.arange(rows.shape[2])
    c = [x[:, :, None] for x in rows.unbind(-1)]
    if is_causal:
        hidden = (row < key) | (row >= c[0]) & (row < c[1] if len(c) > 1 else torch.tensor(True))
    elif len(c) == 2:
        hidden = (row >= c[0]) | (row < c[1])
    else:
        hidden = (row >= c[0]) & (row < c[1]) | (row >= c[2]) & (row < c[3])
    return ~hidden


def lists_of(classes, kind):
    """FlexAttention's lists of one class of tiles, each row's in descending order, with rubbish
    past the counts."""
    is_kind = classes == kind
    count = is_kind.sum(-1).to(torch.int32)
    order = torch.arange(classes.shape[-1]).flip(0).expand(classes.shape)
    entries = (
        torch.where(is_kind.flip(-1), order, -7).sort(-1, descending=True).values.to(torch.int32)
    )
    return count, entries


def every_form(mask):
    """The mask made in each way that a bool mask can be told: bool, bits, blocks with bool and with
    bits."""
    seq_q, seq_k = mask.shape[2:]
    made = {"bool": gk.attn_mask_of(mask), "bits": gk.attn_mask_of(bits_of(mask), seq_k=seq_k)}
    classes = made["bool"].tiles().classes
    lists = (*lists_of(classes, 1), *lists_of(classes, 2))
    for name, how in (("blocks", mask), ("blocks of bits", bits_of(mask))):
        made[name] = gk.attn_mask_blocks(*lists, mask=how, seq_q=seq_q, seq_k=seq_k)
    return made


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_form_stores_the_mask(sizes):
    batch, heads, seq_q, seq_k = sizes
    gen = generator("masks", sizes)
    mask = bool_mask(gen, *sizes)
    made = every_form(mask)
    for name, x in made.items():
        assert_bits(x.dense(), mask)
        assert_bits(x.data, made["bool"].data)
        assert tuple(x.shape) == sizes, name
    for n in (2, 4):
        ranges = torch.randint(
            -20, seq_k + 40, (batch, heads, seq_q, n), generator=gen, dtype=torch.int32
        )
        assert_bits(gk.attn_mask_ranges(ranges, seq_k).dense(), seen_by_ranges(ranges, seq_k))
    for n, is_causal in ((1, True), (2, True), (2, False), (4, False)):
        rows = torch.randint(
            -20, seq_q + 40, (batch, heads, seq_k, n), generator=gen, dtype=torch.int32
        )
        want, got = (
            seen_by_columns(rows, seq_q, is_causal),
            gk.attn_mask_columns(rows, seq_q, is_causal=is_causal),
        )
        assert_bits(got.dense(), want)
        assert_bits(got.tiles().classes, gk.attn_mask_of(want).tiles().classes)


def test_strides_and_missing_dimensions():
    mask = bool_mask(generator("strides"), 1, 3, 200, 150)
    for view in (
        mask.mT.contiguous().mT,
        mask[:, :1].expand(2, 3, -1, -1),
        mask[..., ::2],
        mask[:, :, 3:],
    ):
        assert_bits(gk.attn_mask_of(view).dense(), view)
    assert_bits(gk.attn_mask_of(mask[0, 0]).dense()[0, 0], mask[0, 0])
    assert_bits(gk.attn_mask_of(mask[0]).dense()[0], mask[0])


def test_any_byte_but_0_is_true():
    """As torch takes memory of other sources that it is told to be bool."""
    data = torch.arange(256, dtype=torch.uint8).repeat(128)[: 128 * 200].view(128, 200)
    assert_bits(gk.attn_mask_of(data.view(torch.bool)).dense()[0, 0], data != 0)


def tables(x, by_keys):
    """The parts that a kernel reads of the first head: (tiles, lists, words of a slot as bits)."""
    layout, data = Layout(x.store, x.seq_q, x.seq_k, True), x.data[0, 0]
    major, minor = (layout.tiles_k, layout.tiles_q) if by_keys else (layout.tiles_q, layout.tiles_k)
    at = (
        (layout.tiles_t, layout.lists_t, layout.words_t)
        if by_keys
        else (layout.tiles, layout.lists, layout.words)
    )
    tiles = data[at[0] : at[0] + 4 * major].view(major, 4)
    lists = data[at[1] :].contiguous().view(torch.int16)[: major * minor].view(major, minor)
    words = data[at[2] :][: 512 * major * (minor if x.store == DENSE else KEPT)].view(-1, 512)
    row, col = torch.meshgrid(torch.arange(TILE), torch.arange(TILE), indexing="ij")
    bits = (
        words[:, 2 * (32 * (row // 16) + 4 * (row % 8) + col % 8 // 2) + row % 16 // 8]
        >> (2 * (col // 8) + col % 2)
        & 1
    )
    return tiles, lists, bits.bool()


@pytest.mark.parametrize("form", ("bool", "ranges", "columns"))
def test_tables_of_both_sides(form):
    """Lists ascend, tiles are sorted by length, and words say the mask, by queries and by keys."""
    gen, (seq_q, seq_k) = generator("tables", form), (700, 900)
    if form == "bool":
        first, dense = bool_mask(gen, 1, 1, seq_q, seq_k), None
        dense, first = first[0, 0], first.view(torch.uint8)
    elif form == "ranges":
        first = torch.randint(-20, seq_k + 40, (1, 1, seq_q, 4), generator=gen, dtype=torch.int32)
        dense = seen_by_ranges(first, seq_k)[0, 0]
    else:
        first = torch.randint(-20, seq_q + 40, (1, 1, seq_k, 4), generator=gen, dtype=torch.int32)
        dense = seen_by_columns(first, seq_q, False)[0, 0]
    store = {"bool": DENSE, "ranges": RANGES, "columns": COLUMNS}[form]
    x = gk.AttnMask(ops.attn_mask(first, form, seq_q, seq_k, transposed=True), store, seq_q, seq_k)
    assert_bits(x.dense()[0, 0], dense)
    for by_keys, mask in ((False, dense), (True, dense.mT)):
        tiles, lists, words = tables(x, by_keys)
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % TILE, 0, -mask.shape[0] % TILE))
        blocks = padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)
        valid = torch.nn.functional.pad(
            torch.ones_like(mask), (0, -mask.shape[1] % TILE, 0, -mask.shape[0] % TILE)
        )
        valid = valid.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)
        assert sorted(tiles[:, 2].tolist()) == list(range(len(tiles)))
        lengths = tiles[:, 0].tolist()
        assert lengths == sorted(lengths, reverse=True)
        for count, full, tile, _ in tiles.tolist():
            entries = lists[tile, :count].tolist()
            want = [m for m in range(blocks.shape[1]) if blocks[tile, m].any()]
            assert [e >> 2 for e in entries] == want
            kept = 0
            for entry in entries:
                kind, minor = entry & 3, entry >> 2
                is_full = bool((blocks[tile, minor] == valid[tile, minor]).all())
                assert (kind == 1) == is_full
                if kind == 2:
                    slot = tile * blocks.shape[1] + minor if store == DENSE else tile * KEPT + kept
                    assert_bits(words[slot], blocks[tile, minor])
                    kept += 1
                assert kind != 3 or (store != DENSE and kept == KEPT)
            assert full == sum(e & 3 == 1 for e in entries)


def test_ranges_of_128k_tokens_take_20_megabytes():
    tokens = 131072
    i = torch.arange(tokens, dtype=torch.int32)
    documents = torch.stack([i // 5000 * 5000, i + 1], -1)
    with_transposed = ops.attn_mask(
        documents[None, None], "ranges", tokens, tokens, transposed=True
    )
    assert with_transposed.numel() * 4 <= 20e6
    mask = gk.attn_mask_ranges(documents, tokens)
    assert mask.nbytes <= 12e6
    counts = mask.tiles().counts()
    # a tile of queries has one partial block at its diagonal, one where a document begins, and two
    # where one ends in it
    assert counts["partial"] <= 3 * tokens // TILE and counts["full"] < 20 * tokens // TILE


def test_pictures():
    mask = gk.attn_mask_of(torch.ones(300, 300).tril().bool())
    tiles = mask.tiles()
    assert tiles.picture() == "▒··\n█▒·\n██▒"
    assert tiles.counts() == {"empty": 3, "partial": 3, "full": 3}
    assert str(tiles).startswith(
        "3 x 3 tiles of 128 queries x 128 keys, 1 x 1 masks: 3 empty, 3 partial, 3 full\n"
    )
    assert "shape=(1, 1, 300, 300)" in repr(mask)


def test_pytree():
    mask = gk.attn_mask_of(torch.ones(3, 5).bool())
    leaves, spec = torch.utils._pytree.tree_flatten([mask, 1])
    again, _ = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert len(leaves) == 2 and isinstance(again, gk.AttnMask) and again.shape == mask.shape


def test_a_length_of_numpy_is_an_int_in_a_file(tmp_path):
    mask = gk.attn_mask_ranges(torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), np.int64(5))
    assert type(mask.seq_k) is int
    torch.save(mask, tmp_path / "mask")
    with torch.serialization.safe_globals([gk.AttnMask]):
        assert torch.load(tmp_path / "mask").shape == (1, 1, 2, 5)


class NoViewOfADtype(torch.overrides.TorchFunctionMode):
    """Fails as vmap of torch 2.10 does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.view and isinstance(args[1], torch.dtype):
            raise RuntimeError("Batching rule not implemented for aten::view.dtype")
        return function(*args, **(kwargs or {}))


def test_vmap_makes_masks_without_a_view_of_a_dtype():
    sees = torch.rand(3, 2, 1, 20, 30, generator=generator("vmap bool")) < 0.5
    gen = generator("vmap tensors")
    q, k = torch.randn(2, 2, 20, 8, generator=gen), torch.randn(2, 2, 30, 8, generator=gen)
    with NoViewOfADtype():
        got = torch.vmap(lambda x: gk.flash_attn(q, k, k, attn_mask=x))(sees)
    want = torch.stack([gk.flash_attn(q, k, k, attn_mask=x) for x in sees])
    torch.testing.assert_close(got, want)


def test_vmap_over_masks():
    sees = torch.rand(3, 140, 130, generator=generator("vmap masks")) < 0.5
    assert torch.equal(torch.vmap(lambda x: gk.attn_mask_of(x).dense())(sees)[:, 0, 0], sees)
    masks = gk.AttnMask(torch.stack([gk.attn_mask_of(x).data for x in sees]), 1, 140, 130)
    assert torch.equal(torch.vmap(lambda x: x.dense())(masks)[:, 0, 0], sees)


@pytest.mark.parametrize("strict", (False, True))
def test_an_input_of_an_exported_program(strict, tmp_path):
    """A mask is an input as any tensor is, before and after the program is written to a file."""

    class Attends(torch.nn.Module):
        def forward(self, q, mask):
            return gk.flash_attn(q, q, q, attn_mask=mask)

    gen = generator("exported mask")
    q = torch.randn(2, 3, 40, 8, generator=gen)
    first, second = (torch.rand(2, 1, 40, 40, generator=gen) < 0.5 for _ in range(2))
    program = torch.export.export(Attends(), (q, gk.attn_mask_of(first)), strict=strict)
    torch.export.save(program, tmp_path / "attends.pt2")
    with torch.serialization.safe_globals([gk.AttnMask]):
        loaded = torch.export.load(tmp_path / "attends.pt2")
    want = gk.flash_attn(q, q, q, attn_mask=second)
    for run in (program.module(), loaded.module()):
        assert_bits(run(q, gk.attn_mask_of(second)), want)


def test_a_mask_holds_a_copy():
    ranges = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    mask = gk.attn_mask_ranges(ranges, 4)
    before = mask.dense()
    ranges.zero_()
    assert_bits(mask.dense(), before)


NUM, IDX = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
REFUSED = (
    (lambda: gk.attn_mask_of(torch.ones(3, 3)), ValueError,
     "attn_mask_of: mask must be bool, or uint8 of packed bits, got torch.float32; pass it as "
     "bias"),
    (lambda: gk.attn_mask_of(torch.ones(3).bool()), ValueError, "attn_mask_of: mask must have 2 "
                                                                "to 4 dimensions"),
    (lambda: gk.attn_mask_of([True]), TypeError, "attn_mask_of: mask must be a tensor, got list"),
    (lambda: gk.attn_mask_of(torch.ones(3, 3).bool().to_sparse()), ValueError,
     "attn_mask_of: mask has layout torch.sparse_coo, expected a dense tensor"),
    (lambda: gk.attn_mask_ranges(torch.ones(3, 2, dtype=torch.int32), torch.tensor(3)), ValueError,
     "attn_mask: seq_k must be an int, got a tensor; pass int(seq_k)"),
    (lambda: gk.attn_mask_of(torch.ones(3, 3).bool(), seq_k=3), ValueError, "attn_mask_of: seq_k "
                                                                            "is for bits"),
    (lambda: gk.attn_mask_of(torch.ones(3, 3, dtype=torch.uint8), seq_k=25), ValueError,
     "attn_mask: mask must have 4 in dimension 3, got 3"),
    (lambda: gk.attn_mask_ranges(torch.ones(3, 2), 3), ValueError, "attn_mask: ranges must be "
                                                                   "int32, got float32"),
    (lambda: gk.attn_mask_ranges(torch.ones(3, 3, dtype=torch.int32), 3), ValueError,
     "attn_mask: ranges must have 2 or 4 in dimension 3, got 3"),
    (lambda: gk.attn_mask_ranges(torch.ones(3, 2, dtype=torch.int32), -1), ValueError,
     "attn_mask: seq_k must be 0 or more, got -1"),
    (lambda: gk.attn_mask_columns(torch.ones(3, 4, dtype=torch.int32), 3, is_causal=True), ValueError,
     "attn_mask_columns: rows must have 1 or 2 in dimension 3 where is_causal is true, got 4"),
    (lambda: gk.attn_mask_columns(torch.ones(3, 1, dtype=torch.int32), 3, is_causal=False), ValueError,
     "attn_mask_columns: rows must have 2 or 4 in dimension 3 where is_causal is false, got 1"),
    (lambda: gk.attn_mask_columns(torch.ones(3, 1), 3, is_causal=True), ValueError,
     "attn_mask_columns: rows must be int32, got float32"),
    (lambda: gk.attn_mask_blocks(NUM, IDX, seq_q=500, seq_k=300), ValueError,
     "attn_mask: kv_num_blocks must have 4 in dimension 2, got 2"),
    (lambda: gk.attn_mask_blocks(NUM, IDX, NUM, seq_q=200, seq_k=300), ValueError,
     "attn_mask: full_kv_num_blocks and full_kv_indices go together"),
    (lambda: gk.attn_mask_blocks(NUM + 4, IDX, seq_q=200, seq_k=300), IndexError,
     "attn_mask: kv_num_blocks is expected to hold 0 to 3 blocks, got 4 in [0, 0, 0]"),
    (lambda: gk.attn_mask_blocks(NUM + 1, IDX + 3, seq_q=200, seq_k=300), IndexError,
     "attn_mask: kv_indices is expected to hold blocks 0 to 2, got 3 in [0, 0, 0, 0]"),
    (lambda: gk.attn_mask_blocks(NUM, IDX, mask=torch.ones(200, 300), seq_q=200, seq_k=300), ValueError,
     "attn_mask_blocks: mask must be bool, or uint8 of packed bits, got torch.float32"),
    (lambda: gk.attn_mask_blocks(NUM.expand(2, 3, 2), IDX.expand(1, 2, 2, 3), seq_q=200, seq_k=300), ValueError,
     "attn_mask_blocks: kv_indices has 1 sequences and 2 heads, expected 1 or 2 and 1 or 3, as the other lists"),
)  # fmt: skip


@pytest.mark.parametrize("call", range(len(REFUSED)))
def test_refused_by_name(call):
    make, error, text = REFUSED[call]
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value).startswith(f"gpukern::{text}")


def test_blocks_without_a_mask_are_seen_whole():
    mask = gk.attn_mask_blocks(NUM + 1, IDX + 1, seq_q=200, seq_k=300)
    want = torch.zeros(1, 1, 200, 300, dtype=torch.bool)
    want[..., 128:256] = True
    assert_bits(mask.dense(), want)


def test_the_page_shows_the_pictures():
    i = torch.arange(640)
    shown = gk.attn_mask_ranges(
        torch.stack([i // 300 * 300, i + 1], -1).to(torch.int32), 640
    ).tiles()
    page = (Path(__file__).resolve().parents[2] / "docs" / "masks.md").read_text()
    assert f"```\n{shown}\n```\n" in page
    for title, mask in masks():
        assert f"**{title}**\n\n```\n{mask.tiles().picture()}\n```\n" in page, title


@pytest.mark.gpu
def test_two_masks_of_more_than_two_gigabytes_each():
    """131,072 queries and keys: a head takes more bytes than cudaMemset2D has for a pitch."""
    n = 1 << 17
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool, device="cuda")
    mask[1] = False
    built = gk.attn_mask_of(mask.expand(2, 1, n, n))
    layout = Layout(DENSE, n, n, False)
    assert 4 * layout.total > 2**31
    flags = built.data[:, 0, : layout.tiles].view(torch.uint8)[:, : layout.tiles_q * layout.tiles_k]
    assert (flags[0] == 1).all() and (flags[1] == 0).all()  # full blocks, empty blocks
    assert (built.data[1, 0, layout.lists : layout.words] == 0).all()

# SPDX-License-Identifier: BSD-3-Clause
"""FlexAttention's signature, served by gpukern, beside FlexAttention."""

import pytest
import torch
from conftest import assert_bits, generator, randn
from torch.nn.attention import flex_attention as flex

import torch_gpukern as gk
from torch_gpukern.integrations.flex import alibi, bias, flex_attention, mask_of, softcap

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def window_and_documents(b, h, i, j):
    return (i >= j) & (i - j < 150) & (i // 200 == j // 200) | (j < 20 + h)


def tensors(heads=(4, 4), seq=300):
    gen = generator("flex", heads, seq)
    return [randn(gen, 2, h, seq, 32) for h in (heads[0], heads[1], heads[1])]


@pytest.mark.parametrize("block", (128, 64))
def test_masks_of_mods(block):
    q, k, v = tensors()
    mask = flex.create_block_mask(
        window_and_documents, 1, 4, 300, 300, device="cpu", BLOCK_SIZE=block
    )
    want, want_lse = flex.flex_attention(q, k, v, block_mask=mask, return_lse=True)
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert mask_of(mask) is mask_of(mask)
    assert_bits(
        mask_of(mask).dense(), flex.create_mask(window_and_documents, 1, 4, 300, 300, device="cpu")
    )


@pytest.mark.parametrize("block", (128, 64, (64, 128), (256, 64)))
@pytest.mark.parametrize("with_full", (False, True))
def test_lists_without_a_mod(block, with_full):
    """Only blocks that a BlockMask lists are seen. One made by from_kv_blocks may have no mask_mod,
    and a mask_mod does not decide for full blocks."""
    seq_q, seq_k = 300, 500
    size_q, size_k = (block, block) if isinstance(block, int) else block
    shape = 2, 1, -(-seq_q // size_q), -(-seq_k // size_k)
    kind = torch.randint(0, 3, shape, generator=generator("lists", block, with_full))

    def lists(blocks):
        return blocks.sum(-1).int(), (~blocks).int().argsort(dim=-1, stable=True).int()

    def pairs(blocks):
        wide = blocks.repeat_interleave(size_q, 2).repeat_interleave(size_k, 3)
        return wide[:, :, :seq_q, :seq_k]

    below = torch.arange(seq_q)[:, None] * 2 >= torch.arange(seq_k)
    mods = {"mask_mod": lambda b, h, i, j: 2 * i >= j} if with_full else {}
    full = lists(kind == 2) if with_full else ()
    want = pairs(kind == 1)
    if with_full:
        want = want & below | pairs(kind == 2)
    mask = flex.BlockMask.from_kv_blocks(
        *lists(kind == 1), *full, BLOCK_SIZE=block, seq_lengths=(seq_q, seq_k), **mods
    )
    assert_bits(mask_of(mask).dense(), want)
    gen = generator("lists of blocks")
    q, k = randn(gen, 2, 2, seq_q, 16), randn(gen, 2, 2, seq_k, 16)
    assert_bits(flex_attention(q, k, k, block_mask=mask), gk.flash_attn(q, k, k, attn_mask=want))


@pytest.mark.parametrize("block", (128, 64))
def test_another_mod_makes_another_mask(block):
    """gpt-fast gives a BlockMask another mask_mod after it was used."""
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 96, 96, "cpu", block)
    assert_bits(mask_of(mask).dense(), torch.ones(1, 1, 96, 96).tril().bool())
    mask.mask_mod = lambda b, h, i, j: (i >= j) & (j > 9)
    want = torch.ones(1, 1, 96, 96).tril().bool()
    want[..., :10] = False
    assert_bits(mask_of(mask).dense(), want)
    assert mask_of(mask) is mask_of(mask)


def test_grouped_heads():
    q, k, v = tensors((4, 2))
    mask = flex.create_block_mask(window_and_documents, 1, 4, 300, 300, device="cpu")
    want = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), want)
    with pytest.raises(
        ValueError, match="flex_attention: key has 2 heads, query has 4; pass enable_gqa=True"
    ):
        flex_attention(q, k, v)


def test_changes_of_scores():
    q, k, v = tensors()
    slopes, table = torch.tensor([0.5, 0.25, 0.1, 0.0]), randn(generator("table"), 1, 4, 300, 300)
    for ours, theirs in (
        (alibi(slopes), lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()),
        (softcap(2.0), lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)),
        (bias(table), lambda s, b, h, i, j: s + table[0, h, i, j]),
    ):
        torch.testing.assert_close(
            flex_attention(q, k, v, ours), flex.flex_attention(q, k, v, theirs)
        )
    with pytest.raises(
        ValueError, match="score_mod must be None, alibi\\(slopes\\), softcap\\(x\\) or bias\\(t\\)"
    ):
        flex_attention(q, k, v, lambda s, b, h, i, j: s)


@pytest.mark.skipif(not hasattr(flex, "AuxRequest"), reason="torch has no return_aux")
def test_return_aux():
    """FlexAttention's newer name for return_lse."""
    q, k, v = tensors()
    for request in (flex.AuxRequest(), flex.AuxRequest(lse=True)):
        want = flex.flex_attention(q, k, v, return_aux=request)
        got = flex_attention(q, k, v, return_aux=request)
        torch.testing.assert_close(got, want)
        assert type(got[1]) is flex.AuxOutput
    with pytest.raises(ValueError, match="requests max_scores"):
        flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="return_lse and return_aux are given"):
        flex_attention(q, k, v, return_lse=True, return_aux=flex.AuxRequest())


def test_an_attn_mask_is_taken():
    q, k, v = tensors()
    mask = torch.ones(300, 300).tril().bool()
    assert_bits(
        flex_attention(q, k, v, block_mask=gk.attn_mask_of(mask)),
        gk.flash_attn(q, k, v, attn_mask=mask),
    )
    with pytest.raises(
        ValueError, match="block_mask must be None, a BlockMask or an AttnMask, got T"
    ):
        flex_attention(q, k, v, block_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("block", (128, 64))
def test_masks_of_mods_on_cuda(block):
    q, k, v = (x.bfloat16() for x in tensors((4, 2)))
    made = [
        flex.create_block_mask(window_and_documents, 1, 4, 300, 300, device=d, BLOCK_SIZE=block)
        for d in ("cpu", "cuda")
    ]
    want = flex.flex_attention(
        *(x.double() for x in (q, k, v)), block_mask=made[0], enable_gqa=True
    )
    out = flex_attention(*(x.cuda() for x in (q, k, v)), block_mask=made[1], enable_gqa=True)
    assert (out.double().cpu() - want).norm() <= 1e-2 * want.norm()

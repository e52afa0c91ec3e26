# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn with attn_mask, bias and distance_bias: results and gradients against float64,
properties of masks, and refused calls."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import HALF, assert_bits, assert_close_as, generator, randn
from test_attn_mask import every_form

import torch_gpukern as gk
from torch_gpukern import reference

ops = torch.ops.gpukern
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAMES = ("out", "lse", "q", "k", "v", "sinks", "bias", "distance_bias")


def stats(dtype):
    return F64 if dtype is F64 else F32


def _as(x, dtype):
    """x in a wider dtype. The lowest number of its own dtype, which hides a key, becomes -inf."""
    if dtype is None or dtype is x.dtype:
        return x
    return torch.where(x <= torch.finfo(x.dtype).min, -math.inf, x.to(dtype))


class Call:
    """A call with random tensors. mask, bias: the dimensions of [B, Hq, Sq, Sk] that they do not
    broadcast."""

    def __init__(
        self,
        seed,
        dtype,
        batch=2,
        heads=(4, 2),
        lengths=(200, 300),
        dims=(24, 16),
        mask=None,
        bias=None,
        bias_dtype=None,
        distance=None,
        sinks=False,
        seen=0.5,
        **rules,
    ):
        again = dict(
            batch=batch,
            heads=heads,
            lengths=lengths,
            dims=dims,
            mask=mask,
            bias=bias,
            bias_dtype=bias_dtype,
            distance=distance,
            sinks=sinks,
            seen=seen,
        )
        # makes the same call with other numbers
        self.like = lambda draw: Call((seed, draw), dtype, **again, **rules)
        gen = generator("mask call", seed)
        hq, hkv = heads
        self.dtype, self.full = dtype, (batch, hq, *lengths)
        self.q, self.k, self.v = (
            randn(gen, batch, h, n, d, dtype=dtype)
            for h, n, d in (
                (hq, lengths[0], dims[0]),
                (hkv, lengths[1], dims[0]),
                (hkv, lengths[1], dims[1]),
            )
        )
        self.grad_out = randn(gen, batch, hq, lengths[0], dims[1], dtype=dtype)
        self.grad_lse = randn(gen, batch, hq, lengths[0], dtype=stats(dtype))
        self.mask = None if mask is None else torch.rand(*self._sizes(mask), generator=gen) < seen
        if mask is not None and mask[2] and lengths[0] > 3:
            self.mask[..., 3, :] = False  # a row without keys
        self.bias = (
            None if bias is None else randn(gen, *self._sizes(bias), dtype=bias_dtype or dtype)
        )
        if bias is not None and bias[2] and bias[3] and lengths[0] > 3:
            self.bias[..., 1, ::3] = -math.inf
            self.bias[..., 2, ::4] = torch.finfo(self.bias.dtype).min
        distances = sum(lengths) - 1
        self.distance = (
            None if distance is None else randn(gen, distance, distances, dtype=stats(dtype))
        )
        self.sinks = randn(gen, hq, dtype=stats(dtype)) if sinks else None
        self.rules = rules

    def _sizes(self, wanted):
        return [n if w else 1 for n, w in zip(self.full, wanted, strict=True)]

    def inputs(self):
        return [self.q, self.k, self.v, self.sinks, self.bias, self.distance]

    def run(self, attend, dtype=None, mask="own", **more):
        """out, lse and the gradients of q, k, v, sinks, bias, distance_bias; None for those that
        the call does not have."""
        mask = self.mask if mask == "own" else mask
        leaves = [
            None if x is None else _as(x.detach(), dtype).requires_grad_() for x in self.inputs()
        ]
        q, k, v, sinks, bias, distance = leaves
        out, lse = attend(
            q,
            k,
            v,
            sinks=sinks,
            attn_mask=mask,
            bias=bias,
            distance_bias=distance,
            return_lse=True,
            **self.rules,
            **more,
        )
        finite = torch.where(torch.isfinite(lse), lse, 0)
        loss = (out * self.grad_out.to(out.dtype)).sum() + (
            finite * self.grad_lse.to(lse.dtype)
        ).sum()
        loss.backward()
        return [out.detach(), lse.detach(), *(None if x is None else x.grad for x in leaves)]

    def check(self, got, **more):
        """Checks the call against float64. The yardstick is the reference in the dtype; for the
        gradients of biases also FlashAttention-2's, from the rounded out and lse. The values of a
        row share the rounding of its lse.
        """
        drawn = {}  # by draw: the reference's results in float64 and in the dtype

        def draw(n):
            if n not in drawn:
                call = self if n == 0 else self.like(n)
                drawn[n] = (
                    call,
                    call.run(reference.flash_attn, F64, **more),
                    call.run(reference.flash_attn, **more),
                )
            return drawn[n]

        for i, (name, x, ref, own) in enumerate(zip(NAMES, got, *draw(0)[1:], strict=True)):
            if x is None:
                continue
            assert x.dtype == own.dtype, name
            if self.dtype is F64:
                torch.testing.assert_close(x, ref, rtol=1e-11, atol=1e-11)
                continue
            flash = name in ("bias", "distance_bias") and not more

            def yardstick(n, i=i, name=name, flash=flash):
                call, exact, made = draw(n)
                want = exact[i] if n == 0 else exact[i].where(draw(0)[1][i].isfinite(), 0)
                yield made[i], want
                if flash:
                    yield call.flash_gradient(name, made[i]), want

            rows = self.full[0] * self.full[1] * self.full[2]
            assert_close_as(yardstick, x, ref, name, sources=rows)

    def flash_gradient(self, name, own):
        """dS = P (dP - dO . out + dlse) from the rounded out and lse (Algorithm 2 of Dao 2023),
        summed over broadcast dimensions."""
        q, k, v, sinks, bias, distance = (None if x is None else x.detach() for x in self.inputs())
        out, lse = reference.flash_attn(
            q,
            k,
            v,
            sinks=sinks,
            attn_mask=self.mask,
            bias=bias,
            distance_bias=distance,
            return_lse=True,
            **self.rules,
        )
        groups = self.full[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = [torch.zeros(self.full, requires_grad=True)]

        def attend(added):  # the reference, with an addend to its scores for differentiation
            return reference.flash_attn(
                q,
                k.to(q.dtype),
                v.to(q.dtype),
                sinks=sinks,
                attn_mask=self.mask,
                distance_bias=distance,
                bias=added,
                return_lse=True,
                **self.rules,
            )

        added = (
            scores[0]
            if bias is None
            else torch.where(bias <= torch.finfo(bias.dtype).min, -math.inf, bias.float())
            + scores[0]
        )
        _, row_lse = attend(added)
        # d lse / d s = P
        (p,) = torch.autograd.grad(torch.where(torch.isfinite(row_lse), row_lse, 0).sum(), scores)
        exact = self.run(reference.flash_attn, F64)[1]
        # P as exp(s - lse) with the rounded lse
        p = p * torch.where(torch.isfinite(exact), exact - lse, 0).exp().float()[..., None]
        delta = (self.grad_out.float() * out.float()).sum(-1) - self.grad_lse
        ds = p * (self.grad_out.float() @ v.mT - delta[..., None])
        ds = torch.where(p == 0, 0, ds)
        if name == "bias":
            return ds.sum_to_size(self.bias.shape).to(own.dtype)
        seq_q, seq_k = self.full[2:]
        place = (torch.arange(seq_k) - torch.arange(seq_q)[:, None] + seq_q - 1).flatten()
        sums = torch.zeros(self.full[1], seq_q + seq_k - 1).index_add_(
            1, place, ds.sum(0).flatten(1)
        )
        return sums.sum_to_size(self.distance.shape)


MASKS = ((1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0))
BIASES = (
    (1, 1, 1, 1),
    (0, 1, 1, 1),
    (1, 0, 1, 1),
    (0, 0, 1, 1),
    (1, 0, 0, 1),
    (0, 0, 0, 1),
    (1, 1, 1, 0),
    (0, 0, 1, 0),
    (0, 0, 0, 0),
)


@pytest.mark.parametrize("dtype", (F32, *HALF, F64), ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(dtype, mask):
    call = Call((dtype, mask), dtype, mask=mask, sinks=mask[0] == 1, seen=0.5 if any(mask) else 1.1)
    call.check(call.run(gk.flash_attn))


@pytest.mark.parametrize("dtype", (F32, *HALF, F64), ids=str)
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_biases_and_their_gradients(dtype, bias):
    call = Call((dtype, bias), dtype, bias=bias, sinks=True)
    call.check(call.run(gk.flash_attn))


@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=str)
@pytest.mark.parametrize("heads", (1, 4))
def test_distance_bias_and_its_gradient(dtype, heads):
    call = Call(
        (dtype, heads),
        dtype,
        distance=heads,
        lengths=(130, 1100),
        is_causal=heads == 4,
        diagonal=970,
    )
    call.check(call.run(gk.flash_attn))


def test_float32_bias_beside_16_bits():
    call = Call("wide", BF16, bias=(0, 1, 1, 1), bias_dtype=F32, mask=(1, 1, 1, 1))
    call.check(call.run(gk.flash_attn))


TOGETHER = (
    dict(is_causal=True, diagonal=100),
    dict(window_left=40, window_right=30, softcap=3.0),
    dict(
        kv_start=torch.tensor([0, 70], dtype=torch.int32),
        kv_end=torch.tensor([190, 300], dtype=torch.int32),
    ),
    dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]), diagonal=7),
)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("rules", range(len(TOGETHER)))
@pytest.mark.parametrize("biased", (False, True))
def test_with_every_other_rule(dtype, rules, biased):
    more = dict(bias=(0, 1, 1, 1), distance=4) if biased else {}
    call = Call(
        (dtype, rules, biased), dtype, mask=(1, 0, 1, 1), sinks=True, **more, **TOGETHER[rules]
    )
    call.check(call.run(gk.flash_attn))


@pytest.mark.parametrize(
    "lengths", ((1, 700), (7, 2100), (400, 130), (129, 257), (128, 128), (260, 1)), ids=str
)
@pytest.mark.parametrize("heads", ((1, 1), (8, 1), (3, 3)), ids=str)
def test_lengths_and_groups(lengths, heads):
    call = Call(
        (lengths, heads),
        F32,
        batch=1,
        heads=heads,
        lengths=lengths,
        dims=(64, 40),
        mask=(1, 1, 1, 1),
        bias=(0, 1, 1, 1),
    )
    call.check(call.run(gk.flash_attn))


def test_q_start_and_dropout():
    starts = torch.tensor([90, 10], dtype=torch.int32)
    call = Call("start", F32, mask=(1, 1, 1, 1), bias=(0, 0, 1, 1), is_causal=True, q_start=starts)
    call.check(call.run(gk.flash_attn))
    seed = torch.tensor([5, 9])
    dropped = Call("drop", F32, mask=(1, 1, 1, 1), bias=(0, 1, 1, 1), distance=1)
    more = dict(dropout_p=0.3, dropout_seed=seed)
    dropped.check(dropped.run(gk.flash_attn, **more), **more)


@pytest.mark.parametrize("shape", ((0, 50), (50, 0), (0, 0)), ids=str)
def test_empty(shape):
    q, k, v = (
        torch.randn(2, 4, shape[0], 8),
        torch.randn(2, 2, shape[1], 8),
        torch.randn(2, 2, shape[1], 8),
    )
    bias = torch.randn(1, 4, *shape, requires_grad=True)
    out, lse = gk.flash_attn(
        q, k, v, attn_mask=torch.ones(shape).bool(), bias=bias, return_lse=True
    )
    assert not out.any() and (lse == -math.inf).all()
    out.sum().backward()
    assert not bias.grad.any()


# ---- properties ----------------------------------------------------------------------------------


def ranges_call(gen, lengths):
    """Ranges and the equal bool mask: documents that are causal inside, which every form can
    express."""
    seq_q, seq_k = lengths
    i = torch.arange(seq_q)
    ranges = torch.stack([i // 150 * 150, (i + 1).clamp(max=seq_k)], -1).to(torch.int32)
    key = torch.arange(seq_k)
    return ranges, (ranges[:, :1] <= key) & (key < ranges[:, 1:])


@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=str)
def test_the_same_mask_in_any_form_gives_the_same_bits(dtype):
    lengths = (500, 500)
    ranges, mask = ranges_call(generator("forms"), lengths)
    ends = ((torch.arange(500) // 150 + 1) * 150).to(torch.int32)[None, None, :, None]
    call = Call(dtype, dtype, lengths=lengths, mask=(0, 0, 1, 1), sinks=True, bias=(0, 1, 1, 1))
    forms = {"tensor": mask, **every_form(mask[None, None])}
    forms["ranges"] = gk.attn_mask_ranges(ranges, 500)
    forms["columns"] = gk.attn_mask_columns(ends, 500, is_causal=True)
    results = {name: call.run(gk.flash_attn, mask=form) for name, form in forms.items()}
    for got in results.values():
        for x, y in zip(got, results["tensor"], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert_bits(x, y)


def test_blocks_that_a_store_made_from_ranges_give_the_same_bits():
    """More partial blocks than a store keeps."""
    gen = generator("made")
    ranges = torch.randint(0, 900, (1, 1, 260, 4), generator=gen, dtype=torch.int32)
    rows = torch.randint(0, 260, (1, 1, 900, 4), generator=gen, dtype=torch.int32)
    call = Call("made", F32, lengths=(260, 900), mask=(0, 0, 1, 1))
    for made in (
        gk.attn_mask_ranges(ranges, 900),
        gk.attn_mask_columns(rows, 260, is_causal=False),
    ):
        for x, y in zip(
            call.run(gk.flash_attn, mask=made),
            call.run(gk.flash_attn, mask=made.dense()),
            strict=True,
        ):
            assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_a_rows_bits_do_not_depend_on_other_rows_masks(dtype):
    call = Call(("rows", dtype), dtype, lengths=(300, 600), mask=(1, 1, 1, 1), sinks=True)
    call.q *= 6  # so that the maximum changes between blocks
    want = call.run(gk.flash_attn)
    for seed in range(3):
        keep = torch.rand(300, generator=generator("keep", seed)) < 0.3
        other = torch.where(
            keep[:, None],
            call.mask,
            torch.rand(call.mask.shape, generator=generator("other", seed)) < 0.05,
        )
        if seed == 2:
            other[..., ~keep, :] = False
        got = call.run(gk.flash_attn, mask=other)
        assert_bits(got[0][:, :, keep], want[0][:, :, keep])
        assert_bits(got[1][:, :, keep], want[1][:, :, keep])


@pytest.mark.parametrize("dtype", (F32, *HALF, F64), ids=str)
@pytest.mark.parametrize("how", ("mask", "bias", "rules", "softcap"))
def test_nan_and_inf_of_hidden_pairs_never_show(dtype, how):
    """NaN and inf in keys that are hidden from all rows, and in keys that are hidden from some
    rows; only rows that see such a key may be affected."""
    call = Call(
        ("poison", dtype, how),
        dtype,
        lengths=(200, 400),
        dims=(40, 24),
        mask=(0, 0, 1, 1),
        sinks=True,
    )
    if how == "rules":
        call.rules = dict(window_left=60, window_right=60, diagonal=90)
    if how == "softcap":
        call.rules = dict(softcap=3.0)
    seen = call.mask[0, 0].clone()
    unseen, partly = torch.tensor([0, 5, 131, 390]), torch.tensor([17, 64, 200])
    seen[:, unseen] = False
    seen[:100, partly] = False
    if how == "bias":
        call.bias, call.mask = torch.where(seen, 0.0, -math.inf).to(dtype)[None, None], None
    else:
        call.mask = seen[None, None]
    want = call.run(gk.flash_attn)
    for i, key in enumerate((*unseen, *partly)):
        call.k[:, :, key, i % 7] = (math.nan, math.inf, -math.inf)[i % 3]
        call.v[:, :, key, i % 5] = (math.inf, math.nan)[i % 2]
    call.grad_out[:, :, 100:], call.grad_lse[:, :, 100:] = 0, 0
    clean = Call(
        ("poison", dtype, how),
        dtype,
        lengths=(200, 400),
        dims=(40, 24),
        mask=(0, 0, 1, 1),
        sinks=True,
    )
    clean.mask, clean.bias, clean.rules = call.mask, call.bias, call.rules
    clean.grad_out, clean.grad_lse = call.grad_out, call.grad_lse
    zeroed = [clean.k, clean.v]
    for x in zeroed:
        x[:, :, [*unseen, *partly]] = 0
    got, want = call.run(gk.flash_attn), clean.run(gk.flash_attn)
    rows = slice(0, 100)
    for n in (0, 1, 2):
        assert_bits(got[n][:, :, rows], want[n][:, :, rows])
    if how == "bias":
        assert_bits(got[6][..., rows, :], want[6][..., rows, :])
    assert torch.isfinite(got[2][:, :, rows]).all()
    assert not got[3][:, :, unseen].any() and not got[4][:, :, unseen].any()


@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=str)
@pytest.mark.parametrize("how", ("mask", "bias"))
@pytest.mark.parametrize("sinks", (False, True))
def test_rows_without_keys(dtype, how, sinks):
    """Rows without keys give out 0, lse -inf or the sink, and no gradient. The gradient of lse
    reaches only the sink."""
    call = Call(
        ("empty", dtype, how, sinks), dtype, mask=(0, 0, 1, 1), sinks=sinks, bias=(0, 1, 1, 1)
    )
    hidden = torch.tensor([3, 64, 150])
    call.mask[..., hidden, :] = False
    call.bias[..., :, :] = call.bias.clamp(min=-3)
    if how == "bias":
        call.bias = torch.where(call.mask, call.bias, torch.finfo(dtype).min)
        call.mask = None
    clean = call.run(gk.flash_attn)
    call.grad_out[:, :, hidden] = math.nan
    call.q[:, :, hidden] = math.inf
    got = call.run(gk.flash_attn)
    assert not got[0][:, :, hidden].any()
    want = (
        call.sinks[:, None].expand(2, 4, 3)
        if sinks
        else torch.full((2, 4, 3), -math.inf, dtype=stats(dtype))
    )
    assert_bits(got[1][:, :, hidden], want.contiguous())
    for n, x in enumerate(got):
        if x is not None and n > 1:
            assert torch.isfinite(x).all(), NAMES[n]
            torch.testing.assert_close(x, clean[n], rtol=1e-5, atol=1e-5)
    assert not got[2][:, :, hidden].any()
    assert not got[6][:, :, hidden].any()


def test_results_do_not_depend_on_threads():
    call = Call(
        "threads", F32, mask=(1, 1, 1, 1), bias=(0, 0, 1, 1), distance=1, lengths=(300, 1200)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    want = call.run(gk.flash_attn)
    for n in (2, 5):
        torch.set_num_threads(n)
        for x, y in zip(call.run(gk.flash_attn), want, strict=True):
            assert x is None or torch.equal(x, y)
    torch.set_num_threads(threads)


def test_same_as_sdpa():
    call = Call("sdpa", F32, heads=(4, 4), mask=(1, 0, 1, 1))
    call.mask[..., 3, 0] = True  # SDPA has no rows without keys
    ours = gk.flash_attn(call.q, call.k, call.v, attn_mask=call.mask)
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=call.mask)
    )


# ---- torch ---------------------------------------------------------------------------------------


def test_gradcheck(one_thread):
    call = Call(
        "gradcheck",
        F64,
        batch=1,
        heads=(2, 1),
        lengths=(4, 6),
        dims=(3, 2),
        mask=(1, 1, 1, 1),
        sinks=True,
        distance=2,
    )
    call.bias = torch.randn(1, 2, 4, 6, dtype=F64)

    def attend(q, k, v, sinks, bias, distance):
        out, lse = gk.flash_attn(
            q,
            k,
            v,
            sinks=sinks,
            attn_mask=call.mask,
            bias=bias,
            distance_bias=distance,
            softcap=2.0,
            return_lse=True,
        )
        return out, lse

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in call.inputs()])


def test_opcheck():
    call = Call(
        "opcheck",
        F32,
        batch=1,
        lengths=(9, 140),
        mask=(0, 1, 1, 1),
        bias=(0, 1, 1, 1),
        distance=1,
        sinks=True,
    )
    mask = gk.attn_mask_of(call.mask)
    stored = dict(attn_mask=mask.data, mask_store=mask.store, mask_seq_q=9, mask_seq_k=140)
    more = dict(**stored, bias=call.bias, distance_bias=call.distance, sinks=call.sinks)
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    for op in (ops.flash_attn_masked, ops.flash_attn_masked_fwd):
        torch.library.opcheck(op.default, leaves, more)
    with torch.no_grad():
        out, lse = ops.flash_attn_masked_fwd(*leaves, **more)
        args = (call.grad_out, *(x.detach() for x in leaves), out, lse)
        for need in (False, True):
            torch.library.opcheck(
                ops.flash_attn_masked_bwd.default,
                args,
                dict(**more, need_bias=need, need_distance_bias=need),
            )
        torch.library.opcheck(ops.attn_mask.default, (call.mask.view(torch.uint8), "bool", 9, 140))
        torch.library.opcheck(
            ops.attn_mask.default,
            (torch.ones(1, 1, 9, 2, dtype=torch.int32), "ranges", 9, 140),
            dict(transposed=True),
        )


@pytest.mark.parametrize("made", ("inside", "outside", "ranges"))
def test_compile_with_dynamic_lengths(made):
    def step(q, k, v, mask, bias):
        if made == "ranges":
            mask = gk.attn_mask_ranges(mask, k.shape[2])
        return gk.flash_attn(q, k, v, attn_mask=mask, bias=bias, is_causal=True).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (70, 140, 300):
        call = Call(n, F32, lengths=(n, n + 5), mask=(0, 0, 1, 1), bias=(0, 1, 1, 1))
        mask = call.mask
        if made == "outside":
            mask = gk.attn_mask_of(mask)
        if made == "ranges":
            mask = torch.stack([torch.zeros(n), torch.arange(n) + 3], -1).to(torch.int32)
        results = []
        for f in (step, compiled):
            leaves = [
                x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v, call.bias)
            ]
            loss = f(*leaves[:3], mask, leaves[3])
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in leaves)])
        for x, y in zip(*results, strict=True):
            assert_bits(x, y)


def test_autocast():
    call = Call("autocast", F32, mask=(1, 1, 1, 1), bias=(0, 1, 1, 1))
    with torch.autocast("cpu", BF16):
        out = gk.flash_attn(call.q, call.k, call.v, attn_mask=call.mask, bias=call.bias)
        half = gk.flash_attn(call.q, call.k, call.v, attn_mask=call.mask, bias=call.bias.half())
    assert out.dtype == half.dtype == BF16
    want = gk.flash_attn(
        call.q.bfloat16(), call.k.bfloat16(), call.v.bfloat16(), attn_mask=call.mask, bias=call.bias
    )
    assert_bits(out, want)


def t(*shape, dtype=F32):
    return torch.ones(*shape, dtype=dtype)


GOOD = dict(q=t(2, 4, 5, 8), k=t(2, 2, 6, 8), v=t(2, 2, 6, 8))
REFUSED = (
    (
        dict(attn_mask=t(5, 6)),
        "attn_mask must be bool or an AttnMask, got torch.float32; pass it as bias",
    ),
    (
        dict(attn_mask=t(5, 6, dtype=torch.int32)),
        "attn_mask must be bool or an AttnMask, got torch.int32",
    ),
    (
        dict(attn_mask=t(5, 6).bool().to_sparse()),
        "attn_mask has layout torch.sparse_coo, expected a dense tensor",
    ),
    (dict(bias=t(5, 6).to_sparse()), "bias has layout torch.sparse_coo, expected a dense tensor"),
    (dict(attn_mask=t(6).bool()), "attn_mask must have 2 to 4 dimensions, got 1"),
    (dict(attn_mask=t(5, 5).bool()), "attn_mask must broadcast to [2, 4, 5, 6], got [1, 1, 5, 5]"),
    (
        dict(attn_mask=t(2, 5, 6).bool()),
        "attn_mask must broadcast to [2, 4, 5, 6], got [1, 2, 5, 6]",
    ),
    (
        dict(attn_mask=gk.attn_mask_of(t(2, 5, 6).bool())),
        "attn_mask has 2 heads, expected 1 or 4, the heads of q",
    ),
    (
        dict(attn_mask=gk.attn_mask_of(t(3, 1, 5, 6).bool())),
        "attn_mask has batch size 3, expected 1 or 2",
    ),
    (
        dict(attn_mask=gk.attn_mask_of(t(6, 6).bool())),
        "attn_mask is for 6 queries and 6 keys, q and k have 5 and 6",
    ),
    (
        dict(bias=t(2, 5, 6)),
        "bias must have 4 dimensions that broadcast to [2, 4, 5, 6], got [1, 2, 5, 6]",
    ),
    (
        dict(bias=t(5, 6).bool()),
        "bias must have q's dtype or float32, got bool; pass it as attn_mask",
    ),
    (dict(bias=t(6)), "bias must have 2 to 4 dimensions, got 1"),
    (dict(bias=t(5, 6, dtype=BF16)), "bias must be float32, got bfloat16"),
    (dict(distance_bias=t(4, 11)), "distance_bias must have shape [4, 10] or [1, 10], got [4, 11]"),
    (dict(distance_bias=t(2, 10)), "distance_bias must have shape [4, 10] or [1, 10], got [2, 10]"),
    (dict(distance_bias=t(4, 10, dtype=F64)), "distance_bias must be float32, got float64"),
    (
        dict(distance_bias=t(4, 10), q_start=torch.zeros(2, dtype=torch.int32)),
        "distance_bias must be missing where q_start is given",
    ),
)


@pytest.mark.parametrize("call", range(len(REFUSED)))
def test_refused_by_name(call):
    change, text = REFUSED[call]
    with pytest.raises(ValueError) as raised:
        gk.flash_attn(**GOOD, **change)
    assert str(raised.value).startswith(f"gpukern::flash_attn: {text}")


def test_refused_where_no_mask_is_served():
    codes = [x.to(torch.float8_e4m3fn) for x in GOOD.values()]
    with pytest.raises(ValueError, match="flash_attn: bias must be None where q is float8_e4m3fn"):
        gk.flash_attn(*codes, bias=t(5, 6))
    with pytest.raises(ValueError, match="bias must be float16 or float32, got bfloat16"):
        gk.flash_attn(*(x.half() for x in GOOD.values()), bias=t(5, 6, dtype=BF16))
    with pytest.raises(TypeError, match="attn_mask must be a bool tensor or an AttnMask, got list"):
        gk.flash_attn(**GOOD, attn_mask=[[True]])
    bias = t(5, 6).requires_grad_()
    out = gk.flash_attn(**GOOD, bias=bias)
    (grad,) = torch.autograd.grad(out.sum(), bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn: it is not twice differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("how", ("bias", "distance_bias", "attn_mask", "none"))
def test_gradient_of_sinks_where_there_are_no_keys(how, dtype, device):
    """lse of each row is the head's sink, so a sink's gradient is the sum of grad_lse. With a mask
    or a bias it was 0."""
    stats = torch.float64 if dtype is torch.float64 else torch.float32
    q = torch.randn(2, 4, 5, 16, dtype=dtype, device=device, requires_grad=True)
    k = torch.zeros(2, 2, 0, 16, dtype=dtype, device=device)
    sinks = torch.randn(4, dtype=stats, device=device, requires_grad=True)
    biases = {
        "bias": torch.zeros(1, 4, 5, 1, dtype=dtype, device=device, requires_grad=True),
        "distance_bias": torch.zeros(4, 4, dtype=stats, device=device, requires_grad=True),
        "attn_mask": torch.zeros(5, 0, dtype=torch.bool, device=device),
    }
    given = {} if how == "none" else {how: biases[how]}
    out, lse = gk.flash_attn(q, k, k, sinks=sinks, return_lse=True, **given)
    assert torch.equal(lse, sinks[:, None].expand_as(lse))
    grad = torch.randn_like(lse)
    torch.autograd.backward((out, lse), (torch.randn_like(out), grad))
    torch.testing.assert_close(sinks.grad.double(), grad.double().sum((0, 2)), rtol=1e-6, atol=1e-6)
    assert not q.grad.any()
    assert not any(x.grad.any() for x in given.values() if x.requires_grad)

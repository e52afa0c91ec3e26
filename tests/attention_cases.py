# SPDX-License-Identifier: BSD-3-Clause
"""Cases of attention, dense and paged.

- `modifiers`, `paged_modifiers`: the arguments beside q, k and v, by name.
- `torch_attn`, `lse_yardsticks`, `flash_gradients`, `reordered`: results whose errors are those to
  expect in a dtype, from PyTorch's own ops and from sums in other orders.
- `Paged`, `check_paged`: a paged cache with its dense keys, and the check of paged_attn.
"""

import copy
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from conftest import (
    HALF,
    Lazily,
    as_dtype,
    assert_close_as,
    f64,
    generator,
    on_cpu,
    randn,
    reference,
    shuffled,
    strided,
    yard_dtype,
)

# --------------------------------------------------------------------------------------------------
# attention: modifiers, and PyTorch's own ops in the same dtype


def kv_bounds(batch, seq_k, gen):
    """kv_start, kv_end int32 [batch]: random ranges, some of which begin before the first key or
    end after the last one. The second sequence's end lies before its start."""
    start = torch.randint(-3, max(seq_k // 2, 1), (batch,), generator=gen)
    end = torch.randint(max(seq_k // 2, 1), seq_k + 5, (batch,), generator=gen)
    if batch > 1:
        start[1], end[1] = seq_k // 2 + 1, seq_k // 2 - 1
    return start.to(torch.int32), end.to(torch.int32)


def q_starts(batch, seq_q, seq_k):
    """q_start int32 [batch], the key index of each sequence's first query. Five values repeat: the
    last query at the last key, half of the queries before the first key, the first query at the
    last key, all queries in the middle of the keys, all queries beyond the keys.
    """
    starts = torch.tensor(
        [seq_k - seq_q, -seq_q // 2, seq_k - 1, (seq_k - seq_q) // 2, seq_k + 3], dtype=torch.int32
    )
    return starts.repeat(-(-batch // 5))[:batch]


def modifiers(name, batch, heads_q, seq_q, seq_k, gen, dtype=torch.float32, device="cpu"):
    """The arguments of flash_attn beyond q, k, v for a name of MODIFIERS or MORE_MODIFIERS."""
    extra = torch.float64 if dtype == torch.float64 else torch.float32
    slopes = torch.rand(heads_q, generator=gen, dtype=torch.float64).to(extra).to(device)
    slopes_b = torch.rand(batch, heads_q, generator=gen, dtype=torch.float64).to(extra).to(device)
    sinks = randn(gen, heads_q, dtype=extra, device=device)
    sinks_inf = sinks.clone()
    sinks_inf[::2] = -math.inf
    start, end = (t.to(device) for t in kv_bounds(batch, seq_k, gen))
    first = q_starts(batch, seq_q, seq_k).to(device)
    return {
        "none": {},
        "causal": dict(is_causal=True),
        "causal_end": dict(is_causal=True, diagonal=seq_k - seq_q),
        "causal_left": dict(is_causal=True, diagonal=-3),
        "scale": dict(scale=0.3),
        "scale_negative": dict(scale=-0.25),
        "scale_zero": dict(scale=0.0),
        "window": dict(window_left=5, window_right=3),
        "window_left": dict(window_left=17, diagonal=seq_k - seq_q),
        "window_right": dict(window_right=9, diagonal=2),
        "window_zero": dict(window_left=0, window_right=0),
        "window_causal": dict(
            window_left=33, window_right=70, is_causal=True, diagonal=seq_k - seq_q
        ),
        "softcap": dict(softcap=1.5),
        "alibi": dict(alibi_slopes=slopes),
        "alibi_batch": dict(alibi_slopes=slopes_b, diagonal=seq_k - seq_q),
        "sinks": dict(sinks=sinks),
        "sinks_off": dict(sinks=sinks_inf),
        "sinks_own": dict(sinks=sinks.to(dtype), is_causal=True, diagonal=seq_k - seq_q),
        "q_start": dict(is_causal=True, q_start=first),
        "q_start_window": dict(window_left=9, window_right=4, q_start=first, alibi_slopes=slopes),
        "q_start_all": dict(
            is_causal=True,
            q_start=first,
            window_left=40,
            softcap=3.0,
            alibi_slopes=slopes_b,
            sinks=sinks_inf.to(dtype),
            kv_start=start,
            kv_end=end,
        ),
        "kv_bounds": dict(kv_start=start, kv_end=end),
        "kv_start": dict(kv_start=start),
        "kv_end": dict(kv_end=end),
        "causal_softcap": dict(is_causal=True, softcap=2.0, diagonal=1),
        "causal_alibi": dict(is_causal=True, alibi_slopes=slopes, diagonal=seq_k - seq_q),
        "window_sinks": dict(
            window_left=8, is_causal=True, sinks=sinks_inf, diagonal=seq_k - seq_q
        ),
        "all": dict(
            is_causal=True,
            diagonal=seq_k - seq_q + 2,
            window_left=40,
            window_right=1,
            softcap=3.0,
            alibi_slopes=slopes_b,
            sinks=sinks_inf,
            kv_start=start,
            kv_end=end,
            scale=0.2,
        ),
    }[name]


MODIFIERS = (
    "none causal causal_end causal_left scale scale_negative scale_zero window window_left "
    "window_right window_zero "
    "window_causal softcap alibi alibi_batch sinks sinks_off kv_bounds kv_start kv_end "
    "causal_softcap causal_alibi "
    "window_sinks all"
).split()
# More modifiers, which tests sample separately.
MORE_MODIFIERS = ("sinks_own", "q_start", "q_start_window", "q_start_all")


def stands_at(seq_q, diagonal=0, q_start=None, device="cpu"):
    """[B or 1, 1, Sq, 1]: the key index at which each query stands."""
    first = (
        torch.tensor([diagonal], device=device) if q_start is None else q_start.long().to(device)
    )
    return first[:, None, None, None] + torch.arange(seq_q, device=device)[:, None]


def visible(
    q_shape,
    k_shape,
    is_causal=False,
    diagonal=0,
    window_left=-1,
    window_right=-1,
    kv_start=None,
    kv_end=None,
    q_start=None,
):
    """bool [B, 1, Sq, Sk]: whether query i sees key j, one comparison per rule."""
    batch, seq_q, seq_k = q_shape[0], q_shape[2], k_shape[2]
    i = stands_at(seq_q, diagonal, q_start)
    j = torch.arange(seq_k)[None, :]
    mask = torch.ones(batch, 1, seq_q, seq_k, dtype=torch.bool)
    if is_causal:
        mask &= j <= i
    if window_left >= 0:
        mask &= j >= i - window_left
    if window_right >= 0:
        mask &= j <= i + window_right
    if kv_start is not None:
        mask &= j >= kv_start.cpu().long()[:, None, None, None]
    if kv_end is not None:
        mask &= j < kv_end.cpu().long()[:, None, None, None]
    return mask


def torch_mask(q, k, alibi_slopes=None, **span):
    """SDPA's attn_mask for the same keys and slopes, and bool [B or 1, 1, Sq, 1], the rows that see
    no key.

    In the mask, rows that see no key see all of them, because SDPA has no result for them. The mask
    is None if every query sees every key.
    """
    mask = visible(q.shape, k.shape, **span).to(q.device)
    empty = ~mask.any(-1, keepdim=True)
    if alibi_slopes is not None:
        i = stands_at(q.shape[2], span.get("diagonal", 0), span.get("q_start"), q.device)
        distance = (i - torch.arange(k.shape[2], device=q.device)).abs()
        bias = -alibi_slopes.reshape(-1, q.shape[1], 1, 1).to(logit_dtype(q.dtype)) * distance
        mask = bias.masked_fill(~mask, -math.inf).masked_fill(empty, 0.0)
        return mask.expand(q.shape[0], *mask.shape[1:]), empty
    return (None if mask.all() else mask | empty), empty


def torch_attn(q, k, v, scale=None, softcap=0.0, sinks=None, order=None, **rules):
    """Attention by SDPA in q's dtype; None if SDPA cannot express the call.

    order [Sk] permutes the keys. Rows that see no key are 0.
    """
    if softcap != 0 or sinks is not None or k.shape[2] == 0 or q.shape[2] == 0:
        return None
    mask, empty = torch_mask(q, k, **rules)
    if order is not None:
        k, v = k[:, :, order], v[:, :, order]
        mask = None if mask is None else mask[..., order]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.masked_fill(empty, 0.0)


def lse_yardsticks(q, k, v, ref_lse, softcap=0.0, sinks=None, **rules):
    """Yardsticks of lse: values with PyTorch's errors in q's dtype (float32 for float64).

    Some come from `reference`. In 16 bits, another one is ref_lse plus the error of the lse that
    SDPA's CPU kernel keeps for its backward. That comparison leaves out softcap and sinks, which
    SDPA does not have. If there are few keys, it repeats them and subtracts the logarithm of the
    number of repeats, so that SDPA's vector code runs instead of its code for the remainder.
    """
    q, k, v, ref_lse, sinks, rules = on_cpu((q, k, v, ref_lse, sinks, rules))
    dtype = yard_dtype(q.dtype)
    more = dict(softcap=softcap, sinks=sinks)
    yield from (run[1] for run in reordered(q, k, v, {**rules, **more}))
    if q.dtype in HALF and q.numel() and k.numel():
        q, k = q.contiguous(), k.contiguous()
        rules = for_dtype(rules, dtype)
        scale = rules.pop("scale", None)
        mask, empty = torch_mask(q, k, **rules)
        times = -(-32 // k.shape[2])
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[1], *mask.shape[2:])
            mask = (
                mask
                if mask.is_floating_point()
                else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
            )
            mask = mask.repeat(1, 1, 1, times)
        wide = k.repeat_interleave(q.shape[1] // k.shape[1], 1).repeat(1, 1, times, 1)
        lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, wide, wide, attn_mask=mask, scale=scale
        )[1]
        plain = reference.flash_attn(*f64((q, k, k)), scale=scale, **f64(rules), return_lse=True)[1]
        error = lse.double() - math.log(times) - plain
        yield (ref_lse + error.masked_fill(empty[..., 0], 0.0)).float()


def flipped(
    q,
    k,
    v,
    is_causal=False,
    diagonal=0,
    window_left=-1,
    window_right=-1,
    kv_start=None,
    kv_end=None,
    q_start=None,
    **rest,
):
    """(q, k, v, arguments) of the same problem with queries and keys in reverse order."""
    seq_q, seq_k = q.shape[2], k.shape[2]
    right = window_right if not is_causal else 0 if window_right < 0 else min(window_right, 0)
    rest.update(window_left=right, window_right=window_left)
    if q_start is None:
        rest["diagonal"] = seq_k - seq_q - diagonal
    else:
        rest["q_start"] = seq_k - seq_q - q_start
    if kv_end is not None:
        rest["kv_start"] = seq_k - kv_end
    if kv_start is not None:
        rest["kv_end"] = seq_k - kv_start
    return q.flip(2), k.flip(2), v.flip(2), rest


def flash_gradients(
    q,
    k,
    v,
    grad_out,
    grad_lse=None,
    sinks=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    peak=None,
    kept=None,
    dropout_p=0.0,
    **span,
):
    """(dq, dk, dv, dsinks) by PyTorch's ops, with the roundings of flash attention.

    P is recomputed from lse, and the row sums of P * dP come from the rounded out. P and dS are
    rounded to q's dtype before the products. If `peak` is given, out is computed as SDPA's CUDA
    kernels do: from weights in q's dtype, relative to the row's maximum plus `peak`.
    """
    rules = dict(scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, **span)
    dropped = 1.0 if kept is None else kept / (1 - dropout_p)
    rules |= {} if kept is None else dict(kept=kept, dropout_p=dropout_p)
    out, lse = reference.flash_attn(q, k, v, **rules, return_lse=True)
    group = q.shape[1] // k.shape[1]
    x, y, z = (
        q.float(),
        k.float().repeat_interleave(group, 1),
        v.float().repeat_interleave(group, 1),
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score = scale * (x @ y.mT)
    slope = torch.ones_like(score)  # the derivative of the softcap
    if softcap > 0:
        t = torch.tanh(score / softcap)
        score, slope = softcap * t, 1 - t * t
    if alibi_slopes is not None:
        i = stands_at(q.shape[2], span.get("diagonal", 0), span.get("q_start"))
        score = score - alibi_slopes[..., None, None] * (i - torch.arange(k.shape[2])).abs()
    seen = visible(q.shape, k.shape, **span) & (lse > -math.inf)[..., None]
    p = torch.exp(score - lse[..., None]).masked_fill(~seen, 0.0)
    if peak is not None and k.shape[2]:
        largest = (
            score.masked_fill(~seen, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0) + peak
        )
        rounded = torch.exp(score - largest).masked_fill(~seen, 0.0).to(q.dtype).float()
        out = ((rounded @ z) * torch.exp(largest - lse.nan_to_num(neginf=0.0)[..., None])).to(
            q.dtype
        )
    grad = grad_out.float()
    delta = (grad * out.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.float()
    ds = (p * (grad @ z.mT * dropped - delta[..., None]) * slope).to(q.dtype).float()
    dq = scale * (ds @ y)
    dk, dv = scale * (ds.mT @ x), (p * dropped).to(q.dtype).float().mT @ grad
    dk, dv = (g.unflatten(1, (k.shape[1], group)).sum(2).to(q.dtype) for g in (dk, dv))
    dsinks = None
    if sinks is not None:
        weight = torch.exp(sinks[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
        dsinks = -(weight * delta).sum((0, 2))
    return dq.to(q.dtype), dk, dv, dsinks


def reordered(q, k, v, kwargs, grad_out=None, grad_lse=None):
    """reference.flash_attn in the yardstick's dtype with sums in several orders, which shows the
    errors to expect in that dtype.

    For each order it gives [out, lse], lazily. With grad_out it gives [out, lse, dq, dk, dv, dsinks]
    twice, by autograd and by flash_gradients. Permuting a head_dim, or queries and keys together,
    changes only the order of sums.
    """
    rounds_weights = q.is_cuda and q.dtype in HALF
    q, k, v, kwargs, grad_out, grad_lse = on_cpu((q, k, v, kwargs, grad_out, grad_lse))
    dtype = yard_dtype(q.dtype)
    gen = generator("reordered", q.shape[-1])
    q, k, v = (t.detach().to(dtype) for t in (q, k, v))
    return Lazily(_reordered(q, k, v, kwargs, grad_out, grad_lse, gen, rounds_weights))


def _reordered(q, k, v, kwargs, grad_out, grad_lse, gen, rounds_weights):
    runs = 0  # flash_gradients gets another peak in each run
    for flip, shuffle in itertools.product((False, True), repeat=2):
        args = {"scale": None, **for_dtype(kwargs, q.dtype)}
        leaves, back, back_v = [q, k, v], slice(None), slice(None)
        grads = [grad_out, grad_lse]
        if flip:
            *leaves, args = flipped(*leaves, **args)
            grads = [g if g is None else g.flip(2) for g in grads]
        if shuffle:
            order, order_v = (torch.randperm(t.shape[-1], generator=gen) for t in (q, v))
            leaves = [t[..., o] for t, o in zip(leaves, (order, order, order_v))]
            grads[0] = None if grad_out is None else grads[0][..., order_v]
            back, back_v = order.argsort(), order_v.argsort()

        def undo(name, t, flip=flip, back=back, back_v=back_v):
            if t is None or name == "dsinks":
                return t
            t = t.flip(2) if flip else t
            return t if name == "lse" else t[..., back if name in ("dq", "dk") else back_v]

        leaves = [t.clone().requires_grad_(grad_out is not None) for t in leaves]
        sinks = args.pop("sinks", None)
        if sinks is not None:
            sinks = sinks.requires_grad_(grad_out is not None)
        out, lse = reference.flash_attn(*leaves, sinks=sinks, **args, return_lse=True)
        values = [undo("out", out.detach()), undo("lse", lse.detach())]
        if grad_out is None:
            yield values
            continue
        pairs = [
            (r, g.to(r.dtype))
            for r, g in zip((out, lse), grads)
            if g is not None and r.requires_grad
        ]
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        autograd = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        autograd.append(None if sinks is None else sinks.grad)
        with torch.no_grad():
            peak = 0.25 * runs if rounds_weights else None
            flash = flash_gradients(*leaves, *grads, sinks, **args, peak=peak)
        for found in (autograd, flash):
            runs += 1
            yield values + [undo(n, g) for n, g in zip(("dq", "dk", "dv", "dsinks"), found)]


def reordered_packed(q, k, v, cu_q, cu_k, kwargs, grad_out):
    """`reordered` for each sequence of flash_attn_varlen: [out, lse, dq, dk, dv, dsinks], lazily.

    Sequences with the same lengths are computed as one batch, because there may be hundreds of
    small ones.
    """
    alike = {}
    for b, ((q0, q1), (k0, k1)) in enumerate(
        zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()))
    ):
        alike.setdefault((q1 - q0, k1 - k0), []).append((b, q0, k0))
    parts = []
    for (sq, sk), members in alike.items():
        which, *starts = torch.tensor(members).T
        rows_q, rows_k = (x[:, None] + torch.arange(n) for x, n in zip(starts, (sq, sk)))
        args = {**kwargs, "diagonal": sk - sq}
        slopes = kwargs.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            args["alibi_slopes"] = slopes[which]
        pairs = ((q, rows_q), (k, rows_k), (v, rows_k), (grad_out, rows_q))
        *leaves, grad = (t[rows.to(t.device)].transpose(1, 2) for t, rows in pairs)
        parts.append(((rows_q, rows_k), reordered(*leaves, args, grad)))

    def joined():
        for runs in zip(*(run for _, run in parts)):
            first, whole = runs[0], []
            for j, name in enumerate(("out", "lse", "dq", "dk", "dv")):
                of_k = name in ("dk", "dv")
                shape = (k if of_k else q).shape[0], *first[j].transpose(1, 2).shape[2:]
                whole.append(first[j].new_full(shape, -math.inf if name == "lse" else 0.0))
                for (rows, _), run in zip(parts, runs):
                    whole[-1][rows[of_k]] = run[j].transpose(1, 2)
            sinks = None if first[5] is None else torch.stack([run[5] for run in runs]).sum(0)
            yield [*whole, sinks]

    return Lazily(joined())


def logit_dtype(dtype):
    """The dtype of lse, sinks, slopes and scales beside q's dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def for_dtype(kwargs, dtype):
    """The arguments of an attention op other than q, k, v, converted for q in dtype."""
    return as_dtype(kwargs, logit_dtype(dtype))


# --------------------------------------------------------------------------------------------------
# paged caches


def paged_modifiers(name, batch, heads, gen, dtype, device):
    """The arguments of paged_attn beyond its five tensors. heads: (of q, of the cache)."""
    extra = logit_dtype(dtype)
    heads_q, heads_kv = heads
    slopes = torch.rand(heads_q, generator=gen, dtype=torch.float64).to(extra).to(device)
    slopes_b = torch.rand(batch, heads_q, generator=gen, dtype=torch.float64).to(extra).to(device)
    sinks = randn(gen, heads_q, dtype=extra, device=device)
    off = sinks.clone()
    off[::2] = -math.inf
    # some sequences end before their start
    start = torch.tensor([3, 40, -2, 0, 70, 2], dtype=torch.int32, device=device)[:batch]
    k_scale, v_scale = (
        torch.rand(heads_kv, generator=gen).to(extra).to(device) + 0.5 for _ in range(2)
    )
    of_heads = dict(k_scale=k_scale, v_scale=v_scale)
    of_all = dict(k_scale=k_scale[0], v_scale=v_scale[0])
    return {
        "none": {},
        "full": dict(is_causal=False),
        "full_right": dict(is_causal=False, window_right=2),
        "full_all": dict(is_causal=False, scale=0.2, softcap=2.5, sinks=sinks),
        "scale": dict(scale=-0.3),
        "window": dict(window_left=20),
        "window_zero": dict(window_left=0),
        "window_wide": dict(window_left=2**63 - 1),
        "window_right": dict(window_left=3, window_right=1),
        "softcap": dict(softcap=1.5),
        "alibi": dict(alibi_slopes=slopes),
        "alibi_batch": dict(alibi_slopes=slopes_b),
        "sinks": dict(sinks=sinks),
        "sinks_off": dict(sinks=off),
        "sinks_own": dict(sinks=off.to(dtype)),
        "kv_start": dict(kv_start=start),
        "kv_start_window": dict(
            kv_start=start, window_left=20, is_causal=False, alibi_slopes=slopes
        ),
        "kv_start_all": dict(
            scale=0.2, window_left=5, softcap=2.5, sinks=sinks, kv_start=start, **of_heads
        ),
        "kv_start_alibi": dict(
            window_left=7,
            window_right=0,
            softcap=2.5,
            sinks=sinks,
            kv_start=start,
            alibi_slopes=slopes_b,
            **of_all,
        ),
        "scales": of_all,
        "scales_head": of_heads,
        "all": dict(
            scale=0.2, window_left=50, softcap=2.5, alibi_slopes=slopes_b, sinks=off, **of_heads
        ),
    }[name]


class Paged:
    """A paged cache with shuffled pages, and the dense keys and values that it contains.

    lengths: the context length of each sequence, new tokens included. queries: the query tokens of
    each sequence. Everything that no query may read is NaN: unused pages and the ends of last
    pages. Unused table entries point far outside the cache.
    """

    def __init__(
        self,
        gen,
        lengths,
        queries,
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        block_size,
        dtype,
        device="cpu",
        order="NHD",
        garbage=2_000_000_000,
    ):
        pages = [-(-n // block_size) for n in lengths]
        spare = 3
        total = sum(pages) + spare
        width = max([*pages, 1]) + 1
        free_pages = torch.randperm(total, generator=gen)[: sum(pages)].tolist()
        self.k_cache = torch.full((total, block_size, heads_kv, head_dim), math.nan, dtype=dtype)
        self.v_cache = torch.full((total, block_size, heads_kv, head_dim_v), math.nan, dtype=dtype)
        self.block_table = torch.full((len(lengths), width), garbage, dtype=torch.int32)
        self.keys, self.values = [], []
        for b, n in enumerate(lengths):
            mine = [free_pages.pop() for _ in range(pages[b])]
            self.block_table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            k = randn(gen, n, heads_kv, head_dim, dtype=dtype)
            v = randn(gen, n, heads_kv, head_dim_v, dtype=dtype)
            token = torch.arange(n)
            page, row = (
                torch.tensor(mine, dtype=torch.int64)[token // block_size],
                token % block_size,
            )
            self.k_cache[page, row], self.v_cache[page, row] = k, v
            self.keys.append(k)
            self.values.append(v)
        self.q = randn(gen, sum(queries), heads_q, head_dim, dtype=dtype).to(device)
        self.lengths, self.queries, self.block_size = list(lengths), list(queries), block_size
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32).to(device)
        starts = [0, *itertools.accumulate(queries)]
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32).to(device)
        self.block_table = self.block_table.to(device)
        self.k_cache, self.v_cache = self.k_cache.to(device), self.v_cache.to(device)
        if order == "HND":
            self.k_cache, self.v_cache = (
                strided(c, (0, 2, 1, 3)) for c in (self.k_cache, self.v_cache)
            )
        elif order == "padded":
            self.k_cache, self.v_cache = (strided(c, pad=3) for c in (self.k_cache, self.v_cache))
        elif order == "shared":
            # one tensor [num_blocks, 2, block_size, heads_kv, max(D, Dv)] for both, as in some
            # inference engines
            both = torch.full(
                (total, 2, block_size, heads_kv, max(head_dim, head_dim_v)), math.nan, dtype=dtype
            )
            both = both.to(device)
            both[:, 0, ..., :head_dim] = self.k_cache
            both[:, 1, ..., :head_dim_v] = self.v_cache
            self.k_cache, self.v_cache = both[:, 0, ..., :head_dim], both[:, 1, ..., :head_dim_v]

    def like(self, gen):
        """A similar cache with all values in another order; only `dense` uses it."""
        other = copy.copy(self)
        (other.q,) = shuffled(gen, self.q)
        other.keys, other.values = (
            list(shuffled(gen, *tensors)) for tensors in (self.keys, self.values)
        )
        return other

    def args(self):
        """The positional tensors of paged_attn."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def dense(
        self, dtype, run, window_left=-1, is_causal=True, k_scale=None, v_scale=None, **modifiers
    ):
        """Calls run(q, k, v, **flash_attn's arguments) on each sequence's dense keys in dtype, and
        packs the results. run returns (out, lse) of one sequence, as flash_attn does.
        """
        outs, lses, start = [], [], 0
        for b, (k, v, n, length) in enumerate(
            zip(self.keys, self.values, self.queries, self.lengths)
        ):
            q = self.q[start : start + n].cpu()
            start += n
            if n == 0:
                continue
            q, k, v = (t.to(dtype).transpose(0, 1)[None].contiguous() for t in (q, k, v))
            if k_scale is not None:
                k = k * k_scale.to(dtype).cpu().reshape(1, -1, 1, 1)
            if v_scale is not None:
                v = v * v_scale.to(dtype).cpu().reshape(1, -1, 1, 1)
            span = dict(is_causal=is_causal, diagonal=length - n, window_left=window_left)
            mods = {
                name: m.cpu() if isinstance(m, torch.Tensor) else m for name, m in modifiers.items()
            }
            if mods.get("alibi_slopes") is not None and mods["alibi_slopes"].dim() == 2:
                mods["alibi_slopes"] = mods["alibi_slopes"][b][None]
            if mods.get("kv_start") is not None:
                mods["kv_start"] = mods["kv_start"][b : b + 1]
            out, lse = run(q, k, v, **span, **mods)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0].transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)


def tensor_core_sums(q, k):
    """q k^T in float64 as tensor cores sum it: after every 16 products the sum is cut to float32,
    toward zero. The products and the sum of 16 are exact."""
    q, k = q.double(), k.double()
    total = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for at in range(0, q.shape[-1], 16):
        total += q[..., at : at + 16] @ k[..., at : at + 16].mT
        total = total.view(torch.int64).bitwise_and(-(1 << 29)).view(torch.float64)
    return total


def on_tensor_cores(q, k, v, scale=None, **kwargs):
    """reference.flash_attn in float64 with the scores of tensor_core_sums, (out, lse).

    The error of an lse is the mean error of its row's scores. All cuts are toward zero, so it grows
    with D / 16, while a float32 sum that is rounded errs by sqrt(D). At D = 576 it is four times
    as large: 2.0e-6 instead of 5e-7 for scores up to 5.
    """
    scores = tensor_core_sums(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    keys = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return reference.flash_attn(
        scores,
        keys,
        v.double(),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        return_lse=True,
        **f64(kwargs),
    )


def check_paged(case, out, lse, kwargs, what=""):
    """Checks (out, lse) of paged_attn against the reference on each sequence's dense keys.

    A yardstick of lse on CUDA, in 16 bits, is `on_tensor_cores`.
    """
    assert out.dtype == case.q.dtype and out.is_contiguous()
    assert lse.dtype == logit_dtype(case.q.dtype) and lse.is_contiguous()

    def with_lse(q, k, v, **kw):
        return reference.flash_attn(q, k, v, **kw, return_lse=True)

    def sdpa(q, k, v, **kw):
        plain = torch_attn(q, k, v, **kw)
        ours = reference.flash_attn(q, k, v, **kw, return_lse=True)
        return (ours[0] if plain is None else plain), ours[1]

    dtype, gen = yard_dtype(case.q.dtype), generator("yardsticks")
    refs = case.dense(torch.float64, with_lse, **f64(kwargs))
    of_lse = (on_tensor_cores,) if case.q.is_cuda and dtype in HALF else ()

    def yards(draw, which):
        like = case.like(gen) if draw else case
        want = like.dense(torch.float64, with_lse, **f64(kwargs)) if draw else refs
        runs = (sdpa, with_lse, *(of_lse if which else ()))
        found = (like.dense(dtype, run, **for_dtype(kwargs, dtype)) for run in runs)
        return ((y[which], want[which]) for y in found)

    # the elements of a row of out share the roundings of its scores
    for which, (got, name) in enumerate(((out, "out"), (lse, "lse"))):
        assert_close_as(
            partial(yards, which=which), got, refs[which], what + name, sources=lse.numel()
        )

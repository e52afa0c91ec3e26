# SPDX-License-Identifier: BSD-3-Clause
"""The definition of every op in plain PyTorch, in as few lines as possible.

Each function has the argument names of the op it defines, and is differentiable by autograd.
Nothing here is fast; the attention functions build the whole matrix of scores. The tests compare
the kernels with these functions run in float64. The benchmarks and the documentation use them, too.

Scores, sums and softmax are computed in float64 if the input is float64, otherwise in float32, and
results are rounded once. In 16-bit attention, probabilities are rounded to the input's dtype before
they are multiplied by v, as in every 16-bit attention kernel. So a reference run in 16 bits has the
errors that a kernel must be expected to have.

Shapes: batch B, heads Hq and Hkv, lengths Sq and Sk, head_dim D of q and k, Dv of v; a packed batch
has T tokens. Strides of results are not defined here: see `torch_gpukern.flash_attn`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..ops.attn_dropout import attn_dropout_mask
from ..ops.rules import Rules, states
from .attn_fp8 import decoded_attn, quantize_attn, scale_of_sequence
from .quantised import (
    ACTIVATIONS,
    accumulator,
    dequantize,
    grouped_gemm,
    quantize,
    rms_norm_quantize,
    scaled_gemm,
    silu_mul_quantize,
    spread,
)
from .rows import (
    bias_gelu_dropout,
    cross_entropy,
    dropout,
    dropout_add,
    dropout_mask,
    geglu,
    kl_div,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    moe_unpermute,
    rms_norm,
    rope,
    rotated,
    softmax,
    swiglu,
)
from .sampling import sample_tokens

__all__ = [
    "attn_dropout_mask",
    "attn_merge",
    "bias_gelu_dropout",
    "cross_entropy",
    "dequantize",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "flash_attn",
    "flash_attn_varlen",
    "geglu",
    "gemm",
    "grouped_gemm",
    "kl_div",
    "kv_cache_write",
    "kv_cache_write_latent",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "moe_unpermute",
    "paged_attn",
    "quantize",
    "quantize_attn",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "sample_tokens",
    "scaled_gemm",
    "silu_mul_quantize",
    "softmax",
    "spread",
    "swiglu",
]


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    fp32_precision: str = "ieee",
) -> Tensor:
    """out [..., M, N] = activation(alpha * (a @ b) + beta * c + bias).

    a [..., M, K], b [..., K, N], bias [N]; c broadcasts to out.
    """
    acc = accumulator(a.dtype)
    x = alpha * (a.to(acc) @ b.to(acc))
    if c is not None and beta != 0:  # if beta = 0, c is not read and may contain NaN
        x = x + beta * c.to(acc)
    if bias is not None:
        x = x + bias.to(acc)
    return ACTIVATIONS[activation](x).to(out_dtype or a.dtype)


def _attend(
    q: Tensor,  # [B, Hq, Sq, D]
    k: Tensor,  # [B, Hkv, Sk, D]
    v: Tensor,  # [B, Hkv, Sk, Dv]
    position: Tensor,  # [B or 1, Sq] the index of the key on each query's diagonal
    first: Tensor,  # [B or 1, Sq] the first key that each query sees
    end: Tensor,  # [B or 1, Sq] one beyond the last key that each query sees
    rules: Rules,
    kept: Tensor | None = None,  # [B, Hq, Sq, Sk] bool, the probabilities that dropout keeps
    attn_mask: Tensor | None = None,  # bool, broadcastable to [B, Hq, Sq, Sk]
    bias: Tensor | None = None,  # floating-point, broadcastable to [B, Hq, Sq, Sk]
) -> tuple[Tensor, Tensor]:  # out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq]
    acc = accumulator(q.dtype)
    key = torch.arange(k.shape[2], device=q.device)
    sees = ((first[:, :, None] <= key) & (key < end[:, :, None]))[:, None]  # [B or 1, 1, Sq, Sk]
    if attn_mask is not None:
        sees = sees & attn_mask
    if bias is not None:
        sees = sees & (bias > torch.finfo(bias.dtype).min)

    # A key that no query sees may contain NaN. It becomes 0 here, because 0 * NaN would be NaN.
    unseen = ~sees.any(dim=2)[..., None]  # [B or 1, Hq or 1, Sk, 1]
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k = k.to(acc).repeat_interleave(groups, dim=1).masked_fill(unseen, 0)
    v = v.to(acc).repeat_interleave(groups, dim=1).masked_fill(unseen, 0)

    scale = 1 / math.sqrt(q.shape[3]) if rules.scale is None else rules.scale
    s = scale * (q.to(acc) @ k.transpose(-2, -1))  # [B, Hq, Sq, Sk]
    if rules.softcap > 0:
        s = rules.softcap * torch.tanh(s / rules.softcap)
    if rules.alibi_slopes is not None:
        s = (
            s
            - rules.alibi_slopes.to(acc)[..., None, None] * (position[:, None, :, None] - key).abs()
        )
    if bias is not None:
        s = s + bias.to(acc).masked_fill(~sees, 0)
    s = s.masked_fill(~sees, -torch.inf)

    # Softmax over the keys and the sink. A row that sees neither has total 0, out 0 and lse -inf.
    sinks = rules.sinks
    peak = s.detach().amax(dim=-1) if k.shape[2] else s.new_full(s.shape[:-1], -torch.inf)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach().to(acc)[:, None])
    peak = peak.masked_fill(peak == -torch.inf, 0)
    p = torch.exp(s - peak[..., None])
    total = p.sum(dim=-1)
    if sinks is not None:
        total = total + torch.exp(sinks.to(acc)[:, None] - peak)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (peak + torch.log(total)).masked_fill(empty, -torch.inf)
    p = p / total[..., None]
    if kept is not None:
        p = p * kept / (1 - rules.dropout_p)
    p = p.to(q.dtype)
    # A row without keys has the constant result 0. masked_fill stops its gradient, which would
    # otherwise reach p and v as 0 * inf.
    out = (p.to(acc) @ v).masked_fill(~sees.any(dim=3)[..., None], 0)
    return out.to(q.dtype), lse


def _window(position: Tensor, rules: Rules, keys: int) -> tuple[Tensor, Tensor]:
    """The range of keys [first, end) that the causal mask and the windows leave to a query at
    `position`. first may be negative.
    """
    end = torch.full_like(position, keys)
    if rules.is_causal:
        end = torch.minimum(end, position + 1)
    if rules.window_right >= 0:
        end = torch.minimum(end, position + rules.window_right + 1)
    first = position - rules.window_left if rules.window_left >= 0 else torch.zeros_like(position)
    return first, end


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    """activation(x @ weight.mT + bias)."""
    return gemm(x, weight.mT, bias, activation=activation)


@states("flash_attn", "flash_attn_fp8")
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_lse: bool = False,
    kept: Tensor | None = None,
    attn_mask: Any = None,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] = softmax(scale * q k^T + ...) v for q [B, Hq, Sq, D], k [B, Hkv, Sk, D],
    v [B, Hkv, Sk, Dv].

    kept: a dropout mask to use instead of the one that dropout_seed gives. If q, k and v are
    float8_e4m3fn codes, they are decoded to float64 first.
    """
    rules = Rules(given)
    if rules.dropout_p > 0 and kept is None:
        kept = attn_dropout_mask(q, k, rules.dropout_p, rules.dropout_seed)
    out_dtype = rules.out_dtype
    if q.dtype is torch.float8_e4m3fn:
        q, k, v = decoded_attn(q, k, v, rules.q_scale, rules.k_scale, rules.v_scale, rules.v_mean)
        out_dtype = out_dtype or torch.bfloat16
    keys = k.shape[2]
    starts = (
        torch.full((1,), rules.diagonal, device=q.device)
        if rules.q_start is None
        else rules.q_start.long()
    )
    position = torch.arange(q.shape[2], device=q.device) + starts[:, None]
    first, end = _window(position, rules, keys)
    if rules.kv_start is not None:
        first = torch.maximum(first, rules.kv_start.long()[:, None])
    if rules.kv_end is not None:
        end = torch.minimum(end, rules.kv_end.long()[:, None])
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        attn_mask = attn_mask.dense()
    if distance_bias is not None:
        by_distance = distance_bias[
            :, torch.arange(keys) - torch.arange(q.shape[2])[:, None] + q.shape[2] - 1
        ]
        hidden = by_distance <= torch.finfo(by_distance.dtype).min
        attn_mask = ~hidden if attn_mask is None else attn_mask & ~hidden
        bias = _sum_of(bias, by_distance.masked_fill(hidden, 0))
    out, lse = _attend(q, k, v, position, first, end, rules, kept, attn_mask, bias)
    out = out.to(out_dtype or q.dtype)
    return (out, lse) if return_lse else out


def _sum_of(bias: Tensor | None, by_distance: Tensor) -> Tensor:
    """The sum of both biases in float64. The lowest finite number of `bias`'s dtype hides a key,
    so it becomes -inf."""
    if bias is None:
        return by_distance
    hidden = bias <= torch.finfo(bias.dtype).min
    total = bias.double().masked_fill(hidden, 0) + by_distance.double()
    return total.masked_fill(hidden, -torch.inf)


@states("flash_attn_varlen", "flash_attn_varlen_fp8")
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_lse: bool = False,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [Tq, Hq, Dv]: flash_attn for each sequence b of a packed batch, with diagonal Sk_b -
    Sq_b.

    q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]; sequence b owns tokens cu_seqlens[b] to
    cu_seqlens[b + 1].
    """
    rules = Rules(given)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    kept = (
        attn_dropout_mask(q, k, rules.dropout_p, rules.dropout_seed)
        if rules.dropout_p > 0
        else None
    )
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        queries, length = rows.stop - rows.start, keys.stop - keys.start
        mean = rules.v_mean
        of_sequence = rules.but(
            diagonal=length - queries,
            alibi_slopes=_slopes_of(b, rules.alibi_slopes),
            q_scale=scale_of_sequence(rules.q_scale, b, queries),
            k_scale=scale_of_sequence(rules.k_scale, b, length),
            v_scale=scale_of_sequence(rules.v_scale, b, length),
            v_mean=mean if mean is None or mean.dim() == 2 else mean[b : b + 1],
        )
        out, lse = flash_attn(
            _as_batch(q[rows]),
            _as_batch(k[keys]),
            _as_batch(v[keys]),
            kept=None if kept is None else kept[None, :, rows, :length],
            return_lse=True,
            **of_sequence,
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return _join(q, v, outs, lses, return_lse)


def _as_batch(x: Tensor) -> Tensor:
    """[T, H, D] of one sequence as [1, H, T, D]."""
    return x.transpose(0, 1)[None]


def _slopes_of(b: int, alibi_slopes: Tensor | None) -> Tensor | None:
    """The slopes [Hq] of sequence b, from [Hq] or [B, Hq]."""
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]


def _join(q: Tensor, v: Tensor, outs: list[Tensor], lses: list[Tensor], return_lse: bool):
    """Packs the sequences' results. Tokens after the last sequence have out 0 and lse -inf."""
    rest = q.shape[0] - sum(x.shape[0] for x in outs)
    dtype, wide = (outs[0].dtype, lses[0].dtype) if outs else (q.dtype, accumulator(q.dtype))
    outs = [*outs, q.new_zeros(rest, q.shape[1], v.shape[-1], dtype=dtype)]
    lses = [*lses, q.new_full((rest, q.shape[1]), -torch.inf, dtype=wide)]
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if return_lse else out


@states("paged_attn")
def paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    return_lse: bool = False,
    prefix: Any = None,
    attn_mask: Tensor | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [T, Hq, Dv]: attention of each sequence's newest tokens over the keys in its pages.

    attn_mask [T, S] or [B, S, S] replaces is_causal: a query sees all old keys, and those new keys
    that its row of the mask allows. `prefix` only changes how a kernel reads the pages. It is
    ignored here.

    q [T, Hq, D]; k_cache [num_blocks, block_size, Hkv, D], v_cache [num_blocks, block_size, Hkv,
    Dv]; block_table [B, max_blocks]; seq_lens [B] includes the new tokens. 8-bit caches may have
    scales [], [Hkv] or [num_blocks, Hkv]; with latent_format "fp8_656", k_cache is uint8
    [num_blocks, block_size, 1, 656] and v_cache its view of 512 columns.
    """
    rules = Rules(given)
    if attn_mask is not None:
        rules = rules.but(is_causal=False)
    if rules.latent_format != "none":
        k_cache = _latents_of(k_cache, accumulator(q.dtype))
        v_cache = k_cache[..., :512]
    num_blocks, block_size = k_cache.shape[:2]
    batch, acc = seq_lens.shape[0], accumulator(q.dtype)
    if rules.cu_seqlens_q is not None:
        starts = rules.cu_seqlens_q.tolist()
    else:
        starts = [b * (q.shape[0] // max(batch, 1)) for b in range(batch + 1)]
    outs, lses = [], []
    for b, length in enumerate(seq_lens.tolist()):
        rows = q[starts[b] : starts[b + 1]]
        # Entries of pages before every window may be invalid; their keys are masked below.
        pages = block_table[b, : -(-length // block_size)].long().clamp(0, num_blocks - 1)
        k = _of_pages(k_cache, rules.k_scale, pages, acc)[:length]  # [length, Hkv, D]
        v = _of_pages(v_cache, rules.v_scale, pages, acc)[:length]
        position = torch.arange(rows.shape[0], device=q.device)[None] + (length - rows.shape[0])
        first, end = _window(position, rules, length)
        if not rules.allow_short:
            end = end.masked_fill(position < 0, 0)
        if rules.kv_start is not None:
            first = first.clamp(min=int(rules.kv_start[b]))
        of_sequence = rules.but(alibi_slopes=_slopes_of(b, rules.alibi_slopes))
        sees = None
        if attn_mask is not None:
            n = rows.shape[0]
            own = attn_mask[b] if attn_mask.dim() == 3 else attn_mask[starts[b] : starts[b + 1]]
            sees = torch.ones(n, n + length, dtype=torch.bool, device=q.device)
            sees[:, length:] = own[:n, :n]
            sees = sees[:, n:]  # the n columns in front are for a cache shorter than n tokens
        out, lse = _attend(
            _as_batch(rows),
            _as_batch(k),
            _as_batch(v),
            position,
            first,
            end,
            of_sequence,
            attn_mask=sees,
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return _join(q, v_cache, outs, lses, return_lse)


def _of_pages(cache: Tensor, scale: Tensor | None, pages: Tensor, acc: torch.dtype) -> Tensor:
    """The keys or values of some pages, [tokens, Hkv, D]; scale [], [Hkv] or [num_blocks, Hkv]."""
    x = cache[pages].to(acc)
    if scale is not None:
        x = x * (scale[pages][:, None] if scale.dim() == 2 else scale).to(acc)[..., None]
    return x.flatten(0, 1)


def _latents_of(rows: Tensor, acc: torch.dtype) -> Tensor:
    """Rows of 656 bytes as rows of 576 elements: 512 e4m3 codes, four float32 scales of 128 columns
    each, 64 bfloat16."""
    codes, scales, rotary = rows[..., :512], rows[..., 512:528], rows[..., 528:656]
    values = codes.contiguous().view(torch.float8_e4m3fn).to(acc).unflatten(-1, (4, 128))
    values = values * scales.contiguous().view(torch.float32).to(acc)[..., None]
    return torch.cat([values.flatten(-2), rotary.contiguous().view(torch.bfloat16).to(acc)], dim=-1)


def kv_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes token t of k [T, Hkv, D] and v [T, Hkv, Dv] to row slots[t] % block_size of page
    slots[t] // block_size. Negative slots are skipped.
    """
    taken = slots >= 0
    page, row = slots[taken].long() // k_cache.shape[1], slots[taken].long() % k_cache.shape[1]
    # indexing copies k and v before anything is written: they may be views of the caches
    k, v = k[taken], v[taken]
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is not None:
            x = x.to(accumulator(x.dtype)) / (scale[page] if scale.dim() == 2 else scale)[..., None]
        if cache.dtype == torch.int8:  # NaN becomes 0
            x = x.round().nan_to_num(0, 127, -128).clamp(-128, 127)
        elif scale is not None or cache.element_size() == 1:
            limit = torch.finfo(cache.dtype).max
            x = x.clamp(-limit, limit)
        cache[page, row] = x.to(cache.dtype)


def kv_cache_write_latent(c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes token t of c [T, 1, 512] and k_pe [T, 1, 64] to row slots[t] % block_size of page
    slots[t] // block_size. Negative slots are skipped.

    A row of a uint8 cache has 656 bytes (see _latents_of), a row of any other cache 576 elements.
    """
    if cache.dtype != torch.uint8:
        kv_cache_write(c, k_pe, cache[..., :512], cache[..., 512:], slots)
        return
    codes, scales = quantize(c, torch.float8_e4m3fn, "1x128")
    parts = codes, scales, k_pe.to(torch.bfloat16)
    rows = torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=-1)
    taken = slots >= 0
    at = slots[taken].long()
    cache[at // cache.shape[1], at % cache.shape[1]] = rows[taken]


def attn_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over the union of two disjoint sets of keys, from out [..., Dv] and
    lse [...] over each set.
    """
    acc = accumulator(out_a.dtype)
    lse_a, lse_b = lse_a.to(acc), lse_b.to(acc)
    no_a, no_b = lse_a == -torch.inf, lse_b == -torch.inf
    peak = torch.maximum(lse_a, lse_b).detach().masked_fill(no_a & no_b, 0)
    e_a, e_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = (e_a + e_b).masked_fill(no_a & no_b, 1)
    lse = (peak + torch.log(total)).masked_fill(no_a & no_b, -torch.inf)
    a = out_a.to(acc).masked_fill(no_a[..., None], 0)
    b = out_b.to(acc).masked_fill(no_b[..., None], 0)
    both = (e_a / total)[..., None] * a + (e_b / total)[..., None] * b
    # A side with lse = -inf saw no key, so the result has the bits of the other side.
    out = torch.where(no_a[..., None], b, torch.where(no_b[..., None], a, both))
    return out.to(out_a.dtype), lse


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Applies `rms_norm`, if its weight is given, and `rope` to the heads of q and k, and rounds
    once. Writes k and v by `kv_cache_write` and returns q."""
    queries, keys = (
        rotated(
            x if weight is None else rms_norm(x.to(accumulator(x.dtype)), weight, eps=eps),
            cos,
            sin,
            positions,
            interleaved,
        )
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    kv_cache_write(keys, v, k_cache, v_cache, slots, k_scale, v_scale)
    return queries.to(q.dtype)

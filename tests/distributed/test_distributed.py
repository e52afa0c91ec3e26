# SPDX-License-Identifier: BSD-3-Clause
"""Context and tensor parallelism: four processes (gloo), in one group and in two groups of two at
the same time, compared with one process.

On a machine with 2, 4 or 8 GPUs, the same checks run with as many processes and NCCL (marker
gpu2). The checks name no device; they create tensors on the process's default device.
"""

import contextlib
import datetime
import functools
import itertools
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ALL, generator, processes, run_script
from conftest import randn as randn_on

import torch_gpukern as gk
from torch_gpukern import results

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from torch_gpukern import distributed as gd  # noqa: E402
from torch_gpukern.distributed.sequence import Cut  # noqa: E402

RANKS = 4
CUDA = False  # True in a process with a GPU
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def randn(gen, *shape, dtype=torch.float32):
    with torch.device("cpu"):
        x = randn_on(gen, *shape, dtype=dtype)
    return x.to(torch.get_default_device())


class Ranks:
    """The argument of a check: the group of all ranks, this rank's group of two, and this rank."""

    def __init__(self, folder):
        self.folder = folder
        pairs = [dist.new_group([r, r + 1]) for r in range(0, RANKS, 2)]
        self.rank = dist.get_rank()
        self.all, self.pair = dist.group.WORLD, pairs[self.rank // 2]
        # with two ranks, the pair is the group of all
        self.groups = (self.all, self.pair) if RANKS > 2 else (self.all,)

    def report(self, failed):
        Path(self.folder, str(self.rank)).write_text("\n".join(failed))

    def progress(self, text):
        """Records which check this rank runs, in a file; rank 0 also prints it (pytest -s)."""
        with Path(self.folder, f"progress{self.rank}").open("a") as file:
            file.write(text)
        if self.rank == 0:
            print(text, end="", file=sys.stderr, flush=True)


def same_on_all(x):
    """Whether all ranks have the same bits."""
    met = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(met, x.contiguous())
    return all(torch.equal(x, other) for other in met)


# ---- the sequence --------------------------------------------------------------------------------


def check_shards_come_back(ranks):
    for group, layout, length, dim in itertools.product(
        ranks.groups, ("contiguous", "zigzag"), (64, 13, 3, 1, 0), (0, 1, -1)
    ):
        shape = [3, 2, 4]
        shape[dim] = length
        x = randn(generator("shards", length), *shape).requires_grad_()
        part = gd.shard_sequence(x, group, dim, layout)
        where = gd.positions(length, group, layout, device=x.device)
        assert torch.equal(part, x.index_select(dim, where)), (layout, length, dim)
        whole = gd.gather_sequence(part, group, dim, layout, seq_len=length)
        assert torch.equal(whole, x), (layout, length, dim)
        weight = randn(generator("weight"), *shape)
        (grad,) = torch.autograd.grad((whole * weight).sum(), x)
        mine = torch.zeros_like(grad).index_copy(dim, where, weight.index_select(dim, where))
        assert torch.equal(grad, mine)


# ---- attention -----------------------------------------------------------------------------------

RULES = (
    dict(),
    dict(is_causal=True),
    dict(window_left=9),
    dict(window_right=3, window_left=20),
    dict(is_causal=True, window_left=7),
    dict(is_causal=True, softcap=2.0, scale=0.3),
    dict(is_causal=True, alibi=True),
    dict(alibi=True, sinks=True),
    dict(is_causal=True, sinks=True),
    dict(is_causal=True, window_left=0, sinks=True),
)


def attention_case(seed, length, heads, dims, rules, dtype=torch.float32):
    gen = generator("attention", seed)
    batch, (hq, hkv), (d, dv) = 2, heads, dims
    q, k, v = (
        randn(gen, batch, h, length, n, dtype=dtype) for h, n in ((hq, d), (hkv, d), (hkv, dv))
    )
    rules = dict(rules)
    if rules.pop("alibi", False):
        rules["alibi_slopes"] = randn(gen, hq).abs() * 0.1
    sinks = randn(gen, hq) if rules.pop("sinks", False) else None
    weights = randn(gen, batch, hq, length, dv), randn(gen, batch, hq, length)
    return (q, k, v), sinks, rules, weights


def differentiated(call, leaves, sinks, weights):
    """out, lse and the gradients of a weighted sum of both."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    out, lse = call(*leaves, sinks)
    # -inf where a row sees nothing
    loss = (out.float() * weights[0]).sum() + (
        lse.masked_fill(lse == -torch.inf, 0) * weights[1]
    ).sum()
    wanted = leaves if sinks is None else [*leaves, sinks]
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, wanted)


def compare(ranks, group, mode, layout, case, why, atol=2e-5, bits=False):
    leaves, sinks, rules, weights = case
    length = leaves[0].shape[2]
    part = lambda x: gd.shard_sequence(x, group, 2, layout)  # noqa: E731
    want = differentiated(
        lambda q, k, v, s: gk.flash_attn(q, k, v, sinks=s, return_lse=True, **rules),
        leaves,
        sinks,
        weights,
    )

    def cut(q, k, v, s):
        return gd.context_parallel_attn(
            q,
            k,
            v,
            group,
            sinks=s,
            layout=layout,
            mode=mode,
            seq_len=length,
            return_lse=True,
            **rules,
        )

    got = differentiated(cut, [part(x) for x in leaves], sinks, [part(x) for x in weights])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want):
        b = b if name == "dsinks" else part(b)
        if bits and name in ("out", "lse"):
            assert torch.equal(a, b), f"{why}: {name} is not one rank's bit for bit"
        torch.testing.assert_close(
            a, b, atol=atol, rtol=atol, msg=lambda text, n=name: f"{why}: {n}: {text}"
        )


def check_attention_equals_one_rank(ranks):
    grid = list(
        itertools.product(
            ("all_gather", "ring", "ulysses"),
            ("contiguous", "zigzag"),
            (64, 61, 5, 1),
            RULES,
            (((4, 4), (8, 8)), ((8, 4), (16, 8))),
        )
    )
    points = grid if ALL else random.Random(5).sample(grid, 72)
    for seed, point in enumerate(points):
        mode, layout, length, rules, (heads, dims) = point
        for group in ranks.groups:
            case = attention_case(seed, length, heads, dims, rules)
            compare(ranks, group, mode, layout, case, f"{point} of {dist.get_world_size(group)}")


def check_all_gather_has_one_ranks_bits(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("contiguous", "zigzag"):
            case = attention_case(1, 1024, (2, 1), (32, 32), dict(is_causal=True), dtype)
            compare(
                ranks,
                ranks.all,
                "all_gather",
                layout,
                case,
                f"{dtype} {layout}",
                atol=3e-2 if dtype != torch.float32 else 2e-5,
                bits=True,
            )


def check_16_bits_err_as_one_rank(ranks):
    leaves, sinks, rules, weights = attention_case(2, 512, (8, 4), (32, 32), dict(is_causal=True))
    small = [x.bfloat16() for x in leaves]
    exact = differentiated(
        lambda q, k, v, s: gk.flash_attn(q, k, v, return_lse=True, **rules),
        [x.double() for x in small],
        None,
        [w.double() for w in weights],
    )
    one = differentiated(
        lambda q, k, v, s: gk.flash_attn(q, k, v, return_lse=True, **rules), small, None, weights
    )
    for mode in ("all_gather", "ring", "ulysses"):
        part = lambda x: gd.shard_sequence(x, ranks.all, 2, "zigzag")  # noqa: E731
        got = differentiated(
            lambda q, k, v, s: gd.context_parallel_attn(
                q,
                k,
                v,
                ranks.all,
                mode=mode,  # noqa: B023
                return_lse=True,
                **rules,  # noqa: B023
            ),  # noqa: B023
            [part(x) for x in small],
            None,
            [part(w) for w in weights],
        )
        for name, a, b, ref in zip(("out", "lse", "dq", "dk", "dv"), got, one, exact):
            errors = torch.stack(
                [
                    (a.double() - part(ref)).square().sum(),
                    (part(b).double() - part(ref)).square().sum(),
                ]
            )
            dist.all_reduce(errors)
            ratio = (errors[0] / errors[1]).sqrt().item()
            bound = max(BOUND[name], CUDA_BOUND) if CUDA else BOUND[name]
            assert ratio <= bound, f"{mode}: {name} errs {ratio:.3f} times as much as one rank's"


def check_gradients_of_sinks_err_as_one_rank(ranks):
    """The gradient of sinks sums the rounding errors of out over all rows. One rank's call on the
    CPU corrects for them, so every mode must."""
    modes = ("all_gather", "ring", "ulysses")
    part = lambda x: gd.shard_sequence(x, ranks.all, 2, "zigzag")  # noqa: E731
    for dtype in (torch.float16, torch.bfloat16):
        errors = torch.zeros(4, dtype=torch.float64)
        for seed in range(6):
            leaves, sinks, rules, weights = attention_case(
                seed, 96, (4, 4), (16, 16), dict(is_causal=True, sinks=True)
            )
            small = [x.to(dtype) for x in leaves]

            def of_sinks(call, leaves, weights, sinks=sinks):
                return differentiated(call, leaves, sinks.to(weights[0].dtype), weights)[
                    -1
                ].double()

            one = lambda q, k, v, s, r=rules: gk.flash_attn(q, k, v, sinks=s, return_lse=True, **r)  # noqa: E731
            exact = of_sinks(one, [x.double() for x in small], [w.double() for w in weights])
            found = [of_sinks(one, small, weights)]
            for mode in modes:
                cut = functools.partial(
                    gd.context_parallel_attn, mode=mode, return_lse=True, **rules
                )
                call = lambda q, k, v, s, cut=cut: cut(q, k, v, ranks.all, sinks=s)  # noqa: E731
                found.append(of_sinks(call, [part(x) for x in small], [part(w) for w in weights]))
            errors += torch.stack([(x - exact).square().sum() for x in found])
        ratios = (errors[1:] / errors[0]).sqrt().tolist()
        assert max(ratios) < 2, f"{dtype}: {dict(zip(modes, ratios))} times one rank's"


# lse is float32 on both sides; each merge of a ring rounds it once more.
BOUND = dict(out=1.02, lse=2.0, dq=1.02, dk=1.02, dv=1.02)
CUDA_BOUND = 1.05  # GPU kernels cut keys into other tiles, which round differently


def check_torchs_ring_agrees(ranks):
    """PyTorch's own ring attention, with our CPU kernel inserted, cuts the sequence as zigzag does.
    Its out, lse and gradients agree with ours."""
    theirs = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    if CUDA:  # bench_distributed.py compares with it
        return
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gen = generator("torch's ring")
    whole = [randn(gen, 2, 3, 48, 16) for _ in range(4)]
    q, k, v, grad = (gd.shard_sequence(x, ranks.all, 2, "zigzag").contiguous() for x in whole)
    out, lse = theirs._templated_ring_attention(
        ranks.all,
        2,
        lambda q, k, v, is_causal: forward(q, k, v, 0.0, is_causal),
        q,
        k,
        v,
        is_causal=True,
    )

    def backward(grad_out, query, key, value, out, logsumexp, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        )

    grads = theirs._templated_ring_attention_backward(
        ranks.all, 2, backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got, got_lse = gd.context_parallel_attn(
        *leaves, ranks.all, is_causal=True, mode="ring", return_lse=True
    )
    for x, y in zip((got, got_lse, *torch.autograd.grad(got, leaves, grad)), (out, lse, *grads)):
        torch.testing.assert_close(x, y.reshape(x.shape), atol=5e-6, rtol=5e-6)


def check_strides_and_mode_are_kept(ranks):
    (q, k, v), _, _, _ = attention_case(3, 32, (4, 4), (8, 8), {})
    part = [
        gd.shard_sequence(x, ranks.all, 2).transpose(1, 2).contiguous().transpose(1, 2)
        for x in (q, k, v)
    ]
    for mode in ("all_gather", "ring", "ulysses", "auto"):
        out = gd.context_parallel_attn(*part, ranks.all, mode=mode)
        assert out.stride(1) < out.stride(2), mode


def check_packed_equals_one_rank(ranks):
    lengths = [0, 7, 20, 1, 0, 30]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = int(cu[-1]) + 3  # tokens of no sequence
    points = itertools.product(RULES, ("contiguous", "zigzag"))
    for seed, (rules, layout) in enumerate(points):
        leaves, sinks, rules, weights = attention_case(seed, total, (4, 2), (16, 8), rules)
        leaves, weights = (
            [x[0].transpose(0, 1) for x in leaves],
            [x[0].transpose(0, 1) for x in weights],
        )
        for group in ranks.groups:
            part = lambda x, layout=layout, group=group: gd.shard_sequence(x, group, 0, layout)  # noqa: E731

            def one(q, k, v, s, rules=rules):
                return gk.flash_attn_varlen(
                    q, k, v, cu, cu, 30, 30, sinks=s, return_lse=True, **rules
                )

            def cut(q, k, v, s, rules=rules, layout=layout, group=group):
                return gd.context_parallel_attn_varlen(
                    q,
                    k,
                    v,
                    cu,
                    30,
                    group,
                    sinks=s,
                    layout=layout,
                    seq_len=total,
                    return_lse=True,
                    **rules,
                )

            want = differentiated(one, leaves, sinks, weights)
            got = differentiated(cut, [part(x) for x in leaves], sinks, [part(x) for x in weights])
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want):
                b = b if name == "dsinks" else part(b)
                torch.testing.assert_close(
                    a,
                    b,
                    atol=2e-5,
                    rtol=2e-5,
                    msg=lambda text, n=name, r=rules, y=layout: f"{r} {y}: {n}: {text}",
                )


def check_keys_spread_over_ranks(ranks):
    """Decoding with each rank holding some keys of every sequence, or none."""
    for dtype, with_sinks, group in itertools.product(
        (torch.float32, torch.bfloat16), (False, True), ranks.groups
    ):
        gen, size, mine = generator("paged"), dist.get_world_size(group), dist.get_rank(group)
        keys, block = 24, 4
        lens = [24, 5, 0, 9]
        k, v = (randn(gen, len(lens), keys, 2, 16, dtype=dtype) for _ in range(2))
        q, sinks = randn(gen, len(lens), 4, 16, dtype=dtype), randn(gen, 4) if with_sinks else None
        per = keys // size
        table = torch.arange(len(lens) * keys // block, dtype=torch.int32).view(len(lens), -1)
        whole = [x.reshape(-1, block, 2, 16) for x in (k, v)]
        want, want_lse = gk.paged_attn(
            q, *whole, table, torch.tensor(lens, dtype=torch.int32), sinks=sinks, return_lse=True
        )
        local = torch.tensor([min(max(n - mine * per, 0), per) for n in lens], dtype=torch.int32)
        part = []
        for x in (k, v):
            rows = x[:, mine * per : (mine + 1) * per]
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -per % block), value=float("nan"))
            part.append(rows.reshape(-1, block, 2, 16))
        mine_table = torch.arange(part[0].shape[0], dtype=torch.int32).view(len(lens), -1)
        out, lse = gd.context_parallel_paged_attn(
            q, *part, mine_table, local, group, sinks=sinks, return_lse=True
        )
        close = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(out, want, **close)
        torch.testing.assert_close(lse, want_lse, **close)
        if group is ranks.all:
            assert same_on_all(out)


# ---- products ------------------------------------------------------------------------------------


def check_products_equal_one_rank(ranks):
    for group, activation, rows in itertools.product(
        ranks.groups, ("none", "gelu", "relu"), (8, 7)
    ):
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        gen = generator("products", rows)
        a, b, bias = randn(gen, rows, 12), randn(gen, 12, 8 * size), randn(gen, 8 * size)
        weight = randn(gen, rows, 8 * size)
        leaves = [x.clone().requires_grad_() for x in (a, b, bias)]
        whole = gk.gemm(*leaves, activation=activation)
        want = torch.autograd.grad((whole * weight).sum(), leaves)
        columns = slice(8 * mine, 8 * mine + 8)
        own = [
            x.detach().clone().requires_grad_()
            for x in (a.tensor_split(size)[mine], b[:, columns], bias[columns])
        ]
        out, gathered = gd.all_gather_gemm(
            own[0], own[1], group, bias=own[2], activation=activation, return_gathered=True
        )
        assert torch.equal(gathered, a)
        torch.testing.assert_close(out, whole[:, columns])
        got = torch.autograd.grad((out * weight[:, columns]).sum(), own)
        for x, y in zip(
            got, (want[0].tensor_split(size)[mine], want[1][:, columns], want[2][columns])
        ):
            torch.testing.assert_close(x, y)


def check_a_rank_without_columns(ranks):
    """A rank whose share of K is empty adds nothing."""
    a, b = (randn(generator("no columns", i), 8, 8) for i in range(2))
    mine = slice(0, 8) if ranks.rank == 0 else slice(0, 0)
    want = a @ b
    torch.testing.assert_close(gd.gemm_all_reduce(a[:, mine], b[mine], ranks.all), want)
    part = gd.gemm_reduce_scatter(a[:, mine], b[mine], ranks.all)
    torch.testing.assert_close(part, want.tensor_split(RANKS)[ranks.rank])


def check_sums_of_products(ranks):
    for group, rows, dtype in itertools.product(ranks.groups, (8, 7, 1), FLOATS):
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        gen = generator("sums", rows)
        a, b, weight = (
            randn(gen, rows, 6 * size, dtype=dtype),
            randn(gen, 6 * size, 10, dtype=dtype),
            randn(gen, rows, 10, dtype=dtype),
        )
        inner = slice(6 * mine, 6 * mine + 6)
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        whole = gk.gemm(*leaves)
        want = torch.autograd.grad((whole * weight).sum(), leaves)
        for call, part in (
            (gd.gemm_reduce_scatter, lambda x, size=size, mine=mine: x.tensor_split(size)[mine]),
            (gd.gemm_all_reduce, lambda x: x),
        ):
            own = [a[:, inner].clone().requires_grad_(), b[inner].clone().requires_grad_()]
            out = call(*own, group)
            torch.testing.assert_close(out, part(whole.detach()))
            got = torch.autograd.grad((out * part(weight)).sum(), own)
            torch.testing.assert_close(got[0], want[0][:, inner])
            torch.testing.assert_close(got[1], want[1][inner])
    # large enough that rows are sent to their owners and back
    large = randn(generator("large", 0), 600, 8), randn(generator("large", 1), 8, 600)
    total = gd.gemm_all_reduce(*large)
    torch.testing.assert_close(total, RANKS * (large[0] @ large[1]), atol=1e-4, rtol=1e-4)
    assert same_on_all(total)


def check_vocabulary_over_ranks(ranks):
    """The loss and gradients of linear_cross_entropy: numbers of classes that are no multiple of
    the ranks, fewer classes than ranks, label smoothing, softcap."""
    points = itertools.product(
        ranks.groups,
        (12, 7, 2),
        (
            dict(),
            dict(label_smoothing=0.1, softcap=5.0, logit_scale=0.7, z_loss=0.02),
            dict(class_weight=True),
            dict(class_weight=True, label_smoothing=0.1, softcap=5.0, z_loss=0.02),
        ),
        ("mean", "none"),
    )
    for seed, (group, classes, rules, reduction) in enumerate(points):
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        gen = generator("vocabulary", seed)
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[seed % 4]
        close = {} if dtype.itemsize > 2 else dict(atol=2e-2, rtol=2e-2)
        whole = [
            randn(gen, 2, 5, 6, dtype=dtype),
            randn(gen, classes, 6, dtype=dtype),
            randn(gen, classes, dtype=dtype),
        ]
        x, weight, bias = whole = [x.requires_grad_() for x in whole]
        if "class_weight" in rules:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            rules = rules | dict(class_weight=randn(gen, classes, dtype=wide).abs() + 0.1)
        target = torch.randint(0, classes, (2, 5), generator=gen, device="cpu").to(x.device)
        target[0, 1] = -100
        want = gk.linear_cross_entropy(x, weight, target, bias, reduction=reduction, **rules)
        want_grads = torch.autograd.grad(want.sum(), whole)
        part = lambda t, size=size, mine=mine: t.tensor_split(size)[mine]  # noqa: E731
        own = [t.detach().clone().requires_grad_() for t in (x, part(weight), part(bias))]
        total = None if classes % size == 0 else classes
        got = gd.vocab_parallel_linear_cross_entropy(
            own[0], own[1], target, group, own[2], classes=total, reduction=reduction, **rules
        )
        torch.testing.assert_close(
            got, want, **({} if dtype.itemsize > 2 else dict(atol=2e-3, rtol=2e-3))
        )
        got_grads = torch.autograd.grad(got.sum(), own)
        for a, b in zip(
            got_grads, (want_grads[0], part(want_grads[1]), part(want_grads[2])), strict=True
        ):
            torch.testing.assert_close(a, b, **close)
        if group is ranks.all:
            assert same_on_all(got.detach()) and same_on_all(got_grads[0].view(torch.uint8))
        frozen = own[1].detach()  # a head that does not learn
        again = gd.vocab_parallel_linear_cross_entropy(
            own[0], frozen, target, group, classes=total, **rules
        )
        wanted = gk.linear_cross_entropy(x, weight.detach(), target, **rules)
        for a, b in zip(
            torch.autograd.grad(again, own[0]), torch.autograd.grad(wanted, x), strict=True
        ):
            torch.testing.assert_close(a, b, **close)
    if CUDA:
        wrong = torch.tensor([2 * RANKS])
        loss = gd.vocab_parallel_linear_cross_entropy(
            torch.zeros(1, 2), torch.zeros(2, 2), wrong, ranks.all
        )
        assert loss.isnan().item()
        return
    with pytest.raises(
        ValueError, match="vocab_parallel_linear_cross_entropy: target must be a Tensor, got None"
    ):
        gd.vocab_parallel_linear_cross_entropy(
            torch.zeros(1, 2), torch.zeros(2, 2), None, ranks.all
        )
    with pytest.raises(IndexError, match="target is expected to hold classes"):
        gd.vocab_parallel_linear_cross_entropy(
            torch.zeros(1, 2), torch.zeros(2, 2), torch.tensor([2 * RANKS]), ranks.all
        )


def check_embedding_over_ranks(ranks):
    """The bits of F.embedding's rows, and its gradient for this rank's rows: numbers of rows that
    are no multiple of the ranks, fewer rows than ranks, padding, repeated tokens, signed zeros."""
    embedding = torch.nn.functional.embedding
    points = itertools.product(ranks.groups, (12, 7, 2), (None, 1), (torch.int64, torch.int32))
    for seed, (group, classes, padding, index) in enumerate(points):
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        gen = generator("embedding", seed)
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[seed % 4]
        weight = randn(gen, classes, 5, dtype=dtype)
        weight[0, :2] = torch.tensor([-0.0, float("nan")])
        weight.requires_grad_()
        ids = torch.randint(0, classes, (3, 4), generator=gen, device="cpu")
        ids = ids.to(weight.device, index)
        grad = randn(gen, 3, 4, 5, dtype=dtype)
        want = embedding(ids, weight, padding_idx=padding)
        (want_grad,) = torch.autograd.grad(want, weight, grad)
        own = weight.detach().tensor_split(size)[mine].clone().requires_grad_()
        total = None if classes % size == 0 else classes
        got = gd.vocab_parallel_embedding(ids, own, group, classes=total, padding_idx=padding)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        (got_grad,) = torch.autograd.grad(got, own, grad)
        torch.testing.assert_close(got_grad, want_grad.tensor_split(size)[mine])
        none = gd.vocab_parallel_embedding(ids[:0], own, group, classes=total)
        assert none.shape == (0, 4, 5) and none.dtype is dtype
    wrong, own = torch.tensor([1, 3 * RANKS]), torch.ones(3, 2)
    if CUDA:
        rows = gd.vocab_parallel_embedding(wrong, own, ranks.all)
        assert rows[0].eq(1).all() and rows[1].isnan().all()
        return
    with pytest.raises(IndexError, match=rf"ids are expected to be in \[0, {3 * RANKS}\), got"):
        gd.vocab_parallel_embedding(wrong, own, ranks.all)
    for text, call in {
        "ids must be int64 or int32, got torch.float32": lambda: gd.vocab_parallel_embedding(
            own[0], own, ranks.all
        ),
        "weight must have 2 dimensions": lambda: gd.vocab_parallel_embedding(
            wrong[:1], own[0], ranks.all
        ),
        "padding_idx must be at least 0 or None, got -1": lambda: gd.vocab_parallel_embedding(
            wrong[:1], own, ranks.all, padding_idx=-1
        ),
        rf"padding_idx must be in \[0, {3 * RANKS}\), got 99": lambda: gd.vocab_parallel_embedding(
            wrong[:1], own, ranks.all, padding_idx=99
        ),
        "weight has 3 rows on rank ., expected . of 5": lambda: gd.vocab_parallel_embedding(
            wrong[:1], own, ranks.all, classes=5
        ),
        "columns of weight is 2 on rank 0, 1 on rank 1": lambda: gd.vocab_parallel_embedding(
            wrong[:1], own[:, : 1 + (ranks.rank != 1)], ranks.all
        ),
    }.items():
        with pytest.raises(ValueError, match=f"vocab_parallel_embedding: .*{text}"):
            call()


def check_adamw_of_dtensors(ranks):
    """Each rank updates its part of a parameter, with the bits of AdamW on one rank. States are
    DTensors and can be loaded again."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from torch_gpukern.optim import AdamW

    gen = generator("adamw dtensor")
    some = torch.zeros((), device=randn(gen, 1).device)
    mesh = DeviceMesh.from_group(ranks.all, some.device.type)
    for dtype, master in ((torch.float32, False), (torch.bfloat16, True)):
        whole = [randn(gen, *shape, dtype=dtype) for shape in ((8, 12), (6, 16), (5, 3), (3,))]
        placed = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]]
        parts = [
            distribute_tensor(w, mesh, at).requires_grad_()
            for w, at in zip(whole, placed, strict=True)
        ]
        plain = [w.clone().requires_grad_() for w in whole]
        ours, one = (AdamW(ps, master_weights=master) for ps in (parts, plain))
        for step in range(4):
            for p, w, at in zip(parts, plain, placed, strict=True):
                w.grad = randn(gen, *w.shape, dtype=dtype)
                p.grad = distribute_tensor(w.grad, mesh, [Replicate()] if step == 1 else at)
            torch.testing.assert_close(ours.clip_grad_norm_(1e3), one.clip_grad_norm_(1e3))
            ours.step(), one.step()
            if step == 1:
                with torch.no_grad():
                    parts[0].mul_(2), plain[0].mul_(2)
            if step == 2:
                again = AdamW(parts, master_weights=master)
                again.load_state_dict(ours.state_dict())
                ours = again
        for p, w in zip(parts, plain, strict=True):
            assert torch.equal(p.detach().full_tensor(), w.detach())
            for name, x in ours.state[p].items():
                assert name == "step" or torch.equal(x.full_tensor(), one.state[w][name]), name


def check_experts_over_ranks(ranks):
    """expert_parallel equals grouped_experts over all experts: ranks with different numbers of
    tokens and with none, experts that no token chose, and choices of experts that do not exist."""
    for seed, (group, each, dtype) in enumerate(
        itertools.product(ranks.groups, (1, 3), FLOATS[:2])
    ):
        size, mine, own = dist.get_world_size(group), dist.get_rank(group), 2
        gen, total = generator("experts", seed), 2 * size
        close = {} if dtype.itemsize > 2 else dict(atol=3e-2, rtol=3e-2)
        up, down, up_bias, down_bias = whole = [
            randn(gen, *shape, dtype=dtype)
            for shape in ((total, 8, 12), (total, 6, 8), (total, 12), (total, 8))
        ]
        tokens = [5 * (r % 3) for r in range(size)]  # none on rank 0
        x = randn(gen, sum(tokens), 8, dtype=dtype)
        weight_of = randn(gen, sum(tokens), each).abs()
        expert_of = torch.randint(
            1, total + 1, (sum(tokens), each), generator=gen, device="cpu"
        ).to(x.device)
        # A negative number or one after the last expert names no expert. Such a choice must not affect
        # a result or gradient, whatever x and weight_of contain.
        for t, value in ((expert_of, -1), (x, float("nan")), (weight_of, float("nan"))):
            t[::4] = value
        given = [t.requires_grad_() for t in (x, weight_of, *whole)]
        want = gk.nn.grouped_experts(
            x, expert_of, weight_of, up, down, up_bias=up_bias, down_bias=down_bias
        )
        ct = randn(gen, *want.shape, dtype=dtype)
        want_grads = torch.autograd.grad(want, given, ct)
        assert all(t.isfinite().all() for t in (want, *want_grads))
        rows = lambda t, mine=mine, tokens=tokens: t.split(tokens)[mine]  # noqa: E731
        part = lambda t, mine=mine, own=own: t[mine * own : (mine + 1) * own]  # noqa: E731
        local = [rows(x), rows(weight_of), *map(part, whole)]
        local = [t.detach().clone().requires_grad_() for t in local]
        arguments = (local[0], rows(expert_of), local[1], local[2], local[3], group)
        got = gd.expert_parallel(*arguments, up_bias=local[4], down_bias=local[5])
        torch.testing.assert_close(got, rows(want), **close)
        grads = torch.autograd.grad(got, local, rows(ct))
        for a, b in zip(
            grads, (*map(rows, want_grads[:2]), *map(part, want_grads[2:])), strict=True
        ):
            torch.testing.assert_close(a, b, **close)
        assert torch.equal(
            gd.expert_parallel(*arguments, up_bias=local[4], down_bias=local[5]), got
        )
    layer = gd.shard_experts(gk.nn.MoE(8, 4, RANKS, 1), ranks.all)
    with pytest.raises(ValueError, match="spread over ranks already"):
        gd.shard_experts(layer, ranks.all)
    with pytest.raises(ValueError, match="up is"):
        e = 1 + (ranks.rank == 1)
        one = torch.zeros(1, 1, dtype=torch.int64)
        gd.expert_parallel(
            torch.zeros(1, 8),
            one,
            one.float(),
            torch.zeros(e, 8, 4),
            torch.zeros(e, 2, 8),
            ranks.all,
        )
    with pytest.raises(
        ValueError, match=f"num_experts 3 is no multiple of the group's {RANKS} ranks"
    ):
        gd.shard_experts(gk.nn.MoE(8, 4, 3, 1), ranks.all)
    few = gk.nn.MoE(64, 32, RANKS, 1)
    gk.nn.quantize(few, "w4", skip=("router",), say=None)
    with pytest.raises(ValueError, match="the layer's experts are quantised"):
        gd.shard_experts(few, ranks.all)


def check_a_group_of_one(ranks):
    """On a group of one rank, every function is the plain op. A decoding step can be captured."""
    own = [dist.new_group([r]) for r in range(RANKS)][ranks.rank]
    gen = generator("one")
    q, k, v = (randn(gen, 1, h, 9, 8) for h in (4, 2, 2))
    for mode in ("all_gather", "ring", "ulysses", "auto"):
        got = gd.context_parallel_attn(q, k, v, own, is_causal=True, mode=mode)
        assert torch.equal(got, gk.flash_attn(q, k, v, is_causal=True)), mode
    packed, cu = (
        [x[0].transpose(0, 1) for x in (q, k, v)],
        torch.tensor([0, 4, 9], dtype=torch.int32),
    )
    want = gk.flash_attn_varlen(*packed, cu, cu, 5, 5, is_causal=True)
    assert torch.equal(gd.context_parallel_attn_varlen(*packed, cu, 5, own, is_causal=True), want)
    a, b = randn(gen, 6, 8), randn(gen, 8, 5)
    for call in (gd.all_gather_gemm, gd.gemm_reduce_scatter, gd.gemm_all_reduce):
        torch.testing.assert_close(call(a, b, own), gk.gemm(a, b))
    target = torch.arange(6) % 5
    loss = gd.vocab_parallel_linear_cross_entropy(a, b.t(), target, own)
    torch.testing.assert_close(loss, gk.linear_cross_entropy(a, b.t(), target))
    x = randn(gen, 3, 7)
    assert torch.equal(gd.gather_sequence(gd.shard_sequence(x, own, 1), own, 1), x)
    for text, wrong in {
        "context_parallel_attn: q has 9 tokens on rank 0, expected 8": lambda: (
            gd.context_parallel_attn(q, q, q, own, seq_len=8)
        ),
        "context_parallel_attn: k has 8 tokens on rank 0, expected 9": lambda: (
            gd.context_parallel_attn(q, k[:, :, 1:], v, own)
        ),
        "context_parallel_attn: seq_len must be at least 0, got -3": lambda: (
            gd.context_parallel_attn(q, k, v, own, seq_len=-3)
        ),
        "context_parallel_attn_varlen: q has 9 tokens on rank 0, expected 7": lambda: (
            gd.context_parallel_attn_varlen(*packed, cu, 5, own, seq_len=7)
        ),
        "gather_sequence: x has 7 tokens on rank 0, expected 6": lambda: gd.gather_sequence(
            x, own, 1, seq_len=6
        ),
        "gather_sequence: layout must be": lambda: gd.gather_sequence(x, own, 1, "striped"),
        "classes is 4": lambda: gd.vocab_parallel_linear_cross_entropy(
            a, b.t(), target, own, classes=4
        ),
    }.items():
        with pytest.raises(ValueError, match=text):
            wrong()


def check_decoding_is_captured(ranks):
    if not CUDA:
        return
    gen = generator("captured")
    cache = [randn(gen, 4, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    q, table, lens = (
        randn(gen, 2, 4, 64, dtype=torch.bfloat16),
        torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        torch.tensor([20, 32]),
    )
    call = functools.partial(
        gd.context_parallel_paged_attn, q, *cache, table, lens.to(torch.int32), ranks.all
    )
    call()  # creates NCCL's communicator before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for scale in (1.0, -2.0):
        q.mul_(scale)
        graph.replay()
        assert torch.equal(out, call())


# ---- compiled ------------------------------------------------------------------------------------


def check_compiled_without_a_break(ranks):
    group = ranks.all

    def attend(q, k, v):
        return gd.context_parallel_attn(
            q, k, v, group, is_causal=True, layout="zigzag", mode="all_gather"
        )

    def multiply(a, b, w):
        hidden = gd.all_gather_gemm(a, b, group, activation="gelu")
        return gd.gemm_reduce_scatter(hidden, w, group) + gd.gemm_all_reduce(a, b, group)[:, :4]

    def lose(x, weight):
        target = torch.arange(8, device=x.device) % (3 * RANKS)
        heavy = 1 + torch.arange(3 * RANKS, device=x.device, dtype=x.dtype)
        return gd.vocab_parallel_linear_cross_entropy(
            x, weight, target, group, class_weight=heavy, label_smoothing=0.1
        )

    def look_up(weight):
        ids = torch.arange(8, device=weight.device) % (3 * RANKS)
        return gd.vocab_parallel_embedding(ids, weight, group, padding_idx=1)

    def around(x):
        return gd.gather_sequence(gd.shard_sequence(x, group, 1, "zigzag") * 2, group, 1, "zigzag")

    gen = generator("compiled", ranks.rank)
    cases = (
        (attend, [randn(gen, 1, 2, 8, 8) for _ in range(3)]),
        (multiply, [randn(gen, 4, 8), randn(gen, 8, 12), randn(gen, 12, 4)]),
        (lose, [randn(generator("alike"), 8, 6), randn(gen, 3, 6)]),
        (look_up, [randn(gen, 3, 6)]),
        (around, [randn(gen, 2, 16, 3)]),
    )
    counted = []
    grow = torch.compile(
        lambda a, b: gd.gemm_reduce_scatter(a, b, group) * 2,
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, _: counted.append(graph) or graph,
    )
    # rows that are no multiple of the ranks: one graph with symbolic shapes
    for rows in (9, 10, 15, 13):
        a, b = randn(gen, rows, 8), randn(gen, 8, 4)
        assert torch.equal(grow(a, b), gd.gemm_reduce_scatter(a, b, group) * 2)
        with torch._subclasses.FakeTensorMode() as fake:
            shape = gd.gemm_reduce_scatter(fake.from_tensor(a), fake.from_tensor(b), group).shape
        assert shape == a.tensor_split(RANKS)[ranks.rank].shape[:1] + (4,)
    assert len(counted) == 1
    for call, given in cases:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        found = []
        for f in (call, compiled):
            leaves = [x.clone().requires_grad_() for x in given]
            out = f(*leaves)
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


def check_autocast_casts_as_for_one_rank(ranks):
    """Under autocast, float32 arguments give the call with 16-bit arguments, backward included. The
    dtypes are those of the single-rank op."""
    gen, group, kind = generator("autocast"), ranks.all, torch.get_default_device().type
    q, k, v = (randn(gen, 1, RANKS, 8, 16) for _ in range(3))
    packed, cu = (
        [x[0].transpose(0, 1) for x in (q, k, v)],
        torch.tensor([0, 8 * RANKS], dtype=torch.int32),
    )
    cache, table = (
        randn(gen, 2, 4, RANKS, 16, dtype=torch.bfloat16),
        torch.tensor([[0, 1]], dtype=torch.int32),
    )
    lengths, target = torch.tensor([8], dtype=torch.int32), torch.arange(8) % (4 * RANKS)
    a, b, bias = randn(gen, 8, 16), randn(gen, 16, 12), randn(gen, 12)
    x, weight = randn(generator("alike"), 8, 6), randn(gen, 4, 6)
    up, down = randn(gen, 1, 16, 8), randn(gen, 1, 4, 16)
    expert_of, weight_of = (torch.arange(8) % RANKS)[:, None], torch.ones(8, 1)
    calls = [
        (
            (q, k, v),
            functools.partial(gd.context_parallel_attn, group=group, mode=mode),
            gk.flash_attn,
        )
        for mode in ("all_gather", "ring", "ulysses")
    ]
    calls += [
        (
            packed,
            lambda q, k, v: gd.context_parallel_attn_varlen(q, k, v, cu, 8 * RANKS, group),
            lambda q, k, v: gk.flash_attn_varlen(
                *(x.repeat(RANKS, 1, 1) for x in (q, k, v)), cu, cu, 8 * RANKS, 8 * RANKS
            ),
        ),
        (
            (a, b, bias),
            lambda a, b, c: gd.all_gather_gemm(a, b, group, bias=c, activation="gelu"),
            gk.gemm,
        ),
        ((a, b), lambda a, b: gd.gemm_reduce_scatter(a, b, group), gk.gemm),
        ((a, b), lambda a, b: gd.gemm_all_reduce(a, b, group), gk.gemm),
        (
            (x, weight),
            lambda x, w: gd.vocab_parallel_linear_cross_entropy(x, w, target, group),
            lambda x, w: gk.linear_cross_entropy(x, w.repeat(RANKS, 1), target),
        ),
        (
            (a, up, down),
            lambda x, u, d: gd.expert_parallel(x, expert_of, weight_of, u, d, group),
            lambda x, u, d: gk.nn.grouped_experts(x, expert_of, weight_of, u, d),
        ),
        (
            (packed[0][:1],),
            lambda q: gd.context_parallel_paged_attn(q, cache, cache, table, lengths, group),
            lambda q: gk.paged_attn(q, cache, cache, table, lengths),
        ),
    ]
    for given, several, one in calls:
        leaves = [t.detach().clone().requires_grad_(len(given) > 1) for t in given]
        short = [t.detach().bfloat16().requires_grad_(len(given) > 1) for t in given]
        with torch.autocast(kind, dtype=torch.bfloat16):
            got, like = several(*leaves), one(*given)
            grads = torch.autograd.grad(got.sum(), leaves) if len(given) > 1 else ()
        want = several(*short)
        assert got.dtype is like.dtype and torch.equal(got, want.to(got.dtype)), given[0].shape
        for x, y in zip(
            grads, torch.autograd.grad(want.sum(), short) if grads else (), strict=True
        ):
            assert x.dtype is torch.float32 and torch.equal(x, y.float())


def check_second_derivatives_are_those_of_one_rank(ranks):
    """Second derivatives equal those of one rank, or are refused by name. Each rank has a part of
    the second loss; the parts add up to one rank's."""

    def twice(call, leaves, wanted, weights, weight):
        """The gradients of the leaves with respect to a weighted sum of the wanted first
        gradients."""
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        out = call(*leaves)
        first = torch.autograd.grad(
            (out**3 * weight).sum(), [leaves[i] for i in wanted], create_graph=True
        )
        total = sum((x * w).sum() for x, w in zip(first, [weights[i] for i in wanted], strict=True))
        return torch.autograd.grad(total, leaves, allow_unused=True)

    def compare(several, one, whole, cut, weight, cut_weight, wanted):
        weights = [
            randn(generator("second", i), *x.shape, dtype=x.dtype) for i, x in enumerate(whole)
        ]
        want = twice(one, whole, wanted, weights, weight)
        got = twice(several, cut(whole), wanted, cut(weights), cut_weight(weight))
        for x, y in zip(got, cut(want), strict=True):
            torch.testing.assert_close(x, y)

    for group, rows in itertools.product(ranks.groups, (8, 7)):
        size, mine, gen = dist.get_world_size(group), dist.get_rank(group), generator("twice", rows)
        rows_of = lambda x, size=size, mine=mine: x.tensor_split(size)[mine]  # noqa: E731
        columns_of = lambda x, size=size, mine=mine: x.tensor_split(size, -1)[mine]  # noqa: E731
        a, b, bias = (
            randn(gen, *shape, dtype=torch.float64)
            for shape in ((rows, 4 * size), (4 * size, 2 * size), (2 * size,))
        )
        weight = randn(gen, rows, 2 * size, dtype=torch.float64)
        for wanted in ((0,), (1,), (0, 1)):
            compare(
                lambda a, b, group=group: gd.gemm_all_reduce(a, b, group),
                gk.gemm,
                (a, b),
                lambda x, r=rows_of, c=columns_of: (c(x[0]), r(x[1])),
                weight,
                lambda x: x,
                wanted,
            )
        for activation, wanted in itertools.product(
            ("none", "relu", "gelu", "silu"), ((0,), (1,), (2,), (0, 1, 2))
        ):
            compare(
                lambda a, b, c, group=group, f=activation: gd.all_gather_gemm(
                    a, b, group, bias=c, activation=f
                ),
                lambda a, b, c, f=activation: gk.gemm(a, b, c, activation=f),
                (a, b, bias),
                lambda x, r=rows_of, c=columns_of: (r(x[0]), c(x[1]), c(x[2])),
                weight,
                columns_of,
                wanted,
            )
        mix = randn(gen, rows, rows, dtype=torch.float64)  # every token of the whole depends on all
        compare(
            lambda x, group=group, mix=mix: (
                mix @ gd.gather_sequence(x, group, 0, "contiguous", seq_len=len(mix))
            ),
            lambda x, mix=mix: mix @ x,
            (a,),
            lambda x, r=rows_of: (r(x[0]),),
            randn(gen, rows, 4 * size, dtype=torch.float64),
            lambda x: x,
            (0,),
        )
        ids = torch.arange(9) * 5 % rows
        compare(
            lambda w, group=group, ids=ids, rows=rows: gd.vocab_parallel_embedding(
                ids, w, group, classes=rows
            ),
            lambda w, ids=ids: torch.nn.functional.embedding(ids, w),
            (a,),
            lambda x, r=rows_of: (r(x[0]),),
            randn(gen, 9, 4 * size, dtype=torch.float64),
            lambda x: x,
            (0,),
        )
        with pytest.raises(
            NotImplementedError, match="gpukern::gathered_product: it has no backward"
        ):
            cut = [columns_of(a), rows_of(b)]
            twice(
                lambda a, b, g=group: gd.gemm_reduce_scatter(a, b, g),
                cut,
                (0,),
                cut,
                rows_of(weight),
            )
    expert_of = torch.arange(4 * RANKS)[:, None] % RANKS
    weight_of = torch.ones(4 * RANKS, 1)
    experts = [
        randn(generator("twice"), *shape)
        for shape in ((4 * RANKS, 8), (RANKS, 8, 6), (RANKS, 6, 8))
    ]
    compare(
        lambda x, u, d: gd.expert_parallel(
            x, expert_of[:4], weight_of[:4], u, d, ranks.all, torch.tanh
        ),
        lambda x, u, d: gk.nn.grouped_experts(x, expert_of, weight_of, u, d, torch.tanh),
        experts,
        lambda x: [t.tensor_split(RANKS)[ranks.rank] for t in x],
        randn(generator("weight"), 4 * RANKS, 8),
        lambda x: x.tensor_split(RANKS)[ranks.rank],
        (0,),
    )


# ---- what is refused -----------------------------------------------------------------------------


def _refused(calls, error=ValueError):
    """Checks that each call of {part of the error's text: call} raises on this rank."""
    for text, call in calls.items():
        with pytest.raises(error, match=text):
            call()


def check_ranks_disagree_about_attention(ranks):
    x = torch.zeros(1, 4, 8, 8)
    odd = ranks.rank == 1
    calls = {
        "without its tokens": lambda: gd.context_parallel_attn(
            *[x[:, :2] if odd else x] * 3, ranks.all
        ),
        "is_causal is": lambda: gd.context_parallel_attn(x, x, x, ranks.all, is_causal=odd),
        "layout is": lambda: gd.context_parallel_attn(
            x, x, x, ranks.all, layout="zigzag" if odd else "contiguous"
        ),
        "tokens of q is": lambda: gd.context_parallel_attn(
            *[x[:, :, :7] if odd else x] * 3, ranks.all
        ),
        "rank 1 refused the call|head_dim": lambda: gd.context_parallel_attn(
            x, x[..., :4] if odd else x, x, ranks.all
        ),
        "has 7 tokens on rank 1|refused": lambda: gd.context_parallel_attn(
            *[x[:, :, :7] if odd else x] * 3, ranks.all, seq_len=8 * RANKS
        ),
        "k has 7 tokens on rank ., expected 8 of a sequence of": lambda: gd.context_parallel_attn(
            x, x[:, :, :7], x, ranks.all
        ),
        "v has 7 tokens on rank ., expected 8 of a sequence of": lambda: (
            gd.context_parallel_attn_varlen(
                *[x[0].transpose(0, 1)[: 7 if name == "v" else 8] for name in "qkv"],
                torch.tensor([0, 8]).int(),
                8,
                ranks.all,
            )
        ),
        "the same number of heads": lambda: gd.context_parallel_attn(
            *[x[:, :1]] * 3, ranks.all, mode="ulysses"
        ),
        "x is": lambda: gd.gather_sequence(x if odd else x.double(), ranks.all, 2),
    }
    _refused(calls)


def check_ranks_disagree_about_products_and_losses(ranks):
    row, target = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)
    odd = ranks.rank == 1
    calls = {
        "columns of b is": lambda: gd.gemm_all_reduce(row, row[:, : 8 - odd], ranks.all),
        "rows of a is": lambda: gd.gemm_reduce_scatter(row[: 8 - odd], row, ranks.all),
        "activation is": lambda: gd.all_gather_gemm(
            row, row, ranks.all, activation="relu" if odd else "none"
        ),
        "they must match|refused": lambda: gd.all_gather_gemm(row, row[: 8 - odd], ranks.all),
        "classes of weight is": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row[: 8 - odd], target, ranks.all
        ),
        "label_smoothing must be": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, label_smoothing=2.0
        ),
        "weight has 8 classes on rank ., expected .": lambda: (
            gd.vocab_parallel_linear_cross_entropy(row, row, target, ranks.all, classes=8)
        ),
        "the function is": lambda: (gd.gemm_all_reduce if odd else gd.gemm_reduce_scatter)(
            row, row, ranks.all
        ),
        "reduction is": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, reduction="mean" if odd else "sum"
        ),
    }
    _refused(calls)


def _decode(ranks, pages_added=0, index=torch.int32):
    """A call of paged attention whose block table names pages from `pages_added` on."""
    q = torch.zeros(1, 4, 8)
    cache = torch.zeros(2, 4, 4, 8)
    table = torch.tensor([[0, 1]], dtype=index) + pages_added
    lengths = torch.tensor([8], dtype=torch.int32)
    return gd.context_parallel_paged_attn(q, cache, cache, table, lengths, ranks.all)


def check_an_argument_that_one_rank_refuses(ranks):
    """The error is raised on every rank, also if it is no ValueError on the rank that sees it."""
    x = torch.zeros(1, 4, 8, 8)
    row, target = x[0, 0], torch.zeros(8, dtype=torch.int64)
    packed, cu = x[0].transpose(0, 1).contiguous(), torch.tensor([0, 8 * RANKS], dtype=torch.int32)
    odd = ranks.rank == 1
    calls = {
        "b must have 2 dimensions": lambda: gd.all_gather_gemm(
            row, row[0] if odd else row, ranks.all
        ),
        "a must have 2 dimensions": lambda: gd.all_gather_gemm(
            row[0, 0] if odd else row, row, ranks.all
        ),
        "bias must have shape": lambda: gd.all_gather_gemm(
            row, row, ranks.all, bias=row[0, 0] if odd else row[0]
        ),
        "gemm_all_reduce: a must be float32": lambda: gd.gemm_all_reduce(
            row.int(), row.int(), ranks.all
        ),
        "gemm_reduce_scatter: a must be float32": lambda: gd.gemm_reduce_scatter(
            row.int(), row.int(), ranks.all
        ),
        "mode must be": lambda: gd.context_parallel_attn(
            x, x, x, ranks.all, mode="best" if odd else "ring"
        ),
        "layout must be": lambda: gd.context_parallel_attn(
            x, x, x, ranks.all, layout="none" if odd else "zigzag"
        ),
        "alibi_slopes requires a gradient": lambda: gd.context_parallel_attn(
            x, x, x, ranks.all, alibi_slopes=torch.ones(4, requires_grad=odd)
        ),
        "reduction must be": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, reduction="max" if odd else "sum"
        ),
        "class_weight must have shape": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, class_weight=torch.ones(8 * RANKS - odd)
        ),
        "class_weight must be float32": lambda: gd.vocab_parallel_linear_cross_entropy(
            row,
            row,
            target,
            ranks.all,
            class_weight=torch.ones(8 * RANKS, dtype=torch.float64 if odd else None),
        ),
        "class_weight requires a gradient": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, class_weight=torch.ones(8 * RANKS, requires_grad=odd)
        ),
        "classes must be": lambda: gd.vocab_parallel_linear_cross_entropy(
            row, row, target, ranks.all, classes=-5
        ),
        "dim must be": lambda: gd.gather_sequence(x, ranks.all, dim=5 if odd else 2),
        "block_table must be int32": lambda: _decode(
            ranks, index=torch.int64 if odd else torch.int32
        ),
        "cu_seqlens must be int32": lambda: gd.context_parallel_attn_varlen(
            packed, packed, packed, cu.long() if odd else cu, 8 * RANKS, ranks.all
        ),
    }
    _refused(calls)


def check_contents_of_tables_that_are_refused(ranks):
    packed = torch.zeros(8, 4, 8)
    row, target = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)
    odd = ranks.rank == 1
    if CUDA:  # kernels check contents on the device, and a later call raises
        for wrong in ([0, 9 * RANKS], [1, 8 * RANKS], [0, 5, 3, 8 * RANKS], [0, 8 * RANKS]):
            most = 8 * RANKS - 1 if wrong == [0, 8 * RANKS] else 9 * RANKS
            for is_causal in (False, True):
                gd.context_parallel_attn_varlen(
                    packed,
                    packed,
                    packed,
                    torch.tensor(wrong, dtype=torch.int32),
                    most,
                    ranks.all,
                    is_causal=is_causal,
                )
                torch.cuda.synchronize()
                with pytest.raises(IndexError, match="cu_seqlens is expected"):
                    gk.check_errors()
    else:
        contents = {
            "block_table is expected": lambda: _decode(ranks, pages_added=2 * odd),
            "target is expected": lambda: gd.vocab_parallel_linear_cross_entropy(
                row, row, target + 8 * RANKS * odd, ranks.all
            ),
        }
        _refused(contents, (IndexError, ValueError))
        for wrong in ([0, 9 * RANKS], [1, 8 * RANKS], [0, 5, 3, 8 * RANKS]):
            for is_causal in (False, True):
                with pytest.raises((IndexError, ValueError), match="cu_seqlens is expected"):
                    gd.context_parallel_attn_varlen(
                        packed,
                        packed,
                        packed,
                        torch.tensor(wrong, dtype=torch.int32),
                        9 * RANKS,
                        ranks.all,
                        is_causal=is_causal,
                    )


def check_every_rank_passes_what_attention_refuses(ranks):
    x = torch.zeros(1, 4, 8, 8)
    for wrong in (dict(mode="best"), dict(layout="striped"), dict(seq_len=-3)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gd.context_parallel_attn(x, x, x, ranks.all, **wrong)


def check_attention_has_no_second_derivative(ranks):
    y = torch.zeros(1, 4, 8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no backward"):
        (g,) = torch.autograd.grad(
            gd.context_parallel_attn(y, y, y, ranks.all).square().sum(), y, create_graph=True
        )
        g.sum().backward()


def check_calls_can_go_unchecked(ranks):
    x = torch.zeros(1, 4, 8, 8)
    os.environ["GPUKERN_DIST_CHECK"] = "0"
    try:
        gd.context_parallel_attn(x, x, x, ranks.all)
    finally:
        del os.environ["GPUKERN_DIST_CHECK"]


def check_a_product_in_parts_is_the_whole(ranks):
    """Sizes at which all_gather_gemm and gemm_reduce_scatter cut the product to overlap it with
    transfers."""
    size, mine, rows = RANKS, ranks.rank, 2048
    gen = generator("in parts")
    a, b, bias = randn(gen, rows, 1024), randn(gen, 1024, 256) * 0.1, randn(gen, 256)
    whole = gk.gemm(a, b, bias, activation="relu")
    out = gd.all_gather_gemm(a.tensor_split(size)[mine], b, bias=bias, activation="relu")
    torch.testing.assert_close(out, whole, atol=1e-4, rtol=1e-4)
    inner = slice(1024 // size * mine, 1024 // size * (mine + 1))
    out = gd.gemm_reduce_scatter(a[:, inner], b[inner])
    torch.testing.assert_close(out, (a @ b).tensor_split(size)[mine], atol=1e-4, rtol=1e-4)
    # their gradients are products of the same two kinds
    weight = randn(gen, rows, 256) * 0.1
    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    want = torch.autograd.grad(gk.gemm(*leaves), leaves, weight)
    own = [a.tensor_split(size)[mine].clone().requires_grad_(), b.clone().requires_grad_()]
    got = torch.autograd.grad(
        gd.all_gather_gemm(*own), own, weight / size
    )  # each rank has a share of the whole's gradient
    torch.testing.assert_close(got[0], want[0].tensor_split(size)[mine], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1] * size, want[1], atol=1e-3, rtol=1e-4)
    own = [a[:, inner].clone().requires_grad_(), b[inner].clone().requires_grad_()]
    got = torch.autograd.grad(gd.gemm_reduce_scatter(*own), own, weight.tensor_split(size)[mine])
    torch.testing.assert_close(got[0], want[0][:, inner], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], want[1][inner], atol=1e-3, rtol=1e-4)


def check_operands_that_are_fetched(ranks):
    """A size at which gemm_reduce_scatter fetches the other ranks' operands on GPUs. Their inner
    dimensions differ, and b's columns or rows are contiguous."""
    from torch_gpukern.distributed import transport

    size, gen, made = RANKS, generator("operands"), []
    names = ("OperandsByRank", "OperandsByColumns")
    usual = {name: getattr(transport, name) for name in names}

    def counted(name):
        def make(*given):
            made.append(name)
            return usual[name](*given)

        return make

    ends = list(itertools.accumulate([256 + 8 * (r % 2) for r in range(size)], initial=0))
    inner = slice(ends[ranks.rank], ends[ranks.rank + 1])
    whole = [
        randn(gen, *shape, dtype=torch.bfloat16) for shape in ((2050, ends[-1]), (ends[-1], 2048))
    ]
    weight = randn(gen, 2050, 2048, dtype=torch.bfloat16)
    own_weight = weight.tensor_split(size)[ranks.rank]
    leaves = [x.double().requires_grad_() for x in whole]
    want = leaves[0] @ leaves[1]
    grads = torch.autograd.grad(want, leaves, weight.double())

    def close(got, expected):
        off = (got.double() - expected).norm() / expected.norm()
        assert off < 3e-3, off.item()

    for name in names:
        setattr(transport, name, counted(name))
    try:
        for transposed in (False, True):
            a, b = whole[0][:, inner].clone(), whole[1][inner].clone()
            b = (b.t().contiguous().t() if transposed else b).requires_grad_()
            a.requires_grad_()
            out = gd.gemm_reduce_scatter(a, b)
            close(out, want.tensor_split(size)[ranks.rank])
            assert torch.equal(out, gd.gemm_reduce_scatter(a, b))
            da, db = torch.autograd.grad(out, (a, b), own_weight)
            close(da, grads[0][:, inner])
            close(db, grads[1][inner])
    finally:
        for name, kind in usual.items():
            setattr(transport, name, kind)
    assert not CUDA or size > 4 or set(made) == set(names[: size // 2])


def check_sums_in_mailboxes(ranks):
    """Small sums: the ranks' products are added in float32 in rank order and rounded once. Calls are
    repeated, have several sizes, and run in two graphs at the same time."""
    if not CUDA:
        return
    gen = generator("mailboxes")

    def case(rows, dtype):
        # every rank can compute all ranks' operands
        every = [
            (randn(gen, rows, 64, dtype=dtype), randn(gen, 64, 96, dtype=dtype))
            for _ in range(RANKS)
        ]
        total = gk.gemm(*every[0], out_dtype=torch.float32)
        for pair in every[1:]:
            total = total + gk.gemm(*pair, out_dtype=torch.float32)
        return every[ranks.rank], total.to(dtype)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (1, 700, 3, 129, 2048, 1):
            given, want = case(rows, dtype)
            assert torch.equal(gd.gemm_all_reduce(*given, ranks.all), want), (rows, dtype)
    streams, replays = [torch.cuda.Stream() for _ in range(2)], []
    for stream, rows in zip(streams, (5, 300), strict=True):
        given, want = case(rows, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = [gd.gemm_all_reduce(*given, ranks.all) for _ in range(3)]
        replays.append((graph, out, want))
    for _ in range(20):
        for stream, (graph, out, _) in zip(streams, replays, strict=True):
            with torch.cuda.stream(stream):
                for x in out:
                    x.fill_(float("nan"))
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, want) for _, out, want in replays for x in out)


def check_early_runs_wait_for_the_keys_that_they_see(ranks):
    """The first run of queries gets only the first keys, as in large calls."""
    from torch_gpukern.distributed import gathered

    least, gathered._STAGED_BYTES = gathered._STAGED_BYTES, 0
    try:
        for seed, rules in enumerate(RULES):
            layout, length = ("contiguous", 3) if seed == 3 else ("zigzag", 61)
            case = attention_case(seed, length, (4, 2), (16, 8), rules)
            compare(
                ranks,
                (ranks.all, ranks.pair)[seed % 2],
                "all_gather",
                layout,
                case,
                f"{rules} {layout} {length}",
            )
    finally:
        gathered._STAGED_BYTES = least


def check_large_shards(ranks):
    """Sizes that use copy engines on GPUs: gathered keys, a ring's keys, and the sums of their
    gradients."""
    if not CUDA:
        return
    rules = dict(is_causal=True, alibi=True, sinks=True)
    points = (
        ("all_gather", "zigzag", 4096),
        ("all_gather", "contiguous", 4099),
        ("ring", "zigzag", 4098),
        ("ring", "contiguous", 4096),
    )
    for seed, (mode, layout, length) in enumerate(points):
        case = attention_case(
            seed, length, (4, 2), (128, 64 if seed % 2 else 128), rules, torch.bfloat16
        )
        compare(ranks, ranks.all, mode, layout, case, f"{mode} {layout} {length}", atol=3e-2)


def check_large_transfers(ranks):
    """Sizes that use copy engines on GPUs: unequal shards, several transfers at once, and enough of
    them that buffers are reused."""
    gen = generator("large")
    for length, layout in (
        (4 * 1024, "zigzag"),
        (4 * 1024 + 3, "contiguous"),
        (4 * 1024 + 1, "zigzag"),
    ):
        x = randn(gen, length, 96, dtype=torch.float32)
        parts = [gd.shard_sequence(x + i, ranks.all, 0, layout) for i in range(3)]
        for _ in range(3):
            for i, part in enumerate(parts):
                whole = gd.gather_sequence(part, ranks.all, 0, layout, seq_len=length)
                assert torch.equal(whole, x + i), (length, layout)
    a, b = randn(gen, 2050, 64, dtype=torch.bfloat16), randn(gen, 64, 512, dtype=torch.bfloat16)
    want = (a.float() @ b.float()) * RANKS
    for _ in range(4):
        out = gd.gemm_reduce_scatter(a, b)
        torch.testing.assert_close(
            out.float(), want.tensor_split(RANKS)[ranks.rank], atol=0.2, rtol=1e-2
        )
        a.add_(0)  # written while the previous call's transfer may still run
    assert same_on_all(gd.gemm_all_reduce(a.repeat(2, 1), b))


# ---- the training example ------------------------------------------------------------------------

FORMS = (
    "",
    "--zero 1 --accumulate 2",
    "--zero 3 --accumulate 2 --recompute",
    "--tensor 2 --sequence --zero 2",
    "--tensor 2 --sequence --context 2 --recompute",
    "--context 2 --mode ring --zero 3",
    "--pipeline 2 --tensor 2",
    "--pipeline 2 --schedule zbv --context 2",
    "--experts 4 --context 2 --accumulate 2",
)


def check_every_form_trains_as_one_process(ranks):
    """Every form has the losses of one process over four steps. The second loss depends on all
    gradients of the first step."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "distributed"))
    import train
    from forms import Form

    device = torch.device("cuda", ranks.rank) if CUDA else torch.device("cpu")
    config = train.Config(
        vocab=64, context=24, layers=4, dim=32, heads_q=4, heads_kv=2, head_dim=8, hidden=48
    )
    text = torch.randint(0, 64, (2000,), generator=generator("text"), device="cpu").to(torch.uint8)
    close = dict(atol=2e-4, rtol=0) if not CUDA else dict(atol=3e-2, rtol=0)
    with torch.device("cpu"):
        given = ["--steps", "2", "--seq-len", "24", "--lr", "0.01"]
        alone = Form(dtype=torch.bfloat16 if CUDA else torch.float32)
        want, _ = train.losses_of(train.parse(given), text, config, device, alone)
        mixed, _ = train.losses_of(
            train.parse(given), text, config, device, replace(alone, experts=4)
        )
        assert want[1] != want[0] != mixed[0]
        for form in FORMS:
            options = train.parse([*given, *form.split()])
            if RANKS % (options.tensor * options.context * options.pipeline):
                continue
            got, _ = train.losses_of(options, text, config, device)
            expected = mixed if options.experts else want
            torch.testing.assert_close(
                got, expected, **close, msg=lambda m, f=form: f"{f or 'data parallel'}: {m}"
            )
        with pytest.raises(SystemExit, match=f"--seq-len 23 is no multiple of --context {RANKS}"):
            train.losses_of(
                train.parse([*given, "--seq-len", "23", "--context", str(RANKS)]),
                text,
                config,
                device,
            )


def check_a_rank_that_dies(ranks):
    """The last check: one rank has exited; the others raise and get no result."""
    if CUDA:  # NCCL's watchdog ends the process itself
        return
    x = torch.ones(8, 8)
    if ranks.rank == RANKS - 1:
        ranks.report([])
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        for _ in range(3):
            gd.gemm_all_reduce(x, x)


# ---- the processes -------------------------------------------------------------------------------


def _work(rank, folder, checks, size, cuda):
    global RANKS, CUDA
    RANKS, CUDA = size, cuda
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    where = dict(init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=datetime.timedelta(seconds=100 if cuda else 1800),
        **where,
    )
    ranks, failed = Ranks(folder), []
    for name in checks:
        begin = time.monotonic()
        ranks.progress(f"{name} ")
        try:
            globals()[name](ranks)
        except BaseException:
            failed.append(f"rank {rank}: {name}\n{traceback.format_exc()}")
            break  # the other ranks may wait for this one
        ranks.progress(f"{time.monotonic() - begin:.1f} s\n")
    ranks.report(failed)
    if cuda and not failed:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    os._exit(0)  # must not wait in a collective that no other rank calls


def _all_checks(folder, size, cuda, seconds):
    checks = [name for name in globals() if name.startswith("check_")]
    words = os.environ.get("ONLY", "").split(",")
    checks = [name for name in checks if any(word in name for word in words)]
    context = processes()
    given = (str(folder), checks, size, cuda)
    workers = [context.Process(target=_work, args=(r, *given), daemon=True) for r in range(size)]
    for worker in workers:
        worker.start()
    workers[0].join(seconds)
    for worker in workers[1:]:
        worker.join(5)
    for worker in workers:
        worker.kill()
    read = lambda name, otherwise: (  # noqa: E731
        (folder / name).read_text() if (folder / name).exists() else otherwise
    )  # noqa: E731
    reports = [
        read(str(r), f"rank {r}: no report; it came so far:\n{read(f'progress{r}', '')}")
        for r in range(size)
    ]
    assert not any(reports), "\n\n".join(reports)


@pytest.mark.parametrize(
    "size", (4, pytest.param(8, marks=pytest.mark.skipif(not ALL, reason="slow")))
)
def test_several_processes_equal_one(tmp_path, size):
    _all_checks(tmp_path, size, False, 1800 if ALL else 240)


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("size", (2, 4, 8))
def test_several_gpus_equal_one(tmp_path, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    _all_checks(tmp_path, size, True, 120 if size == 2 else 240)


# ---- a rank that is gone -------------------------------------------------------------------------

TIMEOUT_S = 6


def _outlive(rank, folder, way, call):
    """Two ranks make the call three times. Then rank 1 dies, and rank 0 makes the call again and
    writes what happened."""
    symmetric, check = way
    os.environ |= {"GPUKERN_DIST_SYMMETRIC": symmetric, "GPUKERN_DIST_CHECK": check}
    os.environ |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    torch.cuda.set_device(rank)
    where = dict(init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), **where)
    dist.barrier()  # the short timeout must only affect the calls after it
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rows = 2048 if call != "gemm_all_reduce" else 8
    a, b = (
        torch.ones(shape, device=f"cuda:{rank}", dtype=torch.bfloat16)
        for shape in ((rows, 1024), (1024, 1024))
    )
    for _ in range(3):
        getattr(gd, call)(a, b, group).float().sum().item()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = Path(folder, "said")
    said.write_text("waits")
    try:
        for _ in range(3):
            total = getattr(gd, call)(a, b, group).float().sum().item()
        said.write_text(f"has a value, {total}")
    except RuntimeError as error:
        said.write_text(f"raises {type(error).__name__}: {error}")
    os._exit(1)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_a_rank_that_dies_leaves_an_error(tmp_path):
    """With NCCL, copy engines and mailboxes: after the group's timeout there is an exception, or
    NCCL's watchdog ends the process, but never a result."""
    ways = {"nccl": ("0", "1"), "direct": ("1", "0")}
    calls = (
        ("nccl", "gemm_all_reduce"),
        ("direct", "gemm_all_reduce"),
        ("direct", "gemm_reduce_scatter"),
    )
    context, pairs = processes(), []
    for way, call in calls:
        folder = tmp_path / f"{way}_{call}"
        folder.mkdir()
        pair = [
            context.Process(target=_outlive, args=(r, str(folder), ways[way], call), daemon=True)
            for r in range(2)
        ]
        for worker in pair:
            worker.start()
        pairs.append((folder, pair))
    begin = time.monotonic()
    for folder, (survivor, dead) in pairs:
        survivor.join(max(0.1, 70 - (time.monotonic() - begin)))
        ended = survivor.exitcode
        for worker in (survivor, dead):
            worker.kill()
        said = (folder / "said").read_text() if (folder / "said").exists() else "never came so far"
        aborted = ended is not None and ended < 0 and said == "waits"
        assert said.startswith("raises") or aborted, f"{folder.name}: {said}, exit {ended}"


@pytest.mark.gpu
def test_mailboxes_of_one_gpu():
    """The kernel by itself, with streams of one GPU as ranks. Sums have the bits of rank order, for
    any sequence of sizes, including sizes that are no multiple of four elements."""
    from torch_gpukern._library import ops

    gen = generator("mailboxes of one GPU")
    # Three ranks and more use two exchanges if a rank would write 2 MiB or more in one. The blocks
    # of all ranks must fit the GPU at the same time.
    for size, most in ((2, 1 << 19), (3, 1 << 19), (4, 1 << 18)):
        boxes = [
            torch.zeros(ops.mailbox_bytes(most, size), dtype=torch.uint8, device="cuda")
            for _ in range(size)
        ]
        streams = [torch.cuda.Stream() for _ in range(size)]
        for seed, n in enumerate((1, most, 5, 4096, most // 4 + 3, 3, most - 1, 2048, most - 6)):
            dtype = FLOATS[:2][seed % 2]
            xs = [torch.randn(n, generator=gen).cuda() for _ in range(size)]
            outs = [torch.full((n,), float("nan"), dtype=dtype, device="cuda") for _ in range(size)]
            torch.cuda.synchronize()
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    ops.sum_over_ranks(xs[rank], outs[rank], boxes, rank, 20.0)
            torch.cuda.synchronize()
            want = functools.reduce(torch.add, xs).to(dtype)
            assert all(torch.equal(out, want) for out in outs), (size, n, dtype)
    x = torch.zeros(8, device="cuda")
    for change, text in (
        (dict(x=x.bfloat16()), "x must be float32, got bfloat16"),
        (dict(out=x[:7]), r"out must have shape \[8\], got \[7\]"),
        (dict(out=x), "out shares memory with x"),
        (dict(rank=2), "rank must be 0 to 1, got 2"),
        (dict(mailboxes=boxes[:1]), "num_ranks must be 2 to 16, got 1"),
        (dict(mailboxes=[box[:4096] for box in boxes[:2]]), "a mailbox has 4096 bytes, expected"),
        (dict(timeout_s=0.0), "timeout_s must be more than 0"),
    ):
        given = (
            dict(x=x, out=torch.empty_like(x), mailboxes=boxes[:2], rank=0, timeout_s=1.0) | change
        )
        with pytest.raises(ValueError, match=f"gpukern::sum_over_ranks: {text}"):
            ops.sum_over_ranks(**given)


# ---- tests without a group -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_cut_holds_every_token_once(layout):
    for length, size in itertools.product((0, 1, 5, 16, 61, 128), (1, 2, 3, 4, 8)):
        cut = Cut(length, size, layout)
        held = [t for r in range(size) for s, e in cut.spans[r] for t in range(s, e)]
        assert sorted(held) == list(range(length))
        counts = [cut.tokens(r) for r in range(size)]
        assert max(counts) == cut.most and max(counts) - min(counts) <= (
            1 if layout == "contiguous" else 2
        )
        placed = [
            t
            for rank, at, n in cut.order()
            for t in [x for s, e in cut.spans[rank] for x in range(s, e)][at : at + n]
        ]
        assert placed == list(range(length))
        for r in range(size):
            whole = [x for s, e in cut.spans[r] for x in range(s, e)]
            assert [t for at, s, e in cut.segments(r) for t in whole[at : at + e - s]] == whole
    with pytest.raises(ValueError, match="layout must be"):
        Cut(4, 2, "striped")


def test_zigzag_shares_a_causal_mask_evenly():
    cut = Cut(4096, 8, "zigzag")
    work = [sum(i + 1 for s, e in cut.spans[r] for i in range(s, e)) for r in range(8)]
    assert max(work) / min(work) < 1.01


def test_estimate_counts_bytes_and_time():
    model = dict(
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads_q=32,
        heads_kv=8,
        head_dim=128,
        sequences=64,
    )
    one = gd.estimate(**model, seq_len=8192)
    assert (
        one.gpus == 1
        and one.efficiency == 1
        and one.context_bytes == one.tensor_bytes == one.data_bytes == 0
    )
    eight = gd.estimate(**model, seq_len=8192, data=8)
    assert (
        abs(eight.products_ms * 8 - one.products_ms) < 1e-6 * one.products_ms
        and eight.step_ms < one.step_ms
    )
    long = gd.estimate(**{**model, "sequences": 1}, seq_len=1 << 20, context=64)
    assert (
        long.attention_ms > long.products_ms and long.context_bytes > 0 and 0 < long.efficiency <= 1
    )
    slow = gd.estimate(**model, seq_len=8192, context=2, machine=gd.Machine(latency_us=100))
    assert (
        abs(slow.context_ms - gd.estimate(**model, seq_len=8192, context=2).context_ms - 32 * 0.1)
        < 1e-9
    )
    for wrong in (dict(tensor=0), dict(seq_len=0), dict(layers=-1), dict(hidden_share=1.5)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            gd.estimate(**{**model, "seq_len": 1, **wrong})


@pytest.mark.parametrize(
    "card, tokens, link, latency",
    (
        ("h100-80gb-hbm3", 16384, 228, 4500),
        ("h100-80gb-hbm3", 65536, 228, 4500),
        ("h200", 16384, 340, 900),
        ("h200", 65536, 340, 900),
    ),
)
def test_estimate_holds_to_what_was_measured(card, tokens, link, latency):
    """estimate is within 10 % of the time measured for a layer's attention over two GPUs, forward
    and backward, in docs/distributed.md."""
    root = Path(__file__).resolve().parents[2]
    rows = results.load(root / f"benchmarks/results/2-x-nvidia-{card}.csv")["benches"][
        "distributed"
    ]["rows"]
    measured = {row["label"]: row for row in rows if row["group"] == "cp forward+backward"}
    row = measured[f"{tokens // 2} tokens a rank"]
    us = {name: call["us"] for name, call in row["beside"].items()} | {
        row["note"].removeprefix("ours: "): row["us"]
    }
    layer = dict(
        layers=1,
        hidden=1,
        intermediate=1,
        heads_q=32,
        heads_kv=8,
        head_dim=128,
        seq_len=tokens,
        sequences=1,
    )
    rate = gd.estimate(**layer, machine=gd.Machine(attn_tflops=1)).attention_ms / (
        us["one GPU"] / 1e3
    )
    machine = gd.Machine(attn_tflops=rate, link_gbs=link, latency_us=latency)
    step = gd.estimate(**layer, context=2, hidden_share=0.0, machine=machine)
    assert abs((step.attention_ms + step.context_ms) * 1e3 / us["all_gather"] - 1) < 0.1


def test_the_table_of_scale_is_the_page_s(monkeypatch):
    """The figures that examples/distributed/scale.py prints are those in docs/distributed.md."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "examples" / "distributed"))
    import scale

    lines = scale.table().splitlines()
    page = (root / "docs" / "distributed.md").read_text()
    for line in lines[1:4]:
        gpus, *form, seconds, share, rate = line.replace("%", "").split()[:7]
        seconds = seconds if float(seconds) < 100 else f"{float(seconds):.0f}"
        assert f"| {gpus} | {', '.join(form)} | {seconds} | {share} % | {rate} |" in page
    assert len(scale.measured()) >= 3 and "Assumed" in lines[4]


def test_scripts_of_ranks_say_why_they_refuse():
    """A benchmark without torchrun fails with one line. A training that cannot be split over the ranks
    says why at the end of torchrun's summary."""
    root = Path(__file__).resolve().parents[2]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    bare = dict(check=False, env={name: None for name in names if name in os.environ})
    done = run_script(root / "benchmarks" / "bench_distributed.py", **bare)
    assert done.returncode == 1 and done.stderr.startswith(
        "bench_distributed: measures several ranks, which torchrun starts"
    )
    # one rank is enough, because each of them says the same
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    script = [root / "examples" / "distributed" / "train.py", "--pipeline", "3"]
    done = run_script(*torchrun, *script, **bare)
    summary = done.stderr.rpartition("Root Cause")[2]
    assert (
        done.returncode
        and "ValueError: 1 ranks are no multiple of tensor x context x pipeline, which is 3"
        in summary
    )


def test_a_timeline_counts_copies_between_gpus(monkeypatch):
    monkeypatch.syspath_prepend(
        str(Path(__file__).resolve().parents[2] / "examples" / "distributed")
    )
    import timeline

    def event(name, cat, ts, dur, **args):
        return dict(name=name, cat=cat, ts=ts, dur=dur, args=args)

    events = [
        event("gemm", "kernel", 0, 10),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 5, 10, bytes=100),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 20, 1, bytes=7),
        event("c10d::symmetric_memory::barrier_kernel", "kernel", 30, 2),
        event("ncclDevKernel", "kernel", 40, 2),
    ]
    moved, others = timeline.of_gpu(events)
    assert moved == [(5, 15), (30, 32), (40, 42)] and others == [(0, 10), (20, 21)]
    assert timeline.overlap(moved, others) == 5 and timeline.sent_bytes(events, 2) == 100


class _Stream:
    """A fake stream: the set of operations that precede its next one."""

    def __init__(self, *_, **__):
        self.done, self.events = set(), 0

    def record_event(self):
        self.events += 1
        return frozenset(self.done)

    def wait_event(self, event):
        self.done |= event

    def wait_stream(self, other):
        self.done |= other.done


@pytest.fixture
def staging(monkeypatch):
    """A pool with buffers in plain memory. Its barriers are recorded in `waits`; the current stream
    is `here`."""
    from types import SimpleNamespace

    from torch_gpukern.distributed import symmetric

    class Pool(symmetric.Pool):
        def _made(self, size):
            data = torch.zeros(size, dtype=torch.uint8)

            def get_buffer(rank, shape, dtype, at):
                return data.view(dtype)[at : at + math.prod(shape)].view(shape)

            self._buffers.append(
                symmetric.Buffer(data, SimpleNamespace(barrier=self.met, get_buffer=get_buffer))
            )
            return self._buffers[-1]

        def met(self, **_):
            self.waits.append(self.barriers)
            self.here.done.add(f"barrier {self.barriers}")

    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pool.here)
    pool = Pool(SimpleNamespace(timeout_s=1.0), torch.device("cuda", 0))
    pool.waits, pool.here = [], _Stream()
    return pool


def test_a_staging_buffer_is_used_again_only_after_a_barrier(staging):
    from torch_gpukern.distributed import symmetric

    pool, taken = staging, []
    for _ in range(6):  # transfers one after the other: two buffers alternate, one barrier each
        buffer = pool.take(64)
        pool.barrier(buffer)
        pool.release(buffer)
        taken.append(id(buffer))
    assert len(pool._buffers) == 2 and taken == taken[:2] * 3 and len(pool.waits) == 6
    held = [pool.take(64) for _ in range(symmetric._MOST_BUFFERS)]  # at the same time: all differ
    assert len({id(x) for x in held}) == symmetric._MOST_BUFFERS
    for buffer in held:
        pool.release(buffer)
    before = len(pool.waits)
    pool.take(64)  # every buffer may still be read, so a barrier comes first
    assert len(pool.waits) == before + 1
    for size in (0, symmetric._MOST_BYTES + 1):
        assert symmetric.pool_for(torch.device("cuda"), None, size) is None
    assert symmetric.pool_for(torch.device("cpu"), None, 1 << 24) is None
    assert pool.here.events == 0  # a single stream needs no events


def test_streams_that_share_staging_buffers_follow_each_other(staging):
    """A barrier orders only its own stream. A stream that takes a buffer waits for the reads and
    barriers of the stream that used the pool before."""
    pool, first, second = staging, staging.here, _Stream()

    def transfer(name):
        buffer = pool.take(64)
        pool.barrier(buffer)
        pool.here.done.add(f"reads {name}")
        pool.release(buffer)
        return buffer

    a = transfer("a")
    pool.here = second
    b = transfer("b")
    assert b is not a and {"reads a", "barrier 0"} <= second.done
    pool.here = first
    # that barrier was on the second stream
    assert transfer("c") is a and {"reads b", "barrier 1"} <= first.done
    first.done.add("more")
    pool.here = second
    assert transfer("d") is b and "reads c" in second.done and "more" not in second.done
    pool.here, buffer = first, pool.take(64)  # taken on one stream, read on another
    pool.barrier(buffer)
    first.done.add("writes e")
    pool.here = second
    second.done.add("reads e")
    pool.release(buffer)
    pool.here = first
    pool.take(64)
    assert "reads e" in first.done and "writes e" in second.done


@pytest.mark.parametrize("fails", ("barrier", "copies"))
def test_a_call_that_raises_gives_its_staging_buffers_back(staging, monkeypatch, fails):
    from types import SimpleNamespace

    from torch_gpukern.distributed import products, symmetric, transport

    pool = staging
    ranks = SimpleNamespace(rank=0, size=2, around=lambda step: (step % 2, step % 2))
    monkeypatch.setitem(symmetric._pools, "pair", (None, pool))
    monkeypatch.setattr(transport, "pool_for", lambda *_: pool)
    monkeypatch.setattr(products, "ranks_of", lambda _: ranks)

    @contextlib.contextmanager
    def copying():
        pool.stream.done.add("copy")
        yield
        raise MemoryError

    def met(**_):
        raise MemoryError

    monkeypatch.setattr(pool, *(("met", met) if fails == "barrier" else ("copying", copying)))
    for _ in range(3):
        with pytest.raises(MemoryError):
            torch.ops.gpukern.gather_rows(torch.zeros(4, 8), 8, "pair")
        assert len(pool._buffers) == 1 and not pool._buffers[0].busy
        pool.barriers += 1  # as the next call's barrier would
    assert fails == "barrier" or "copy" in pool.here.done


def test_ranks_tell_each_other_the_gpu_of_their_tensors(monkeypatch):
    """That GPU need not be the current one."""
    from types import SimpleNamespace

    from torch_gpukern.distributed import symmetric

    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: asked.append(b) or True)

    def gather(told, mine, group):
        told[:] = [mine, (mine[0], 3, mine[2]) if isinstance(mine, tuple) else mine]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert symmetric.reaches_all(
        torch.device("cuda", 2), SimpleNamespace(size=2, group=None)
    ) and asked == [3]


def test_which_sums_go_through_mailboxes(monkeypatch):
    """Mailboxes serve float32 sums of at most 2 MiB on GPUs, for two to sixteen ranks."""
    from types import SimpleNamespace

    from torch_gpukern.distributed import mailboxes

    made, groups = [], {}
    monkeypatch.setattr(mailboxes, "reaches_all", lambda *_: True)
    monkeypatch.setattr(
        mailboxes, "_Mailboxes", lambda *_: SimpleNamespace(of=lambda n: made.append(n) or "found")
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def goes(elements, size, dtype=torch.float32, device="cuda"):
        x = SimpleNamespace(
            device=torch.device(device), dtype=dtype, numel=lambda: elements, element_size=lambda: 4
        )
        name = f"{elements} {size}"
        group = groups.setdefault(name, SimpleNamespace(group_name=name))
        return mailboxes.mailboxes_for(x, SimpleNamespace(size=size, group=group)) == "found"

    most = mailboxes.MOST_BYTES // 4
    assert [goes(most, 2), goes(most + 1, 2), goes(most, 4), goes(most + 1, 4)] == [
        True,
        False,
        True,
        False,
    ]
    assert [goes(8, size) for size in (1, 2, 16, 17)] == [False, True, True, False] and not goes(
        0, 2
    )
    assert (
        not goes(8, 2, torch.float64)
        and not goes(8, 2, device="cpu")
        and made == [most, most, 8, 8]
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert goes(8, 2) and not goes(9, 2)  # a group's first call must not be in a capture
    mailboxes._known.clear()


def test_mailboxes_are_those_of_a_stream_and_of_a_capture(monkeypatch):
    from types import SimpleNamespace

    from torch_gpukern.distributed import mailboxes

    at = {"stream": 1, "capture": 0}
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=at["stream"])
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: at["capture"] > 0)
    real = mailboxes.ops
    monkeypatch.setattr(
        mailboxes,
        "ops",
        SimpleNamespace(capture_id=lambda _: at["capture"], mailbox_bytes=real.mailbox_bytes),
    )

    class Chunk:
        cut = mailboxes._Chunk.cut

        def __init__(self, *_):
            self.size, self.used = mailboxes.chunk_bytes(2), 0
            handle = SimpleNamespace(
                get_buffer=lambda rank, shape, dtype, place: (rank, place, place + shape[0])
            )
            self._symmetric = SimpleNamespace(handle=handle)

    monkeypatch.setattr(mailboxes, "_Chunk", Chunk)
    held = mailboxes._Mailboxes(SimpleNamespace(size=2), None)
    at["capture"] = 7
    assert held.of(8) is None  # there is no chunk yet
    at["capture"] = 0
    first = held.of(8)
    assert first == held.of(1 << 14) and first[0][0] == 0 and first[1][0] == 1
    found = {first[0][1:], held.of((1 << 14) + 1)[0][1:]}
    for at["stream"], at["capture"] in ((2, 0), (1, 7), (1, 8), (2, 8)):
        found.add(held.of(8)[0][1:])
        assert held.of(8)[0][1:] in found
    spans = sorted(found)
    assert len(spans) == 6 and all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert all(start % 16 == 0 for start, _ in spans)
    at["capture"] = 0
    for at["stream"] in range(10, 10 + 40):
        held.of(1 << 19)
    assert len(held._chunks) == mailboxes._MOST_CHUNKS and held.of(1 << 19) is None  # NCCL serves


class _Threads:
    """Ranks as CPU threads with a pool in plain memory. It simulates copies between GPUs, in any
    order of the threads."""

    def __init__(self, size, monkeypatch):
        from types import SimpleNamespace

        from torch_gpukern.distributed import transport

        self.size, self.meet, self.buffers, self.local = (
            size,
            threading.Barrier(size),
            {},
            threading.local(),
        )
        self.waited = 0  # the number of waits for a transfer, over all ranks
        stream = SimpleNamespace(
            record_event=lambda: None, wait_event=self._wait_event, wait_stream=lambda _: None
        )
        monkeypatch.setattr(transport, "pool_for", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        self.stream = stream

    def _wait_event(self, _):
        self.waited += 1

    def take(self, size):
        self.meet.wait()  # each call has new buffers
        self.buffers[self.local.rank] = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN
        self.meet.wait()
        return self.buffers

    def view(self, buffer, rank, shape, dtype, at=0):
        typed = buffer[rank].view(dtype)
        return typed[at : at + math.prod(shape)].view(tuple(shape))

    def barrier(self, _):
        self.meet.wait()

    def release(self, _):
        self.meet.wait()  # as on a GPU, no rank writes before all have read

    copying = contextlib.nullcontext

    def run(self, work):
        """The results of work(ranks) on all ranks."""
        from types import SimpleNamespace

        found = [None] * self.size

        def rank_of(rank):
            self.local.rank = rank
            around = lambda step: ((rank + step) % self.size, (rank - step) % self.size)  # noqa: E731
            try:
                found[rank] = work(SimpleNamespace(rank=rank, size=self.size, around=around))
            except BaseException as error:
                found[rank] = error
                self.meet.abort()

        threads = [threading.Thread(target=rank_of, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_copies_between_gpus_bring_rows_to_their_place(size, monkeypatch):
    from torch_gpukern.distributed import transport

    threads, gen = _Threads(size, monkeypatch), generator("copies", size)
    for length, layout in ((64, "zigzag"), (61, "zigzag"), (7, "contiguous"), (1, "contiguous")):
        cut = Cut(length, size, layout)
        xs = [randn(gen, length, 3, 4), randn(gen, length, 2, dtype=torch.bfloat16)]
        for in_buffer in (False, True):

            def gather(ranks, cut=cut, xs=xs, in_buffer=in_buffer):
                mine = [transport.tokens_of(x, cut, ranks.rank) for x in xs]
                moving = transport.Gather(cut, ranks, *mine, in_buffer=in_buffer)
                early = [x[: cut.length // 2].clone() for x in moving.wait(cut.length // 2)]
                whole = [x.clone() for x in moving.wait()]
                moving.done()
                return early, whole

            for found in threads.run(gather):
                assert not isinstance(found, BaseException), found
                early, whole = found
                assert all(map(torch.equal, whole, xs)), (length, layout, in_buffer)
                assert all(torch.equal(a, b[: length // 2]) for a, b in zip(early, xs))


def test_rows_are_copied_16_bytes_at_a_time_where_they_can():
    from torch_gpukern.distributed import transport

    seen = []
    for dtype, (tokens, heads, dim), offset in itertools.product(
        (torch.bfloat16, torch.float32, torch.uint8, torch.float64),
        ((5, 3, 16), (4, 2, 24), (3, 2, 7), (0, 2, 16)),
        (0, 1),
    ):
        bits = torch.randint(
            0, 256, (heads * tokens * dim * dtype.itemsize + 16,), dtype=torch.uint8
        )
        bits = bits[: bits.numel() // 16 * 16].view(dtype)[offset : offset + heads * tokens * dim]
        x = bits.view(heads, tokens, dim).transpose(0, 1)  # a head's tokens are contiguous
        to = torch.empty(x.shape, dtype=dtype)
        transport._copy(to, x)
        assert torch.equal(to.view(torch.uint8), x.contiguous().view(torch.uint8)), (
            dtype,
            tokens,
            dim,
        )
        seen.append(transport._of_16_bytes(x))
    assert any(seen) and not all(seen)
    assert not transport._of_16_bytes(torch.zeros(8)) and not transport._of_16_bytes(
        torch.zeros(8, 16).t()
    )


def test_a_run_waits_for_no_key_that_it_has(monkeypatch):
    """With a zigzag cut, rank 0's early queries see only its own early keys, so they need no
    transfer.
    """
    from types import SimpleNamespace

    from torch_gpukern.distributed import transport

    threads = _Threads(1, monkeypatch)  # one thread; the other rank's transfers count as done
    threads.local.rank, threads.size = 0, 2
    ranks, cut = (
        SimpleNamespace(rank=0, size=2, around=lambda step: (step % 2, step % 2)),
        Cut(64, 2, "zigzag"),
    )
    threads.view = lambda buffer, rank, shape, dtype, at=0: torch.zeros(shape, dtype=dtype)
    moving = transport.Gather(cut, ranks, torch.zeros(32, 4), in_buffer=True)
    moving.wait(16)
    assert threads.waited == 0
    moving.wait(17)
    assert threads.waited == 1
    moving.done()


@pytest.mark.parametrize("size", (2, 3, 4, 8))
@pytest.mark.parametrize("way", ("sums", "by rank", "by columns"))
def test_large_products_are_summed_over_ranks(size, way, monkeypatch):
    """The sums are sent in parts, or the operands are fetched. Rows and inner dimensions are split
    evenly and unevenly. b is contiguous by rows or by columns."""
    from torch_gpukern.distributed import products

    how_many = {(4096, 10240): 2, (4096, 6144): 3, (4096, 57344): 3, (1, 1): 4}
    assert {shape: products._how_many(*shape) for shape in how_many} == how_many
    threads, gen = _Threads(size, monkeypatch), generator("parts", size)
    monkeypatch.setattr(products, "_overlaps", lambda *_: True)
    monkeypatch.setattr(products, "_fetches", lambda *_: way != "sums")
    monkeypatch.setattr(products, "_columns_at_once", lambda *_: 16)  # of 40
    used = []
    for name in ("_product_by_rank", "_product_by_columns", "_product_in_parts"):
        call = getattr(products, name)
        record = lambda *given, n=name, c=call: used.append(n) or c(*given)  # noqa: E731
        monkeypatch.setattr(products, name, record)
    for rows, dtype in (
        (700, torch.bfloat16),
        (5, torch.float32),
        (1, torch.bfloat16),
        (513, torch.float64),
    ):
        every = []
        for rank in range(size):
            k = 24 if rows != 513 else 24 * (rank % 3)
            b = randn(gen, k, 40, dtype=dtype)
            column_major = way == "by rank" and rank % 2 == 0
            every.append(
                (randn(gen, rows, k, dtype=dtype), b.t().contiguous().t() if column_major else b)
            )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = functools.reduce(torch.add, (gk.gemm(*pair, out_dtype=wide) for pair in every))
        inner = [products._inner(b) for _, b in every]
        cuts = [Cut(rows, size, "contiguous")]
        cuts.append(
            products._Rows(
                [rows - size + 1, *[1] * (size - 1)] if rows >= size else [rows, *[0] * (size - 1)]
            )
        )
        for cut in cuts:
            for found, ((start, end),) in zip(
                threads.run(
                    lambda ranks, e=every, c=cut, i=inner: products._scattered_product(
                        *e[ranks.rank], c, i, ranks
                    )
                ),
                cut.spans,
            ):
                assert not isinstance(found, BaseException), found
                assert found.dtype == dtype
                torch.testing.assert_close(
                    found,
                    total[start:end].to(dtype),
                    rtol=1e-2 if dtype.itemsize == 2 else 1e-5,
                    atol=1e-5 if dtype.itemsize > 2 else 1e-2,
                )
    expected = {"sums": "_product_in_parts", "by rank": "_product_by_rank"}
    by_columns = "_product_by_rank" if size == 2 else "_product_by_columns"
    assert set(used) == {expected.get(way, by_columns)}


@pytest.mark.parametrize("rows, columns", ((2048, 10240), (1024, 57344), (100, 40), (0, 8)))
def test_blocks_of_columns_are_few_and_whole_waves(rows, columns):
    from torch_gpukern.distributed import products

    width = products._columns_at_once(rows, columns)
    assert width % products._TILE_COLUMNS == 0 and -(-columns // width) <= 8
    tiles = -(-rows // products._TILE_ROWS) * (width // products._TILE_COLUMNS)
    assert tiles % products._SMS == 0 or tiles % products._SMS > 0.9 * products._SMS or rows < 1024


def test_gradients_of_gathered_rows_are_rounded_once():
    """A token's gradient is the sum over its choices. Some choices may be dropped."""
    from torch_gpukern.distributed.experts import _Permuted
    from torch_gpukern.nn.moe import gathered

    def places_of(order, tokens, each):
        places = torch.full((tokens * each,), -1)
        places[order] = torch.arange(len(order))
        return places.view(tokens, each)

    gen, tokens, each = generator("choices"), 64, 8
    order = torch.randperm(tokens * each, generator=gen)[:500]
    x, grad = (randn(gen, n, 24, dtype=torch.bfloat16) for n in (tokens, 500))
    rows = gathered(x.requires_grad_(), order, places_of(order, tokens, each))
    assert torch.equal(rows, x[order // each])
    (got,) = torch.autograd.grad(rows, x, grad)
    want = torch.zeros(tokens, 24, dtype=torch.float64).index_add_(0, order // each, grad.double())
    assert ((got.double() - want).abs() <= 2**-7.99 * want.abs() + 1e-6).all()
    wide = randn(gen, 5, 2, dtype=torch.float64).requires_grad_()
    order = torch.randperm(15, generator=gen)[:13]
    moved, place = torch.randperm(13, generator=gen), places_of(order, 5, 3)

    def call(x):
        return _Permuted.apply(gathered(x, order, place), moved, moved.argsort())

    assert torch.autograd.gradcheck(call, wide) and torch.autograd.gradgradcheck(call, wide)


def test_operands_are_fetched_where_they_have_fewer_bytes():
    from torch_gpukern.distributed import products

    for rows, k, columns, dtype, fetches in (
        (8192, 8192, 10240, torch.bfloat16, True),
        (8192, 4096, 6144, torch.bfloat16, True),
        (64, 8192, 8192, torch.bfloat16, False),  # small M: the sums are small
        (8192, 32768, 8192, torch.bfloat16, False),
        (8192, 8192, 10240, torch.float32, False),
        (8192, 4096, 10240, torch.float32, True),
    ):
        for size in (2, 4, 8):
            each = [(k // size, rank % 2 == 1) for rank in range(size)]
            like = torch.empty(0, dtype=dtype)
            got = products._fetches(Cut(rows, size, "contiguous"), columns, like, each)
            assert got is fetches, (rows, k, columns, dtype, size)


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_gathered_rows_are_multiplied_as_they_arrive(size, monkeypatch):
    """Every row is in exactly one product, no product reads rows that have not arrived, and the
    result is that of one product."""
    from torch_gpukern.distributed import products

    for rows, columns, k in (
        (8192, 10240 // size, 8192),
        (8192, 57344 // size, 8192),
        (700, 96, 64),
    ):
        for cut in (
            Cut(rows, size, "contiguous"),
            products._Rows(
                [rows - 128 * (size - 1), *[128] * (size - 1)]
                if rows > 2000
                else [rows, *[0] * (size - 1)]
            ),
        ):
            for rank in range(size):
                found = products._as_they_arrive(cut, rank, columns, k, 2)
                covered = sorted((low, high) for low, high, _ in found)
                assert covered[0][0] == 0 and covered[-1][1] == rows
                assert all(end == start for (_, end), (start, _) in zip(covered, covered[1:]))
                come = set()
                for low, high, steps in found:
                    come |= {(rank - step) % size for step in range(steps + 1)}
                    for owner, ((start, end),) in enumerate(cut.spans):
                        assert owner in come or end <= low or start >= high
    threads, gen = _Threads(size, monkeypatch), generator("arrive", size)
    monkeypatch.setattr(products, "_overlaps", lambda *_: True)
    monkeypatch.setattr(products, "_SMS", 3)  # several waves
    for rows, keep in ((128 * size * 3, False), (1000, True), (5, False)):
        cut = Cut(rows, size, "contiguous")
        a, b, bias = randn(gen, rows, 24), randn(gen, 24, 300), randn(gen, 300)
        want = gk.gemm(a, b, bias, activation="relu")
        for out, gathered, _ in threads.run(
            lambda ranks, a=a, b=b, bias=bias, cut=cut, keep=keep: products._gathered_product(
                a[slice(*cut.spans[ranks.rank][0])], b, bias, "relu", keep, cut, ranks
            )
        ):
            torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-5)
            assert torch.equal(gathered, a) if keep else not gathered.numel()

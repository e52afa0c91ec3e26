# SPDX-License-Identifier: BSD-3-Clause
"""NaN and infinities in attention whose keys are cut into parts.

Kernels cut the keys of a call into parts for warps, blocks or several calls, and merge the parts'
results. A merge that skips empty parts must not skip those that are NaN. So `CASES` has every
kernel that merges parts. One element of a query, a key or a value becomes NaN or infinite. Results
are then NaN and infinite exactly where they are in float64. Other sequences, and heads that do not
read the key, keep their bits.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from attention_cases import Paged
from conftest import f64, generator, ops, randn, same_bits, statements, torch_gpukern

from torch_gpukern import SharedPrefix, paged_attn

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
E4M3 = torch.float8_e4m3fn
# atol and rtol of out. Its values are averages, around 0.05 with many keys.
CLOSE = {BF16: (4e-3, 2e-2), F16: (1e-3, 3e-3), F32: (1e-5, 1e-4), F64: (1e-12, 1e-9)}


class Call(NamedTuple):
    attend: Callable  # () -> (out [.., D], lse [..])
    exact: Callable  # the same in float64
    places: dict  # name -> [D], a row of q, and a key and value that only its heads read
    row: tuple  # where the row of q is in lse
    seers: tuple  # the rows of lse that read the key
    explained: Callable  # (arch) -> the plan of the call that merges parts


def dense(gen, dtype, device, dim=128, rows=3, keys=2500, **rules):
    q, k, v = (
        randn(gen, 2, heads, n, dim, dtype=dtype, device=device)
        for heads, n in ((4, rows), (2, keys), (2, keys))
    )
    if "sinks" in rules:
        rules["sinks"] = randn(gen, 4, device=device)
    return Call(
        lambda: torch_gpukern.flash_attn(q, k, v, **rules, return_lse=True),
        lambda: statements.flash_attn(*f64((q, k, v)), **f64(rules), return_lse=True),
        {"q": q[0, 1, -1], "k": k[0, 0, keys // 2], "v": v[0, 0, keys // 2]},
        (0, 1, rows - 1),
        (0, slice(0, 2)),
        lambda arch: torch_gpukern.explain("flash_attn", q, k, v, **rules, arch=arch),
    )


def accumulated(gen, dtype, device, dim=128, rows=3, keys=2500, **rules):
    """The second half of the keys is attended onto the result of the first."""
    call = dense(gen, dtype, device, dim, rows, keys, **rules)
    q, k, v = (call.places[n]._base for n in "qkv")
    half = k.shape[2] // 2 - 5

    def attend():
        out, lse = ops.flash_attn_fwd(q, k[:, :, :half], v[:, :, :half], out_dtype=F32, **rules)
        ops.flash_attn_accumulate(q, k[:, :, half:], v[:, :, half:], out, lse, **rules)
        return out, lse

    later = k[:, :, half:], v[:, :, half:]
    return call._replace(
        attend=attend,
        explained=lambda arch: torch_gpukern.explain(
            "flash_attn", q, *later, out_dtype=F32, arch=arch, **rules
        ),
    )


def merged(gen, dtype, device):
    """Two calls, and attn_merge."""
    call = dense(gen, dtype, device, keys=200)
    q, k, v = (call.places[n]._base for n in "qkv")

    def attend():
        parts = (
            torch_gpukern.flash_attn(q, k[:, :, s], v[:, :, s], return_lse=True)
            for s in (slice(0, 90), slice(90, None))
        )
        return ops.attn_merge(*(x for part in parts for x in part))

    return call._replace(attend=attend)


def paged(
    gen,
    dtype,
    device,
    lengths=(2500, 700),
    queries=(1, 1),
    heads=(4, 2),
    dims=(128, 128),
    size=16,
    code=None,
    tree=False,
    prefix=False,
):
    case = Paged(gen, lengths, queries, *heads, *dims, size, dtype, device)
    group = heads[0] // heads[1]
    at = min(lengths[0] // 2, lengths[0] - queries[0] - 1)  # an old key
    if code is not None:
        case.k_cache, case.v_cache = case.k_cache.to(code), case.v_cache.to(code)
    if dims[0] != dims[1]:
        case.v_cache = case.k_cache[..., : dims[1]]
    rules = {}
    if tree:
        rules["attn_mask"] = torch.cat(
            [torch.eye(n, max(queries), dtype=torch.bool) for n in queries]
        ).to(device)
    if len(set(queries)) > 1:
        rules |= {"cu_seqlens_q": case.cu_seqlens_q, "max_seqlen_q": max(queries)}
    how = {}
    if prefix:  # the first 1280 keys of both sequences are the same
        pages = 1280 // size
        case.block_table[1, :pages] = case.block_table[0, :pages]
        both = torch.tensor([1280], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
        how["prefix"] = SharedPrefix(case.block_table[:1, :pages], both, starts, both.repeat(2))
        at = 2000
    page, row = int(case.block_table[0, at // size]), at % size
    return Call(
        lambda: paged_attn(*case.args(), **rules, **how, return_lse=True),
        lambda: statements.paged_attn(*f64(case.args()), **f64(rules), return_lse=True),
        {"q": case.q[queries[0] - 1, 1], "k": case.k_cache[page, row, 0]}
        | ({"v": case.v_cache[page, row, 0]} if dims[0] == dims[1] else {}),
        (queries[0] - 1, 1),
        (slice(0, queries[0]), slice(0, group)),
        lambda arch: torch_gpukern.explain("paged_attn", *case.args(), **rules, arch=arch),
    )


# name -> the call, its dtype and arguments, the kernel that serves it on Hopper. A kernel with
# SPLIT behind its name cuts the keys into parts for split_combine.
FWD, SPLIT = "flash_attn_fwd_", " split"
CASES = {
    "dense": (dense, BF16, {}, FWD + "sm90a_bf16_d128" + SPLIT),
    "dense d64": (dense, F16, dict(dim=64), FWD + "sm90a_f16_d64_short" + SPLIT),
    "dense d256": (dense, BF16, dict(dim=256), FWD + "sm90a_bf16_d256" + SPLIT),
    "dense d192": (dense, F16, dict(dim=192), FWD + "sm90a_f16_d192" + SPLIT),
    "dense d512": (dense, BF16, dict(dim=512), FWD + "wide_sm90a_bf16_d512" + SPLIT),
    "dense softcap": (dense, BF16, dict(softcap=9.0), FWD + "sm90a_bf16_d128_score" + SPLIT),
    "dense sinks": (dense, F16, dict(sinks=None), FWD + "sm90a_f16_d128" + SPLIT),
    "dense float32": (dense, F32, {}, FWD + "simt_f32_d128" + SPLIT),
    "dense float64": (dense, F64, dict(keys=300), FWD + "plain_f64"),
    "accumulated": (accumulated, BF16, {}, FWD + "sm90a_bf16_d128" + SPLIT),
    "accumulated d256": (accumulated, F16, dict(dim=256), FWD + "sm90a_f16_d256" + SPLIT),
    "accumulated float32": (accumulated, F32, dict(dim=64), FWD + "simt_f32_d64" + SPLIT),
    "accumulated in registers": (
        accumulated,
        BF16,
        dict(rows=600, keys=200),
        FWD + "partial_sm90a_bf16_d128",
    ),
    "merged bfloat16": (merged, BF16, {}, FWD + "sm90a_bf16_d128"),
    "merged float32": (merged, F32, {}, FWD + "simt_f32_d128"),
    "merged float64": (merged, F64, {}, FWD + "plain_f64"),
    "clusters": (paged, BF16, {}, "paged_attn_sm90a_bf16_128x8"),
    "list": (paged, BF16, dict(queries=(3, 3), heads=(16, 2)), "paged_attn_sm90a_bf16_128x16"),
    "list float16": (
        paged,
        F16,
        dict(queries=(3, 2), heads=(16, 2), dims=(64, 64)),
        "paged_attn_sm90a_f16_64x16",
    ),
    "clusters of codes": (paged, F16, dict(code=E4M3), "paged_attn_sm90a_f16_e4m3_128x8"),
    "list of codes": (
        paged,
        BF16,
        dict(queries=(3, 3), heads=(16, 2), code=E4M3),
        "paged_attn_sm90a_bf16_e4m3_128x16",
    ),
    "sm80": (paged, BF16, dict(dims=(80, 80)), "paged_attn_sm80_bf16_128x8"),
    "sm80 float16": (paged, F16, dict(size=12, queries=(3, 1)), "paged_attn_sm80_f16_128x8"),
    "codes sm80": (paged, BF16, dict(size=8, code=E4M3), "paged_codes_sm80_bf16_e4m3_128x8"),
    "codes sm80 float16": (
        paged,
        F16,
        dict(size=8, code=E4M3, queries=(9, 2)),
        "paged_codes_sm80_f16_e4m3_128x16",
    ),
    "paged float32": (paged, F32, {}, "paged_attn_f32_128x4"),
    "paged float64": (paged, F64, dict(lengths=(300, 70)), "paged_attn_plain_f64"),
    "prefill": (paged, BF16, dict(queries=(40, 40)), "paged_prefill_sm90a_bf16_d128" + SPLIT),
    "prefill float16": (
        paged,
        F16,
        dict(queries=(40, 17), dims=(64, 64)),
        "paged_prefill_sm90a_f16_d64" + SPLIT,
    ),
    "prefill of codes": (
        paged,
        BF16,
        dict(queries=(80, 80), code=E4M3),
        "paged_prefill_decoded_sm90a_bf16" + SPLIT,
    ),
    "latent": (
        paged,
        BF16,
        dict(heads=(16, 1), dims=(576, 512), size=64),
        "paged_latent_sm90a_bf16",
    ),
    "latent, many parts": (
        paged,
        F16,
        dict(heads=(16, 1), dims=(576, 512), size=64, lengths=(5000, 70)),
        "paged_latent_sm90a_f16",
    ),
    "tree": (paged, BF16, dict(queries=(4, 4), tree=True), "paged_tree_mma_bf16"),
    "tree, short": (
        paged,
        F16,
        dict(lengths=(9, 700), queries=(6, 3), tree=True),
        "paged_tree_mma_f16",
    ),
    "tree of codes": (
        paged,
        F16,
        dict(queries=(4, 4), code=E4M3, tree=True),
        "paged_tree_mma_f16",
    ),
    "tree float32": (paged, F32, dict(queries=(4, 4), tree=True), "paged_tree_f32"),
    "tree in one pass": (
        paged,
        BF16,
        dict(queries=(24, 24), tree=True),
        "paged_tree_sm90a_bf16_d128" + SPLIT,
    ),
    "tree in one pass, short": (
        paged,
        F16,
        dict(lengths=(30, 2500), queries=(24, 24), dims=(64, 64), tree=True),
        "paged_tree_sm90a_f16_d64" + SPLIT,
    ),
    "prefix": (paged, BF16, dict(prefix=True, lengths=(2500, 1900)), "paged_attn_sm90a_bf16_128x8"),
    "prefix float16": (
        paged,
        F16,
        dict(prefix=True, lengths=(2500, 1900), dims=(80, 80)),
        "paged_attn_sm80_f16_128x8",
    ),
    "prefix float32": (paged, F32, dict(prefix=True, lengths=(2500, 1900)), "paged_attn_f32_128x4"),
}


def made(name, device):
    make, dtype, how, _ = CASES[name]
    return make(generator("nan", name), dtype, device, **how)


@pytest.mark.parametrize("name", CASES)
def test_merged_parts(name, device):
    call, dtype = made(name, device), CASES[name][1]
    before = call.attend()
    assert all(x.isfinite().all() for x in before)
    for place, row in call.places.items():
        for bad in (math.nan, math.inf):
            if row.dtype is E4M3 and bad == math.inf:
                continue  # there is no such code
            held = row.clone()
            row.view(torch.uint8 if row.dtype is E4M3 else dtype)[5] = (
                0x7F if row.dtype is E4M3 else bad
            )
            got, want = call.attend(), call.exact()
            row.copy_(held)
            touched = torch.zeros(want[1].shape, dtype=torch.bool)
            touched[call.row if place == "q" else call.seers] = True
            what = f"{place} with {bad}"
            if math.isnan(bad) and place != "v":
                assert want[0][touched.to(device)].isnan().all(), what
            elif "softcap" not in CASES[name][2]:  # which makes infinite scores finite
                assert not want[0][touched.to(device)].isfinite().all(), what
            others = torch.ones_like(touched)
            others[call.seers] = False
            for x, y, ref, (atol, rtol) in zip(
                got, before, want, (CLOSE[dtype], (2e-3, 2e-3)), strict=True
            ):
                torch.testing.assert_close(
                    x.double(),
                    ref,
                    atol=atol,
                    rtol=rtol,
                    equal_nan=True,
                    msg=lambda told, what=what: f"{what}: {told}",
                )
                assert same_bits(x[others.to(device)], y[others.to(device)]), what
    assert all(map(same_bits, call.attend(), before))


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
@pytest.mark.parametrize("name", CASES)
def test_which_kernels_serve(name):
    """The kernels of CASES on Hopper, and that they cut the keys into parts."""
    plan, kernel = made(name, "cpu").explained("sm_90"), CASES[name][3]
    assert plan["instance"] == kernel.removesuffix(SPLIT)
    assert plan["chunks"] > 1 or not kernel.endswith(SPLIT)

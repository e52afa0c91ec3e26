# SPDX-License-Identifier: BSD-3-Clause
"""A valid call of every op. Used by the test of docs/operators.md, and by the pages of ops that
`make docs` makes.
"""

import torch
from registry import OPS, dense, i32, normed, packed, paged, product, t
from registry_quantised import codes, experts, packed_weight, sparse

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def calls():
    """For each op the arguments of a valid call, with every optional floating-point tensor."""
    few = dict(dtype=E4M3, granularity="row")
    return {
        **{name: op.make() for name, op in OPS.items()},
        "gemm": product(bias=t(5), c=t(3, 5)),
        "flash_attn": dense(alibi_slopes=t(4), sinks=t(4), bias=t(5, 6), distance_bias=t(4, 10)),
        "flash_attn_varlen": packed(alibi_slopes=t(4), sinks=t(4)),
        "paged_attn": paged(alibi_slopes=t(4), sinks=t(4)),
        "rms_norm": normed(bias=t(8), residual=t(2, 3, 8)),
        "layer_norm": normed(bias=t(8), residual=t(2, 3, 8)),
        "swiglu": dict(gate=t(3, 8), up=t(3, 8)),
        "geglu": dict(gate=t(3, 8), up=t(3, 8)),
        "cross_entropy": dict(logits=t(3, 7), target=torch.tensor([0, 6, 1]), weight=t(7)),
        "attn_dropout_mask": dict(
            q=t(1, 2, 3, 8).int(), k=t(1, 2, 5, 8).int(), p=0.5, seed=torch.tensor([1, 2])
        ),
        "dropout_mask": dict(shape=(3, 4), p=0.5, seed=torch.tensor([1, 2])),
        "attn_mask_of": dict(mask=t(3, 4).bool()),
        "attn_mask_ranges": dict(ranges=t(3, 2).int(), seq_k=4),
        "attn_mask_columns": dict(rows=t(4, 1).int(), seq_q=3, is_causal=True),
        "attn_mask_blocks": dict(
            kv_num_blocks=t(1).int(), kv_indices=t(1, 1).int() * 0, seq_q=3, seq_k=4
        ),
        "tree_mask": dict(parents=torch.tensor([-1, 0, 0, 1])),
        "linear": dict(x=t(3, 4), weight=t(5, 4), bias=t(5)),
        "linear_cross_entropy": dict(
            x=t(3, 4), weight=t(7, 4), target=torch.tensor([0, 6, 1]), bias=t(7), class_weight=t(7)
        ),
        "rope_kv_write": dict(
            q=t(2, 4, 8),
            k=t(2, 2, 8),
            v=t(2, 2, 8),
            cos=t(6, 3),
            sin=t(6, 3),
            positions=i32(0, 1),
            q_weight=t(8),
            k_weight=t(8),
            k_cache=t(5, 4, 2, 8),
            v_cache=t(5, 4, 2, 8),
            slots=torch.tensor([0, 1]),
        ),
        "quantize": dict(x=t(2, 8), **few),
        "quantize_attn": dict(q=t(1, 2, 3, 8), k=t(1, 2, 3, 8), v=t(1, 2, 3, 8)),
        "silu_mul_quantize": dict(gate=t(2, 8), up=t(2, 8), **few),
        "rms_norm_quantize": dict(x=t(2, 8), weight=t(8), residual=t(2, 8), **few),
        "dequantize": dict(codes=t(2, 8, dtype=E4M3), scale=t(2, 1)),
        "scaled_gemm": codes(bias=t(5, dtype=BF16), c=t(2, 5, dtype=BF16)),
        "pack_weight": dict(q=t(5, 32, dtype=torch.int8), format="int4"),
        "unpack_weight": dict(packed=t(1, 1, 2048, dtype=torch.uint8), n=5, k=32, format="int4"),
        "weight_gemm": packed_weight(bias=t(5)),
        "grouped_gemm": experts(bias=t(3, 5)),
        "sparse_pack": dict(w=torch.zeros(5, 8, dtype=BF16)),
        "sparse_gemm": sparse(bias=t(5, dtype=BF16)),
    }

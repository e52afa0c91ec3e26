# SPDX-License-Identifier: BSD-3-Clause
"""The table OPS of all ops: a valid call of each, its gradients, its number arguments, and the
calls that it refuses.

Tests that check the same for every op loop over OPS: errors (test_errors.py), transforms
(test_transforms.py), numbers (test_numbers.py), .out (test_out.py), compilers, autocast and opcheck
(test_compile.py), modes and subclasses that observe calls (test_runtime.py), graphs, streams and
devices (test_cuda.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import registry_quantised
import torch
from conftest import generator, ops, randn, torch_gpukern

FLOATS = "float32, bfloat16, float16 or float64"


def t(*shape, dtype=torch.float32):
    """A tensor of ones."""
    return torch.ones(*shape, dtype=dtype)


def i32(*values):
    """An int32 vector of these values."""
    return torch.tensor(values, dtype=torch.int32)


def dense(**change):
    """A valid flash_attn call with some of its arguments changed."""
    return dict(q=t(2, 4, 5, 8), k=t(2, 2, 6, 8), v=t(2, 2, 6, 16)) | change


def packed(**change):
    """A valid flash_attn_varlen call of two sequences with some of its arguments changed."""
    return (
        dict(
            q=t(9, 4, 8),
            k=t(12, 2, 8),
            v=t(12, 2, 16),
            cu_seqlens_q=i32(0, 4, 9),
            cu_seqlens_k=i32(0, 7, 12),
            max_seqlen_q=5,
            max_seqlen_k=7,
        )
        | change
    )


def paged(**change):
    """A valid paged_attn call of two sequences with some of its arguments changed."""
    return (
        dict(
            q=t(2, 4, 8),
            k_cache=t(5, 4, 2, 8),
            v_cache=t(5, 4, 2, 16),
            block_table=torch.tensor([[0, 3, -1], [4, 1, 2]], dtype=torch.int32),
            seq_lens=i32(7, 9),
        )
        | change
    )


def write(**change):
    """A valid kv_cache_write call with some of its arguments changed."""
    return (
        dict(
            k=t(3, 2, 8),
            v=t(3, 2, 16),
            k_cache=torch.zeros(5, 4, 2, 8),
            v_cache=torch.zeros(5, 4, 2, 16),
            slots=torch.tensor([0, 19, -1]),
        )
        | change
    )


def latent_write(**change):
    """A valid kv_cache_write_latent call with some of its arguments changed."""
    return (
        dict(
            c=t(3, 1, 512),
            k_pe=t(3, 1, 64),
            cache=torch.zeros(5, 4, 1, 576),
            slots=torch.tensor([0, 19, -1]),
        )
        | change
    )


def rotated_write(**change):
    """A valid rope_kv_write call with some of its arguments changed."""
    angles = dict(cos=t(6, 3), sin=t(6, 3), positions=torch.tensor([4, 0, 5]))
    given = dict(q=t(3, 4, 8), k=t(3, 2, 8), v=t(3, 2, 16)) | angles  # in the schema's order
    return given | {name: x for name, x in write().items() if name not in given} | change


def merge(**change):
    """A valid attn_merge call with some of its arguments changed."""
    return dict(out_a=t(3, 2, 8), lse_a=t(3, 2), out_b=t(3, 2, 8), lse_b=t(3, 2)) | change


def normed(**change):
    """A valid rms_norm or layer_norm call with some of its arguments changed."""
    return dict(x=t(2, 3, 8), weight=t(8)) | change


def rotary(**change):
    """A valid rope call with some of its arguments changed."""
    return dict(q=t(2, 4, 5, 8), k=t(2, 2, 5, 8), cos=t(6, 3), sin=t(6, 3)) | change


def dropped(**change):
    """A valid dropout call with some of its arguments changed."""
    return dict(x=t(2, 3, 8), p=0.25, seed=torch.tensor([1, 2])) | change


def dropped_sum(**change):
    """A valid dropout_add call with some of its arguments changed."""
    return dict(x=t(2, 3, 8), residual=t(2, 3, 8), p=0.25, seed=torch.tensor([1, 2])) | change


def dropped_gelu(**change):
    """A valid bias_gelu_dropout call with some of its arguments changed."""
    return dict(x=t(2, 3, 8), bias=t(8), p=0.25, seed=torch.tensor([1, 2])) | change


def sampled(**change):
    """A valid sample_tokens call with some of its arguments changed."""
    return dict(logits=t(3, 7), temperature=t(3), number=t(3) / 2) | change


def sampled_with_penalties(**change):
    """A sample_tokens call with all arguments, some of them changed."""
    return (
        dict(
            logits=t(3, 7),
            temperature=t(3),
            number=t(3) / 2,
            top_k=torch.tensor([0, 3, 9]),
            top_p=t(3),
            min_p=t(3),
            counts=t(2, 7).int(),
            prompt=t(2, 7).to(torch.uint8),
            slots=torch.tensor([1, -1, 0]),
            drafted=torch.tensor([[3, -1]]).expand(3, 2),
            presence_penalty=t(3),
            frequency_penalty=t(3),
            repetition_penalty=t(3),
        )
        | change
    )


def chosen(**change):
    """A valid moe_unpermute call with some of its arguments changed. Rows 4 and 0 have two places
    and none."""
    return (
        dict(rows=t(6, 8), place=i32(3, 5, 4, 1, -1, 4, 2, -7).view(4, 2), weight=t(4, 2)) | change
    )


def distilled(**change):
    """A valid kl_div call with some of its arguments changed."""
    return dict(logits=t(2, 3, 7), teacher_logits=t(2, 3, 7).flip(-1) / 2) | change


def classes(**change):
    """A valid cross_entropy call with some of its arguments changed."""
    return dict(logits=t(2, 3, 7), target=torch.tensor([[0, 6, -100], [3, 3, 1]])) | change


def product(**change):
    """A valid gemm call with some of its arguments changed."""
    return dict(a=t(2, 3, 4), b=t(4, 5)) | change


BF16, F64, I64 = torch.bfloat16, torch.float64, torch.int64

# Calls that raise ValueError: (op, arguments, whole text after "gpukern::<op>: ").
VALUE_ERRORS = [
    # ---- gemm
    ("gemm", product(a=t(4)), "a must have at least 2 dimensions, got 1"),
    ("gemm", product(a=torch.tensor(1.0)), "a must have at least 2 dimensions, got 0"),
    ("gemm", product(b=t(4)), "b must have at least 2 dimensions, got 1"),
    ("gemm", product(a=t(1, 1, 1, 1, 1, 1, 1, 3, 4)), "a must have at most 8 dimensions, got 9"),
    ("gemm", product(a=t(2, 3, 4).long()), f"a must be {FLOATS}, got int64"),
    ("gemm", product(a=t(2, 3, 4).bool()), f"a must be {FLOATS}, got bool"),
    ("gemm", product(a=t(2, 3, 4).to(torch.complex64)), f"a must be {FLOATS}, got complex64"),
    (
        "gemm",
        product(a=t(2, 3, 4).to(torch.float8_e4m3fn)),
        f"a must be {FLOATS}, got float8_e4m3fn",
    ),
    (
        "gemm",
        product(b=t(4, 5, dtype=BF16)),
        "b has dtype bfloat16, a has float32; they must match",
    ),
    ("gemm", product(b=t(4, 5, dtype=F64)), "b has dtype float64, a has float32; they must match"),
    ("gemm", product(b=t(3, 5)), "b has 3 rows, a has 4 columns; they must match"),
    ("gemm", product(b=t(3, 4, 5)), "b has batch dimensions [3], a has [2]; they must broadcast"),
    ("gemm", product(bias=t(4)), "bias must have shape [5], got [4]"),
    ("gemm", product(bias=t(1)), "bias must have shape [5], got [1]"),
    ("gemm", product(bias=t(1, 5)), "bias must have shape [5], got [1, 5]"),
    (
        "gemm",
        product(bias=t(5, dtype=BF16)),
        "bias has dtype bfloat16, a has float32; they must match",
    ),
    (
        "gemm",
        product(a=t(2, 3, 4, dtype=BF16), b=t(4, 5, dtype=BF16), bias=t(5)),
        "bias has dtype float32, a has bfloat16; they must match",
    ),
    (
        "gemm",
        product(
            a=t(2, 3, 4, dtype=BF16),
            b=t(4, 5, dtype=BF16),
            bias=t(5, dtype=torch.float16),
            out_dtype=torch.float32,
        ),
        "bias must be bfloat16 (as a) or float32 (as out_dtype), got float16",
    ),
    ("gemm", product(c=t(3, 4)), "c must broadcast to the result's shape [2, 3, 5], got [3, 4]"),
    (
        "gemm",
        product(c=t(3, 2, 3, 5)),
        "c must broadcast to the result's shape [2, 3, 5], got [3, 2, 3, 5]",
    ),
    (
        "gemm",
        product(c=t(1, 2, 3, 5)),
        "c must broadcast to the result's shape [2, 3, 5], got [1, 2, 3, 5]",
    ),
    (
        "gemm",
        product(a=t(1, 3, 4), c=t(2, 3, 5)),
        "c must broadcast to the result's shape [1, 3, 5], got [2, 3, 5]",
    ),
    (
        "gemm",
        product(c=t(3, 5, dtype=torch.float16)),
        "c has dtype float16, a has float32; they must match",
    ),
    ("gemm", product(alpha=math.nan), "alpha must be a number, got nan"),
    ("gemm", product(beta=math.nan), "beta must be a number, got nan"),
    (
        "gemm",
        product(activation="swish"),
        "activation must be none, relu, gelu, gelu_tanh or silu, got 'swish'",
    ),
    (
        "gemm",
        product(activation=""),
        "activation must be none, relu, gelu, gelu_tanh or silu, got ''",
    ),
    ("gemm", product(out_dtype=BF16), "out_dtype must be float32 (as a), got bfloat16"),
    (
        "gemm",
        product(a=t(2, 3, 4, dtype=BF16), b=t(4, 5, dtype=BF16), out_dtype=torch.float16),
        "out_dtype must be bfloat16 (as a) or float32, got float16",
    ),
    ("gemm", product(out_dtype=torch.int32), "out_dtype must be float32 (as a), got int32"),
    ("gemm", product(fp32_precision="fast"), "fp32_precision must be ieee or tf32, got 'fast'"),
    (
        "gemm_act_bwd",
        dict(grad_out=t(3, 4), saved=t(3, 5), activation="silu"),
        "saved must have shape [3, 4], got [3, 5]",
    ),
    (
        "gemm_act_bwd",
        dict(grad_out=t(3, 4).int(), saved=t(3, 4), activation="silu"),
        f"grad_out must be {FLOATS}, got int32",
    ),
    (
        "gemm_act_bwd",
        dict(grad_out=t(3, 4), saved=t(3, 4, dtype=F64), activation="silu"),
        "saved has dtype float64, grad_out has float32; they must match",
    ),
    (
        "gemm_act_bwd",
        dict(grad_out=t(3, 4), saved=t(3, 4), activation="tanh"),
        "activation must be none, relu, gelu, gelu_tanh or silu, got 'tanh'",
    ),
    # ---- rows
    ("rms_norm", normed(x=torch.tensor(1.0)), "x must have at least 1 dimension, got 0"),
    ("rms_norm", normed(x=t(2, 3, 0)), "x must have a last dimension of at least 1, got 0"),
    ("rms_norm", normed(x=t(2, 3, 8).int()), f"x must be {FLOATS}, got int32"),
    ("rms_norm", normed(weight=t(7)), "weight must have shape [8], got [7]"),
    ("rms_norm", normed(weight=t(1, 8)), "weight must have shape [8], got [1, 8]"),
    ("rms_norm", normed(weight=t(8, dtype=BF16)), "weight must be float32, got bfloat16"),
    (
        "rms_norm",
        normed(x=t(2, 3, 8, dtype=BF16), weight=t(8, dtype=torch.float16)),
        "weight must be bfloat16 or float32, got float16",
    ),
    ("rms_norm", normed(residual=t(3, 8)), "residual must have shape [2, 3, 8], got [3, 8]"),
    (
        "rms_norm",
        normed(residual=t(2, 3, 8, dtype=BF16)),
        "residual has dtype bfloat16, x has float32; they must match",
    ),
    ("rms_norm", normed(eps=-1.0), "eps must be a finite number of at least 0, got -1"),
    ("rms_norm", normed(eps=math.nan), "eps must be a finite number of at least 0, got nan"),
    ("rms_norm", normed(weight_offset=math.inf), "weight_offset must be finite, got inf"),
    ("layer_norm", normed(bias=t(9)), "bias must have shape [8], got [9]"),
    (
        "layer_norm",
        normed(x=t(1, 1, 1, 1, 1, 1, 1, 2, 8)),
        "x must have at most 8 dimensions, got 9",
    ),
    ("softmax", dict(x=t(2, 3), lengths=i32(1)), "lengths must have shape [2], got [1]"),
    ("softmax", dict(x=t(2, 3), lengths=torch.tensor([1, 2])), "lengths must be int32, got int64"),
    ("softmax", dict(x=t(2, 3), scale=math.inf), "scale must be finite, got inf"),
    (
        "swiglu",
        dict(gate=t(2, 7)),
        "gate must have an even last dimension where there is no up, got 7",
    ),
    ("swiglu", dict(gate=t(2, 6), up=t(2, 5)), "up must have shape [2, 6], got [2, 5]"),
    (
        "swiglu",
        dict(gate=t(2, 6), up=t(2, 6, dtype=BF16)),
        "up has dtype bfloat16, gate has float32; they must match",
    ),
    ("geglu", dict(gate=t(2, 6), approximate="erf"), "approximate must be none or tanh, got 'erf'"),
    (
        "rope",
        rotary(q=t(5, 8)),
        "q must have 4 dimensions [B, Hq, S, D] (or 3, packed [T, Hq, D]), got 2",
    ),
    ("rope", rotary(k=t(2, 2, 6, 8)), "k has tokens 6, q has 5; they must match"),
    ("rope", rotary(k=t(2, 2, 5, 6)), "k has head_dim 6, q has 8; they must match"),
    ("rope", rotary(k=t(1, 2, 5, 8)), "k has batch size 1, q has 2; they must match"),
    ("rope", rotary(cos=t(6, 5)), "cos rotates 10 columns, expected at most the head_dim 8 of q"),
    ("rope", rotary(sin=t(6, 2)), "sin must have shape [6, 3], got [6, 2]"),
    ("rope", rotary(cos=t(6, 3, dtype=BF16)), "cos must be float32, got bfloat16"),
    (
        "rope",
        rotary(cos=t(4, 3), sin=t(4, 3)),
        "cos has 4 rows, expected at least the 5 tokens of q",
    ),
    ("rope", rotary(positions=i32(0, 1)), "positions must have shape [5], got [2]"),
    ("rope", rotary(positions=t(2, 5)), "positions must be int64 or int32, got float32"),
    (
        "cross_entropy",
        classes(target=torch.tensor([0, 1])),
        "target must have shape [2, 3], got [2]",
    ),
    ("cross_entropy", classes(target=i32(0, 1, 2).expand(2, 3)), "target must be int64, got int32"),
    ("cross_entropy", classes(weight=t(6)), "weight must have shape [7], got [6]"),
    ("cross_entropy", classes(weight=t(7, dtype=BF16)), "weight must be float32, got bfloat16"),
    (
        "cross_entropy",
        classes(label_smoothing=1.5),
        "label_smoothing must be between 0 and 1, got 1.5",
    ),
    (
        "cross_entropy",
        classes(softcap=-1.0),
        "softcap must be 0 (off) or a positive finite number, got -1",
    ),
    ("cross_entropy", classes(logit_scale=math.inf), "logit_scale must be finite, got inf"),
    ("cross_entropy", classes(z_loss=math.nan), "z_loss must be finite, got nan"),
    # ---- flash_attn
    ("flash_attn", dense(q=t(4, 5, 8)), "q must have 4 dimensions [B, Hq, Sq, D], got 3"),
    ("flash_attn", dense(q=t(2, 4, 5, 8).int()), f"q must be {FLOATS}, got int32"),
    (
        "flash_attn",
        dense(q=t(2, 4, 5, 8).to(torch.complex128)),
        f"q must be {FLOATS}, got complex128",
    ),
    ("flash_attn", dense(q=t(2, 4, 5, 0)), "q has head_dim 0; it must be 1 to 576"),
    (
        "flash_attn",
        dense(q=t(2, 4, 5, 577), k=t(2, 2, 6, 577)),
        "q has head_dim 577; it must be 1 to 576",
    ),
    ("flash_attn", dense(k=t(2, 6, 8)), "k must have 4 dimensions [B, Hkv, Sk, D], got 3"),
    (
        "flash_attn",
        dense(k=t(2, 2, 6, 8, dtype=BF16)),
        "k has dtype bfloat16, q has float32; they must match",
    ),
    ("flash_attn", dense(k=t(1, 2, 6, 8)), "k has batch size 1, q has 2; they must match"),
    (
        "flash_attn",
        dense(k=t(2, 3, 6, 8), v=t(2, 3, 6, 16)),
        "k has 3 heads, q has 4; q's must be a multiple of k's",
    ),
    (
        "flash_attn",
        dense(k=t(2, 8, 6, 8), v=t(2, 8, 6, 16)),
        "k has 8 heads, q has 4; q's must be a multiple of k's",
    ),
    (
        "flash_attn",
        dense(k=t(2, 0, 6, 8), v=t(2, 0, 6, 16)),
        "k has 0 heads, q has 4; q's must be a multiple of k's",
    ),
    (
        "flash_attn",
        dense(q=t(2, 4, 5, 128), k=t(2, 2, 6, 64)),
        "k has head_dim 64, q has 128; they must match",
    ),
    ("flash_attn", dense(v=t(2, 6, 16)), "v must have 4 dimensions [B, Hkv, Sk, Dv], got 3"),
    (
        "flash_attn",
        dense(v=t(2, 2, 6, 16, dtype=F64)),
        "v has dtype float64, q has float32; they must match",
    ),
    ("flash_attn", dense(v=t(1, 2, 6, 16)), "v has batch size 1, k has 2; they must match"),
    ("flash_attn", dense(v=t(2, 1, 6, 16)), "v has heads 1, k has 2; they must match"),
    ("flash_attn", dense(v=t(2, 2, 7, 16)), "v has length 7, k has 6; they must match"),
    ("flash_attn", dense(v=t(2, 2, 6, 0)), "v has head_dim 0; it must be 1 to 576"),
    ("flash_attn", dense(v=t(2, 2, 6, 600)), "v has head_dim 600; it must be 1 to 576"),
    ("flash_attn", dense(scale=math.nan), "scale must be finite, got nan"),
    ("flash_attn", dense(scale=math.inf), "scale must be finite, got inf"),
    ("flash_attn", dense(window_left=-2), "window_left must be -1 (unbounded), 0 or more, got -2"),
    (
        "flash_attn",
        dense(window_right=-7),
        "window_right must be -1 (unbounded), 0 or more, got -7",
    ),
    (
        "flash_attn",
        dense(softcap=-1.0),
        "softcap must be 0 (off) or a positive finite number, got -1",
    ),
    (
        "flash_attn",
        dense(softcap=math.nan),
        "softcap must be 0 (off) or a positive finite number, got nan",
    ),
    ("flash_attn", dense(alibi_slopes=t(3)), "alibi_slopes must have shape [4] or [2, 4], got [3]"),
    (
        "flash_attn",
        dense(alibi_slopes=t(1, 4)),
        "alibi_slopes must have shape [4] or [2, 4], got [1, 4]",
    ),
    (
        "flash_attn",
        dense(alibi_slopes=t(4, dtype=BF16)),
        "alibi_slopes must be float32, got bfloat16",
    ),
    ("flash_attn", dense(sinks=t(2)), "sinks must have shape [4], got [2]"),
    ("flash_attn", dense(sinks=t(2, 4)), "sinks must have shape [4], got [2, 4]"),
    ("flash_attn", dense(sinks=t(4, dtype=F64)), "sinks must be float32, got float64"),
    (
        "flash_attn",
        dense(
            q=t(2, 4, 5, 8, dtype=F64),
            k=t(2, 2, 6, 8, dtype=F64),
            v=t(2, 2, 6, 16, dtype=F64),
            sinks=t(4),
        ),
        "sinks must be float64, got float32",
    ),
    ("flash_attn", dense(dropout_p=1.5), "dropout_p must be between 0 and 1, got 1.5"),
    (
        "flash_attn",
        dense(dropout_seed=torch.tensor([1])),
        "dropout_seed must have shape [2], got [1]",
    ),
    ("flash_attn", dense(dropout_seed=t(2)), "dropout_seed must be int64, got float32"),
    ("flash_attn", dense(kv_start=i32(0)), "kv_start must have shape [2], got [1]"),
    ("flash_attn", dense(kv_start=torch.tensor([0, 0])), "kv_start must be int32, got int64"),
    ("flash_attn", dense(kv_end=i32(0, 1, 2)), "kv_end must have shape [2], got [3]"),
    ("flash_attn", dense(kv_end=t(2)), "kv_end must be int32, got float32"),
    (
        "flash_attn",
        dense(
            q=t(2, 4, 5, 8, dtype=BF16),
            k=t(2, 2, 6, 8, dtype=BF16),
            v=t(2, 2, 6, 16, dtype=BF16),
            sinks=t(4, dtype=torch.float16),
        ),
        "sinks must be float32 or bfloat16, got float16",
    ),
    ("flash_attn", dense(q_start=i32(0)), "q_start must have shape [2], got [1]"),
    ("flash_attn", dense(q_start=torch.tensor([0, 0])), "q_start must be int32, got int64"),
    ("flash_attn", dense(q_start=t(2)), "q_start must be int32, got float32"),
    (
        "flash_attn",
        dense(q_start=i32(0, 1), diagonal=1),
        "diagonal must be 0 where q_start is given, got 1",
    ),
    # ---- flash_attn_varlen
    ("flash_attn_varlen", packed(q=t(1, 9, 4, 8)), "q must have 3 dimensions [Tq, Hq, D], got 4"),
    (
        "flash_attn_varlen",
        packed(k=t(12, 3, 8), v=t(12, 3, 16)),
        "k has 3 heads, q has 4; q's must be a multiple of k's",
    ),
    ("flash_attn_varlen", packed(v=t(11, 2, 16)), "v has length 11, k has 12; they must match"),
    (
        "flash_attn_varlen",
        packed(cu_seqlens_q=torch.tensor([0, 4, 9])),
        "cu_seqlens_q must be int32, got int64",
    ),
    (
        "flash_attn_varlen",
        packed(cu_seqlens_q=i32(0, 4, 9)[None]),
        "cu_seqlens_q must have 1 dimension [B+1], got 2",
    ),
    (
        "flash_attn_varlen",
        packed(cu_seqlens_q=i32()),
        "cu_seqlens_q must have at least 1 element, got 0",
    ),
    (
        "flash_attn_varlen",
        packed(cu_seqlens_k=i32(0, 12)),
        "cu_seqlens_k must have shape [3], got [2]",
    ),
    ("flash_attn_varlen", packed(cu_seqlens_k=t(3)), "cu_seqlens_k must be int32, got float32"),
    ("flash_attn_varlen", packed(max_seqlen_q=-1), "max_seqlen_q must be 0 or more, got -1"),
    ("flash_attn_varlen", packed(max_seqlen_k=-5), "max_seqlen_k must be 0 or more, got -5"),
    ("flash_attn_varlen", packed(scale=-math.inf), "scale must be finite, got -inf"),
    (
        "flash_attn_varlen",
        packed(window_left=-3),
        "window_left must be -1 (unbounded), 0 or more, got -3",
    ),
    (
        "flash_attn_varlen",
        packed(softcap=-0.5),
        "softcap must be 0 (off) or a positive finite number, got -0.5",
    ),
    (
        "flash_attn_varlen",
        packed(alibi_slopes=t(3, 4)),
        "alibi_slopes must have shape [4] or [2, 4], got [3, 4]",
    ),
    # ---- paged_attn
    ("paged_attn", paged(q=t(2, 4, 1, 8)), "q must have 3 dimensions [T, Hq, D], got 4"),
    ("paged_attn", paged(q=t(2, 4, 8).char()), f"q must be {FLOATS}, got int8"),
    ("paged_attn", paged(q=t(2, 4, 577)), "q has head_dim 577; it must be 1 to 576"),
    (
        "paged_attn",
        paged(v_cache=t(5, 4, 2, 600)),
        "v_cache has head_dim 600; it must be 1 to 576",
    ),
    (
        "paged_attn",
        paged(k_cache=t(5, 4, 2, 8, dtype=BF16)),
        "k_cache has dtype bfloat16, q has float32; they must match",
    ),
    (
        "paged_attn",
        paged(k_cache=t(5, 4, 16)),
        "k_cache must have 4 dimensions [num_blocks, block_size, Hkv, D], got 3",
    ),
    (
        "paged_attn",
        paged(k_cache=t(5, 4, 2, 16)),
        "k_cache has head_dim 16, q has 8; they must match",
    ),
    (
        "paged_attn",
        paged(k_cache=t(5, 0, 2, 8), v_cache=t(5, 0, 2, 16)),
        "k_cache has block_size 0; it must be 1 or more",
    ),
    (
        "paged_attn",
        paged(v_cache=t(4, 4, 2, 16)),
        "v_cache has num_blocks 4, k_cache has 5; they must match",
    ),
    (
        "paged_attn",
        paged(v_cache=t(5, 3, 2, 16)),
        "v_cache has block_size 3, k_cache has 4; they must match",
    ),
    (
        "paged_attn",
        paged(v_cache=t(5, 4, 1, 16)),
        "v_cache has heads 1, k_cache has 2; they must match",
    ),
    (
        "paged_attn",
        paged(q=t(2, 3, 8)),
        "k_cache has 2 heads, q has 3; q's must be a multiple of k_cache's",
    ),
    (
        "paged_attn",
        paged(block_table=torch.zeros(2, 3, dtype=I64)),
        "block_table must be int32, got int64",
    ),
    (
        "paged_attn",
        paged(block_table=i32(0, 1)),
        "block_table must have 2 dimensions [B, max_blocks], got 1",
    ),
    ("paged_attn", paged(seq_lens=i32(7)), "seq_lens must have shape [2], got [1]"),
    ("paged_attn", paged(seq_lens=torch.tensor([7, 9])), "seq_lens must be int32, got int64"),
    ("paged_attn", paged(cu_seqlens_q=i32(0, 2)), "cu_seqlens_q must have shape [3], got [2]"),
    (
        "paged_attn",
        paged(cu_seqlens_q=i32(0, 1, 2), max_seqlen_q=-1),
        "max_seqlen_q must be 0 or more, got -1",
    ),
    (
        "paged_attn",
        paged(q=t(3, 4, 8)),
        "q has 3 tokens, block_table has 2 sequences; without cu_seqlens_q the tokens must be a "
        "multiple of them",
    ),
    ("paged_attn", paged(scale=math.nan), "scale must be finite, got nan"),
    ("paged_attn", paged(window_left=-2), "window_left must be -1 (unbounded), 0 or more, got -2"),
    (
        "paged_attn",
        paged(softcap=-2.0),
        "softcap must be 0 (off) or a positive finite number, got -2",
    ),
    ("paged_attn", paged(alibi_slopes=t(2)), "alibi_slopes must have shape [4] or [2, 4], got [2]"),
    ("paged_attn", paged(sinks=t(3)), "sinks must have shape [4], got [3]"),
    ("paged_attn", paged(sinks=t(4, dtype=BF16)), "sinks must be float32, got bfloat16"),
    ("paged_attn", paged(kv_start=i32(0, 1, 2)), "kv_start must have shape [2], got [3]"),
    ("paged_attn", paged(kv_start=torch.tensor([0, 1])), "kv_start must be int32, got int64"),
    ("paged_attn", paged(k_scale=t(4)), "k_scale must have shape [] or [2], got [4]"),
    ("paged_attn", paged(k_scale=t(2, dtype=BF16)), "k_scale must be float32, got bfloat16"),
    ("paged_attn", paged(v_scale=t(1, 2)), "v_scale must have shape [] or [2], got [1, 2]"),
    # ---- dropout
    ("dropout", dropped(x=t(3).int()), f"x must be {FLOATS}, got int32"),
    ("dropout", dropped(p=1.5), "p must be between 0 and 1, got 1.5"),
    ("dropout", dropped(p=math.nan), "p must be between 0 and 1, got nan"),
    ("dropout", dropped(seed=torch.tensor([1])), "seed must have shape [2], got [1]"),
    ("dropout", dropped(seed=t(2)), "seed must be int64, got float32"),
    (
        "dropout_add",
        dropped_sum(residual=t(2, 3, 7)),
        "residual must have shape [2, 3, 8], got [2, 3, 7]",
    ),
    (
        "dropout_add",
        dropped_sum(residual=t(2, 3, 8, dtype=BF16)),
        "residual has dtype bfloat16, x has float32; they must match",
    ),
    ("bias_gelu_dropout", dropped_gelu(bias=t(7)), "bias must have shape [8], got [7]"),
    (
        "bias_gelu_dropout",
        dropped_gelu(bias=t(8, dtype=F64)),
        "bias has dtype float64, x has float32; they must match",
    ),
    (
        "bias_gelu_dropout",
        dropped_gelu(approximate="erf"),
        "approximate must be none or tanh, got 'erf'",
    ),
    # ---- kl_div
    ("kl_div", distilled(logits=t(2, 3, 7).int()), f"logits must be {FLOATS}, got int32"),
    (
        "kl_div",
        distilled(logits=t(2, 3, 0)),
        "logits must have a last dimension of at least 1, got 0",
    ),
    (
        "kl_div",
        distilled(teacher_logits=t(2, 3, 7, dtype=BF16)),
        "teacher_logits has dtype bfloat16, logits has float32; they must match",
    ),
    (
        "kl_div",
        distilled(teacher_logits=t(2, 3, 6)),
        "teacher_logits must have shape [2, 3, 7], got [2, 3, 6]",
    ),
    ("kl_div", distilled(mask=t(2, 3)), "mask must be uint8, got float32"),
    ("kl_div", distilled(mask=t(3).to(torch.uint8)), "mask must have shape [2, 3], got [3]"),
    ("kl_div", distilled(beta=1.5), "beta must be between 0 and 1, got 1.5"),
    ("kl_div", distilled(temperature=0.0), "temperature must be positive and finite, got 0"),
    # ---- moe_unpermute
    ("moe_unpermute", chosen(rows=t(6, 8).int()), f"rows must be {FLOATS}, got int32"),
    ("moe_unpermute", chosen(rows=t(8)), "rows must have 2 dimensions [R, H], got 1"),
    ("moe_unpermute", chosen(place=i32(0, 1)), "place must have 2 dimensions [T, J], got 1"),
    ("moe_unpermute", chosen(place=t(4, 2)), "place must be int32 or int64, got float32"),
    ("moe_unpermute", chosen(weight=t(4, 3)), "weight must have shape [4, 2], got [4, 3]"),
    (
        "moe_unpermute",
        chosen(rows=t(6, 8, dtype=BF16), weight=t(4, 2, dtype=torch.float16)),
        "weight must be float32 or bfloat16, got float16",
    ),
    # ---- sample_tokens
    ("sample_tokens", sampled(logits=t(3, 7).int()), f"logits must be {FLOATS}, got int32"),
    ("sample_tokens", sampled(logits=t(7)), "logits must have 2 dimensions [R, V], got 1"),
    (
        "sample_tokens",
        sampled(logits=t(3, 0)),
        "logits must have between 1 and 2^20 - 1 columns, got 0",
    ),
    ("sample_tokens", sampled(temperature=t(4)), "temperature must have shape [3], got [4]"),
    (
        "sample_tokens",
        sampled(number=t(3, dtype=BF16)),
        "number must be float64 or float32, got bfloat16",
    ),
    ("sample_tokens", sampled(top_k=t(3)), "top_k must be int64 or int32, got float32"),
    (
        "sample_tokens",
        sampled(slots=torch.tensor([0, 0, 0])),
        "slots is given without counts; pass counts [S, V] and slots [R], or leave out slots",
    ),
    (
        "sample_tokens",
        sampled(repetition_penalty=t(3)),
        "repetition_penalty is given without counts; pass counts [S, V] and slots [R], or leave out "
        "repetition_penalty",
    ),
    (
        "sample_tokens",
        sampled(counts=t(2, 7).int()),
        "counts is given without slots; pass slots [R], the row of counts of each row",
    ),
    (
        "sample_tokens",
        sampled_with_penalties(counts=t(2, 6).int()),
        "counts has tokens 6, logits has 7; they must match",
    ),
    (
        "sample_tokens",
        sampled_with_penalties(prompt=t(3, 7).to(torch.uint8)),
        "prompt must have shape [2, 7], got [3, 7]",
    ),
    (
        "sample_tokens",
        sampled_with_penalties(drafted=torch.tensor([[3, -1]])),
        "drafted has rows 1, logits has 3; they must match",
    ),
    (
        "sample_tokens",
        sampled_with_penalties(repetition_penalty=t(2)),
        "repetition_penalty must have shape [3], got [2]",
    ),
    # ---- rope_kv_write
    ("rope_kv_write", rotated_write(q=t(3, 32)), "q must have 3 dimensions [T, Hq, D], got 2"),
    ("rope_kv_write", rotated_write(q=t(3, 4, 8).int()), f"q must be {FLOATS}, got int32"),
    (
        "rope_kv_write",
        rotated_write(k=t(3, 2, 8, dtype=BF16)),
        "k has dtype bfloat16, q has float32; they must match",
    ),
    ("rope_kv_write", rotated_write(k=t(3, 2, 6)), "k has head_dim 6, q has 8; they must match"),
    ("rope_kv_write", rotated_write(v=t(4, 2, 16)), "v has tokens 4, q has 3; they must match"),
    ("rope_kv_write", rotated_write(v=t(3, 1, 16)), "v has heads 1, k has 2; they must match"),
    (
        "rope_kv_write",
        rotated_write(cos=t(6, 5)),
        "cos rotates 10 columns, expected at most the head_dim 8 of q",
    ),
    ("rope_kv_write", rotated_write(sin=t(6, 2)), "sin must have shape [6, 3], got [6, 2]"),
    (
        "rope_kv_write",
        rotated_write(positions=t(3)),
        "positions must be int64 or int32, got float32",
    ),
    ("rope_kv_write", rotated_write(positions=i32(0, 1)), "positions must have shape [3], got [2]"),
    (
        "rope_kv_write",
        rotated_write(v_cache=torch.zeros(5, 4, 2, 8)),
        "v_cache has head_dim 8, v has 16; they must match",
    ),
    (
        "rope_kv_write",
        rotated_write(slots=torch.tensor([0, 1])),
        "slots must have shape [3], got [2]",
    ),
    ("rope_kv_write", rotated_write(q_weight=t(4)), "q_weight must have shape [8], got [4]"),
    (
        "rope_kv_write",
        rotated_write(k_weight=t(8, dtype=F64)),
        "k_weight must be float32, got float64",
    ),
    ("rope_kv_write", rotated_write(k_scale=t(3)), "k_scale must have shape [] or [2], got [3]"),
    ("rope_kv_write", rotated_write(eps=-1.0), "eps must be a finite number of at least 0, got -1"),
    # ---- kv_cache_write
    ("kv_cache_write", write(k=t(3, 16)), "k must have 3 dimensions [T, Hkv, D], got 2"),
    ("kv_cache_write", write(k=t(3, 2, 8).int()), f"k must be {FLOATS}, got int32"),
    ("kv_cache_write", write(v=t(4, 2, 16)), "v has tokens 4, k has 3; they must match"),
    ("kv_cache_write", write(v=t(3, 1, 16)), "v has heads 1, k has 2; they must match"),
    (
        "kv_cache_write",
        write(v=t(3, 2, 16, dtype=BF16)),
        "v has dtype bfloat16, k has float32; they must match",
    ),
    (
        "kv_cache_write",
        write(k_cache=torch.zeros(5, 4, 2, 8, dtype=BF16)),
        "k_cache has dtype bfloat16, k has float32; they must match",
    ),
    (
        "kv_cache_write",
        write(k_cache=torch.zeros(5, 4, 2, 9)),
        "k_cache has head_dim 9, k has 8; they must match",
    ),
    (
        "kv_cache_write",
        write(k_cache=torch.zeros(5, 4, 1, 8), v_cache=torch.zeros(5, 4, 1, 16)),
        "k_cache has heads 1, k has 2; they must match",
    ),
    (
        "kv_cache_write",
        write(v_cache=torch.zeros(5, 4, 2, 8)),
        "v_cache has head_dim 8, v has 16; they must match",
    ),
    (
        "kv_cache_write",
        write(v_cache=torch.zeros(6, 4, 2, 16)),
        "v_cache has num_blocks 6, k_cache has 5; they must match",
    ),
    ("kv_cache_write", write(slots=t(3)), "slots must be int64 or int32, got float32"),
    ("kv_cache_write", write(slots=torch.tensor([0, 1])), "slots must have shape [3], got [2]"),
    ("kv_cache_write", write(k_scale=t(3)), "k_scale must have shape [] or [2], got [3]"),
    ("kv_cache_write", write(v_scale=t(2, dtype=F64)), "v_scale must be float32, got float64"),
    # ---- kv_cache_write_latent
    (
        "kv_cache_write_latent",
        latent_write(c=t(3, 512)),
        "c must have 3 dimensions [T, 1, 512], got 2",
    ),
    ("kv_cache_write_latent", latent_write(c=t(3, 1, 512).int()), f"c must be {FLOATS}, got int32"),
    (
        "kv_cache_write_latent",
        latent_write(c=t(3, 1, 256)),
        "c must have shape [3, 1, 512], got [3, 1, 256]",
    ),
    (
        "kv_cache_write_latent",
        latent_write(c=t(3, 2, 512)),
        "c must have shape [3, 1, 512], got [3, 2, 512]",
    ),
    (
        "kv_cache_write_latent",
        latent_write(k_pe=t(4, 1, 64)),
        "k_pe must have shape [3, 1, 64], got [4, 1, 64]",
    ),
    (
        "kv_cache_write_latent",
        latent_write(k_pe=t(3, 1, 64, dtype=BF16)),
        "k_pe has dtype bfloat16, c has float32; they must match",
    ),
    (
        "kv_cache_write_latent",
        latent_write(cache=torch.zeros(5, 4, 1, 576, dtype=BF16)),
        "cache has dtype bfloat16, expected float32, or uint8 for latents in rows of 656 bytes",
    ),
    (
        "kv_cache_write_latent",
        latent_write(cache=torch.zeros(5, 4, 1, 512)),
        "cache must have shape [num_blocks, block_size, 1, 576], got [5, 4, 1, 512]",
    ),
    (
        "kv_cache_write_latent",
        latent_write(cache=torch.zeros(5, 4, 576, dtype=torch.uint8)),
        "cache of uint8 must have shape [num_blocks, block_size, 1, 656], got [5, 4, 576]",
    ),
    (
        "kv_cache_write_latent",
        latent_write(cache=torch.zeros(5, 4, 1, 660, dtype=torch.uint8)[..., 2:658]),
        "cache has rows that do not begin at multiples of 16 bytes",
    ),
    (
        "kv_cache_write_latent",
        latent_write(slots=t(3)),
        "slots must be int64 or int32, got float32",
    ),
    (
        "kv_cache_write_latent",
        latent_write(slots=torch.tensor([0, 1])),
        "slots must have shape [3], got [2]",
    ),
    # ---- attn_merge
    ("attn_merge", merge(out_a=t(3, 2, 8).int()), f"out_a must be {FLOATS}, got int32"),
    ("attn_merge", merge(lse_a=t(3, 3)), "lse_a must have shape [3, 2], got [3, 3]"),
    ("attn_merge", merge(lse_a=t(3, 2, dtype=BF16)), "lse_a must be float32, got bfloat16"),
    (
        "attn_merge",
        merge(out_b=t(3, 2, 8, dtype=BF16)),
        "out_b has dtype bfloat16, out_a has float32; they must match",
    ),
    ("attn_merge", merge(out_b=t(3, 2, 4)), "out_b must have shape [3, 2, 8], got [3, 2, 4]"),
    ("attn_merge", merge(lse_b=t(2, 2)), "lse_b must have shape [3, 2], got [2, 2]"),
]

# Calls with invalid contents of index tensors, which raise IndexError; as VALUE_ERRORS.
INDEX_ERRORS = [
    ("flash_attn_varlen", packed(cu_seqlens_q=i32(1, 4, 9)), "cu_seqlens_q is expected to start "
                                                             "at 0, got cu_seqlens_q[0] = 1"),
    ("flash_attn_varlen", packed(cu_seqlens_q=i32(0, 10, 9), max_seqlen_q=99),
     "cu_seqlens_q is expected not to decrease, got cu_seqlens_q[2] = 9 after 10"),
    ("flash_attn_varlen", packed(cu_seqlens_k=i32(0, -3, 12)), "cu_seqlens_k is expected not to "
                                                               "decrease, got cu_seqlens_k[1] = "
                                                               "-3 after 0"),
    ("flash_attn_varlen", packed(cu_seqlens_k=i32(0, 7, 13)),
     "cu_seqlens_k is expected to end at or before the 12 tokens there are, got cu_seqlens_k[2] = "
     "13"),
    ("flash_attn_varlen", packed(max_seqlen_q=4),
     "cu_seqlens_q is expected to hold sequences of at most max_seqlen 4 tokens, got 5 in "
     "sequence 1"),
    ("flash_attn_varlen", packed(max_seqlen_k=6),
     "cu_seqlens_k is expected to hold sequences of at most max_seqlen 6 tokens, got 7 in "
     "sequence 0"),
    ("paged_attn", paged(seq_lens=i32(7, -1), allow_short=True), "seq_lens is expected not to be "
                                                                 "negative, got seq_lens[1] = -1"),
    ("paged_attn", paged(seq_lens=i32(7, -1)), "seq_lens is expected not to be negative, got "
                                               "seq_lens[1] = -1"),
    ("paged_attn", paged(seq_lens=i32(7, 13)), "seq_lens is expected to fit a row of block_table "
                                               "(12 keys), got seq_lens[1] = 13"),
    ("paged_attn", paged(q=t(6, 4, 8), seq_lens=i32(7, 2)),
     "seq_lens is expected to count the query tokens (3 in sequence 1), got seq_lens[1] = 2"),
    ("paged_attn", paged(seq_lens=i32(9, 9)), "block_table is expected to hold pages in [0, 5), "
                                              "got block_table[0, 2] = -1"),
    ("paged_attn", paged(block_table=torch.tensor([[0, 3, -1], [4, 5, 2]], dtype=torch.int32)),
     "block_table is expected to hold pages in [0, 5), got block_table[1, 1] = 5"),
    ("paged_attn", paged(cu_seqlens_q=i32(0, 2, 1), max_seqlen_q=2),
     "cu_seqlens_q is expected not to decrease, got cu_seqlens_q[2] = 1 after 2"),
    ("paged_attn", paged(cu_seqlens_q=i32(0, 1, 3), max_seqlen_q=2),
     "cu_seqlens_q is expected to end at or before the 2 tokens there are, got cu_seqlens_q[2] = "
     "3"),
    ("paged_attn", paged(cu_seqlens_q=i32(0, 0, 2), max_seqlen_q=1),
     "cu_seqlens_q is expected to hold sequences of at most max_seqlen 1 tokens, got 2 in "
     "sequence 1"),
    ("rope", rotary(positions=i32(0, 1, 6, 2, 3)), "positions is expected to hold rows of cos, "
                                                   "[0, 6), got 6 at token 2"),
    ("rope", rotary(positions=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, 4]])),
     "positions is expected to hold rows of cos, [0, 6), got -1 at token 8"),
    ("cross_entropy", classes(target=torch.tensor([[0, 6, -100], [7, 3, 1]])),
     "target is expected to hold classes in [0, 7) or ignore_index, got 7 in row 3"),
    ("cross_entropy", classes(ignore_index=0), "target is expected to hold classes in [0, 7) or "
                                               "ignore_index, got -100 in row 2"),
    (
        "sample_tokens",
        sampled_with_penalties(slots=torch.tensor([0, 2, -1])),
        "slots is expected to hold rows of counts, below 2, or negative ones, got slots[1] = 2",
    ),
    ("moe_unpermute", chosen(place=i32(3, 5, 4, 1, -1, 6, 2, -7).view(4, 2)),
     "place is expected to hold rows, below 6, or negative ones, got place[2, 1] = 6"),
    ("rope_kv_write", rotated_write(positions=i32(0, 1, 6)), "positions is expected to hold rows "
                                                             "of cos, [0, 6), got 6 at token 2"),
    ("rope_kv_write", rotated_write(slots=torch.tensor([0, 20, -1])),
     "slots is expected to hold slots below 20 (num_blocks * block_size), got slots[1] = 20"),
    ("kv_cache_write_latent", latent_write(slots=torch.tensor([0, 20, -1])),
     "slots is expected to hold slots below 20 (num_blocks * block_size), got slots[1] = 20"),
    ("kv_cache_write", write(slots=torch.tensor([0, 20, -1])),
     "slots is expected to hold slots below 20 (num_blocks * block_size), got slots[1] = 20"),
    ("kv_cache_write", write(slots=i32(3, 2, 2**31 - 1)),
     "slots is expected to hold slots below 20 (num_blocks * block_size), got slots[2] = "
     "2147483647"),
    ("kv_cache_write", write(slots=torch.tensor([2**62, 0, 1])),
     "slots is expected to hold slots below 20 (num_blocks * block_size), got slots[0] = "
     "4611686018427387904"),
]  # fmt: skip

VALUE_ERRORS += registry_quantised.VALUE_ERRORS
INDEX_ERRORS += registry_quantised.INDEX_ERRORS


@dataclass(frozen=True)
class Registered:
    """An op's entry in OPS."""

    make: Callable[..., dict]  # makes the arguments of a valid call; keywords change some of them
    gradients: tuple[str, ...] = ()  # arguments that have a gradient
    raw: str | None = None  # the raw op, which returns all results
    cast: tuple[str, ...] = ()  # arguments that autocast casts
    has_lse: bool = False  # the public function has return_lse
    explained: bool = False
    has_out: bool = False
    wide: tuple[str, ...] = ()  # arguments that are float32 in 16-bit calls
    # name -> changes of the valid call that select another code path
    variants: dict[str, dict] = field(default_factory=lambda: {"": {}})

    @property
    def errors(self) -> list:
        """The refused calls: (changed arguments, exception, text after the op's name)."""
        name = next(n for n, op in OPS.items() if op is self)
        tables = (VALUE_ERRORS, ValueError), (INDEX_ERRORS, IndexError)
        return [
            (kwargs, error, text)
            for table, error in tables
            for op, kwargs, text in table
            if op == name
        ]


OPS = {
    "gemm": Registered(
        product,
        ("a", "b", "bias", "c"),
        "gemm_fwd",
        cast=("a", "b", "bias", "c"),
        explained=True,
        has_out=True,
        variants={
            "": {},
            "two batches": dict(a=t(2, 1, 3, 4), b=t(2, 4, 5)),
            "bias, silu": dict(bias=t(5), activation="silu"),
            "c, relu": dict(c=t(3, 1), alpha=0.5, beta=-2.0, activation="relu"),
            "bias and c": dict(bias=t(5), c=t(2, 1, 5)),
            "bias, gelu": dict(bias=t(5), alpha=2.0, activation="gelu", fp32_precision="ieee"),
        },
    ),
    "flash_attn": Registered(
        dense,
        ("q", "k", "v", "sinks"),
        "flash_attn_fwd",
        cast=("q", "k", "v"),
        has_lse=True,
        explained=True,
        variants={
            "": {},
            "scale": dict(scale=0.5),
            "causal, slopes": dict(is_causal=True, diagonal=1, alibi_slopes=t(4)),
            "slopes of each, bounds": dict(
                alibi_slopes=t(2, 4), kv_start=i32(0, 2), kv_end=i32(6, 4)
            ),
            "sinks": dict(sinks=t(4), softcap=5.0),
            "places": dict(
                is_causal=True,
                window_left=3,
                q_start=i32(1, -2),
                kv_start=i32(0, 1),
                alibi_slopes=t(4),
            ),
            "sinks, places": dict(is_causal=True, q_start=i32(1, -2), sinks=t(4)),
            "sinks, slopes, bounds": dict(sinks=t(4), alibi_slopes=t(2, 4), kv_start=i32(0, 2)),
            "all": dict(
                is_causal=True,
                diagonal=3,
                window_left=40,
                window_right=1,
                softcap=3.0,
                scale=0.2,
                sinks=t(4),
                alibi_slopes=t(2, 4),
                kv_start=i32(0, 2),
                kv_end=i32(6, 4),
            ),
        },
    ),
    "flash_attn_varlen": Registered(
        packed,
        ("q", "k", "v", "sinks"),
        "flash_attn_varlen_fwd",
        cast=("q", "k", "v"),
        has_lse=True,
        explained=True,
        has_out=True,
        variants={
            "": {},
            "sinks, slopes": dict(is_causal=True, sinks=t(4), alibi_slopes=t(2, 4)),
            "window, sinks": dict(is_causal=True, window_left=2, sinks=t(4)),
        },
    ),
    "paged_attn": Registered(
        paged,
        (),
        "paged_attn_fwd",
        has_lse=True,
        explained=True,
        has_out=True,
        variants={
            "": {},
            "sinks": dict(sinks=t(4)),
            "lengths": dict(cu_seqlens_q=i32(0, 2, 2), max_seqlen_q=2),
            "to the right": dict(q=t(6, 4, 8), is_causal=False, window_left=3, window_right=1),
            "short": dict(q=t(6, 4, 8), seq_lens=i32(7, 2), allow_short=True),
            "all": dict(
                q=t(3, 4, 8),
                cu_seqlens_q=i32(0, 1, 3),
                max_seqlen_q=2,
                scale=0.2,
                window_left=4,
                softcap=3.0,
                sinks=t(4),
                alibi_slopes=t(2, 4),
                k_scale=t(2),
                v_scale=torch.tensor(1.0),
                kv_start=i32(0, 2),
            ),
        },
    ),
    "kv_cache_write": Registered(
        write,
        variants={
            "": {},
            "scales": dict(slots=i32(0, 19, -1), k_scale=t(2), v_scale=torch.tensor(1.0)),
        },
    ),
    "kv_cache_write_latent": Registered(
        latent_write, variants={"": {}, "int32": dict(slots=i32(0, 19, -1))}
    ),
    "rope_kv_write": Registered(
        rotated_write,
        explained=True,
        variants={
            "": {},
            "norms, scales": dict(
                q_weight=t(8), k_weight=t(8), eps=1e-3, k_scale=t(2), v_scale=torch.tensor(1.0)
            ),
            "interleaved": dict(interleaved=True, slots=i32(0, 19, -1)),
        },
    ),
    "attn_merge": Registered(merge, ("out_a", "lse_a", "out_b", "lse_b")),
    "rms_norm": Registered(
        normed,
        ("x", "weight", "bias", "residual"),
        explained=True,
        variants={
            "": {},
            "offset, bias, residual": dict(
                weight_offset=1.0, bias=t(8), residual=t(2, 3, 8), eps=1e-3
            ),
        },
    ),
    "layer_norm": Registered(
        normed,
        ("x", "weight", "bias", "residual"),
        explained=True,
        variants={"": {}, "bias, residual": dict(bias=t(8), residual=t(2, 3, 8))},
    ),
    "softmax": Registered(
        lambda **change: dict(x=t(2, 3, 8)) | change,
        ("x",),
        explained=True,
        variants={
            "": {},
            "scale, lengths": dict(
                scale=0.5, lengths=torch.tensor([[3, 8, 0], [9, -1, 7]], dtype=torch.int32)
            ),
        },
    ),
    "log_softmax": Registered(
        lambda **change: dict(x=t(2, 3, 8)) | change,
        ("x",),
        explained=True,
        variants={"": {}, "scale": dict(scale=0.5)},
    ),
    "swiglu": Registered(
        lambda **change: dict(gate=t(2, 3, 8)) | change,
        ("gate", "up"),
        explained=True,
        variants={"": {}, "up": dict(up=t(2, 3, 8))},
    ),
    "geglu": Registered(
        lambda **change: dict(gate=t(2, 3, 8)) | change,
        ("gate", "up"),
        explained=True,
        variants={"": {}, "up, tanh": dict(up=t(2, 3, 8), approximate="tanh")},
    ),
    "rope": Registered(
        rotary,
        ("q",),  # k has a gradient, too, but not from the first result: test_rows.py
        explained=True,
        variants={
            "": {},
            "positions": dict(positions=i32(5, 4, 3, 2, 0)),
            "interleaved, positions of each": dict(
                interleaved=True, positions=torch.tensor([[0, 1, 2, 3, 4], [5, 5, 0, 1, 2]])
            ),
            "packed": dict(q=t(5, 4, 8), k=t(5, 2, 8)),
        },
    ),
    "kl_div": Registered(
        distilled,
        ("logits",),
        explained=True,
        variants={
            "": {},
            "reverse": dict(beta=1.0),
            "all": dict(
                mask=torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.uint8),
                beta=0.3,
                temperature=1.7,
            ),
        },
    ),
    "moe_unpermute": Registered(
        chosen,
        ("rows", "weight"),
        explained=True,
        variants={
            "": {},
            "int64": dict(place=torch.tensor([[3, 5], [-1, -1], [0, 1], [2, 4]])),
            "one expert": dict(place=i32(5, 0, -1, 2).view(4, 1), weight=t(4, 1)),
        },
    ),
    "sample_tokens": Registered(
        sampled,
        wide=("temperature", "number", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        + ("repetition_penalty",),
        variants={"": {}, "all": sampled_with_penalties()},
    ),
    "dropout": Registered(dropped, ("x",), explained=True, variants={"": {}, "all": dict(p=1.0)}),
    "dropout_add": Registered(dropped_sum, ("x", "residual"), explained=True),
    "bias_gelu_dropout": Registered(
        dropped_gelu,
        ("x", "bias"),
        explained=True,
        variants={"": {}, "tanh": dict(approximate="tanh")},
    ),
    "cross_entropy": Registered(
        classes,
        ("logits",),
        explained=True,
        wide=("weight",),
        variants={
            "": {},
            "all": dict(
                weight=t(7),
                ignore_index=3,
                label_smoothing=0.1,
                softcap=5.0,
                logit_scale=0.5,
                z_loss=0.1,
                target=torch.tensor([[0, 6, 3], [3, 5, 1]]),
            ),
        },
    ),
}
# arguments of every op that are float32 in 16-bit calls
WIDE = ("alibi_slopes", "sinks", "lse_a", "lse_b", "k_scale", "v_scale", "cos", "sin")
IN_PLACE = {"kv_cache_write", "kv_cache_write_latent"}  # ops without a result
VARIANTS = tuple((name, variant) for name, op in OPS.items() for variant in op.variants)


def drawn(
    name: str,
    variant: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    copies: int = 0,
) -> dict:
    """A variant of a valid call with normal values. With `copies`, floating-point tensors have that
    dimension in front. Arguments that must be wider than `dtype` are at least float32."""
    gen = generator("registry", name, variant)
    call = OPS[name].make(**OPS[name].variants[variant])
    always_wide = WIDE + OPS[name].wide

    def draw(argument, x):
        if not isinstance(x, torch.Tensor):
            return x
        if not x.is_floating_point():
            return x.to(device)
        wide = torch.float32 if argument in always_wide and dtype.itemsize < 4 else dtype
        values = randn(gen, *(copies,) * (copies > 0), *x.shape, dtype=wide, device=device)
        # scales of a cache must be above 0
        return values.abs() + 0.1 if argument in ("k_scale", "v_scale") else values

    return {argument: draw(argument, x) for argument, x in call.items()}


class Bound:
    """A drawn call as a function of its floating-point tensors, `leaves`, that returns the first
    result. The valid call's arguments are passed by position. If the leaves are on meta, so are the
    other tensors."""

    def __init__(
        self,
        name: str,
        variant: str,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        fn=None,
        **more,
    ):
        self.name = name
        self.fn = fn or public(name)
        self.call = drawn(name, variant, device, dtype) | more
        self.names = [
            n for n, x in self.call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        self.leaves = [self.call[n] for n in self.names]
        self.positional = tuple(OPS[name].make())

    def want_gradients(self) -> list:
        """The leaves that have a gradient; sets requires_grad on them."""
        return [self.call[n].requires_grad_() for n in self.names if n in OPS[self.name].gradients]

    def results(self, *leaves) -> tuple:
        call = self.call | dict(zip(self.names, leaves, strict=True))
        if leaves and leaves[0].is_meta:
            call = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        result = self.fn(
            *(call[n] for n in self.positional),
            **{n: call[n] for n in call if n not in self.positional},
        )
        return result if isinstance(result, tuple) else (result,)

    def __call__(self, *leaves):
        return self.results(*leaves)[0]


def public(name: str) -> Callable:
    return getattr(torch_gpukern, name)


def op(name: str) -> Callable:
    return getattr(ops, name)

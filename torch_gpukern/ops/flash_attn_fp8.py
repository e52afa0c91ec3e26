# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn and flash_attn_varlen with float8_e4m3fn q, k and v: declarations of the ops that
serve them. The public functions in flash_attn.py and flash_attn_varlen.py call them and document
the arguments."""

from typing import Any

import torch

from .._library import NAMESPACE
from . import attention
from .define import Op, define_op

__all__ = [
    "FP8",
    "Coded",
    "declare",
    "refuse_dropout",
    "refuse_scales",
    "symbolic",
    "varlen_symbolic",
]

FP8 = torch.float8_e4m3fn


def refuse_scales(
    name: str, q: Any, q_scale: Any, k_scale: Any, v_scale: Any, v_mean: Any, accumulate: Any
) -> None:
    """Refuses arguments that only float8_e4m3fn calls have. ValueError if scales or v_mean are
    given, or if accumulate is an unknown word."""
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "v_mean": v_mean}
    for argument, x in given.items():
        if x is not None:
            dtype = str(getattr(q, "dtype", type(q).__name__)).removeprefix("torch.")
            raise ValueError(
                f"{NAMESPACE}::{name}: {argument} goes with a float8_e4m3fn q, got {dtype}"
            )
    if accumulate not in ("auto", "fast", "precise"):
        raise ValueError(
            f"{NAMESPACE}::{name}: accumulate must be auto, fast or precise, got '{accumulate}'"
        )


def refuse_dropout(name: str, p: Any) -> None:
    """ValueError unless p is 0: attention with 8-bit inputs is for inference."""
    if p != 0:
        raise ValueError(
            f"{NAMESPACE}::{name}: dropout_p must be 0 where q is float8_e4m3fn, got {p}"
        )


class Coded:
    """Calls the float8_e4m3fn op with the arguments of `plain`, the op of the other dtypes: those
    up to out_dtype, then the scales. An argument behind out_dtype must have its default."""

    def __init__(self, op: Op, plain: Op, *scales: Any):
        self.op, self.plain, self.scales = op, plain, scales

    def call(self, *args: Any) -> Any:
        shared, plain = self.op.places["q_scale"], self.plain
        for name, default, x in zip(plain.names[shared:], plain.defaults[shared:], args[shared:]):
            given = x is not None if default is None else x != default
            if given and name not in ("dropout_p", "dropout_seed"):  # refuse_dropout checked those
                raise ValueError(
                    f"{self.op.said}: {name} must be left out where q is float8_e4m3fn"
                )
        return self.op.call(*args[:shared], *self.scales)


# ---- fake functions ------------------------------------------------------------------------------


def symbolic(q, k, v, kv_start, kv_end, q_start, out_dtype, **_):
    bounds = {"kv_start": (kv_start, "B"), "kv_end": (kv_end, "B"), "q_start": (q_start, "B")}
    n = attention.sizes("flash_attn", q, k, v, **bounds)
    out = attention.empty_stored_like(q, n["Dv"], out_dtype or torch.bfloat16)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def varlen_symbolic(q, k, v, cu_seqlens_q, cu_seqlens_k, out_dtype, **_):
    lengths = {"cu_seqlens_q": (cu_seqlens_q, "B+1"), "cu_seqlens_k": (cu_seqlens_k, "B+1")}
    n = attention.sizes("flash_attn_varlen", q, k, v, **lengths)
    out = q.new_empty((*q.shape[:2], n["Dv"]), dtype=out_dtype or torch.bfloat16)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


# ---- declarations --------------------------------------------------------------------------------


def declare(name: str, symbolic: Any, flops: Any) -> Any:
    """Declares the op `name`_fp8. Its errors call it `name`."""
    op = define_op(
        f"{name}_fp8",
        symbolic=symbolic,
        refuse=f"{name}: it has no backward where q, k and v are float8_e4m3fn; train in 16 bits",
        flops=flops,
        whole_sequences=True,
    )
    op.said = op.all.said = f"{NAMESPACE}::{name}"
    return op

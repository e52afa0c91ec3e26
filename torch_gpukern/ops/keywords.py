# SPDX-License-Identifier: BSD-3-Clause
"""Errors for unknown keywords, and defaults that torch.compile accepts.

A call with a keyword of another library raises a TypeError that names our argument."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from .._library import NAMESPACE

__all__ = ["hide_unknown", "keep_defaults_constant", "number", "refuse_unknown"]

_MASK = "it takes no mask: is_causal, windows and lengths say which keys a query sees"
_NO_DROPOUT = "there is no dropout: leave it out"
_NO_ZERO = (
    "operands have no zero point: a zero point z of a is worth -z * scale_a * scale_b * b.sum(0), "
    "which bias or c adds"
)
_SCALES_ROUND_UP = (
    "scales of 1x32 are rounded up to a power of two, so that nothing saturates; codes made with "
    "other scales (torchao's FLOOR "
    "or EVEN) are taken by scaled_gemm and dequantize as they are"
)

# Keyword of another library -> names of arguments of ours that replace it, of which a function may have
# some; or a sentence that says what to do instead.
_OURS: dict[str, tuple[str, ...] | str] = {
    "causal": ("is_causal",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "window_size": ("window_left", "window_right"),
    "sliding_window": ("window_left", "window_right"),
    "logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "softmax_cap": ("softcap",),
    "s_aux": ("sinks",),
    "return_attn_probs": ("return_lse",),
    "return_softmax_lse": ("return_lse",),
    "cache_seqlens": ("seq_lens", "kv_end"),
    "context_lens": ("seq_lens", "kv_end"),
    "seqused_k": ("seq_lens", "kv_end"),
    "cache_leftpad": ("kv_start",),
    "leftpad_k": ("kv_start",),
    "q_descale": ("q_scale",),
    "k_descale": ("k_scale",),
    "v_descale": ("v_scale",),
    "attn_mask": _MASK,
    "attention_mask": ("attn_mask",),
    "attn_bias": ("bias",),
    "block_mask": ("attn_mask",),
    "score_mod": "scores can only be changed by scale, softcap, alibi_slopes, sinks and, in flash_attn, bias",
    "dropout_p": _NO_DROPOUT,  # of functions without it
    "dropout": ("dropout_p",),
    "p_dropout": ("dropout_p",),
    "enable_gqa": "heads are grouped whenever k has fewer heads than q: leave it out",
    "deterministic": "leave it out and call torch.use_deterministic_algorithms(True)",
    "num_splits": "long contexts are split automatically: leave it out",
    "act": ("activation",),
    "epilogue": ("activation",),
    "approximate": 'activation="gelu_tanh" is the approximate GELU',
    "dtype": ("out_dtype",),
    "allow_tf32": ("fp32_precision",),
    "out": "the op's .out overload, below torch.ops.gpukern, writes into the caller's tensor",
    "output_scale": "the result has 16 or 32 bits: divide it by the scale, clamp it and cast it "
    "to the 8-bit dtype",
    "zero_a": _NO_ZERO,
    "input_zero_point": _NO_ZERO,
    "zero_point": _NO_ZERO,
    "azp": _NO_ZERO,
    "rounding": _SCALES_ROUND_UP,
    "rounding_mode": _SCALES_ROUND_UP,
    "scale_calculation_mode": _SCALES_ROUND_UP,
    "scaling_mode": _SCALES_ROUND_UP,
    "lse_square_scale": ("z_loss",),
    "ce_weight": ("class_weight",),
    "return_z_loss": "the loss holds z_loss * lse^2: call it without z_loss too and take the "
    "difference",
    "return_predicted_tokens": "no class is returned beside the loss: logits.argmax(-1) finds it",
    "return_token_accuracy": "no accuracy is returned beside the loss: logits.argmax(-1) == "
    "target is it",
    "precomputed_lse": "lse is computed in the same pass as the loss: leave it out",
    "size_average": ("reduction",),
    "normalized_shape": "norms are over the last dimension: leave it out",
    "residual_in_fp32": "a float32 residual needs a float32 x: pass x.float() and cast the result",
}


def refuse_unknown(public: Callable, unknown: dict[str, Any], more: tuple = ()) -> NoReturn:
    """Raises TypeError for keywords that `public` does not have, or for positional arguments `more`
    that must be passed by name."""
    name = public.__name__
    parameters = [
        p for p in inspect.signature(public).parameters.values() if p.kind not in _REFUSED
    ]
    names = [p.name for p in parameters]
    if more:
        first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = names[len(first) :]
        by_name = f"pass {', '.join(rest)} by name" if rest else "there are no others"
        raise TypeError(
            f"{NAMESPACE}::{name}: it takes {len(first)} positional arguments "
            f"({', '.join(first)}), "
            f"got {len(first) + len(more)}; {by_name}"
        )
    given = next(iter(unknown))
    ours = _OURS.get(given)
    if isinstance(ours, tuple):
        ours = [n for n in ours if n in names]
        ours = f"use {' and '.join(ours)}" if ours else None
    raise TypeError(
        f"{NAMESPACE}::{name}: it has no argument '{given}'; "
        f"{ours or 'its arguments are ' + ', '.join(names)}"
    )


_REFUSED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def hide_unknown(public: Callable) -> None:
    """Hides `*more` and `**unknown` from inspect, help() and editors. They exist only so that
    `refuse_unknown` can raise."""
    signature = inspect.signature(public)
    parameters = [p for p in signature.parameters.values() if p.kind not in _REFUSED]
    public.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


_HIDDEN = "default "  # in front of a number


def keep_defaults_constant(public: Callable) -> None:
    """Replaces float defaults by values that torch.compile treats as constants. inspect and help()
    still show floats.

    With dynamic=True a float default becomes an input of the graph, made in the subgraph that reads
    it first, such as a checkpointed block or an autograd Function. The next subgraph that reads it
    finds the input of the first and fails (torch 2.10 to 2.14). Integers and strings are constants.
    So 0.0 and 1.0 become the integers 0 and 1, and every other float becomes a string, which the
    public function reads with `number`.
    """
    public.__signature__ = inspect.signature(public)  # type: ignore[attr-defined]

    def hidden(default: Any) -> Any:
        if not isinstance(default, float):
            return default
        return int(default) if default in (0.0, 1.0) else f"{_HIDDEN}{default!r}"

    public.__kwdefaults__ = {n: hidden(d) for n, d in (public.__kwdefaults__ or {}).items()}  # type: ignore[attr-defined]
    public.__defaults__ = tuple(map(hidden, public.__defaults__ or ()))  # type: ignore[attr-defined]


def number(given: float) -> float:
    """The value of a float argument whose default `keep_defaults_constant` replaced by a
    string."""
    return (
        float(given[len(_HIDDEN) :]) if type(given) is str and given.startswith(_HIDDEN) else given
    )

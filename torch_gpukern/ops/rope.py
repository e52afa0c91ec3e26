# SPDX-License-Identifier: BSD-3-Clause
"""rope, rotary embedding of queries and keys: the public function and its declaration."""

from torch import Tensor

from . import attention, autocast
from .define import define_op

__all__ = ["rope"]


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of columns of queries and keys by the angles of their tokens' positions, both
    in one launch.

    In float32, rounded once (float64 for float64)::

        (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)

    Args:
        q: [B, Hq, S, D], or packed [T, Hq, D]; float32, bfloat16, float16 or float64, any strides;
            If the last dimension is not contiguous, it is copied first.
        k: [B, Hkv, S, D], or packed [T, Hkv, D], q's dtype.
        cos: [P, R / 2] float32 (float64 with float64), a row for each position. The first R <= D
            columns are rotated, the others copied.
        sin: likewise.
        positions: [S] or [B, S] (packed [T]), int32 or int64: rows of cos and sin. None is
            0 .. S - 1.
        interleaved: x1 and x2 are columns 2 i and 2 i + 1. By default they are columns i and
            i + R / 2.

    Returns:
        (q, k) rotated, in their dtype, each stored in the order of its argument's dimensions.

    Gradients: q and k. Twice differentiable. Under autocast both take the wider of their dtypes.

    Raises:
        ValueError: a shape or dtype that the op does not take.
        IndexError: a position outside cos. CUDA uses the last row instead, and the next call of an
            op or `check_errors` raises the error.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021),
    arXiv:2104.09864.
    """
    return _rope.call(q, k, cos, sin, positions, interleaved, False)


def _symbolic(q, k, **_):
    def like(x):
        return attention.empty_stored_like(x, x.shape[-1]) if x.dim() == 4 else x.new_empty(x.shape)

    return like(q), q.new_empty(0) if k is None else like(k)


def _save(needs, args, out_q, out_k):
    cos, sin = args[2:4]
    return (cos, sin, args[4] if len(args) > 4 else None), {}


def _backward(needs, cos, sin, positions, interleaved, inverse, grad_out_q, grad_out_k, **_):
    how = {
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "interleaved": interleaved,
        "inverse": not inverse,
    }
    made: dict[str, Tensor | None] = {"q": None, "k": None}
    grads = {"q": grad_out_q, "k": grad_out_k if "k" in needs else None}
    given = [name for name, grad in grads.items() if grad is not None]
    if given:
        results = _rope.call_named(
            q=grads[given[0]], k=grads[given[1]] if len(given) > 1 else None, **how
        )
        made.update(zip(given, results, strict=False))
    return made


_rope = define_op(
    "rope",
    public=rope,
    symbolic=_symbolic,
    save=_save,
    saved=("cos", "sin", "positions"),
    backward=_backward,
    autocast=autocast.widest("q", "k", vectors=("cos", "sin")),
    without_gradient=("cos", "sin"),
)

# SPDX-License-Identifier: BSD-3-Clause
"""moe_unpermute, the end of a mixture of experts: the public function, and the declarations of the
op and of its backward. Each is the other's gradient, so both may be differentiated as often as
asked for."""

import torch
from torch import Tensor

from . import fakes
from .define import define_op

__all__ = ["moe_unpermute"]


def moe_unpermute(rows: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """Each token's weighted sum of its experts' rows, the end of a mixture of experts:
    ``out[t] = sum over j of weight[t, j] * rows[place[t, j]]``. One pass over memory.

    In float32 (float64 for float64), summed in the order of j and rounded once. Every call gives
    the same bits.

    Args:
        rows: [R, H] float32, bfloat16, float16 or float64. Rows may have any stride. If the last
            dimension is not contiguous, rows are copied first.
        place: [T, J] int32 or int64: the row of each token's j-th expert. A place below 0 marks a
            dropped token. It adds nothing, and no row is read for it. Rows that no place names are
            not read either: they may hold NaN.
        weight: [T, J] float32 or rows' dtype. The weight of a place below 0 may be NaN.

    Returns:
        [T, H] in rows' dtype, contiguous.

    Gradients: rows and weight, as often as asked for. The gradient of a row that no place names is
    0. That of a row that several places name is their sum in the order of places, rounded once.
    The gradient of a weight is a dot product over H. Sums are float32, and float64 for float64 rows.

    Raises:
        ValueError: a shape or dtype that the op does not take.
        IndexError: a place that is not below R. On CUDA it adds nothing, and the next call or
            `check_errors` raises.

    Gale et al., "MegaBlocks" (2022), arXiv:2211.15841.
    """
    return _moe_unpermute.call(rows, place, weight)


def _symbolic(rows, place, **_):
    return (rows.new_empty((place.shape[0], rows.shape[1])),)


def _bwd_symbolic(grad_out, rows, place, need_rows, need_weight, **_):
    return (
        rows.new_empty(rows.shape if need_rows else 0),
        rows.new_empty(place.shape if need_weight else 0, dtype=fakes.stats_dtype(rows)),
    )


def _save(needs, args, out):
    return args, {}


def _backward(needs, rows, place, weight, grad_out, **values):
    grad = grad_out if grad_out is not None else values["grad_"]
    drows, dweight = _moe_unpermute_bwd.call(
        grad, rows, place, weight, "rows" in needs, "weight" in needs
    )
    return {"rows": drows, "weight": dweight.to(weight.dtype)}


def _bwd_backward(
    needs, grad_out, rows, place, weight, need_rows, need_weight, grad_drows, grad_dweight, **_
):
    """drows is linear in weight and in grad_out, dweight in grad_out and in rows."""
    made = {}

    def add(name: str, gradient: Tensor) -> None:
        made[name] = gradient if name not in made else made[name] + gradient

    if need_rows and grad_drows is not None:
        if "grad_out" in needs:
            add("grad_out", _moe_unpermute.call(grad_drows, place, weight))
        if "weight" in needs:
            found = _moe_unpermute_bwd.call(grad_out, grad_drows, place, weight, False, True)[1]
            add("weight", found.to(weight.dtype))
    if need_weight and grad_dweight is not None:
        by = grad_dweight if rows.dtype is torch.float64 else grad_dweight.float()
        if "grad_out" in needs:
            add("grad_out", _moe_unpermute.call(rows, place, by))
        if "rows" in needs:
            add("rows", _moe_unpermute_bwd.call(grad_out, rows, place, by, True, False)[0])
    return made


def _own_places(size: int, place: Tensor, rows: int) -> Tensor:
    """place [size, T, J] in `size` times `rows` rows. A place that is out of range stays so."""
    own = place.long() + rows * torch.arange(size, device=place.device)[:, None, None]
    return torch.where(place < 0, -1, torch.where(place < rows, own, size * rows)).flatten(0, 1)


def _spread(size: int, batched: set[str], **given: Tensor) -> dict[str, Tensor]:
    return {n: x if n in batched else x.expand(size, *x.shape) for n, x in given.items()}


def _fold(size, batched, rows, place, weight, **_):
    every = _spread(size, batched - {"rows"}, place=place, weight=weight)
    if "rows" in batched:
        own = _own_places(size, every["place"], rows.shape[1])
        rows = rows.flatten(0, 1)
    else:
        own = every["place"].flatten(0, 1)
    changed = {"rows": rows, "place": own, "weight": every["weight"].flatten(0, 1)}
    return changed, lambda name, x: x.unflatten(0, (size, -1) if x.shape[0] else (size, 0))


def _bwd_fold(size, batched, grad_out, rows, place, weight, need_rows, need_weight):
    every = _spread(size, batched, grad_out=grad_out, rows=rows, place=place, weight=weight)
    counts = {"drows": every["rows"].shape[1], "dweight": every["place"].shape[1]}
    missing = {"drows": not need_rows, "dweight": not need_weight}
    every["place"] = _own_places(size, every["place"], counts["drows"])
    changed = {n: x if n == "place" else x.flatten(0, 1) for n, x in every.items()}

    def unfold(name: str, x: Tensor) -> Tensor | None:
        return None if missing[name] else x.unflatten(0, (size, counts[name]))

    return changed, unfold


def _flops(rows, place, **_) -> int:
    return 2 * place[0] * place[1] * rows[1]


def _bwd_flops(rows, place, need_rows, need_weight, **_) -> int:
    return place[0] * place[1] * rows[1] * (need_rows + 2 * need_weight)


_moe_unpermute_bwd = define_op(
    "moe_unpermute_bwd",
    symbolic=_bwd_symbolic,
    save=lambda needs, args, *results: (args[:4], {}),
    saved=("grad_out", "rows", "place", "weight"),
    backward=_bwd_backward,
    flops=_bwd_flops,
    fold=_bwd_fold,
)
_moe_unpermute = define_op(
    "moe_unpermute",
    public=moe_unpermute,
    symbolic=_symbolic,
    save=_save,
    saved=("rows", "place", "weight"),
    backward=_backward,
    flops=_flops,
    fold=_fold,
)

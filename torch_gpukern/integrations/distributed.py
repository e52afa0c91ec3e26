# SPDX-License-Identifier: BSD-3-Clause
"""Sharding rules of gemm, flash_attn, flash_attn_varlen, their backwards, paged_attn and
kv_cache_write for DTensor.

There is nothing to call: the first call of an op after torch.distributed.tensor has been imported
registers the rules. Then the ops work in tensor-parallel layers (`parallelize_module`) and under
FSDP2 as torch's own ops do. A rule says which shards a rank can compute alone:

- gemm: rows of a, columns of b, or a batch dimension. Without an activation also shards of K, whose
  products are summed afterwards (Partial); one rank then adds bias and c.
- flash_attn: the batch, or the heads if the number of shards divides both the heads of q and those
  of k and v.
- flash_attn_varlen, paged_attn: the heads, under the same condition. So each rank decodes with its
  heads over a cache of its heads.
- kv_cache_write: the heads. The caches are not moved: k and v are redistributed to the placement of
  the caches. Caches that are sharded in another dimension are refused.

Attention with dropout has no rule, because the dropout mask depends on a row's index among all
rows.

Every other placement is redistributed first, as DTensor does for torch's ops: the result is correct
and the call costs an all-gather. `attn_merge`, `flash_attn_accumulate`, attention with a mask or a
bias, and the .out overloads have no rule, and DTensor refuses them by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from .._library import ops

__all__ = ["register"]

_Sizes = dict[str, Sequence[int]]  # the shape of each tensor argument, by name
_Rule = dict[str, Placement]  # the placement of arguments and results, by name; others: Replicate


def register() -> None:
    """Registers the rules with DTensor. The first call that needs them does it."""
    for name, rules in _RULES.items():
        _register(getattr(ops, name).default, rules)
    DTensor._op_dispatcher._custom_op_handlers[ops.kv_cache_write.default] = _write_local_heads


def _register(op: OpOverload, rules: Callable[[_Sizes, dict], list[_Rule]]) -> None:
    """Registers the rules of one op. Replicating everything is always allowed as well."""
    arguments, results = op._schema.arguments, [r.name or "out" for r in op._schema.returns]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def strategy(schema: OpSchema) -> OpStrategy:
        given = dict(zip((a.name for a in arguments), schema.args_schema)) | schema.kwargs_schema
        tensors = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, OpStrategy)}
        others = {name: x for name, x in given.items() if name not in tensors}
        names = [*results, *tensors]
        placements = [
            [rule.get(name, Replicate()) for name in names]
            for rule in [{}, *rules(tensors, defaults | others)]
        ]
        mesh = schema.get_mesh_from_args()
        found = expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=len(results))
        heads = [
            (i, _HEADS[name], x[_HEADS[name]])
            for i, (name, x) in enumerate(tensors.items())
            if name in _HEADS
        ]
        if heads:  # with unequal shards, a query head's keys may be on another rank
            found.strategies = [
                s
                for s in found.strategies
                if all(_divides(s.input_specs[i], dim, size) for i, dim, size in heads)
            ]
        return found

    # DTensor caches a rule's answer. Its key has the tensors' specs and every argument from a given
    # index on. That index is the first argument that is not always a tensor, so that the key tells
    # which optional tensors are None.
    from_here = next(i for i, a in enumerate(arguments) if str(a.type) != "Tensor")
    info = RuntimeSchemaInfo(from_here, None, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategy, info)


def _divides(spec: Any, dim: int, size: int) -> bool:
    """Whether the shards of a dimension are equal."""
    shards = 1
    for ranks, placement in zip(spec.mesh.shape, spec.placements):
        if placement.is_shard(dim):
            shards *= ranks
    return size % shards == 0


# ---- gemm ----------------------------------------------------------------------------------------


def _gemm(sizes: _Sizes, given: dict) -> list[_Rule]:
    a, b, c = len(sizes["a"]), len(sizes["b"]), len(sizes.get("c", ()))  # numbers of dimensions
    out = max(a, b)
    saves = given["activation"] not in ("none", "relu")  # preact is a result for the backward

    def of(dim: int, **operands: Placement) -> _Rule:
        """The rule for shards of dimension `dim` of the result; the last one is -1."""
        rule = {"out": Shard(out + dim), **operands}
        if saves:
            rule["preact"] = rule["out"]
        if c >= -dim and sizes["c"][dim] != 1:
            rule["c"] = Shard(c + dim)
        return rule

    rules = [of(-2, a=Shard(a - 2)), of(-1, b=Shard(b - 1), bias=Shard(0))]
    for dim in range(-out, -2):
        operands = {
            n: Shard(d + dim) for n, d in (("a", a), ("b", b)) if d >= -dim and sizes[n][dim] != 1
        }
        if operands:
            rules.append(of(dim, **operands))
    if given["activation"] == "none":  # linear in k: one rank adds bias and c
        rules.append(
            {"a": Shard(a - 1), "b": Shard(b - 2), **dict.fromkeys(("bias", "c", "out"), Partial())}
        )
    return rules


def _gemm_act_bwd(sizes: _Sizes, given: dict) -> list[_Rule]:
    return [
        {n: Shard(dim) for n in ("grad_out", "saved", "grad_in")}
        for dim in range(len(sizes["saved"]))
    ]


# ---- attention -----------------------------------------------------------------------------------

_HEADS = {"q": 1, "k": 1, "k_cache": 2}  # the dimension of the heads
_OF_QUERIES = ("q", "out", "lse", "grad_out", "grad_lse", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")


def _heads(sizes: _Sizes, given: dict) -> list[_Rule]:
    if given["dropout_p"] > 0:
        # The dropout mask depends on a row's index in the whole tensor. With shards, every rank
        # would use the same mask.
        return []
    rule = {name: Shard(1) for name in (*_OF_QUERIES, *_OF_KEYS)}
    if "alibi_slopes" in sizes:
        rule["alibi_slopes"] = Shard(len(sizes["alibi_slopes"]) - 1)
    if "sinks" in sizes:
        rule["sinks"] = rule["dsinks"] = Shard(0)
    return [rule]


def _batch_or_heads(sizes: _Sizes, given: dict) -> list[_Rule]:
    if given["dropout_p"] > 0:
        return []
    rule: _Rule = {
        name: Shard(0) for name in (*_OF_QUERIES, *_OF_KEYS, "q_start", "kv_start", "kv_end")
    }
    if len(sizes.get("alibi_slopes", ())) == 2:
        rule["alibi_slopes"] = Shard(0)
    if "sinks" in sizes:
        rule["dsinks"] = Partial()
    return [rule, *_heads(sizes, given)]


def _paged_heads(sizes: _Sizes, given: dict) -> list[_Rule]:
    rule: _Rule = {
        "q": Shard(1),
        "out": Shard(1),
        "lse": Shard(1),
        "k_cache": Shard(2),
        "v_cache": Shard(2),
    }
    # [heads], or [..., heads]; a scale may be one number
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
        if sizes.get(name):
            rule[name] = Shard(len(sizes[name]) - 1)
    return [rule]


def _write_local_heads(op: OpOverload, args: tuple, kwargs: dict) -> None:
    """kv_cache_write: each rank writes the heads of its own part of the caches."""
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    where = {
        name: given[name].placements
        for name in ("k_cache", "v_cache")
        if isinstance(given[name], DTensor)
    }
    placed = next(iter(where.values()), ())
    if (
        len(where) < 2
        or len(set(where.values())) > 1
        or not all(p.is_replicate() or p.is_shard(2) for p in placed)
    ):
        raise ValueError(
            "gpukern::kv_cache_write: k_cache and v_cache must be DTensors that are replicated or "
            "sharded in dimension 2, the heads, "
            f"both alike; got {where or 'plain tensors'}"
        )
    mesh = given["k_cache"].device_mesh
    heads = given["k_cache"].shape[2]
    if not _divides(given["k_cache"]._spec, 2, heads):
        raise ValueError(
            f"gpukern::kv_cache_write: the {heads} heads of k_cache are not a multiple of its "
            f"shards"
        )
    local = {}
    for name, x in given.items():
        if isinstance(x, DTensor):
            dim = {"k": 1, "v": 1, "k_cache": 2, "v_cache": 2, "slots": None}.get(
                name, x.dim() - 1 if x.dim() else None
            )
            wanted = [
                Shard(dim) if p.is_shard() and dim is not None else Replicate() for p in placed
            ]
            x = x.redistribute(mesh, wanted).to_local()
        elif x is not None and name != "slots":
            raise ValueError(
                f"gpukern::kv_cache_write: {name} must be a DTensor, as the caches are"
            )
        local[name] = x
    op(**local)


_RULES = {
    "gemm": _gemm,
    "gemm_fwd": _gemm,
    "gemm_act_bwd": _gemm_act_bwd,
    "flash_attn": _batch_or_heads,
    "flash_attn_fwd": _batch_or_heads,
    "flash_attn_bwd": _batch_or_heads,
    "flash_attn_varlen": _heads,
    "flash_attn_varlen_fwd": _heads,
    "flash_attn_varlen_bwd": _heads,
    "paged_attn": _paged_heads,
    "paged_attn_fwd": _paged_heads,
}

# SPDX-License-Identifier: BSD-3-Clause
"""Sharding rules of gemm, flash_attn, flash_attn_varlen and their backwards for DTensor.

There is nothing to call: the first op that is given a DTensor registers them. With them the ops stand in tensor-parallel
layers (`parallelize_module`) and under FSDP2 as torch's own do. A rule says which shards a rank may compute alone:

- gemm: rows of a, columns of b, dimensions of the batch; and, without an activation, shards of K, whose products are summed
  afterwards (Partial). One rank then adds bias and c.
- flash_attn: the batch; heads, only where the shards divide those of q and those of k and v alike.
- flash_attn_varlen: heads likewise.

Every other placement is redistributed first, as DTensor does for torch's ops: the result is right and the call costs an
all-gather. `kv_cache_write`, `paged_attn`, `attn_merge` and the .out overloads have no rule, and DTensor refuses them by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from .._library import ops

__all__ = ["register"]

# By the names of arguments and results, those that are tensors: their sizes, and where one is sharded.
_Sizes = dict[str, Sequence[int]]
_Rule = dict[str, Placement]


def register() -> None:
    """Gives DTensor the rules; done by the first call that needs them."""
    for name, rules in _RULES.items():
        _register(getattr(ops, name).default, rules)


def _register(op: OpOverload, rules: Callable[[_Sizes, dict], list[_Rule]]) -> None:
    arguments, results = op._schema.arguments, [r.name or "out" for r in op._schema.returns]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def strategy(schema: OpSchema) -> OpStrategy:
        given = dict(zip((a.name for a in arguments), schema.args_schema)) | schema.kwargs_schema
        tensors = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, OpStrategy)}
        others = {name: x for name, x in given.items() if name not in tensors}
        names = [*results, *tensors]
        placements = [
            [rule.get(name, Replicate()) for name in names] for rule in [{}, *rules(tensors, defaults | others)]
        ]
        mesh = schema.get_mesh_from_args()
        found = expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=len(results))
        heads = [(i, shape[1]) for i, (name, shape) in enumerate(tensors.items()) if name in ("q", "k")]
        if heads:  # of unequal shards a query head would read another's keys
            found.strategies = [
                s for s in found.strategies if all(_divides(s.input_specs[i], 1, size) for i, size in heads)
            ]
        return found

    # DTensor keeps what a rule said by the specs of tensors and all arguments from a number on. From the first on that may be
    # something else than a tensor: None is an answer too, and of two optional tensors one may be given.
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
    a, b, c = len(sizes["a"]), len(sizes["b"]), len(sizes.get("c", ()))
    out = max(a, b)
    saves = given["activation"] not in ("none", "relu")

    def of(dim: int, **operands: Placement) -> _Rule:
        """Of dimension `dim` of the result, the last being -1."""
        rule = {"out": Shard(out + dim), **operands}
        if saves:
            rule["preact"] = rule["out"]
        if c >= -dim and sizes["c"][dim] != 1:
            rule["c"] = Shard(c + dim)
        return rule

    rules = [of(-2, a=Shard(a - 2)), of(-1, b=Shard(b - 1), bias=Shard(0))]
    for dim in range(-out, -2):
        operands = {n: Shard(d + dim) for n, d in (("a", a), ("b", b)) if d >= -dim and sizes[n][dim] != 1}
        if operands:
            rules.append(of(dim, **operands))
    if given["activation"] == "none":  # linear: what is added is added by one rank
        rules.append({"a": Shard(a - 1), "b": Shard(b - 2), **dict.fromkeys(("bias", "c", "out"), Partial())})
    return rules


def _gemm_act_bwd(sizes: _Sizes, given: dict) -> list[_Rule]:
    return [{n: Shard(dim) for n in ("grad_out", "saved", "grad_in")} for dim in range(len(sizes["saved"]))]


# ---- attention -----------------------------------------------------------------------------------

_OF_QUERIES = ("q", "out", "lse", "grad_out", "grad_lse", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")


def _heads(sizes: _Sizes, given: dict) -> list[_Rule]:
    rule = {name: Shard(1) for name in (*_OF_QUERIES, *_OF_KEYS)}
    if "alibi_slopes" in sizes:
        rule["alibi_slopes"] = Shard(len(sizes["alibi_slopes"]) - 1)
    if "sinks" in sizes:
        rule["sinks"] = rule["dsinks"] = Shard(0)
    return [rule]


def _batch_or_heads(sizes: _Sizes, given: dict) -> list[_Rule]:
    rule: _Rule = {name: Shard(0) for name in (*_OF_QUERIES, *_OF_KEYS, "q_start", "kv_start", "kv_end")}
    if len(sizes.get("alibi_slopes", ())) == 2:
        rule["alibi_slopes"] = Shard(0)
    if "sinks" in sizes:
        rule["dsinks"] = Partial()
    return [rule, *_heads(sizes, given)]


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
}

# SPDX-License-Identifier: BSD-3-Clause
"""Attention and products over several ranks of torch.distributed: the same code by NCCL on GPUs and
by gloo on a CPU.

A rank is a process of a `ProcessGroup`. Context parallel functions take tensors whose sequence is
cut over the ranks, tensor parallel ones matrices whose rows or columns are. Functions of tensors
have gradients (but `context_parallel_paged_attn`) and a fake function for torch.compile with
fullgraph (but `expert_parallel`, whose host waits for counts), and give on a group of one rank what
the op of one GPU gives.

**Bits.** What is summed over ranks is summed in float32, always in the same order, and rounded
once. So the same call gives the same bits each time.

**Disagreement.** Ranks whose shapes, dtypes or arguments differ would wait for each other for ever,
or read foreign memory. Each call first compares them over the group; where they differ, every rank
raises a ValueError that names the argument and what two of the ranks passed. That costs one small
exchange, on CUDA with a wait of the host. ``GPUKERN_DIST_CHECK=0`` leaves it out, and so does a
call inside a CUDA graph's capture.

**A rank that dies.** The others get torch.distributed's error or its timeout, never a result.
"""

from .attention import context_parallel_attn, context_parallel_attn_varlen
from .estimate import Estimate, Machine, estimate
from .experts import expert_parallel, shard_experts
from .loss import vocab_parallel_linear_cross_entropy
from .paged import context_parallel_paged_attn
from .products import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from .sequence import gather_sequence, positions, shard_sequence
from .sms import sm_limit

__all__ = [
    "Estimate",
    "Machine",
    "all_gather_gemm",
    "context_parallel_attn",
    "context_parallel_attn_varlen",
    "context_parallel_paged_attn",
    "estimate",
    "expert_parallel",
    "gather_sequence",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "positions",
    "shard_experts",
    "shard_sequence",
    "sm_limit",
    "vocab_parallel_linear_cross_entropy",
]

# SPDX-License-Identifier: BSD-3-Clause
"""Attention and products over several ranks of torch.distributed, over NCCL on GPUs and over gloo
on a CPU.

A rank is a process of a `ProcessGroup`. Context-parallel functions take tensors whose sequence is
cut over the ranks. Tensor-parallel functions take matrices whose rows or columns are cut over the
ranks. All functions have gradients, except `context_parallel_paged_attn`. All work under
torch.compile with fullgraph, except `expert_parallel`, whose host waits for counts. On a group of
one rank, each gives the result of the corresponding single-GPU op.

**Reproducibility.** Sums over ranks are computed in float32 in rank order and rounded once. So the
same call gives the same bits each time.

**Disagreement.** If ranks passed different shapes, dtypes or arguments, they would wait for each
other for ever or read the wrong memory. So each call first compares its arguments over the group.
If they differ, every rank raises a ValueError that names the argument and two of the values. The
comparison costs one small exchange; on CUDA the host waits for it. ``GPUKERN_DIST_CHECK=0``
switches it off. It is also skipped while a CUDA graph is captured.

**A rank that dies.** The others get torch.distributed's error or its timeout, never a result.
"""

from .attention import context_parallel_attn, context_parallel_attn_varlen
from .embedding import vocab_parallel_embedding
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
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]

# SPDX-License-Identifier: BSD-3-Clause
"""SharedPrefix: the keys that sequences of a paged_attn call have in common."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["SharedPrefix"]


class SharedPrefix(NamedTuple):
    """The first keys of sequences whose block tables begin with the same pages, for `paged_attn`.

    Neighbouring sequences of the call form groups, and the sequences of a group share their first
    keys. `PagedKVCache.shared_prefix` makes one from its pages. All tensors are int32 and lie on
    the device of q.

    Attributes:
        block_table: [G, columns], the pages of each group's shared keys.
        seq_lens: [G], the shared keys of each group: 0 if its sequences share nothing, otherwise at
            least as many as the group has query tokens. Every query of the group stands behind
            them, or on the last of them.
        cu_seqlens_q: [G + 1]: group g owns query tokens ``cu_seqlens_q[g]`` to
            ``cu_seqlens_q[g + 1]``.
        kv_start: [B], the shared keys of each sequence: ``seq_lens`` of its group.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    kv_start: Tensor

"""One interval of keys a sequence, wherever a device's number says: packed calls over a padded batch, no copy and no host."""

import torch
from torch import Tensor


def cu_seqlens(first: Tensor, stop: Tensor, seq_q: int, seq_k: int) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k) [3 B + 1] int32 for B sequences that lie seq_q queries and seq_k keys apart.

    Each becomes three packed ones: the keys before first[b], which meet no query, those in [first[b], stop[b]), which all
    its queries meet, the last query at the last key, and the rest. first <= stop, both [B] int32 in [0, seq_k].
    """
    base = torch.arange(first.shape[0] + 1, dtype=torch.int32, device=first.device)
    here, end = base[:-1], base[-1:]
    cu_q = torch.stack([here * seq_q, here * seq_q, (here + 1) * seq_q], 1).flatten()
    cu_k = torch.stack([here * seq_k, here * seq_k + first, here * seq_k + stop], 1).flatten()
    return torch.cat([cu_q, end * seq_q]), torch.cat([cu_k, end * seq_k])

# SPDX-License-Identifier: BSD-3-Clause
"""A limit on the SMs that persistent kernels take."""

import contextlib
from collections.abc import Iterator

from .._library import ops

__all__ = ["sm_limit"]


@contextlib.contextmanager
def sm_limit(sms: int) -> Iterator[None]:
    """Context in which persistent kernels leave SMs free for kernels on other streams, for example
    NCCL's.

    A persistent kernel keeps every SM busy until all its work is done, so kernels launched later on
    other streams wait. Under the limit, `gemm`, the quantised products, `flash_attn` (forward) and
    `paged_attn` launch grids that fit `sms` SMs. The backward of attention and small kernels are
    not limited. If the limit changes how keys or k are split, the last bits of results change.

    The limit belongs to the process, like PyTorch's own SM carveout: it holds on every GPU and in
    every thread, including backward's. A captured graph keeps the limit of its capture. On the CPU
    it has no effect.

    Args:
        sms: number of SMs; 0, or at least as many as the GPU has, is no limit.

    Raises:
        ValueError: sms is negative.

    Example:
        >>> with gd.sm_limit(116):  # an H100 has 132
        ...     out = gk.gemm(a, b)
    """
    before = ops.limit_sms(sms)
    try:
        yield
    finally:
        ops.limit_sms(before)

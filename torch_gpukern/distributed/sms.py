# SPDX-License-Identifier: BSD-3-Clause
"""How many SMs of a GPU kernels may take whose blocks stay on their SM."""

import contextlib
from collections.abc import Iterator

from .._library import ops

__all__ = ["sm_limit"]


@contextlib.contextmanager
def sm_limit(sms: int) -> Iterator[None]:
    """Context in which persistent kernels leave SMs free for what runs on other streams, NCCL's
    kernels and copies that need SMs.

    A persistent kernel launches a block for each SM and holds it until all its work is done, so
    that whatever comes later waits. Under the limit `gemm`, the quantised products, `flash_attn`
    (forward) and `paged_attn` launch what `sms` SMs hold. The backward of attention and small
    kernels launch as many blocks as they have work, as ever. Where the limit changes how keys or k
    are split, the last bits change with it.

    The limit is the process's, as that of PyTorch's own SM carveout is: it holds on every GPU and
    in every thread, backward's too. A captured graph keeps the limit of its capture. On the CPU it
    means nothing.

    Args:
        sms: 0, or at least as many as the GPU has, is no limit.

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

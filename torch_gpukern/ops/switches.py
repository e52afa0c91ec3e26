# SPDX-License-Identifier: BSD-3-Clause
"""Switches of the process that public functions read."""

from .._library import ops

__all__ = ["batch_invariant"]

# Compiled code guards on this variable, so changing it compiles functions again.
is_batch_invariant = False


class batch_invariant:
    """Switches batch invariance on or off, for the process.

    While it is on, every `paged_attn` call behaves as with ``batch_invariant=True``: the bits of a
    sequence's results depend on that sequence alone, not on the other sequences of the call. The
    bits of a row of a product, a norm, a softmax or `quantize` then depend on that row and on the
    other operand alone, and those of `flash_attn` on the sequence. docs/numerics.md says what holds
    where, and what it costs. Instances that `gpukern tune` found are not used while it is on. A
    captured graph keeps the state at its capture. A plain call switches for good. As a context
    manager, it restores the previous state.

    Args:
        on: the new state.

    Example:
        >>> torch_gpukern.batch_invariant(True)
        >>> with torch_gpukern.batch_invariant(False):
        ...     out = torch_gpukern.paged_attn(q, k_cache, v_cache, block_table, seq_lens)
    """

    def __init__(self, on: bool = True) -> None:
        global is_batch_invariant
        if not isinstance(on, bool):
            raise TypeError(
                f"batch_invariant: on is expected to be a bool, got {type(on).__name__}"
            )
        self.before = is_batch_invariant
        is_batch_invariant = on
        ops.set_batch_invariant(on)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global is_batch_invariant
        is_batch_invariant = self.before
        ops.set_batch_invariant(self.before)

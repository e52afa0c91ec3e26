# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention backend GPUKERN: ``vllm serve MODEL --attention-backend GPUKERN``.

vLLM calls `register` through the entry point ``vllm.general_plugins`` in each of its processes. The
backend itself is in `vllm_backend`, which vLLM imports when it is chosen. Nothing else of gpukern
imports either.
"""

import warnings

__all__ = ["register"]

NAME = "GPUKERN"
PATH = "torch_gpukern.integrations.vllm_backend.GpukernBackend"


def register() -> None:
    """Adds the backend to vLLM's list. A second call changes nothing.

    A vLLM whose list takes no new names is left as it is, with a warning: a plugin that raises
    would end every vLLM of the environment.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        add = AttentionBackendEnum.register
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"gpukern: this vLLM takes no new attention backend ({error}); {NAME} needs vLLM 0.33 "
            f"or later",
            stacklevel=2,
        )
        return
    if NAME not in AttentionBackendEnum.__members__:
        add(NAME, PATH)

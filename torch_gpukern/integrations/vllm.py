# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention backends GPUKERN and, for latent attention, GPUKERN_MLA:
``vllm serve MODEL --attention-backend GPUKERN``.

vLLM calls `register` through the entry point ``vllm.general_plugins`` in each of its processes. The
backends themselves are in `vllm_backend` and `vllm_mla`, which vLLM imports when they are chosen.
Nothing else of gpukern imports them.
"""

import warnings

__all__ = ["register"]

NAME = "GPUKERN"
NAME_MLA = "GPUKERN_MLA"
PATHS = {
    NAME: "torch_gpukern.integrations.vllm_backend.GpukernBackend",
    NAME_MLA: "torch_gpukern.integrations.vllm_mla.GpukernMLABackend",
}


def register() -> None:
    """Adds the backends to vLLM's list. A second call changes nothing.

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
    for name, path in PATHS.items():
        if name not in AttentionBackendEnum.__members__:
            add(name, path)

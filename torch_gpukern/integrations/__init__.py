# SPDX-License-Identifier: BSD-3-Clause
"""gpukern inside other libraries. Each module is imported by name and needs its library alone:

- `transformers`: ``attn_implementation="gpukern"``
- `transformers_experts`: ``experts_implementation="gpukern"``
- `peft`: LoRA over quantised layers, GLoRA over patched ones
- `flash_attn`: the functions of the flash-attn package
- `sdpa`: ``F.scaled_dot_product_attention``
- `distributed`: sharding rules for DTensor, which the ops register by themselves
- `vllm`: the attention backend GPUKERN, which vLLM finds by itself
"""

from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from . import flash_attn as flash_attn
    from . import peft as peft
    from . import sdpa as sdpa
    from . import transformers as transformers
    from . import transformers_experts as transformers_experts
else:

    def __getattr__(name: str) -> _Any:
        """Imports a module when it is first used."""
        if name in ("flash_attn", "peft", "sdpa", "transformers", "transformers_experts"):
            import importlib

            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

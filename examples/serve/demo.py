# SPDX-License-Identifier: BSD-3-Clause
"""A model of your own under the engine and its server: the byte model that `make demo` trains.

    pip install '.[serve]'
    make demo                                             # writes build/demo/checkpoint.pt
    python examples/serve/demo.py build/demo/checkpoint.pt
    curl localhost:8000/v1/completions -d '{"prompt": "import os\\n", "max_tokens": 64}'

A subclass of `torch_gpukern.serve.Model` states how packed tokens become logits. Batching, prefixes,
preemption, drafts, sampling and HTTP are the engine's. A model of transformers needs none of this:
`gpukern serve MODEL_DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from torch_gpukern import PagedKVCache
from torch_gpukern.serve import Engine, Model

sys.path.append(str(Path(__file__).resolve().parent.parent / "demo"))
from model import GPT, Config, GpukernOps  # noqa: E402


class DemoModel(Model):
    """The byte model that `make demo` trains, from its checkpoint."""

    def __init__(
        self, checkpoint: str, num_blocks: int, block_size: int = 16, device: str = "cpu"
    ) -> None:
        with torch.serialization.safe_globals([Config]):
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
        config = saved["config"]
        self.net, self.ops, self.grams = GPT(config), GpukernOps(), config.grams
        self.net.load_state_dict(saved["weights"])
        self.net.to(device).eval()
        cache = PagedKVCache(
            num_blocks, block_size, config.heads_kv, config.head_dim, layers=config.layers,
            dtype=torch.float32, device=device,
        )  # fmt: skip
        super().__init__(cache, config.vocab, config.context, captured_batch=64)

    def tokens_of(self, ids: list[int], starts: list[int], before: list) -> list:
        """[T, grams]: each byte and those before it, 0 before the first."""
        found = []
        for first, end, known in zip(starts, [*starts[1:], len(ids)], before):
            seen = [0] * (self.grams - 1 - len(known)) + known + ids[first:end]
            found += [seen[i : i + self.grams][::-1] for i in range(end - first)]
        return found

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at) -> Tensor:
            cache, step = self.cache, self.step
            q = cache.rope_write(
                q, k, v, at.cos, at.sin, at.positions, step.slots, layer, **at.norm()
            )
            return step.attend(cache, layer, q)

        return self.net(tokens, positions, self.ops, attend, rotated=False)[rows]


def main(checkpoint: str) -> None:
    from torch_gpukern.serve.app import application
    from torch_gpukern.serve.server import Server, bind

    engine = Engine(DemoModel(checkpoint, num_blocks=4096))
    app, own = application(engine, name="demo"), bind("127.0.0.1", 8000)
    Server(app, engine, says="http://127.0.0.1:8000/v1 has demo").run(sockets=[own])


if __name__ == "__main__":
    main(sys.argv[1])

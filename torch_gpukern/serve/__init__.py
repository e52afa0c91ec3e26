# SPDX-License-Identifier: BSD-3-Clause
"""Serving: a continuous-batching engine over PagedKVCache, and the HTTP server of `gpukern serve`.

    engine = Engine(TransformersModel(net, num_blocks=4096))
    with engine:                                         # steps run in a thread of their own
        request = engine.submit(Request(prompt_tokens, max_tokens=64))
        request.over.wait()
    print(request.answer)

`app.application(engine, ...)` is the ASGI application of the server. It needs the extra
`gpukern[serve]`; the engine needs nothing but torch, and `TransformersModel` transformers.
"""

from .engine import Engine
from .models import Model, TransformersModel
from .probe import served
from .request import Busy, Refused, Request

__all__ = ["Busy", "Engine", "Model", "Refused", "Request", "TransformersModel", "served"]

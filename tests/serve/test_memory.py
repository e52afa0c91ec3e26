# SPDX-License-Identifier: BSD-3-Clause
"""How many pages a GPU has room for: the arithmetic, with a GPU's memory that is made up."""

import pytest
import torch
from serving import run

from torch_gpukern.serve import Engine, Request, TransformersModel, memory
from torch_gpukern.serve.random_models import random_llama

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)


@pytest.fixture
def net():
    return random_llama("tiny")


@pytest.fixture
def gpu(monkeypatch):
    """Sets (free, total) bytes."""

    def of(free, total):
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return of


def test_a_page_has_the_bytes_of_the_caches(net):
    cache = TransformersModel(net, 7).cache
    size = cache.k.nbytes + cache.v.nbytes
    assert 7 * memory.bytes_of_page(net, 16, 4, 1) == size
    assert 14 * memory.bytes_of_page(net, 16, 4, 2) == size


def test_pages_fill_a_share(net, gpu):
    """What others have taken counts as used."""
    page = memory.bytes_of_page(net, 16, 4, 1)
    steps = memory.bytes_of_steps(net.config, 8, 64, 2)
    total = 10 * steps + 1000 * page
    gpu(total, total)
    settings = {"itemsize": 4, "batch": 8, "step_tokens": 64, "drafts": 2}
    assert memory.pages_beside(net, 1.0, **settings) == (total - steps) // page
    assert memory.pages_beside(net, 0.5, **settings) == int((0.5 * total - steps) // page)
    gpu(total - 300 * page, total)
    assert memory.pages_beside(net, 1.0, **settings) == (total - steps) // page - 300


def test_no_room_is_said_with_what_to_do(net, gpu):
    gpu(2**30, 10 * 2**30)
    with pytest.raises(ValueError, match=r"--memory is 0\.9: of 10 GiB 1 are free.*give --pages"):
        memory.pages_beside(net, 0.9, itemsize=4, batch=8, step_tokens=64)


def test_steps_are_estimated_from_above(net):
    """Of the CPU's tensors in the largest step there is no record, but its logits are known."""
    engine = Engine(TransformersModel(net, 64), max_batch=8, max_step_tokens=64, max_drafts=0)
    most, forward = 0, engine.model.forward

    def watched(*args):
        nonlocal most
        logits = forward(*args)
        most = max(most, logits.nbytes)
        return logits

    engine.model.forward = watched
    for i in range(8):
        engine.submit(Request([i + 1] * 8, max_tokens=3))
    run(engine)
    assert 0 < most < memory.bytes_of_steps(net.config, 8, 64, 0)


def test_captured_steps_are_estimated_from_above(net, on_cpu):
    """They have up to 256 tokens, though a step that is asked for has 8."""
    model = on_cpu(TransformersModel(net, 64), 1)
    made = []
    for layer in model.model.modules():
        if type(layer).__name__ == "LlamaMLP":
            layer.register_forward_hook(
                lambda layer, args, out: made.append((args[0].shape[-2], out.nbytes))
            )
    model.prepare(1)
    tokens, nbytes = max(made)
    assert tokens == 256
    wide = nbytes // net.config.hidden_size * net.config.intermediate_size
    assert 2 * wide < memory.bytes_of_steps(net.config, 1, 8, 0)  # gate and up


def test_no_more_requests_are_captured(net):
    """Of 256 requests and of 1000 the same steps are captured, and more logits are in others."""
    few, many = (memory.bytes_of_steps(net.config, n, 2048, 0) for n in (256, 1000))
    assert many - few == memory.BYTES_OF_A_LOGIT * (1000 - 256) * net.config.vocab_size

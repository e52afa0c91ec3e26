# SPDX-License-Identifier: BSD-3-Clause
"""A model that two ranks serve: parts of a network add up to it, answers are those of one rank, and
a rank that ends is noticed."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from serving import prompts_of, run
from test_fused import network, off
from test_life import Process

from torch_gpukern import nn as gnn
from torch_gpukern.nn.quant.files import stays_in
from torch_gpukern.serve import Engine, Request, TransformersModel, shards
from torch_gpukern.serve.completions import Completions
from torch_gpukern.serve.probe import served
from torch_gpukern.serve.tokenizer import Bytes

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)


@pytest.mark.parametrize(
    "kind, settings, fused",
    (
        ("Llama", {}, 3),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),
        ("Llama", {"tie_word_embeddings": True, "vocab_size": 301}, 3),  # a head that stays whole
        ("Qwen3", {"tie_word_embeddings": True}, 3),
        ("Qwen2", {}, 3),
        ("Mistral", {"sliding_window": 4}, 3),
        ("Gemma2", {"sliding_window": 4}, 0),
        ("Mixtral", {"num_local_experts": 4}, 0),
    ),
)
def test_the_parts_of_a_network_are_it(ranks, kind, settings, fused):
    """`served` compares each rank's pages with the same part alone; here the part is compared with
    the whole."""
    whole = network(kind, **settings)
    vocab, want = whole.config.vocab_size, None
    whole.set_attn_implementation("eager")
    with torch.inference_mode():
        want = [whole(input_ids=torch.tensor([[5, 7, 9, 11, 2]])).logits]
    nets = [network(kind, **settings) for _ in range(2)]

    def work(rank):
        shards.shard(nets[rank], rank, 2)
        model = served(nets[rank], 16, ranks=2)
        with torch.inference_mode():
            nets[rank].set_attn_implementation("eager")
            logits = nets[rank](input_ids=torch.tensor([[5, 7, 9, 11, 2]])).logits
        return model, logits

    for model, logits in ranks.run(work):
        assert logits.shape[-1] == vocab and off(logits, want[0]) < 1e-4
        assert len(model.fused.layers) == fused
        assert model.cache.k.shape[3] == 1  # of two heads_kv
    count = sum(
        p.numel() for n, p in nets[0].named_parameters() if "_proj.weight" in n or "inner" in n
    )
    of_all = sum(p.numel() for n, p in whole.named_parameters() if "_proj" in n and p.dim() >= 2)
    assert count < 0.75 * of_all + whole.config.vocab_size * whole.config.hidden_size


@pytest.mark.parametrize("recipe", ("int8", "w4"))
def test_parts_are_quantised(ranks, recipe):
    """Each rank's layers have few bits and run fused; the head stays."""
    whole, nets = network(), [network() for _ in range(2)]
    want = alone_logits(whole)

    def work(rank):
        shards.shard(nets[rank], rank, 2)
        gnn.quantize(nets[rank], recipe, skip=stays_in(nets[rank]), say=None)
        return served(nets[rank], 16, ranks=2), alone_logits(nets[rank])

    for model, logits in ranks.run(work):
        assert len(model.fused.layers) == 3
        assert type(model.model.lm_head.inner).__name__ == "Linear"
        assert ((logits - want).square().mean() / want.var()).sqrt() < 0.4


def alone_logits(net):
    net.set_attn_implementation("eager")
    with torch.inference_mode():
        return net(input_ids=torch.tensor([[5, 7, 9, 11, 2]])).logits


def test_what_cannot_be_divided_is_named():
    for kind, settings, says in (
        ("Llama", {"num_key_value_heads": 1}, "num_key_value_heads 1, which 2 ranks do not divide"),
        ("Llama", {"intermediate_size": 255}, "out_features 255, which 2 ranks do not divide"),
        ("GPT2", {}, "GPT2LMHeadModel has no base_model_tp_plan"),
        ("Phi3", {}, "the plan of Phi3ForCausalLM has .* for layers"),
    ):
        if kind == "GPT2":
            net = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
            )
        else:
            net = network(kind, **settings)
        with pytest.raises(ValueError, match=says):
            shards.shard(net, 0, 2)
    net = network()
    gnn.quantize(net, "w4", say=None)
    with pytest.raises(ValueError, match="is QuantizedLinear; expected nn.Linear.*--recipe"):
        shards.shard(net, 0, 2)


@pytest.fixture
def process():
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    started = []

    def start(*flags):
        started.append(Process(*flags))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def children_of(pid):
    """Processes that multiprocessing has spawned with this parent."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_two_processes_answer_as_one(process, net, wanted):
    """Greedy tokens in float32: chunks, several requests, pages that are copied as the answers to one
    prompt part. Then a rank is killed in mid-stream: the stream ends, and so does the server."""
    server = process(
        "--random=tiny", "--tensor-parallel", "2", "--step-tokens", "64", "--draft-branches", "3"
    )
    assert "of weights on each of 2 ranks" in server.says
    (its_engine,) = children_of(server.process.pid)
    (other,) = children_of(its_engine)
    prompts = prompts_of(70, 20, 9)
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "n": 2, "logprobs": 0}
    answer = server.ask(body)
    assert answer.status == 200
    choices = json.loads(answer.read())["choices"]
    engine = Engine(TransformersModel(net, 64))
    for i, prompt in enumerate(prompts):
        one = engine.submit(Request(prompt, max_tokens=12, logprobs=0))
        run(engine)
        assert one.answer == wanted(prompt, 12)
        for choice in choices[2 * i : 2 * i + 2]:
            found = choice["logprobs"]
            assert found["tokens"] == [Completions(Bytes()).name(t) for t in one.answer]
            want = [score.logprob for score in one.scores]
            assert found["token_logprobs"] == pytest.approx(want, abs=1e-4)
    server.until(lambda: server.metric("gpukern_used_pages") == 0)

    stream = server.ask({"prompt": "once", "max_tokens": 8000, "temperature": 0, "stream": True})
    stream.readline()
    os.kill(other, signal.SIGKILL)
    rest = stream.read()
    assert server.process.wait(200) == 1
    assert b'"message": "error: ' in rest or b'"abort"' in rest
    said = server.process.stderr.read()
    assert said.count("rank 1 has ended, exit code -9; the server ends") == 1


def test_a_signal_ends_both_processes(process, model_dir):
    server = process(model_dir, "--tensor-parallel", "2", "--kv-cache", "int8", "--recipe", "int8")
    assert "(int8) on each of 2 ranks" in server.says and "tokens, int8" in server.says
    (its_engine,) = children_of(server.process.pid)
    (other,) = children_of(its_engine)
    assert server.ask({"prompt": "x", "max_tokens": 2}).status == 200
    assert server.end() == []
    assert not Path(f"/proc/{other}").exists()

# SPDX-License-Identifier: BSD-3-Clause
"""Tokens against a plain float64 reference of one row, written as the settings are defined."""

import math
import random
from fractions import Fraction

import pytest
import torch
from serving import all_free, prompts_of, run
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_gpukern import sample_tokens
from torch_gpukern.serve import Engine, Request, TransformersModel
from torch_gpukern.serve.sampling import Place, Sampler, uniform

pytest_plugins = ("serve_fixtures",)


def pick(sampler, logits, places):
    drawn = sampler.draw(logits, places)
    return drawn.get(), drawn.scores


def place(prompt=(0,), answer=(), drafted=(), position=None, **settings):
    """A place of a request that the engine has taken."""
    request = Request(list(prompt), **settings)
    request.tokens = request.check(1 << 20, 1 << 30) + list(answer)
    request.prompt = tuple(prompt)
    if position is None:
        position = len(request.tokens) + len(drafted)
    return Place(request, position, list(drafted))


def distribution(logits, at):
    """Probabilities of a row, one setting after the other, in float64 and plain Python; and how far
    the nearest decision was from falling otherwise."""
    r, x = at.request, [float(v) for v in logits]
    answer = r.tokens[len(r.prompt) :] + list(at.drafted)
    for token in range(len(x)):
        times = answer.count(token)
        if times or token in r.prompt:
            x[token] = (
                x[token] / r.repetition_penalty if x[token] > 0 else x[token] * r.repetition_penalty
            )
        x[token] -= r.frequency_penalty * times + r.presence_penalty * (times > 0)
    largest = max(x)
    if r.temperature == 0:
        return [float(token == x.index(largest)) for token in range(len(x))], 1.0
    p = [math.exp((v - largest) / r.temperature) for v in x]
    margin = min((abs(v - r.min_p) for v in p), default=1.0) if 0 < r.min_p < 1 else 1.0
    p = [v if v >= r.min_p else 0.0 for v in p]
    order = sorted(range(len(x)), key=lambda t: (p[t] == 0.0 and r.min_p > 0, -x[t], t))
    if r.top_k > 0:
        for token in order[r.top_k :]:
            p[token] = 0.0
    if r.top_p < 1:
        total, before = math.fsum(p), 0.0
        for rank, token in enumerate(order):
            margin = min(margin, abs(before / total - r.top_p))
            if rank and not before < r.top_p * total:
                p[token] = 0.0
            else:
                before += p[token]
    total = math.fsum(p)
    return [v / total for v in p], margin


def wanted_token(p, number):
    """The token whose share of [0, 1), in the tokens' order, has the number; None on an edge."""
    upto = Fraction(0)
    for token, share in enumerate(p):
        before, upto = upto, upto + Fraction(share)
        if abs(float(upto) - number) < 1e-9:
            return None
        if before <= number < upto:
            return token
    return None


SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.9, "repetition_penalty": 0.6, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "presence_penalty": -2.0, "top_k": 9},
    {"temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3, "min_p": 0.01},
)


@pytest.mark.parametrize("vocab", (7, 300, 2100))
@pytest.mark.parametrize("kind", ("smooth", "ties", "peaked"))
def test_each_row_is_the_references(vocab, kind):
    """All settings in one batch; ties of logits, and rows whose probabilities differ a lot."""
    gen = torch.Generator().manual_seed(vocab)
    rng = random.Random(vocab)
    places = []
    for seed in range(3):
        for settings in SETTINGS:
            history = [[rng.randrange(vocab) for _ in range(n)] for n in (4, 6, rng.randrange(3))]
            places.append(place(*history, seed=seed, **settings))
    logits = torch.randn(len(places), vocab, generator=gen)
    if kind == "ties":
        logits = (2 * logits).round() / 2
    if kind == "peaked":
        logits = 20 * logits
    sampler = Sampler(len(places), vocab, torch.device("cpu"))
    tokens, _ = pick(sampler, logits, places)
    judged = 0
    for row, at, token in zip(logits, places, tokens):
        p, margin = distribution(row, at)
        assert p[token] > 0 or margin < 1e-9, at.request
        want = wanted_token(p, uniform(at.request.seed, at.position))
        if want is not None and margin > 1e-9:
            assert token == want, at.request
            judged += 1
    assert judged > 0.9 * len(places)
    # a row by itself, and the rows in another order, which brings other neighbours
    for i in rng.sample(range(len(places)), 12):
        assert pick(sampler, logits[i : i + 1], places[i : i + 1])[0] == tokens[i : i + 1]
    order = rng.sample(range(len(places)), len(places))
    assert pick(sampler, logits[order], [places[i] for i in order])[0] == [tokens[i] for i in order]


def test_ties_at_the_edge_stay_by_token():
    """Four equal logits, of which top_k and top_p leave the lower tokens."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0, 3.0]]).expand(400, -1)
    sampler = Sampler(1, 6, torch.device("cpu"))
    for settings, want in (
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3, 4}),
        ({"top_k": 4, "top_p": 0.25}, {1}),
        ({"min_p": 1.0}, {1, 3, 4, 5}),
    ):
        places = [place(seed=seed, temperature=1.0, **settings) for seed in range(400)]
        assert set(pick(sampler, logits, places)[0]) == want


def test_shares_of_draws():
    """20,000 seeds: each token's share is its probability, within five standard deviations."""
    p = torch.tensor([0.4, 0.05, 0.3, 0.25])
    places = [place(seed=seed, temperature=1.0) for seed in range(20_000)]
    tokens, _ = pick(Sampler(1, 4, torch.device("cpu")), p.log().expand(20_000, -1), places)
    for token, share in enumerate(p.tolist()):
        error = 5 * math.sqrt(share * (1 - share) / 20_000)
        assert abs(tokens.count(token) / 20_000 - share) < error


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_logits_that_are_not_finite_harm_their_row_alone(bad):
    gen = torch.Generator().manual_seed(1)
    places = [place(seed=i, **settings) for i, settings in enumerate(SETTINGS)]
    logits = torch.randn(len(places), 300, generator=gen)
    sampler = Sampler(len(places), 300, torch.device("cpu"))
    clean, _ = pick(sampler, logits, places)
    for row in range(len(places)):
        broken = logits.clone()
        broken[row] = bad
        tokens, _ = pick(sampler, broken, places)
        assert 0 <= tokens[row] < 300
        assert tokens[:row] + tokens[row + 1 :] == clean[:row] + clean[row + 1 :]
        broken[row] = logits[row]
        broken[row, 7] = bad
        tokens, _ = pick(sampler, broken, places)
        if bad == float("inf"):
            assert tokens[row] == 7
        elif bad < 0:
            assert tokens[row] != 7


def test_nothing_is_read_on_the_host():
    """Fake tensors have no contents: an operation that reads one on the host, or whose size hangs on
    contents, raises. So the same can be captured in a graph."""
    places = [place(answer=[1], **settings) for settings in SETTINGS]
    sampler = Sampler(len(places), 300, torch.device("cpu"))
    arguments = {"logits": torch.randn(len(places), 300), **sampler.settings(places)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        out = sample_tokens(**fake)
    assert out.shape == (len(places),) and out.dtype == torch.int64
    with pytest.raises(Exception, match="data-dependent|Data-dependent|aten._local_scalar_dense"):
        with mode:
            fake["logits"].argmax().item()


@pytest.mark.gpu
def test_captured_sampling_is_the_same():
    places = [place(answer=[1], **settings) for settings in SETTINGS]
    sampler = Sampler(len(places), 5000, torch.device("cuda"))
    logits = torch.randn(len(places), 5000, device="cuda")
    settings = sampler.settings(places)
    want = sample_tokens(logits, **settings)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_tokens(logits, **settings)
    graph.replay()
    assert out.tolist() == want.tolist()
    on_cpu = Sampler(len(places), 5000, torch.device("cpu"))
    assert pick(on_cpu, logits.cpu(), places)[0] == want.tolist()


def test_scores_are_the_models_own():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    places = [
        place(temperature=2.0, top_k=3, repetition_penalty=2.0, answer=[4], logprobs=n)
        for n in (0, 4, None)
    ]
    tokens, scores = pick(Sampler(3, 50, torch.device("cpu")), logits, places)
    want = logits.double().log_softmax(-1)
    assert scores[2] is None
    for i, n in enumerate((0, 4)):
        assert abs(scores[i].logprob - want[i, tokens[i]]) < 1e-12
        best = want[i].topk(n)
        assert [t for t, _ in scores[i].top] == best.indices.tolist()


# ---- in the engine -------------------------------------------------------------------------------

MIXED = (
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "frequency_penalty": 1.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0.0},
)


def test_a_requests_tokens_depend_on_its_own_seed_alone(net):
    """Alone, beside others, with drafts, in small chunks and when pages run out: penalties, too,
    count the same tokens."""
    prompts = prompts_of(20, 30, 40, 7, 12)

    def answers(which, blocks=64, **engine_settings):
        engine = Engine(TransformersModel(net, blocks), **engine_settings)
        requests = [
            engine.submit(Request(prompts[i], seed=i, max_tokens=24, **MIXED[i])) for i in which
        ]
        run(engine)
        assert all_free(engine) and not engine.sampler.counts.known
        assert len(engine.sampler.counts.free) == engine.max_batch
        for request in requests:
            assert len(request.scores) == (24 if request.logprobs is not None else 0)
        return {i: r.answer for i, r in zip(which, requests)}, engine.metrics

    together, _ = answers(range(5), max_drafts=0)
    for i in range(5):
        assert answers([i], max_drafts=0)[0][i] == together[i]
    drafted, metrics = answers(range(5), max_drafts=4, max_batch=2, max_step_tokens=9)
    assert drafted == together and metrics.accepted > 0
    few, metrics = answers(range(5), blocks=8)
    assert few == together and metrics.preemptions > 0
    assert answers([4, 3, 2, 1, 0])[0] == together
    assert len(set(together[2])) > len(set(together[4]))  # what a repetition penalty is for

# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.serve: answers are generate's, whatever else runs; nothing of a request is left behind."""

from collections import Counter

import pytest
import torch
from serving import all_free, prompts_of, run

from torch_gpukern.nn import patch
from torch_gpukern.paged import shared
from torch_gpukern.serve import Busy, Engine, Refused, Request, TransformersModel
from torch_gpukern.serve.drafts import NGrams
from torch_gpukern.serve.random_models import random_llama
from torch_gpukern.serve.sampling import Place, Sampler

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)


def generated(net, prompts, n):
    """What transformers' generate adds to each prompt, greedy."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=net.device)
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.gpu
def test_captured_steps_are_generates():
    """Graphs of decoding steps of 1, 2, 4 requests, replayed after other tensors have taken what
    was free at the capture."""
    net = random_llama("tiny", "cuda")
    prompts = prompts_of(9, 30, 17)
    wanted = generated(net, prompts, 12)
    patch(net, say=None)  # as the server does
    model = TransformersModel(net, num_blocks=64)
    for count in (3, 1, 2, 3):
        engine = Engine(model, max_batch=4, max_step_tokens=64, max_drafts=0)
        requests = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts[:count]]
        run(engine)
        assert [request.answer for request in requests] == wanted[:count]
        assert all_free(engine)
        taken = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 65) for _ in range(8)]
        del taken
    assert sorted(shape.requests for shape in model.graphs) == [1, 2, 4]


def test_tokens_are_generates(net, wanted):
    """Chunked prompts beside decoding, drafts, prefixes that are found, and too few pages for all:
    the same tokens."""
    common, *rest = prompts_of(40, 5, 33, 1, 17, 60)
    prompts = [common + rest[0], common + rest[1], rest[2], rest[3], rest[4], common + rest[0]]
    model = TransformersModel(net, num_blocks=8)  # too few for two of them
    engine = Engine(model, max_batch=4, max_step_tokens=24, max_drafts=3)
    requests = []
    for prompt in prompts:
        requests.append(engine.submit(Request(prompt, max_tokens=24)))
        engine.step()
    run(engine)
    for request, prompt in zip(requests, prompts):
        assert request.answer == wanted(prompt, 24) and request.finish == "length"
    done = engine.metrics
    assert (
        done.preemptions > 0
        and done.reused_tokens > 0
        and done.accepted > 0
        and done.drafted > done.accepted
    )
    assert all_free(engine) and 0.5 < done.most_cache_use <= 1
    assert len(done.first_token) == 6 and done.new_tokens == 6 * 24


def test_shared_pages_are_read_once(device, monkeypatch):
    """Requests that found the same pages are neighbours in a step, and their answers are
    generate's. Windows of other layers read each request by itself."""
    net = random_llama("tiny", device)
    monkeypatch.setattr(shared, "LEAST_KEYS", {"cpu": 1, "cuda": 1})
    common, other, *rest = prompts_of(40, 33, 5, 7, 1, 17, 9)
    prompts = [(common, other)[i % 2] + own for i, own in enumerate(rest)]
    wanted = generated(net, prompts, 12)
    model = TransformersModel(net, num_blocks=64, captured_batch=2)
    engine = Engine(model, max_batch=8, max_step_tokens=64, max_drafts=2)
    groups = []
    begin = model.begin

    def watched(handles, counts, *more):
        begin(handles, counts, *more)
        if model.step.prefix is not None:
            groups.append(model.step.prefix.seq_lens.tolist())

    monkeypatch.setattr(model, "begin", watched)
    first = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts[:2]]
    run(engine)
    requests = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts]
    run(engine)
    assert [request.answer for request in [*first, *requests]] == [*wanted[:2], *wanted]
    size = model.cache.block_size
    assert sorted([40 // size * size, 33 // size * size]) in [sorted(x)[-2:] for x in groups]
    assert all_free(engine)


def test_sampled_answers_depend_on_the_seed_alone(net):
    settings = dict(max_tokens=16, temperature=0.7, top_p=0.9)
    prompts = prompts_of(20, 30, 40, 7)

    def answers(seeds, **engine_settings):
        engine = Engine(TransformersModel(net, 64), **engine_settings)
        requests = [engine.submit(Request(p, seed=s, **settings)) for p, s in zip(prompts, seeds)]
        run(engine)
        assert all_free(engine)
        return [r.answer for r in requests]

    together = answers((1, 2, 3, 4), max_drafts=0)
    assert answers((1, 2, 3, 4), max_drafts=4, max_batch=2, max_step_tokens=9) == together
    assert answers((5, 6, 7, 8)) != together


@pytest.mark.parametrize("settings", ({}, {"max_batch": 2, "max_step_tokens": 13}))
def test_answers_to_one_prompt_compute_it_once(net, settings):
    """They are those of single requests with the same seeds. All but the first compute one token of
    the prompt. Its pages are shared, a partly filled one included."""
    how = dict(max_tokens=12, temperature=0.8, repetition_penalty=1.1)
    prompt, other = prompts_of(45, 20)  # two full pages and a part of one
    wanted = []
    for seed in range(5):
        engine = Engine(TransformersModel(net, 64), max_drafts=0)
        wanted.append(engine.submit(Request(prompt, seed=seed, **how)))
        run(engine)
    engine = Engine(TransformersModel(net, 64), max_drafts=0, **settings)
    requests = [Request(prompt, seed=seed, **how) for seed in range(5)]
    single = Request(other, seed=9, **how)
    engine.submit_all([*requests, single])
    most = 0
    while engine.step():
        most = max(most, engine.used_pages)
    assert [r.answer for r in requests] == [r.answer for r in wanted]
    assert len({tuple(r.answer) for r in requests}) > 1 and len(single.answer) == 12
    computed = engine.metrics.step_tokens
    # With two at once, an answer may come when the others of its prompt have ended: pages that are
    # full are found, the last one is not.
    assert computed == 45 + 4 + 20 + 6 * 11 or settings and computed < 2 * 45 + 20 + 6 * 11
    assert most <= 2 + 5 * 2 + 2  # shared pages, two of each answer's own, the single request's
    assert all_free(engine)


def test_answers_to_one_prompt_when_the_first_ends_or_leaves(net):
    """The next one computes the prompt, or what the cache does not have of it."""
    prompt, *_ = prompts_of(45)
    alone = Engine(TransformersModel(net, 64))
    wanted = alone.submit(Request(prompt, max_tokens=6))
    run(alone)
    engine = Engine(TransformersModel(net, 64), max_step_tokens=20)
    requests = [Request(prompt, max_tokens=6) for _ in range(4)]
    engine.submit_all(requests)
    engine.step()
    assert [r.handle is None for r in requests] == [False, True, True, True]
    requests[0].cancel()
    run(engine)
    assert [r.answer for r in requests[1:]] == [wanted.answer] * 3 and all_free(engine)
    assert engine.metrics.step_tokens == 20 + 45 + 2 + 3 * 5 + engine.metrics.drafted
    short = Engine(TransformersModel(net, 64))
    requests = [Request(prompt, max_tokens=1) for _ in range(3)]
    short.submit_all(requests)  # the first has ended when the others could fork it
    run(short)
    assert [r.answer for r in requests] == [wanted.answer[:1]] * 3 and all_free(short)
    assert short.metrics.step_tokens == 45 + 2 * (45 - 32)


def test_answers_to_one_prompt_with_too_few_pages(net):
    """Some give their pages back and come again; the answers are the same."""
    prompt, *_ = prompts_of(45)
    answers = []
    for pages in (64, 7):
        engine = Engine(TransformersModel(net, pages), max_drafts=0)
        requests = [Request(prompt, seed=s, temperature=0.8, max_tokens=30) for s in range(4)]
        engine.submit_all(requests)
        run(engine)
        answers.append([r.answer for r in requests])
        assert all_free(engine)
    assert engine.metrics.preemptions > 0 and answers[0] == answers[1]


def test_a_cache_of_8_bits(net, wanted):
    """Answers do not depend on what else runs, on chunks or on shared pages, and begin as
    generate's."""
    common, *rest = prompts_of(36, 5, 30, 12, seed=3)
    prompts = [common + rest[0], common + rest[1], rest[2]]
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.full((2, 2), 0.02)}
    answers = []
    for settings in ({"max_batch": 1}, {"max_batch": 3, "max_step_tokens": 11}):
        model = TransformersModel(net, 32, dtype=torch.int8, scales=scales)
        engine = Engine(model, **settings)
        requests = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts]
        run(engine)
        assert all_free(engine)
        answers.append([r.answer for r in requests])
    assert answers[0] == answers[1]
    assert [a[0] for a in answers[0]] == [wanted(p, 12)[0] for p in prompts]


def test_draws_follow_the_probabilities():
    """Of 4,000 draws, each token's share; top_p leaves the rest out."""
    sampler = Sampler(1, 4, torch.device("cpu"))
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = (2 * p.log()).expand(4000, -1)
    for top_p, shares in ((1.0, p.tolist()), (0.6, [5 / 8, 3 / 8, 0, 0])):
        places = [
            Place(Request([0], temperature=2.0, top_p=top_p, seed=seed), 9) for seed in range(4000)
        ]
        counts = Counter(sampler.draw(logits, places).get())
        assert all(abs(counts[i] / 4000 - share) < 0.03 for i, share in enumerate(shares))
        assert all(counts[i] == 0 for i, share in enumerate(shares) if share == 0)


def test_drafts_are_what_followed():
    ngrams = NGrams()
    assert ngrams.draft([1, 2, 3, 4, 1, 2], 3).tokens == [3, 4, 1]
    assert ngrams.draft([1, 2, 3, 4, 1, 2, 9], 3).tokens == []
    assert ngrams.draft([1, 2, 3, 4, 1, 2, 9, 1, 2], 3).tokens == [9, 1, 2]  # the newest


def test_cancelled_refused_and_failed(net, wanted, monkeypatch):
    """What goes wrong with one request: the others' tokens are unchanged, and no page is kept."""
    model = TransformersModel(net, 32)
    engine = Engine(model, max_batch=4, max_waiting=5)
    a, b, c = prompts_of(20, 25, 30, seed=1)
    for name, request in {
        "prompt is empty": Request([]),
        "prompt is .1, 2.5.; expected integers": Request([1, 2.5]),
        "prompt is True; expected integers": Request(True),
        "prompt is 'abc'": Request("abc"),
        "prompt is None": Request(None),
        "max_tokens is 2.5; expected an integer": Request([1], max_tokens=2.5),
        "temperature is None": Request([1], temperature=None),
        "token 512": Request([512]),
        "max_tokens is 0": Request([1], max_tokens=0),
        "512 that fit": Request([1] * 500, max_tokens=13),
        "temperature": Request([1], temperature=float("nan")),
        "top_p": Request([1], top_p=0.0),
    }.items():
        with pytest.raises(Refused, match=name):
            engine.submit(request)

    def gone(*_):
        raise ConnectionError

    kept = engine.submit(Request(a, max_tokens=20))
    dropped = engine.submit(Request(b, max_tokens=200))
    unheard = engine.submit(Request(c, max_tokens=200, on_tokens=gone))
    with pytest.raises(Refused, match="submitted before"):
        engine.submit(kept)
    a[0] = b[0]  # what the caller does to its list is not seen
    stopped = engine.submit(Request(c, max_tokens=20, stop_ids=frozenset(wanted(c, 20)[5:6])))
    never = engine.submit(Request(c))
    with pytest.raises(Busy):
        engine.submit(Request(c))
    never.cancel()
    for _ in range(3):
        engine.step()
    dropped.cancel()
    run(engine)
    (a, _, _) = prompts_of(20, 25, 30, seed=1)
    assert (
        kept.answer == wanted(a, 20) and dropped.finish == unheard.finish == never.finish == "abort"
    )
    assert (
        stopped.finish == "stop"
        and stopped.answer == wanted(c, 20)[: wanted(c, 20).index(wanted(c, 20)[5]) + 1]
    )
    assert all_free(engine)

    with engine:  # a step that fails ends those that ran with its error, and the engine goes on
        forward, calls = model.forward, []

        def fails(*args):
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("no luck")
            return forward(*args)

        monkeypatch.setattr(model, "forward", fails)
        failed = engine.submit(Request(b, max_tokens=100))
        assert failed.over.wait(20) and failed.finish == "error: no luck"
        after = engine.submit(Request(b, max_tokens=10))
        assert after.over.wait(20) and after.answer == wanted(b, 10)
        slow = [engine.submit(Request(p, max_tokens=200)) for p in (a, b, c)]
    # closed under load
    assert all(r.over.is_set() and r.finish == "abort" for r in slow) and all_free(engine)
    with pytest.raises(Busy):
        engine.submit(Request(a))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_an_error_leaves_nobody_waiting(net, monkeypatch):
    """The error of a step is its requests'. One past that ends the engine, and the others with it."""
    engine = Engine(TransformersModel(net, 32), max_batch=1)

    def fails(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(engine.model, "forward", fails)
    monkeypatch.setattr(engine.cache, "forget", fails)
    first, second = (engine.submit(Request(p, max_tokens=5)) for p in prompts_of(4, 5))
    with engine:
        assert first.over.wait(20) and second.over.wait(20)
    assert (first.finish, second.finish) == ("error: no luck", "abort")
    assert engine.closing and not engine.alive
    with pytest.raises(Busy, match="the server closes"):
        engine.submit(Request([1]))


@pytest.mark.parametrize("stop", (0, 30))
@pytest.mark.parametrize("pages", (64, 9))
def test_a_step_that_follows_on_the_device_changes_no_answer(net, pages, stop):
    """Steps whose input the host does not know yet, as CUDA has them: with end tokens, cancelled
    requests, scores, penalties, drafts, equal prompts and too few pages."""
    prompts = prompts_of(*range(3, 60, 5), seed=1)
    prompts += [prompts[0]] * 2

    def answers(follows):
        model = TransformersModel(net, pages)
        model.follows = follows
        forward, followed = model.forward, []

        def counting(ids, *rest):
            followed.append(isinstance(ids, torch.Tensor))
            return forward(ids, *rest)

        model.forward = counting
        engine = Engine(model, max_batch=8, max_step_tokens=64, max_drafts=3)
        requests = [
            Request(
                prompt,
                max_tokens=10 + 3 * (i % 5),
                temperature=0.0 if i % 2 else 1.1,
                seed=i,
                stop_ids=frozenset(range(stop * (i % 3))),
                logprobs=2 if i == 5 else None,
                repetition_penalty=1.2 if i == 7 else 1.0,
            )
            for i, prompt in enumerate(prompts)
        ]
        engine.submit_all(requests[-3:])
        for i, request in enumerate(requests[:-3]):
            engine.submit(request)
            engine.step()
            engine.step()
            if i == 6:
                requests[4].cancel()
        run(engine)
        assert all_free(engine)
        del requests[4]
        return [(r.answer, r.finish, len(r.scores)) for r in requests], sum(followed)

    (want, none), (found, some) = answers(False), answers(True)
    assert found == want and none == 0 and some > 5


def test_a_streak_of_drafts():
    """Tokens in a row that drafts would have said, while there is a draft of the next."""
    ngrams, tokens, found = NGrams(), [1, 2, 3, 4], []
    for token in (9, 1, 2, 3, 4, 9, 8, 1, 2):
        tokens.append(token)
        found.append(ngrams.streak(tokens))
    # after 1 2 a draft says 3; 3, 4, 9 are right, and then 8 is not 1
    assert found == [0, 0, 0, 1, 2, 3, 0, 0, 0]

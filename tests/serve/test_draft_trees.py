# SPDX-License-Identifier: BSD-3-Clause
"""Drafts with branches: the answers are those without drafts, the accepted path is contiguous in the
cache, every page returns."""

import pickle
import random

import numpy as np
import pytest
import torch
from serving import all_free, prompts_of, run
from test_fused import network

from torch_gpukern import tree_mask
from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, Model, Request, TransformersModel, models
from torch_gpukern.serve.costs import Costs
from torch_gpukern.serve.drafts import MOST_MATCHES, Draft, NGrams, mask_of
from torch_gpukern.serve.metrics import Metrics
from torch_gpukern.serve.random_models import random_llama
from torch_gpukern.serve.ranks import CopyingCache

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)

# Few tokens, so that the same two follow each other often and what comes behind them differs.
LIVELY = {"temperature": 1.5, "top_k": 2}
MIXED = (
    {"temperature": 0.0},
    {**LIVELY, "logprobs": 2},
    {**LIVELY, "repetition_penalty": 1.1},
    {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {**LIVELY, "top_p": 0.9, "stop_ids": frozenset(range(0, 512, 29))},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 0},
)


# ---- drafts ----


def test_branches_are_what_followed_earlier():
    tokens = [1, 2, 7, 8, 1, 2, 7, 9, 5, 1, 2, 4, 1, 2]
    ngrams = NGrams()
    assert ngrams.draft(tokens, 3, 1) == Draft([4, 1, 2], [-1, 0, 1])
    both = ngrams.draft(tokens, 3, 2)
    assert both == Draft([4, 1, 2, 7, 9, 5], [-1, 0, 1, -1, 3, 4])
    three = ngrams.draft(tokens, 3, 3)  # 7 is common to two of them
    assert three == Draft([4, 1, 2, 7, 9, 5, 8, 1], [-1, 0, 1, -1, 3, 4, 3, 6])
    assert three.depths == [1, 2, 3, 1, 2, 3, 2, 3] and three.branches
    assert three.paths()[6:] == [[7, 8], [7, 8, 1]]
    assert ngrams.draft(tokens, 3, 9) == three  # there are no more
    assert ngrams.draft(tokens, 3, 3, room=5) == Draft([4, 1, 2, 7, 9], [-1, 0, 1, -1, 3])
    assert not ngrams.draft(tokens, 3, 1).branches and not NGrams().draft([1, 2, 3], 4, 4)


def test_a_short_branch_becomes_longer():
    """The newest match may end with the text. An earlier one that agrees makes the branch longer and
    is no second one."""
    tokens = [0, 1, 2, 1, 2, 1, 2, 9, 8, 0, 1, 2, 1, 2, 1, 2]
    draft = NGrams().draft(tokens, 4, 3)  # 1 2, then 9 8 0 1, then 1 2 9 8, then 1 2 1 2
    assert draft == Draft([1, 2, 9, 8, 1, 2, 9, 8, 0, 1], [-1, 0, 1, 2, 1, 4, -1, 6, 7, 8])


def test_drafts_of_random_texts():
    """Each path did follow the n-gram; the first is that of one branch, or longer; leaves are at most
    the branches."""
    draw = random.Random(5)
    several = 0
    for _ in range(200):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(2, 80))]
        most, branches = draw.randint(1, 5), draw.randint(2, 4)
        ngrams = NGrams()
        for n in sorted(draw.randrange(1, len(tokens) + 1) for _ in range(2)):
            ngrams.draft(tokens[:n], most, branches)  # texts grow
        draft = ngrams.draft(tokens, most, branches)
        chain = ngrams.draft(tokens, most)
        assert draft.tokens[: len(chain)] == chain.tokens
        assert draft.parents[: len(chain)] == chain.parents
        leaves = set(range(len(draft))) - set(draft.parents)
        assert len(leaves) <= branches and max(draft.depths, default=0) <= most
        assert len({tuple(path) for path in draft.paths()}) == len(draft)
        text = " ".join(map(str, tokens))
        for path in draft.paths():
            assert " ".join(map(str, [*tokens[-2:], *path])) in text
        several += len(leaves) > 1
    assert several > 50
    assert len(NGrams().draft([1, 2] * (MOST_MATCHES + 9) + [3, 1, 2], 1, 2)) == 2


def test_a_streak_counts_branches():
    found = []
    for branches in (1, 2):
        ngrams, tokens = NGrams(), [1, 2, 3, 1, 2, 4, 1, 2]
        found.append([ngrams.streak(tokens, branches)])
        for token in (3, 1, 2, 4, 1, 2):
            tokens.append(token)
            found[-1].append(ngrams.streak(tokens, branches))
    assert found[0][1] == 0 and found[1][1] == 1 and found[1][-1] == 6


def test_what_is_expected_of_a_draft():
    """No more than it may have tokens: one where a token repeats itself."""
    ngrams, tokens = NGrams(), [1, 2, 3, 4, 5, 1, 2]
    ngrams.streak(tokens)
    assert ngrams.expected(3) == 0.5 + 0.25 + 0.125 and ngrams.expected(0) == 0
    ngrams.streak(tokens + [9])  # 3 was wrong, and nothing has followed 2 9
    assert ngrams.right == 0.4375 and ngrams.expected(3) == 0
    once = NGrams()
    once.streak([7, 7, 7, 7])
    assert once.expected(3) == 0.5
    once.streak([7, 7, 7, 7, 7])
    assert once.expected(3) == once.right == 0.5625


def test_ngrams_are_learned_token_by_token_and_at_once():
    draw = random.Random(3)
    for _ in range(50):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(40))]
        whole, parts = NGrams(), NGrams()
        whole.draft(tokens, 3)
        for n in sorted(draw.randrange(len(tokens) + 1) for _ in range(4)):
            parts.draft(tokens[:n], 3)
        parts.draft(tokens, 3)
        assert whole.after == parts.after and whole.earlier == parts.earlier
        for n in whole.sizes:
            assert len(whole.earlier[n]) == len(tokens)
            for end, before in enumerate(whole.earlier[n]):
                same = [e for e in range(n, end) if tokens[e - n : e] == tokens[end - n : end]]
                assert before == (max(same, default=-1) if end >= n else -1)


def test_right_follows_what_was_drawn():
    draft = Draft([4, 1, 7, 9, 8], [-1, 0, -1, 2, 2])
    assert draft.right([4, 1, 3, 0, 0, 0]) == [0, 1]
    assert draft.right([7, 0, 0, 8, 0, 5]) == [2, 4]
    assert draft.right([5, 1, 9, 9, 9, 9]) == [] and Draft().right([5]) == []


def test_masks_show_ancestors():
    draw = random.Random(1)
    counts, drafts = [1, 3, 2, 5], []
    for n in (4, 0, 7, 1):
        drafts.append(Draft([0] * n, [draw.randrange(-1, i) if i else -1 for i in range(n)]))
    mask, first = mask_of(counts, drafts), 0
    assert mask.shape == (11 + 12, 9)
    for n, draft in zip(counts, drafts):
        parents = [*range(-1, n - 1), *(n + p if p >= 0 else n - 1 for p in draft.parents)]
        rows = mask[first : first + len(parents)]
        assert not rows[:, len(parents) :].any()
        assert np.array_equal(rows[:, : len(parents)], tree_mask(parents).numpy())
        first += len(parents)


# ---- answers ----


class Planted(NGrams):
    """Drafts that hold the true answer at a random place of a random tree, as far as they are right."""

    def __init__(self, prompt, answer, draw):
        super().__init__()
        self.prompt, self.answer, self.draw = list(prompt), answer, draw

    def draft(self, tokens, most, branches=1, room=None):
        if branches == 1:
            return super().draft(tokens, most)
        room = most * branches if room is None else min(most * branches, room)
        draw, draft, at = self.draw, Draft(), len(tokens) - len(self.prompt)
        true = self.answer[at : at + draw.randint(0, most)]
        known = {}
        place = -1  # where the true path ends
        while len(draft) < room and (true or draw.random() < 0.8):
            planted = bool(true) and draw.random() < 0.5
            parent, token = place, true[0] if planted else draw.randrange(250)
            if not planted:
                parent = draw.randrange(-1, len(draft))
                if parent >= 0 and draft.depths[parent] == most:
                    parent = -1
            if (parent, token) not in known:
                known[parent, token] = len(draft)
                draft.tokens.append(token)
                draft.parents.append(parent)
            if planted:
                place, true = known[parent, token], true[1:]
        return draft


def answers_of(model, prompts, wanted=None, tokens=32, copies=1, **settings):
    """[(answer, finish, scores)] of a request for each prompt, and the engine. wanted: answers that
    drafts know."""
    engine = Engine(model, **settings)
    requests = []
    for i, prompt in enumerate(prompts):
        how = MIXED[i % len(MIXED)]
        group = [Request(prompt, max_tokens=tokens, seed=i + j, **how) for j in range(copies)]
        for request in group:
            if wanted is not None:
                draw = random.Random(len(requests))
                request.ngrams = Planted(prompt, wanted[len(requests)][0], draw)
            requests.append(request)
        engine.submit_all(group)
        engine.step()
    run(engine)
    assert all_free(engine) and not engine.sampler.counts.known
    return [(r.answer, r.finish, r.scores) for r in requests], engine


def assert_same(found, want):
    assert [x[:2] for x in found] == [x[:2] for x in want]
    for (*_, mine), (*_, theirs) in zip(found, want):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize(
    "pages, copies, settings",
    (
        (96, 1, {}),
        (96, 2, {"max_step_tokens": 40}),
        (11, 1, {"max_batch": 3, "max_step_tokens": 24}),
    ),
    ids=("all at once", "copies of prompts", "few pages"),
)
def test_answers_do_not_depend_on_branches(device, pages, copies, settings):
    """Penalties, log probabilities, end tokens, seeds; chunked prompts beside them; pages that are
    shared, found by prefix, or too few. The right path is anywhere in the tree."""
    net = random_llama("tiny", device)
    common, *rest = prompts_of(36, 5, 30, 17, 1, 70, 9, seed=2)
    prompts = [(common if i % 2 else []) + own for i, own in enumerate(rest)]
    model = TransformersModel(net, pages, captured_batch=0)
    how = {"copies": copies, "max_batch": 12, "max_step_tokens": 200, **settings}
    want, _ = answers_of(model, prompts, max_drafts=0, **how)
    found, engine = answers_of(model, prompts, want, max_drafts=4, draft_branches=3, **how)
    assert_same(found, want)
    done = engine.metrics
    assert done.drafted > done.accepted > done.accepted_beside > 20
    assert any(finish == "stop" for _, finish, _ in want)
    assert (done.preemptions > 0) == (pages == 11)
    assert sum(len(answer) for answer, *_ in found) == done.new_tokens


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn), ids=str)
def test_a_cache_of_8_bits(device, dtype):
    """Codes are copied as they are."""
    net = random_llama("tiny", device)
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.full((2, 2), 0.02)}
    scales = {name: x.to(device) for name, x in scales.items()}
    model = TransformersModel(net, 64, dtype=dtype, scales=scales, captured_batch=0)
    prompts = prompts_of(20, 33, 7, seed=4)
    want, _ = answers_of(model, prompts, max_drafts=0)
    found, engine = answers_of(model, prompts, want, max_drafts=3, draft_branches=2)
    assert_same(found, want)
    assert engine.metrics.accepted_beside > 5


def test_prompt_lookup_accepts_second_branches(device):
    """Of random prompts and repeating answers, more drafts are right with more branches."""
    net = random_llama("tiny", device)
    prompts = [p * 3 for p in prompts_of(4, 9, 6, 3, 7, 12, 5, 8, seed=7)]
    model = TransformersModel(net, 160, captured_batch=0)
    model.follows = (
        False  # on CUDA a step that is launched before the last one has ended has no drafts
    )
    figures, want = {}, None
    for branches in (0, 1, 2, 4):
        drafts = {"max_drafts": 4 if branches else 0, "draft_branches": max(branches, 1)}
        engine = Engine(model, max_batch=8, max_step_tokens=200, **drafts)
        requests = [
            engine.submit(Request(p, max_tokens=80, seed=i, **(LIVELY if i % 4 else {})))
            for i, p in enumerate(prompts)
        ]
        run(engine)
        assert all_free(engine)
        answers = [r.answer for r in requests]
        want = want or answers
        assert answers == want
        figures[branches] = engine.metrics
    assert figures[1].accepted_beside == 0 and figures[0].drafted == 0
    assert figures[2].accepted_beside > 10 and figures[4].accepted_beside > 10
    assert figures[4].accepted > figures[1].accepted
    # the request that gains least decides how many steps there are
    assert all(figures[n].steps < figures[0].steps for n in (1, 2, 4))


def test_the_second_branch_is_right(net, wanted):
    """One step: the first branch is wrong and the second right. Keys that follow are read where they
    were copied to."""
    (prompt,) = prompts_of(30, seed=9)
    true = wanted(prompt, 12)

    class Two(NGrams):
        def draft(self, tokens, most, branches=1, room=None):
            at = len(tokens) - len(prompt)
            wrong, right = [(t + 1) % 512 for t in true[at : at + 3]], true[at : at + 3]
            n = len(right)
            return Draft(wrong + right, [*range(-1, n - 1), -1, *range(n, 2 * n - 1)])

    engine = Engine(TransformersModel(net, 8), max_drafts=3, draft_branches=2)
    request = Request(prompt, max_tokens=12)
    request.ngrams, request.drafts = Two(), 3
    engine.submit(request)
    run(engine)
    done = engine.metrics
    assert request.answer == true and all_free(engine)
    # a prompt; three steps of three drafted tokens and one more; what max_tokens leaves
    assert done.accepted == done.accepted_beside >= 8 and done.steps <= 4


@pytest.mark.parametrize("kind", ("Mistral", "Gemma2"))
def test_a_request_behind_the_window_has_one_branch(kind):
    """A window counts places, which are not positions in a tree."""
    net = network(kind, sliding_window=24)
    model = TransformersModel(net, 64)
    assert model.window == 24
    prompts = prompts_of(6, 18, 40, seed=3)
    prompts = [[t % net.config.vocab_size for t in p] for p in prompts]
    want, _ = answers_of(model, prompts, max_drafts=0, tokens=24)
    trees = []
    begin = model.begin

    def watched(handles, counts, mask=None, rows=None):
        begin(handles, counts, mask, rows)
        trees.append(mask is not None)

    model.begin = watched
    found, engine = answers_of(
        model, prompts, want, max_drafts=3, draft_branches=2, tokens=24, max_step_tokens=100
    )
    assert_same(found, want)
    assert any(trees) and not all(trees)
    model.window = None  # as of a model that says it has none
    with pytest.raises(ValueError, match=r"a sliding window of 24 keys; the model's attribute"):
        answers_of(model, prompts[2:], want[2:], max_drafts=3, draft_branches=2)
    assert engine.metrics.accepted_beside > 0


def test_other_ranks_copy_the_same_tokens(net, monkeypatch):
    """What rank 0 sends is enough for another rank to have the same cache."""
    monkeypatch.setattr(models, "PagedKVCache", CopyingCache)
    first, second = (TransformersModel(net, 40) for _ in range(2))
    for model in (first, second):
        model.cache.k.zero_()
        model.cache.v.zero_()
    prompts = prompts_of(20, 33, 7, seed=4)
    want, _ = answers_of(TransformersModel(net, 40), prompts, max_drafts=0, copies=2)
    moved = []

    class Other:
        def tell(self, message):
            message = pickle.loads(pickle.dumps(message))
            moved.extend(x for x in message.copies if hasattr(x, "targets"))
            second.cache.repeat(message.copies)
            second.follow(message)

        def failed(self, error):
            raise error

    first.lead(Other())
    found, _ = answers_of(first, prompts, want, max_drafts=3, draft_branches=2, copies=2)
    assert_same(found, want)
    second.cache.repeat(first.cache.take_copies())
    assert moved
    assert torch.equal(first.cache.k, second.cache.k)
    assert torch.equal(first.cache.v, second.cache.v)


@pytest.mark.gpu
def test_captured_steps_beside_branches(monkeypatch):
    """Without `prepare` steps with branches are not captured, and come where they are expected to add
    a token."""
    monkeypatch.setattr(Costs, "pays", lambda _, gain, *more: gain > 0)
    net = random_llama("tiny", "cuda")
    patch(net, say=None)
    model = TransformersModel(net, 64, captured_batch=4)
    prompts = prompts_of(9, 30, 17, seed=6)
    want, _ = answers_of(model, prompts, max_drafts=0, tokens=60, max_batch=4)
    replayed, of_trees = [], []
    step_of = model.step_of

    def watched(*args):
        replayed.append(model.graph is not None)
        of_trees.append(model.graph is None and model.step.mask is not None)
        return step_of(*args)

    model.step_of = watched
    for branches in (1, 4):
        settings = {"max_drafts": 4, "draft_branches": branches, "max_batch": 4}
        found, engine = answers_of(model, prompts, tokens=60, **settings)
        assert_same(found, want)
    found, engine = answers_of(model, prompts, want, tokens=60, **settings)
    assert_same(found, want)
    assert any(replayed) and any(of_trees) and engine.metrics.accepted_beside > 0


def test_a_client_that_leaves(net, wanted):
    """In the middle of trees; the others go on."""
    prompts = prompts_of(20, 25, seed=1)
    engine = Engine(TransformersModel(net, 32), max_drafts=4, draft_branches=3)
    want = [(wanted(p, 40), None, None) for p in prompts]
    requests = []
    for i, prompt in enumerate(prompts):
        request = Request(prompt, max_tokens=40)
        request.ngrams = Planted(prompt, want[i][0], random.Random(i))
        requests.append(engine.submit(request))
    for _ in range(4):
        engine.step()
    requests[0].cancel()
    run(engine)
    assert requests[0].finish == "abort" and all_free(engine)
    assert requests[1].answer == want[1][0] and engine.metrics.accepted_beside > 0


# ---- settings ----


def test_refused_by_name(net):
    model = TransformersModel(net, 8)
    for wrong in (1.5, "2"):
        with pytest.raises(ValueError, match="draft_branches is .*; expected an integer from 1"):
            Engine(model, draft_branches=wrong)
    with pytest.raises(ValueError, match="draft_branches is 0; expected an integer from 1"):
        Engine(model, draft_branches=0)

    class Pairs(Model):
        def tokens_of(self, ids, starts, before):
            return ids

    pairs = Pairs(model.cache, 512, 64)
    Engine(pairs)
    with pytest.raises(
        ValueError, match="draft_branches is 2; Pairs takes 1, because its tokens_of"
    ):
        Engine(pairs, draft_branches=2)
    step = models.Step(None, None, None, None, 4, mask=torch.ones(1), window=9)
    step.check({"window_left": 8})
    for rules, says in (
        ({"window_left": 7}, "a sliding window of 8 keys"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
    ):
        with pytest.raises(ValueError, match=says):
            step.check(rules)


def test_metrics_count_branches(net):
    exposition = pytest.importorskip("torch_gpukern.serve.exposition")
    metrics = Metrics()
    metrics.drafts(12, 5, 3)
    metrics.drafts(4, 4, 0)
    text = exposition.text(Engine(TransformersModel(net, 8)).numbers()._replace(metrics=metrics))
    for line in ("drafted_tokens_total 16.0", "accepted_drafts_total 9.0"):
        assert f"gpukern_{line}\n" in text.decode()
    assert "gpukern_accepted_branch_drafts_total 3.0\n" in text.decode()

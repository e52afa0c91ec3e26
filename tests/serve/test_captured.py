# SPDX-License-Identifier: BSD-3-Clause
"""Captured steps with one token per request, with drafts and with short prompts: the shapes that are
captured, and that answers are the same as without captures. On a CPU, a replay runs the network again
on the graph's inputs."""

import math
import pickle
import random
from collections import Counter

import pytest
import torch
from serving import all_free, prompts_of, run
from test_draft_trees import Planted, answers_of, assert_same
from test_engine import generated
from test_fused import network

from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, Request, TransformersModel, captured, costs, models
from torch_gpukern.serve.captured import Shape, Shapes
from torch_gpukern.serve.costs import Costs
from torch_gpukern.serve.random_models import random_llama
from torch_gpukern.serve.ranks import CopyingCache

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)


# ---- shapes ----


def test_sizes_of_captured_steps():
    assert captured.sizes_upto(1) == [1] and captured.sizes_upto(3) == [1, 2, 4]
    assert captured.sizes_upto(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
    assert captured.sizes_upto(130)[-1] == 192


@pytest.mark.parametrize(
    "drafts, branches, most", ((4, 1, 8), (4, 2, 7), (3, 1, 9), (4, 16, 4), (0, 1, 0))
)
def test_shapes_are_few(drafts, branches, most):
    found = captured.drafted(256, drafts, branches)
    assert len(found) == len(set(found)) <= most
    assert all(s.requests < s.tokens <= captured.CAPTURED_TOKENS for s in found)
    assert all(s.rows == s.tokens and s.columns == (branches > 1) * s.longest for s in found)
    assert len(captured.prompted(256)) == 6 and len(captured.prompted(1)) == 4
    if drafts:
        longest = 1 + drafts * branches
        assert found[0].requests == 1 or longest > 64
        # all drafts of as many requests as there is room for, one of each of more
        shapes = Shapes.upto(256, drafts, branches)
        for n in range(1, 129):
            most = shapes.draft(n, 256)
            assert most.requests >= n
            assert most.tokens >= min(n * longest, 256)


def test_a_step_takes_the_smallest_shape_with_room():
    shapes = Shapes.upto(64, 4, 1)
    assert shapes.of([1] * 33, 33, False) == Shape(48, 48, 1, 48)
    assert shapes.of([5], 5, False) == Shape(1, 5, 5, 5)
    assert shapes.of([5, 1, 1], 7, False) == Shape(4, 20, 5, 20)
    assert shapes.of([3] * 16, 48, False) == Shape(32, 64, 5, 64)
    assert shapes.of([5] * 16, 80, False) == Shape(64, 128, 5, 128)
    assert shapes.of([6], 1, False) == Shape(16, 64, 64, 16)
    assert shapes.of([1] * 20 + [100], 21, False) == Shape(128, 192, 192, 128)
    assert shapes.of([200], 200, False) is None  # logits of each token of a prompt
    assert shapes.of([5] * 64, 320, False) is None and shapes.of([300], 1, False) is None
    assert shapes.of([5], 5, True) is None
    trees = Shapes.upto(64, 4, 2)
    assert trees.of([9], 9, True) == trees.of([5], 5, False) == Shape(1, 9, 9, 9, 9)
    draw = random.Random(0)
    for _ in range(300):  # a shape is found exactly if one has room
        counts = [draw.choice((1, 1, 2, 4, 5, 40)) for _ in range(draw.randint(1, 70))]
        rows, mask = draw.choice((len(counts), sum(counts))), draw.random() < 0.3
        found = trees.of(counts, rows, mask)
        room = [s for s in trees.all if s.holds(len(counts), sum(counts), max(counts), rows)]
        room = [s for s in room if s.columns or not mask]
        assert (found is None) == (not room)
        assert found is None or found in room


def test_short_requests_have_shapes_of_their_own():
    shapes = Shapes.upto(256, 3, 1)
    short = [s for s in shapes.decoding if s.keys]
    assert [s.requests for s in short] == [32, 48, 64, 96, 128, 192, 256]
    assert [s.keys for s in short[:3]] == [1024, 1536, 1920]
    # the length is not known, at most that of the shape, longer
    assert [shapes.of([1] * 40, 40, False, *n).keys for n in ([], [1536], [1537])] == [0, 1536, 0]
    assert shapes.of([1] * 31, 31, False, 100) == short[0]
    assert shapes.of([1] * 16, 16, False, 100) == Shape(16, 16, 1, 16)
    # of a model whose longest request is as short, the other graph has the same table
    assert not any(s.keys for s in shapes.below(1024).decoding)
    assert [s.requests for s in shapes.below(1025).decoding if s.keys] == [32]
    assert len(shapes.below(1025).all) == len(shapes.all) - len(short) + 1


def test_room_and_cost_of_drafts(net, on_cpu):
    model = on_cpu(TransformersModel(net, 16, captured_batch=8), 8)
    known = Costs(model)
    assert model.draft_room(3) == 0 and known.ratio(3, 4) == costs.EAGER_COST
    model.prepare(4, drafts=4)
    assert model.draft_room(3) == 17 and model.draft_room(5) == 0
    plain, host = 4.04, costs.HOST_MS + 3 * costs.HOST_MS_EACH
    assert known.ratio(3, 12) == pytest.approx((4.2 + host) / (plain + host))
    model.follows = True  # then a step without drafts does not wait for the host
    assert known.ratio(3, 99) == pytest.approx((4.2 + host) / plain)
    assert known.ratio(5, 1) == math.inf  # no graph has 5 requests and drafts


def test_costs_are_learned(net, on_cpu):
    model = on_cpu(TransformersModel(net, 16, captured_batch=4), 4)
    model.prepare(4, drafts=4)
    model.follows = True
    known = Costs(model)
    first = known.ratio(4, 16)
    for _ in range(60):
        known.took(5.04e-3, 4.04, 4, 0)
        known.took(8.2e-3, 4.2, 4, 12)
    assert first < known.ratio(4, 16) == pytest.approx(8.2 / 5.04, rel=0.03)
    for _ in range(30):
        known.took(4.7e-3, 4.2, 4, 12)
    assert known.ratio(4, 16) == pytest.approx(4.7 / 5.04, rel=0.02)
    known.took(9.0, 4.2, 4, 12)  # one slow step must not count
    assert known.ratio(4, 16) < 1.1
    for _ in range(2000):  # many steps without drafts
        known.took(4.04e-3, 4.04, 4, 0)
    assert known.ratio(4, 16) == pytest.approx(first, rel=0.01)


def test_drafts_begin_where_they_pay_and_stay(net, on_cpu):
    model = on_cpu(TransformersModel(net, 16, captured_batch=4), 4)
    model.prepare(4, drafts=4)
    model.follows = True
    known = Costs(model)
    needed = 4 * (known.ratio(4, 16) - 1)  # tokens of a step
    begins = needed + 4 * known.expected(4) / 4.04 / costs.BEGIN

    def after(gain, drafting, steps=20):
        return [known.pays(gain, 4, 16, drafting) for _ in range(steps)][-1]

    middle = (needed + begins) / 2
    assert not after(middle, False) and after(middle, True)
    assert not after(0.9 * needed, True) and after(1.1 * begins, False)
    assert not known.pays(0.0, 4, 16, True)
    after(middle, True)
    assert known.pays(0.9 * needed, 4, 16, True)  # one poor step ends nothing, several do
    assert not after(0.9 * needed, True)
    model.follows = False  # then no step is launched ahead
    assert after(1.01 * 4 * (known.ratio(4, 16) - 1), False)


def test_what_drafts_add_is_learned(net, on_cpu):
    model = on_cpu(TransformersModel(net, 16, captured_batch=4), 4)
    model.prepare(4, drafts=4)
    known = Costs(model)
    assert known.kept == 1.0
    known.gave(0, 1.0)
    assert known.kept == pytest.approx(costs.PRIOR / (costs.PRIOR + 1))
    for _ in range(200):
        known.gave(2, 4.0)
    assert 0.5 < known.kept < 0.7
    gain = 4 * (known.ratio(4, 16) - 1) / known.kept
    assert [known.pays(0.95 * gain, 4, 16, True) for _ in range(20)][-1] is False
    assert [known.pays(1.05 * gain, 4, 16, True) for _ in range(20)][-1] is True
    for _ in range(1000):  # without drafts what was learned is forgotten
        known.took(5e-3, 4.04, 4, 0)
    assert known.kept > 0.99


# ---- answers ----


def watch(model):
    """Counts the steps of each shape; None is a step that is not captured."""
    seen, step_of = Counter(), model.step_of

    def watched(*args):
        seen[model.graph and model.graph.shape] += 1
        return step_of(*args)

    model.step_of = watched
    return seen


def kinds(model, seen):
    """The numbers of captured steps (with one token per request, with drafts, with prompts)."""
    return [sum(seen[s] for s in family) for family in model.shapes]


@pytest.fixture
def always(monkeypatch):
    """Returns a function. After its call, every step that may have drafts has some."""
    return lambda: monkeypatch.setattr(Costs, "pays", lambda _, gain, *more: gain > 0)


@pytest.mark.parametrize("branches", (1, 3))
@pytest.mark.parametrize("follows", (False, True))
def test_answers_are_those_without_captures(net, on_cpu, branches, follows, always):
    """Requests have penalties, log probabilities, end tokens, seeds, equal prompts and shared
    prefixes, and join and leave. There are steps with drafts, with prompts and with neither."""
    common, *rest = prompts_of(36, 5, 30, 17, 1, 70, 9, seed=2)
    prompts = [(common if i % 2 else []) + own for i, own in enumerate(rest)]
    how = {"copies": 2, "max_batch": 12, "max_step_tokens": 100}
    want, _ = answers_of(TransformersModel(net, 64), prompts, max_drafts=0, **how)
    model = on_cpu(TransformersModel(net, 64, captured_batch=12), 12)
    model.follows = follows
    model.prepare(12, drafts=4, branches=branches)
    always()
    seen = watch(model)
    how |= {"max_drafts": 4, "draft_branches": branches}
    found, engine = answers_of(model, prompts, want, **how)
    assert_same(found, want)
    assert engine.metrics.accepted > 10 and (engine.metrics.accepted_beside > 5) == (branches > 1)
    _, with_drafts, with_prompts = kinds(model, seen)
    assert with_drafts > 5 and with_prompts > 1 and not seen[None]
    assert engine.metrics.reused_tokens > 0


def check_short(net, cuda, on_cpu=None):
    """Requests pass the bound of the graphs of short ones, at different steps."""
    prompts = prompts_of(5, 1, 12, 3, 20, seed=5)
    how = {"tokens": 60, "max_batch": 6, "max_step_tokens": 200, "max_drafts": 0}
    want, _ = answers_of(TransformersModel(net, 96, captured_batch=0), prompts, **how)
    model = TransformersModel(net, 96, captured_batch=6)
    if not cuda:
        model, model.follows = on_cpu(model, 6), True
    model.prepare(6)
    seen = watch(model)
    found, engine = answers_of(model, prompts, want, **how)
    assert_same(found, want)
    tables = {s: g.inputs.host["table"].shape[1] for s, g in model.graphs.items()}
    assert all(n == -(-(s.keys or 8192) // 16) for s, n in tables.items())
    short, others = (
        sum(n for s, n in seen.items() if s in model.shapes.decoding and bool(s.keys) == is_short)
        for is_short in (True, False)
    )
    assert short > 3 and others > 3 and all_free(engine)


@pytest.fixture
def short(monkeypatch):
    """Graphs of short requests from 2 requests on, whose requests have up to 48 keys."""
    monkeypatch.setattr(captured, "SHORT_REQUESTS", 2)
    monkeypatch.setattr(captured, "SHORT_KEYS", 48)


def test_steps_of_short_requests(net, on_cpu, short):
    check_short(net, False, on_cpu)


@pytest.mark.gpu
def test_graphs_of_short_requests(short):
    net = random_llama("tiny", "cuda")
    patch(net, say=None)
    check_short(net, True)


def test_prompts_beside_captured_steps(net, on_cpu, wanted):
    """Requests arrive one by one. A prompt is run in one or more captured steps, but a long prompt is
    not captured."""
    model = on_cpu(TransformersModel(net, 300, captured_batch=16), 16)
    model.follows = True
    model.prepare(16)
    seen = watch(model)
    prompts = prompts_of(100, 3, 60, 200, 17, 300, 2100, seed=3)
    engine = Engine(model, max_batch=16, max_step_tokens=512, max_drafts=0)
    requests = []
    for prompt in prompts:
        requests.append(engine.submit(Request(prompt, max_tokens=20)))
        for _ in range(3):
            engine.step()
    run(engine)
    for prompt, request in zip(prompts, requests):
        assert request.answer == wanted(prompt, 20)
    plain, _, with_prompts = kinds(model, seen)
    assert all_free(engine) and plain > 10 and with_prompts >= 5
    # 300 tokens are more than a captured step has; 2100 have more keys than one reads
    assert 2 <= seen[None] <= 7


def test_inactive_rows_write_nothing(net, on_cpu):
    """Inputs that an earlier, larger step left in a graph are not written to any page."""
    model = on_cpu(TransformersModel(net, 16, captured_batch=4), 4)
    model.prepare(4, drafts=3, branches=2)
    handles = [model.cache.allocate() for _ in range(4)]
    model.begin(handles, [7] * 4, rows=28)
    assert model.graph.shape == Shape(4, 28, 7, 28, 7)
    model.forward(list(range(28)), list(range(7)) * 4, list(range(28)), [0, 7, 14, 21], [[]] * 4)
    for handle in handles[1:]:
        model.cache.free(handle)
    other = model.cache.allocate()
    model.cache.truncate(handles[0], 3)
    model.cache.k.fill_(0)
    model.begin([handles[0], other], [4, 3], rows=7)
    assert model.graph.shape == Shape(2, 14, 7, 14, 7)
    model.begin([handles[0], other], [5, 7], rows=12)
    rows = list(range(12))
    model.forward([3] * 12, [*range(7, 12), *range(3, 10)], rows, [0, 5], [[]] * 2)
    written = set(model.cache.k[0].abs().sum((-1, -2)).flatten().nonzero().flatten().tolist())
    assert written == set(model.step.slots[:12].tolist())
    assert (model.step.slots[12:] == -1).all() and (model.step.starts[2:] == 12).all()


def test_more_rows_than_a_graph_has(net, on_cpu):
    model = on_cpu(TransformersModel(net, 16, captured_batch=1), 1)
    model.prepare(1)
    handle = model.cache.allocate()
    model.begin([handle], [20])
    with pytest.raises(ValueError, match="for 20 rows of logits, and its graph has 16; begin must"):
        model.forward([1] * 20, list(range(20)), list(range(20)), [0], [[]])


@pytest.mark.parametrize("kind", ("Mistral", "Gemma2"))
def test_windows(kind, on_cpu, always):
    """A request that is longer than the window has one branch, in a graph with a mask."""
    net = network(kind, sliding_window=24)
    prompts = [[t % net.config.vocab_size for t in p] for p in prompts_of(6, 18, 40, seed=3)]
    want, _ = answers_of(TransformersModel(net, 64), prompts, max_drafts=0, tokens=24)
    model = on_cpu(TransformersModel(net, 64, captured_batch=4), 4)
    model.prepare(4, drafts=3, branches=2)
    always()
    seen = watch(model)
    how = {"max_drafts": 3, "draft_branches": 2, "tokens": 24, "max_batch": 4}
    found, engine = answers_of(model, prompts, want, **how)
    assert_same(found, want)
    assert kinds(model, seen)[1] > 5 and engine.metrics.accepted_beside > 0


def test_drafts_as_long_as_the_context(net, on_cpu, always):
    """Trees have more tokens than the longest sequence may have."""
    model = on_cpu(TransformersModel(net, 40, captured_batch=1), 1)
    model.max_length = 64
    model.prepare(1, drafts=4, branches=4)
    always()
    (prompt,) = prompts_of(20, seed=4)
    plain = Engine(TransformersModel(net, 40), max_drafts=0)
    want = plain.submit(Request(prompt, max_tokens=44))
    run(plain)
    engine = Engine(model, max_drafts=4, draft_branches=4)
    request = Request(prompt, max_tokens=44)
    request.ngrams = Planted(prompt, want.answer, random.Random(0))
    engine.submit(request)
    run(engine)
    assert request.answer == want.answer and engine.metrics.accepted_beside > 0


def test_other_ranks_replay_the_same_steps(net, on_cpu, monkeypatch, always):
    """The messages of rank 0 are enough for another rank to build the same cache."""
    monkeypatch.setattr(models, "PagedKVCache", CopyingCache)
    first, second = (on_cpu(TransformersModel(net, 40, captured_batch=4), 4) for _ in range(2))
    for model in (first, second):
        model.cache.k.zero_()
        model.cache.v.zero_()
    prompts = prompts_of(20, 33, 7, seed=4)
    want, _ = answers_of(TransformersModel(net, 40), prompts, max_drafts=0)
    shapes = Counter()

    class Other:
        def tell(self, message):
            message = pickle.loads(pickle.dumps(message))
            shapes[message.shape] += 1
            if isinstance(message, models.Capture):
                second.graphs[message.shape] = second.capture(message.shape)
                return
            second.cache.repeat(message.copies)
            second.follow(message)

        def failed(self, error):
            raise error

    first.lead(Other())
    first.prepare(4, drafts=3, branches=2)
    always()
    found, _ = answers_of(first, prompts, want, max_drafts=3, draft_branches=2, max_batch=4)
    assert_same(found, want)
    found, _ = answers_of(first, prompts, max_drafts=0, max_batch=4)
    assert_same(found, want)
    second.cache.repeat(first.cache.take_copies())
    assert all(any(shapes[s] > 1 for s in family) for family in first.shapes)
    assert torch.equal(first.cache.k, second.cache.k)
    assert torch.equal(first.cache.v, second.cache.v)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "branches, dtype", ((1, None), (3, None), (2, torch.float8_e4m3fn)), ids=str
)
def test_graphs(branches, dtype, always):
    """Answers are the same with CUDA graphs, also after other tensors have taken the memory that was
    free at the capture."""
    net = random_llama("tiny", "cuda")
    patch(net, say=None)
    scale = torch.tensor(0.02, device="cuda")
    cache = (
        {} if dtype is None else {"dtype": dtype, "scales": {"k_scale": scale, "v_scale": scale}}
    )
    common, *rest = prompts_of(36, 5, 30, 17, 1, 70, 9, seed=2)
    prompts = [(common if i % 2 else []) + own for i, own in enumerate(rest)]
    how = {"copies": 2, "max_batch": 12, "max_step_tokens": 100}
    plain = TransformersModel(net, 64, captured_batch=0, **cache)
    want, _ = answers_of(plain, prompts, max_drafts=0, **how)
    model = TransformersModel(net, 64, captured_batch=12, **cache)
    model.prepare(12, drafts=4, branches=branches)
    assert len(model.graphs) == len(model.shapes.all)
    assert all(0 < graph.ms < 50 for graph in model.graphs.values())
    seen = watch(model)
    how |= {"max_drafts": 4, "draft_branches": branches}
    for drafts in (False, True):
        if drafts:
            always()
        found, engine = answers_of(model, prompts, want, **how)
        assert_same(found, want)
        taken = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 65) for _ in range(8)]
        del taken
    assert engine.metrics.accepted > 10 and (engine.metrics.accepted_beside > 5) == (branches > 1)
    kinds_ = kinds(model, seen)
    assert all(n > 1 for n in kinds_) and not seen[None], kinds_


@pytest.mark.gpu
def test_graphs_of_prompts():
    """Steps with prompts, captured or not, follow each other on the device without the host. The
    tokens are those of generate."""
    net = random_llama("tiny", "cuda")
    prompts = prompts_of(100, 3, 60, 200, 17, 300, 1, seed=3)
    want = generated(net, prompts, 20)
    patch(net, say=None)
    model = TransformersModel(net, 300, captured_batch=16)
    model.prepare(16)
    seen = watch(model)
    for steps in (1, 3, 30):
        engine = Engine(model, max_batch=16, max_step_tokens=512, max_drafts=0)
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(Request(prompt, max_tokens=20)))
            for _ in range(steps):
                engine.step()
        run(engine)
        assert [request.answer for request in requests] == want and all_free(engine)
    plain, _, with_prompts = kinds(model, seen)
    assert plain > 10 and with_prompts > 5


# ---- when there are drafts ----


def test_drafts_follow_their_cost(net, on_cpu, monkeypatch):
    """The text repeats itself. Cheap drafts begin early, dearer drafts begin later and are longer, and
    there are none if drafts cost more than they can save."""
    (prompt,) = prompts_of(30, seed=1)
    figures, first = [], []
    for cost in (1.2, 2.5, 9.0):
        model = on_cpu(TransformersModel(net, 16, captured_batch=1), 1)
        model.prepare(1, drafts=4)
        monkeypatch.setattr(Costs, "ratio", lambda *_, cost=cost: cost)
        engine = Engine(model, max_drafts=4)
        request, longest, begin = Request(prompt, max_tokens=100), [], engine._begin

        def watched(chunks, longest=longest, begin=begin):
            longest.append(len(chunks[0].draft))
            begin(chunks)

        engine._begin = watched
        engine.submit(request)
        run(engine)
        figures.append((request.answer, engine.metrics.steps, engine.metrics.drafted))
        first.append(next((i for i, n in enumerate(longest) if n), 100))
    answers, steps, drafted = zip(*figures)
    assert answers[0] == answers[1] == answers[2] and first[0] < first[1] < first[2]
    assert drafted[0] >= drafted[1] > 0 == drafted[2] and steps[0] <= steps[1] < steps[2] == 100


def test_wrong_drafts_stop(net, on_cpu):
    """The tokens 1, 2 are followed by another token each time, so drafts are wrong and stop. When the
    text repeats itself, drafts return."""
    model = on_cpu(TransformersModel(net, 64, captured_batch=1), 1)
    model.prepare(1, drafts=4)
    model.follows = True
    draw = random.Random(2)
    text = [t for i in range(100) for t in (1, 2, 3 + draw.randrange(400))]
    once = len(text)
    text += text[-60:] * 3
    engine = Engine(model, max_drafts=4)
    drew, model.best = engine.sampler.draw, None

    def draws(logits, places, best=None):
        found = drew(logits, places, None)
        found.tokens = found.host = torch.tensor([text[place.position] for place in places])
        return found

    engine.sampler.draw = draws
    request = engine.submit(Request(text[:9], max_tokens=len(text) - 9))
    while len(request.tokens) < once:
        assert engine.step()
    steps, drafted = engine.metrics.steps, engine.metrics.drafted
    run(engine)
    assert request.answer == text[9:]
    # of each three tokens, 1 and 2 can be predicted, but the third cannot
    assert drafted < once // 2
    assert engine.metrics.steps - steps < 120 and engine.metrics.accepted > 60

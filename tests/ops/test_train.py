# SPDX-License-Identifier: BSD-3-Clause
"""AdamW compared with torch.optim.AdamW: several steps in float64, errors in lower precision, state
dicts, gradient scale, clip, capture."""

import copy
import io
import pickle

import pytest
import torch
from conftest import generator, randn

from torch_gpukern._library import ops
from torch_gpukern.optim import AdamW

SHAPES = ((3, 5), (1,), (0, 4), (1000,), (33, 257), (2, 3, 4, 5), ())
RULES = {
    "": {},
    "amsgrad, maximize": dict(amsgrad=True, maximize=True, lr=3e-3),
    "no decay": dict(weight_decay=0.0, betas=(0.5, 0.9), eps=1e-4),
    "no momentum": dict(betas=(0.0, 0.99)),
}


def drawn(name, dtype, device, shapes=SHAPES):
    gen = generator("adamw", name)
    return [randn(gen, *s, dtype=dtype, device=device).requires_grad_() for s in shapes]


def take_steps(params, optimiser, steps=5, name="", grads=None, tail=lambda: None):
    """Makes `steps` steps with random gradients, which are drawn in float64 and rounded."""
    gen = generator("adamw gradients", name)
    for _ in range(steps):
        for p in params:
            p.grad = (randn(gen, *p.shape, dtype=torch.float64, device=p.device) * 0.3 + 0.05).to(
                p.dtype
            )
        optimiser.step()
        tail()


def three_runs(dtype, device, rule="", **more):
    """Parameters after five steps of ours, of torch's, and of torch's in float64."""
    first = drawn(rule, dtype, device)
    second = [p.detach().clone().requires_grad_() for p in first]
    exact = [p.detach().double().requires_grad_() for p in first]
    ours, theirs = (
        AdamW(first, **RULES[rule], **more),
        torch.optim.AdamW(second, **RULES[rule], fused=True),
    )
    judge = torch.optim.AdamW(exact, **RULES[rule])
    take_steps(first, ours, name=rule), take_steps(second, theirs, name=rule)
    gen = generator("adamw gradients", rule)
    for _ in range(5):
        for p, q in zip(first, exact, strict=True):
            q.grad = (
                (randn(gen, *p.shape, dtype=torch.float64, device=device) * 0.3 + 0.05)
                .to(dtype)
                .double()
            )
        judge.step()
    return (first, ours), (second, theirs), (exact, judge)


def error(some, exact):
    return max(
        (
            (x.double() - y).abs().max().item()
            for x, y in zip(some, exact, strict=True)
            if x.numel()
        ),
        default=0,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str
)
def test_beside_torch(dtype, rule, device):
    (first, ours), (second, _), (exact, judge) = three_runs(dtype, device, rule)
    unit = torch.finfo(dtype).eps
    assert error(first, exact) <= 2 * error(second, exact) + (
        1e-14 if dtype == torch.float64 else 0.02 * unit
    )
    for p, q in zip(first, exact, strict=True):
        assert ours.state[p]["step"].item() == 5
        assert ours.state[p]["exp_avg"].dtype == dtype
        if p.numel():
            for name in ("exp_avg", "exp_avg_sq"):
                got, want = ours.state[p][name].double(), judge.state[q][name]
                assert (got - want).abs().max() <= 4 * unit * want.abs().max() + 1e-15


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_master_weights(dtype, device):
    """The master is as accurate as a float32 parameter, and the parameter is its rounding. Steps
    far below an ulp of the parameter add up."""
    (first, ours), _, (exact, _) = three_runs(dtype, device, master_weights=True)
    masters = [ours.state[p]["master"] for p in first]
    assert error(masters, exact) < 5e-6 and all(m.dtype == torch.float32 for m in masters)
    assert all(torch.equal(p.detach(), m.to(dtype)) for p, m in zip(first, masters, strict=True))
    w = torch.ones(8, dtype=dtype, device=device, requires_grad=True)
    optimiser = AdamW([w], lr=1e-5, weight_decay=0.0, master_weights=True)
    for _ in range(1000):
        w.grad = torch.ones_like(w)
        optimiser.step()
    assert abs(w[0].item() - 0.99) < 0.004


def test_stochastic_rounding(device):
    """The mean of many parameters moves as in float32, where rounding to nearest would not move.
    The same seed gives the same bits."""
    n, steps = 20000, 20

    def train(**more):
        torch.manual_seed(5)
        w = torch.ones(n, dtype=torch.bfloat16, device=device, requires_grad=True)
        optimiser = AdamW([w], lr=1e-4, weight_decay=0.0, **more)
        for _ in range(steps):
            w.grad = torch.ones_like(w)
            optimiser.step()
        return w.detach()

    some = train(stochastic_rounding=True)
    assert (train() == 1).all()
    assert abs(some.double().mean().item() - (1 - steps * 1e-4)) < 2e-4
    assert torch.equal(some, train(stochastic_rounding=True)) and some.unique().numel() > 1


def test_an_empty_parameter_counts_in_stochastic_rounding(device):
    """The bits of a parameter depend on its place in the list, where an empty one has a place."""

    def step(between):
        torch.manual_seed(5)
        params = [
            torch.ones(n, dtype=torch.bfloat16, device=device, requires_grad=True)
            for n in (100, between, 3000)
        ]
        for w in params:
            w.grad = torch.ones_like(w)
        AdamW(params, lr=1e-4, weight_decay=0.0, stochastic_rounding=True).step()
        return params[-1].detach()

    assert step(0).unique().numel() > 1 and torch.equal(step(0), step(3))


def test_scale_clip_and_infinities(device):
    params = drawn("scale", torch.float32, device)
    plain = [p.detach().clone().requires_grad_() for p in params]
    grads = [torch.randn_like(p) for p in params]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    ours, theirs = AdamW(params), torch.optim.AdamW(plain)
    for p, q, g in zip(params, plain, grads, strict=True):
        p.grad, q.grad = g.clone(), g.clone()
    assert torch.allclose(ours.clip_grad_norm_(0.5), norm)
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    ours.step(), theirs.step()
    assert error(params, [p.double() for p in plain]) < 1e-6
    # gradients are only read
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))

    ours.grad_scale, ours.found_inf = (
        torch.tensor(4.0, device=device),
        torch.tensor(0.0, device=device),
    )
    for p, q, g in zip(params, plain, grads, strict=True):
        p.grad, q.grad = 4 * g, g.clone()
    ours.step(), theirs.step()
    assert error(params, [p.double() for p in plain]) < 1e-6
    before = copy.deepcopy(ours.state_dict()), [p.detach().clone() for p in params]
    ours.found_inf = torch.tensor(1.0, device=device)
    ours.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
    for i, state in before[0]["state"].items():
        assert all(torch.equal(x, ours.state_dict()["state"][i][n]) for n, x in state.items())


@pytest.mark.parametrize("master", (False, True))
def test_state_dicts(master, device):
    """State dicts go to torch's AdamW and back, through a file and through pickle. float32 state
    stays float32."""
    params = drawn("state", torch.bfloat16, device)
    ours = AdamW(params, master_weights=master, amsgrad=True)
    take_steps(params, ours, 2)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    again = [p.detach().clone().requires_grad_() for p in params]
    loaded = AdamW(again, lr=1.0, master_weights=master, amsgrad=True)
    loaded.load_state_dict(torch.load(file, map_location=device))
    take_steps(params, ours, 2, "more"), take_steps(again, loaded, 2, "more")
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))
    for p, q in zip(params, again, strict=True):
        assert {n: x.dtype for n, x in ours.state[p].items()} == {
            n: x.dtype for n, x in loaded.state[q].items()
        }
    theirs = torch.optim.AdamW(again, fused=True, amsgrad=True)
    theirs.load_state_dict(ours.state_dict())
    take_steps(again, theirs, 1)
    back = AdamW(again, master_weights=master, amsgrad=True)
    back.load_state_dict(theirs.state_dict())
    take_steps(again, back, 1)
    assert back.state[again[0]]["step"].item() == 6
    copied = pickle.loads(pickle.dumps(ours))
    assert copied.defaults["master_weights"] is master


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_parameter_that_was_written_counts(dtype, device):
    """Elements written between steps are taken over; the other elements keep the master's
    precision."""
    module = torch.nn.Module()
    module.w = w = torch.nn.Parameter(torch.ones(6, dtype=dtype, device=device))
    optimiser = AdamW([w], lr=0.01, weight_decay=0.0, master_weights=True)
    for new in (5.0, 7.0):
        w.grad = torch.ones_like(w)
        optimiser.step()
        kept = optimiser.state[w]["master"].clone()
        with torch.no_grad():
            w[:3].copy_(torch.full((3,), new))
        optimiser.step()
        master = optimiser.state[w]["master"]
        want = torch.cat([torch.full((3,), new, device=device), kept[3:]]) - 0.01
        torch.testing.assert_close(master, want, rtol=0, atol=2e-6)
        assert torch.equal(w.detach(), master.to(dtype))
    before = w.detach().clone()
    module.load_state_dict({"w": torch.full_like(w, 3.0)})
    optimiser.step()
    assert (w.detach() != before).all() and ((w - 2.99).abs() < 0.01).all()


def test_a_hook_may_change_what_is_loaded(device):
    params = drawn("hooked", torch.bfloat16, device, ((4,), (4,)))
    ours = AdamW(params, master_weights=True)
    take_steps(params, ours, 2)
    again = [p.detach().clone().requires_grad_() for p in reversed(params)]
    loaded = AdamW(again, master_weights=True)

    def swap(_, state):
        state = dict(state)
        state["state"] = {0: state["state"][1], 1: state["state"][0]}
        return state

    hook = loaded.register_load_state_dict_pre_hook(swap)
    loaded.load_state_dict(ours.state_dict())
    for p, q in zip(params, reversed(again)):
        assert torch.equal(ours.state[p]["master"], loaded.state[q]["master"])
        assert torch.equal(ours.state[p]["exp_avg"], loaded.state[q]["exp_avg"])
    hook.remove()

    def drop(_, state):
        return {**state, "state": {0: state["state"][0]}}

    loaded.register_load_state_dict_pre_hook(drop)
    loaded.load_state_dict(ours.state_dict())
    assert again[1] not in loaded.state
    take_steps(again, loaded, 1)


@pytest.mark.parametrize("master", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_float32_gradients_of_16_bits(dtype, master, device):
    """With p.grad_dtype = float32, the step is computed in float32 from the unrounded gradient."""
    gen = generator("wide gradients")
    w = randn(gen, 40, dtype=dtype, device=device).requires_grad_()
    exact = w.detach().double().requires_grad_()
    w.grad_dtype = torch.float32
    optimiser, judge = (
        AdamW([w], eps=1e-3, master_weights=master),
        torch.optim.AdamW([exact], eps=1e-3),
    )
    optimiser.grad_scale = torch.tensor(65536.0, device=device)
    g = randn(gen, 40, device=device) * 4
    w.grad, exact.grad = g * 65536, g.double()
    optimiser.step(), judge.step()
    got = optimiser.state[w]["master"] if master else w
    unit = 1e-6 if master else torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact.detach(), rtol=unit, atol=unit / 100)
    want = judge.state[exact]["exp_avg"].to(optimiser.state[w]["exp_avg"].dtype)
    torch.testing.assert_close(optimiser.state[w]["exp_avg"], want, rtol=unit, atol=0)
    if dtype is torch.bfloat16:
        with pytest.raises(
            ValueError, match="stochastic_rounding takes gradients in the parameter's dtype"
        ):
            AdamW([w], stochastic_rounding=True).step()


@pytest.mark.parametrize(
    "dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str
)
def test_an_infinite_weight_stays_where_nothing_moves(dtype, device):
    w = torch.tensor([float("inf"), -float("inf"), 1.0] * 7, dtype=dtype, device=device)
    p = w.clone().requires_grad_()
    p.grad = torch.ones_like(p)
    AdamW([p], lr=0.0).step()
    assert torch.equal(p.detach(), w)


def test_a_step_that_raises_does_not_count(device):
    w = torch.ones(4, device=device, requires_grad=True)
    optimiser = AdamW([w])
    take_steps([w], optimiser, 2)
    optimiser.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match="eps"):
        optimiser.step()
    assert optimiser.state[w]["step"].item() == 2


@pytest.mark.parametrize(
    "step",
    (
        lambda n: torch.tensor(n, dtype=torch.float64),
        torch.tensor,
        lambda n: torch.tensor([float(n)]),
        int,
    ),
)
def test_states_as_torch_saves_them(step, device):
    """Loaded states may have step counts on the CPU, with other dtypes and shapes, and moments with
    other strides."""
    gen = generator("adamw states")
    first = randn(gen, 4, 3, 2, 2, device=device).requires_grad_()
    optimiser = torch.optim.AdamW([first])
    take_steps([first], optimiser, 3)
    state = copy.deepcopy(optimiser.state_dict())
    state["state"][0]["step"] = step(3)
    second = first.detach().clone().to(memory_format=torch.channels_last).requires_grad_()
    ours = AdamW([second])
    ours.load_state_dict(state)
    take_steps([first], optimiser, 2, "more"), take_steps([second], ours, 2, "more")
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
    assert ours.state[second]["step"].item() == 5


def test_options_are_of_all_groups(device):
    one, two = (
        torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    optimiser = AdamW([one], master_weights=True)
    optimiser.add_param_group({"params": [two]})
    assert optimiser.param_groups[0].keys() == optimiser.param_groups[1].keys()
    take_steps([one, two], optimiser, 1)
    assert "master" in optimiser.state[two]
    for make in (lambda g: optimiser.add_param_group(g), lambda g: AdamW([g], master_weights=True)):
        with pytest.raises(ValueError, match="master_weights holds for all groups"):
            make({"params": [two], "master_weights": False})


def test_layouts_and_parameters_without_gradients(device):
    gen = generator("adamw layouts")
    conv = (
        randn(gen, 4, 3, 2, 2, device=device).to(memory_format=torch.channels_last).requires_grad_()
    )
    odd = randn(gen, 65, device=device)[1:].requires_grad_()  # misaligned
    idle = randn(gen, 5, device=device).requires_grad_()
    params, other = (
        [conv, odd, idle],
        [x.detach().clone().requires_grad_() for x in (conv, odd, idle)],
    )
    ours, theirs = AdamW(params), torch.optim.AdamW(other)
    for _ in range(3):
        for p, q in zip(params[:2], other[:2], strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone().contiguous()
        ours.step(), theirs.step()
    assert error(params, [p.double() for p in other]) < 1e-6 and idle not in ours.state
    gap = randn(gen, 4, 6, device=device)[:, :3].requires_grad_()
    gap.grad = torch.ones_like(gap)
    with pytest.raises(ValueError, match=r"adamw_: params\[0\] must be dense"):
        AdamW([gap]).step()


def test_lr_as_a_tensor_and_groups(device):
    params, other = (drawn("groups", torch.float32, device) for _ in range(2))
    lr = torch.tensor(2e-3, device=device)
    groups = lambda ps, lr: [dict(params=ps[:3], weight_decay=0.0), dict(params=ps[3:], lr=lr)]  # noqa: E731
    ours, theirs = AdamW(groups(params, lr)), torch.optim.AdamW(groups(other, 2e-3))
    take_steps(params, ours, 3), take_steps(other, theirs, 3)
    assert error(params, [p.double() for p in other]) < 1e-6


def test_refusals(device):
    w = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="choose one"):
        AdamW([w], master_weights=True, stochastic_rounding=True)
    half = torch.ones(3, dtype=torch.float16, device=device, requires_grad=True)
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="seed is for bfloat16 params"):
        AdamW([half], stochastic_rounding=True).step()
    z = lambda *s, dtype=torch.float32: torch.zeros(s, dtype=dtype, device=device)  # noqa: E731
    good = dict(
        params=[z(3)],
        grads=[z(3)],
        exp_avgs=[z(3)],
        exp_avg_sqs=[z(3)],
        max_exp_avg_sqs=[],
        masters=[],
        steps=[z()],
    )
    refused = (
        (dict(grads=[]), "grads has 0 tensors, params has 1; they must match"),
        (dict(grads=[z(4)]), r"grads\[0\] must have shape \[3\], got \[4\]"),
        (dict(grads=[z(3, dtype=torch.float64)]), r"grads\[0\] must be float32, got float64"),
        (
            dict(exp_avgs=[z(3, dtype=torch.bfloat16)]),
            r"exp_avgs\[0\] must be float32, got bfloat16",
        ),
        (dict(masters=[z(3)]), "masters are for bfloat16 and float16 params, got float32"),
        (dict(steps=[z(1)]), r"steps\[0\] must have shape \[\], got \[1\]"),
        (dict(clip=z(1)), r"clip must have shape \[\], got \[1\]"),
        (dict(beta1=1.0), "beta1 must be at least 0 and less than 1, got 1"),
        (
            dict(params=[z(3).int()]),
            "params must be float32, bfloat16, float16 or float64, got int32",
        ),
    )
    for change, text in refused:
        with pytest.raises(ValueError, match="gpukern::adamw_: " + text):
            ops.adamw_.default(**good | change)


def test_compiled(device):
    params = drawn("compiled", torch.float32, device, SHAPES[:2])
    other = [p.detach().clone().requires_grad_() for p in params]
    ours, theirs = AdamW(params), AdamW(other)
    take_steps(params, ours, 1), take_steps(other, theirs, 1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def update(params, grads, m, v, steps):
        ops.adamw_.default(params, grads, m, v, [], [], steps, lr=1e-2)

    def lists(params, optimiser):
        states = [optimiser.state[p] for p in params]
        return (
            [p.detach() for p in params],
            [p.grad for p in params],
            *([s[n] for s in states] for n in ("exp_avg", "exp_avg_sq", "step")),
        )

    update(*lists(params, ours))
    a, g, m, v, s = lists(other, theirs)
    ops.adamw_.default(a, g, m, v, [], [], s, lr=1e-2)
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("many", (5, 60, 500))
def test_captured(many):
    """Replays of a captured step equal the steps one by one, for lists in a small table, in a large
    one, and in several launches."""
    params = drawn(
        "captured", torch.bfloat16, "cuda", ((1000,), (37,), (64, 65)) * (many // 3 + 1)
    )[:many]
    other = [p.detach().clone().requires_grad_() for p in params]
    lr = torch.tensor(1e-2, device="cuda")
    ours, theirs = (
        AdamW(params, lr=lr, master_weights=True),
        AdamW(other, lr=1e-2, master_weights=True),
    )
    for p, q in zip(params, other, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    graph.replay(), graph.replay()
    for _ in range(3):
        theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))
    assert ours.state[params[0]]["step"].item() == 3

# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.nn.MoE and grouped_experts against a loop over experts; transformers' experts."""

import pytest
import torch
from conftest import assert_close_as, generator, randn

from torch_gpukern import nn as gnn


def loop(moe, x, dtype):
    """The reference: token by token, expert by expert."""
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    router, up, down = (p.to(dtype) for p in (moe.router.weight, moe.gate_up_proj, moe.down_proj))
    p, e = (rows @ router.mT).softmax(-1).topk(moe.top_k, -1)
    if moe.normalize:
        p = p / p.sum(-1, keepdim=True)
    out = []
    for t, row in enumerate(rows):
        total = 0
        for j in range(moe.top_k):
            gate, value = (up[e[t, j]] @ row).chunk(2)
            act = {"silu": torch.nn.functional.silu, "relu": torch.relu}[moe.activation]
            total = total + p[t, j] * (down[e[t, j]] @ (act(gate) * value))
        out.append(total)
    return torch.stack(out).reshape(x.shape)


@pytest.mark.parametrize("options", [{}, {"normalize": False, "activation": "relu"}], ids=str)
def test_moe(options):
    torch.manual_seed(0)
    moe = gnn.MoE(24, 16, 5, 2, **options)
    x = randn(generator("moe"), 2, 9, 24).requires_grad_()
    grad = randn(generator("moe grad"), 2, 9, 24)
    wrt = (x, moe.gate_up_proj, moe.down_proj, moe.router.weight)
    out, logits = moe(x, return_logits=True)
    assert logits.shape == (2, 9, 5) and torch.equal(moe(x), out)
    values = {}
    for dtype in (torch.float32, torch.float64):
        y = loop(moe, x, dtype)
        values[dtype] = [y, *torch.autograd.grad(y, wrt, grad.to(dtype))]
    got = [out, *torch.autograd.grad(out, wrt, grad)]
    for name, g, yard, want in zip(
        ("out", "x", "up", "down", "router"), got, *values.values(), strict=True
    ):
        assert_close_as(yard.float(), g, want.double(), name)
    with pytest.raises(ValueError, match="MoE: top_k must be 1 to num_experts 5, got 6"):
        gnn.MoE(24, 16, 5, 6)


def test_experts_of_other_ranks_add_nothing():
    gen = generator("sentinel")
    x, up, down = randn(gen, 6, 8), randn(gen, 3, 8, 12), randn(gen, 3, 6, 8)
    e = torch.tensor([[0, 3], [3, 3], [2, 1], [1, 3], [3, 0], [2, 2]])
    p = torch.rand(6, 2, generator=gen)
    down_bias = randn(gen, 3, 8)
    got = gnn.grouped_experts(x, e, p, up, down, down_bias=down_bias)
    assert (got[1] == 0).all()
    want = gnn.grouped_experts(x[:1], torch.tensor([[0]]), p[:1, :1], up, down, down_bias=down_bias)
    torch.testing.assert_close(got[:1], want)
    negative = gnn.grouped_experts(x, torch.where(e == 3, -1, e), p, up, down, down_bias=down_bias)
    torch.testing.assert_close(
        negative, got
    )  # a negative index marks a dropped token; it is not expert 0
    with pytest.raises(ValueError, match="grouped_experts: x must be \\[T, H\\]"):
        gnn.grouped_experts(x, e[:3], p, up, down)
    none = gnn.grouped_experts(x[:0], e[:0], p[:0], up, down)
    assert none.shape == (0, 8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("mark", (-1, -(2**31), 3, 2**31 - 1))
def test_a_marked_token_may_hold_nan(mark, index, dtype, device):
    """NaN in a token that goes to no expert, or in its weight, changes neither the result nor the
    gradients of the others."""
    gen = generator("marked nan")
    x, up, down = (
        randn(gen, *shape).to(device, dtype) for shape in ((6, 8), (3, 8, 12), (3, 6, 8))
    )
    up_bias, down_bias = (randn(gen, *shape).to(device, dtype) for shape in ((3, 12), (3, 8)))
    e = torch.tensor(
        [[0, 1], [mark, mark], [2, 1], [1, mark], [mark, 0], [2, 2]], device=device
    ).to(index)
    p = torch.rand(6, 2, generator=gen).to(device)

    def run(x, p):
        given = [t.clone().requires_grad_() for t in (x, p, up, down, up_bias, down_bias)]
        x, p, *experts, first, second = given
        out = gnn.grouped_experts(
            x, e, p, *experts, up_bias=first, down_bias=second, after=lambda rows: rows * 2
        )
        return out, *torch.autograd.grad(out.float().square().sum(), given)

    want = run(x, p)
    assert all(t.isfinite().all() for t in want)
    bad_x, bad_p = x.clone(), p.clone()
    bad_x[1] = float("nan")
    bad_p[e == mark] = float("nan")
    for name, got, ref in zip(
        ("out", "x", "weight", "up", "down", "up_bias", "down_bias"), run(bad_x, bad_p), want
    ):
        assert torch.equal(got, ref), name


def test_arguments_are_refused_by_their_own_names():
    """grouped_gemm, which multiplies, would speak of a, b and offs. A float expert number was taken."""
    x, up, down = torch.ones(3, 8), torch.ones(4, 8, 12), torch.ones(4, 6, 8)
    expert_of, weight_of = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for changed, says in (
        ({"expert_of": expert_of.float()}, "expert_of must be int32 or int64, got torch.float32"),
        ({"expert_of": expert_of.bool()}, "expert_of must be int32 or int64, got torch.bool"),
        ({"up": up[:3]}, r"up must be \[E, H, I\] and down \[E, I', H\] of one E"),
        ({"up": up[0]}, r"up must be \[E, H, I\] and down \[E, I', H\] of one E"),
        ({"up": up[:, :4]}, r"up must be \[E, H, I\] with x's H 8, got \[4, 4, 12\]"),
    ):
        given = {"expert_of": expert_of, "weight_of": weight_of, "up": up, "down": down} | changed
        with pytest.raises(ValueError, match=f"grouped_experts: {says}"):
            gnn.grouped_experts(x, **given)


def test_compile_without_a_break():
    moe = gnn.MoE(24, 16, 5, 2)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (4, 7):
            x = randn(generator("moe compiled", tokens), tokens, 24)
            torch.testing.assert_close(compiled(x), moe(x), rtol=1e-5, atol=1e-6)


def test_gradients_compile_without_a_break():
    moe = gnn.MoE(24, 16, 5, 2)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 7):
        x = randn(generator("moe compiled gradients", tokens), tokens, 24).requires_grad_()
        wrt = (x, *moe.parameters())
        want = torch.autograd.grad(moe(x).square().sum(), wrt)
        got = torch.autograd.grad(compiled(x).square().sum(), wrt)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_gradients_of_tokens_are_summed_in_float32(device):
    """Eight experts that give x, x / 256, x / 256 and so on: added in bfloat16 one by one, the small
    parts would be lost."""
    x = torch.ones(3, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    factors = torch.tensor([1.0] + [2.0**-9] * 7, device=device).bfloat16()
    eye = torch.eye(8, dtype=torch.bfloat16, device=device)
    e = torch.arange(8, device=device).expand(3, 8)
    out = gnn.grouped_experts(
        x,
        e,
        torch.ones(3, 8, device=device),
        factors[:, None, None] * eye,
        eye.expand(8, 8, 8),
        gate=lambda rows: rows,
    )
    want = torch.tensor(1 + 7 * 2.0**-9).bfloat16().item()
    assert (out == want).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (grad == want).all()


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_transformers(family):
    transformers = pytest.importorskip("transformers", minversion="5.10")
    from torch_gpukern.integrations import transformers_experts

    transformers_experts.register_experts()
    sizes = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=4)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **sizes, num_local_experts=4, layer_types=["full_attention"]
        )
        model = transformers.GptOssForCausalLM(config)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.1)
    tokens = torch.randint(0, 32, (2, 11), generator=generator("tokens"))

    def run(implementation, dtype=torch.float32):
        model.to(dtype).set_experts_implementation(implementation)
        model.zero_grad()
        out = model(tokens).logits
        out.square().sum().backward()
        return {
            "logits": out.detach(),
            **{n: p.grad.clone() for n, p in model.named_parameters() if "experts" in n},
        }

    got, yard, want = run("gpukern"), run("grouped_mm"), run("eager", torch.float64)
    assert len(got) > 2
    for name, ref in want.items():
        assert_close_as(yard[name], got[name], ref, name)


def test_reset_parameters_after_meta():
    with torch.device("meta"):
        moe = gnn.MoE(16, 24, 4, 2)
    moe.to_empty(device="cpu")
    with torch.no_grad():
        for p in moe.parameters():
            p.fill_(float("nan"))
    for m in moe.modules():
        m.reset_parameters()
    for p, fan_in in ((moe.gate_up_proj, 16), (moe.down_proj, 24), (moe.router.weight, 16)):
        assert 0.5 * fan_in**-0.5 < float(p.detach().abs().max()) <= fan_in**-0.5


def test_rows_of_another_width_are_refused():
    """Four rows of 8 columns have as many elements as two of 16."""
    moe = gnn.MoE(16, 24, 4, 2)
    for x in (torch.randn(4, 8), torch.randn(5, 7), torch.randn(())):
        with pytest.raises(ValueError, match=r"MoE: x must have shape \[.., 16\].*pass rows of 16"):
            moe(x)
    with pytest.raises(ValueError, match="MoE: x must be a Tensor"):
        moe(None)
